"""Random lives of a channel: what is to stay always gives the right bits, and pruning in the end leaves no garbage."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from deltasync import Publisher, Replica, housekeeping, layout, open_store
from deltasync.errors import StoreError
from deltasync.reader import ChannelReader
from deltasync.retention import Keep
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

_ELEMENTS = 64

Crash = tuple[tuple[str, str], bool]

_counts = st.none() | st.integers(1, 6)
_keeps = st.fixed_dictionaries(
    {"last": st.integers(1, 6), "anchors": _counts, "step_every": _counts}
) | st.fixed_dictionaries({"last": st.none(), "anchors": st.integers(1, 3), "step_every": _counts})
_versions = st.integers(1, 14)
_left_behind = st.builds(
    lambda folder, version, span, attempt, name: {
        "delta": f"{layout.delta_dir(version, attempt)}/{name}",
        "anchor": f"{layout.anchor_dir(version, attempt)}/{name}",
        "fold": f"{layout.fold_dir(version, version + span, attempt)}/{name}",
    }[folder],
    st.sampled_from(["delta", "anchor", "fold"]),
    _versions,
    st.integers(1, 5),
    st.integers(0, 2),
    st.sampled_from([layout.delta_part(1, 1), "model.safetensors", "config.json"]),
)
_places = st.sampled_from([("list", ""), ("list", "folds/"), ("read", "manifests/"), ("read", "head"), ("delete", "")])
_places_of_forget = _versions.map(lambda v: ("delete", layout.manifest(v))) | st.sampled_from(
    [("create", "forgotten/"), ("delete", "folds/")]
)
_places_of_prune = st.builds(
    lambda folder, v: ("delete", folder(v)), st.sampled_from([layout.delta_dir, layout.anchor_dir]), _versions
)
_places_of_prune |= st.sampled_from(
    [("replace", "forgotten/"), ("list", "forgotten/"), ("delete", "folds/"), ("delete", "forgotten/")]
)
_actions = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 3)),
    st.tuples(st.just("forget"), _keeps, st.none() | st.tuples(_places | _places_of_forget, st.booleans())),
    st.tuples(st.just("prune"), st.none() | st.tuples(_places | _places_of_prune, st.booleans())),
    st.tuples(st.just("leave"), _left_behind),
    st.tuples(st.just("fold"), st.integers(0, 20), st.integers(0, 20)),
)


class Model:
    """What must be there, worked out another way than `retention` does: each version rests on the one before it."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        self.anchors: list[int] = []
        self.steps: dict[int, int | None] = {}
        self.stored: set[int] = set()

    def forget(self, last: int | None, anchors: int | None, step_every: int | None) -> None:
        stored = sorted(self.stored)
        wanted = {stored[-1]}
        wanted |= set(stored[-last:] if last else [])
        wanted |= set([version for version in stored if version in self.anchors][-anchors:] if anchors else [])
        steps = {version: self.steps[version] for version in stored}
        wanted |= {version for version, step in steps.items() if step_every and step is not None and not step % step_every}
        self.stored = set()
        for version in wanted:
            anchor = max(found for found in self.anchors if found <= version)
            self.stored |= set(range(anchor, version + 1))


class Life:
    """A channel, its publisher and its model."""

    def __init__(self, anchor_every: int, codec: str) -> None:
        self.store = FaultyStore(open_store(f"memory://{uuid.uuid4().hex}"))
        self.publisher = Publisher(
            self.store.inner, anchor_every=anchor_every, codec=codec, model_files={"config.json": b"{}"}
        )
        self.model = Model()
        self.weights = {"w": torch.zeros(_ELEMENTS, dtype=torch.bfloat16)}
        self.random = np.random.default_rng(0)
        self.publish(1)

    @property
    def reader(self) -> ChannelReader:
        return ChannelReader(self.store)

    def publish(self, count: int) -> None:
        for _ in range(count):
            where = self.random.integers(0, _ELEMENTS, 3)
            self.weights["w"].view(torch.int16)[where] = torch.from_numpy(self.random.integers(-99, 99, 3, np.int16))
            step = None if self.random.random() < 0.2 else int(self.random.integers(0, 20))
            receipt = self.publisher.publish(self.weights.items(), step=step).wait(60)
            self.model.states[receipt.version] = {"w": self.weights["w"].clone()}
            self.model.steps[receipt.version] = step
            self.model.anchors += [receipt.version] if receipt.kind == "anchor" else []
            self.model.stored.add(receipt.version)

    def forget(self, keep: dict[str, int | None], crash: Crash | None) -> None:
        self.model.forget(**keep)
        self._crashing(crash, lambda: housekeeping.forget(self.reader, Keep(**keep)))
        assert self.reader.versions() == sorted(self.model.stored)

    def prune(self, crash: Crash | None) -> None:
        self._crashing(crash, lambda: housekeeping.prune(self.reader, grace_s=0))

    def _crashing(self, crash: Crash | None, action: Callable[[], object]) -> None:
        """Do it, and again if it crashed."""
        if crash is not None:
            (operation, key), after = crash
            self.store.fail_at(operation, key, after=after, error=StoreError)
        try:
            action()
        except StoreError:
            note(f"crashed at {crash}")
            event("crashed")
            self.store.heal()
            self.check()
            action()
        self.store.heal()

    def leave(self, key: str) -> None:
        """What a dead publisher or a fold's dead writer left; never in a folder that is an anchor."""
        versions = layout.data_versions(key)
        ahead = len(versions) == 2 and versions[1] > self.publisher.version  # nobody folds what is not published
        anchored = key.startswith(f"{layout.anchor_dir(versions[0])}/") and versions[0] in self.model.stored
        if not ahead and not anchored and key not in {info.key for info in self.store.list(key)}:
            self.store.create(key, b"left")

    def fold(self, base: int, version: int) -> None:
        stored = sorted(self.model.stored)
        base, version = sorted((stored[base % len(stored)], stored[version % len(stored)]))
        if base < version:
            housekeeping.write_fold(self.reader, base, version)

    def check(self) -> None:
        """Every version that is to stay has its bits, one after the other and from nothing."""
        walker = Replica(self.store)
        for version in sorted(self.model.stored):
            late = Replica(self.store)
            for replica in (walker, late):
                assert replica.sync(version) == version
                assert_same_bits(replica.state_dict(), self.model.states[version])

    def end(self) -> None:
        housekeeping.prune(self.reader, grace_s=0)
        referred, folders = set(), set()
        for version in self.reader.versions():
            document = self.reader.manifest(version)
            referred |= {file.key for part in (document.delta, document.anchor) if part for file in part.files}
            folders |= {document.anchor.directory} if document.anchor else set()
        for key, fold in housekeeping.read_folds(self.reader).items():
            referred |= {key, *(file.key for file in fold.files)}
        head = self.reader.head().version
        for info in (info for prefix in layout.DATA for info in self.store.list(prefix)):
            of = info.key in referred or info.key.rpartition("/")[0] in folders
            assert of or max(layout.data_versions(info.key)) > head, info.key
        report = housekeeping.check(self.reader, read_data=True)
        assert report.problems == []
        assert report.proven == sorted(self.model.stored)
        assert [info.key for info in self.store.list(layout.FORGOTTEN)] == ["forgotten/clock"]


@settings(max_examples=100)
@given(st.integers(1, 5), st.sampled_from(["packed", "context"]), st.lists(_actions, min_size=1, max_size=14))
def test_what_is_kept_stays_and_what_is_not_goes(anchor_every: int, codec: str, actions: list[tuple]) -> None:
    life = Life(anchor_every, codec)
    with life.publisher:
        for name, *arguments in actions:
            getattr(life, name)(*arguments)
            if name in ("forget", "prune"):
                life.check()
        life.check()
        life.end()
