"""Random lives of a channel: what is to stay always gives the right bits, and collecting in the end leaves no
garbage.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import event, given, note
from hypothesis import strategies as st

from deltasync import ops
from deltasync.channel import keys
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.errors import StoreError
from deltasync.following import Replica
from deltasync.ops import KeepPolicy
from deltasync.stores import open_store
from tests.channels import Made
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

_ELEMENTS = 64

Crash = tuple[tuple[str, str], bool]

_counts = st.none() | st.integers(1, 6)
_keeps = st.fixed_dictionaries(
    {"last": st.integers(1, 6), "anchors": _counts, "step_every": _counts}
) | st.fixed_dictionaries({"last": st.none(), "anchors": st.integers(1, 3), "step_every": _counts})
_left_behind = st.tuples(
    st.sampled_from([keys.parts_folder, keys.anchor_folder]),
    st.integers(1, 14),
    st.integers(1, 3),
    st.booleans(),
)
_places = st.sampled_from(
    [
        *[("list", prefix) for prefix in ("versions/", "compactions/", "anchors/", "parts/")],
        *[("read", prefix) for prefix in ("versions/", "compactions/")],
        *[("delete", prefix) for prefix in ("versions/", "compactions/", "anchors/", "parts/", "probe/")],
    ]
)
_crashes = st.none() | st.tuples(_places, st.booleans())
_actions = st.one_of(
    st.tuples(
        st.just("publish"), st.integers(1, 3), st.booleans(), st.sampled_from(["", "announce", "anchor"])
    ),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("gc"), st.none() | _keeps, _crashes),
    st.tuples(st.just("leave"), _left_behind),
    st.tuples(st.just("compaction"), st.integers(0, 20), st.integers(0, 20)),
)


class Model:
    """What must be there: each version rests on an anchor, on a compaction from one, or on the version before
    it.
    """

    def __init__(self) -> None:
        self.versions: dict[int, VersionId] = {}
        self.anchors: list[int] = []
        self.steps: dict[int, int | None] = {}
        self.stored: set[int] = set()
        self.compactions: set[tuple[int, int]] = set()

    def keep(self, last: int | None, anchors: int | None, step_every: int | None) -> None:
        stored = sorted(self.stored)
        wanted = {stored[-1]}
        wanted |= set(stored[-last:] if last else [])
        wanted |= set(
            [version for version in stored if version in self.anchors][-anchors:] if anchors else []
        )
        steps = {version: self.steps[version] for version in stored}
        wanted |= {
            version
            for version, step in steps.items()
            if step_every and step is not None and not step % step_every
        }
        self.stored = set()
        for version in wanted:
            self.stored |= self._chain_to(version)
        self.compactions = {ends for ends in self.compactions if {*ends} <= self.stored}

    def _chain_to(self, version: int) -> set[int]:
        if version in self.anchors:
            return {version}
        bases = [base for base, end in self.compactions if end == version and base in self.anchors]
        return {version, max(bases)} if bases else {version} | self._chain_to(version - 1)


class Life:
    """A channel, what writes it, and its model."""

    def __init__(self, codec: str) -> None:
        self.store = FaultyStore(open_store(f"memory://{uuid.uuid4().hex}"))
        self.channel = Made(self.store.inner, codec_name=codec)
        self.model = Model()
        self.weights = {"w": torch.zeros(_ELEMENTS, dtype=torch.bfloat16)}
        self.channel.create(self.weights)
        self.random = np.random.default_rng(0)
        self.publish(1, False, "anchor")

    @property
    def reader(self) -> ChannelReader:
        return ChannelReader(self.store)

    def publish(self, count: int, parts: bool, kind: str) -> None:
        for _ in range(count):
            where = self.random.integers(0, _ELEMENTS, 3)
            self.weights["w"].view(torch.int16)[where] = torch.from_numpy(
                self.random.integers(-99, 99, 3, np.int16)
            )
            step = None if self.random.random() < 0.2 else int(self.random.integers(0, 20))
            make = (
                self.channel.anchor
                if kind == "anchor"
                else lambda *a: self.channel.delta(a[0], int(parts), a[1])
            )
            version = make(self.weights, step).version
            if kind == "announce":
                self.channel.announce(version)
            self.model.versions[version.version] = version
            self.model.steps[version.version] = step
            self.model.anchors += [version.version] if kind else []
            self.model.stored.add(version.version)
        self.channel.head()

    def reopen(self) -> None:
        self.channel.seal(keys.new_epoch(keys.epoch_number(self.channel.epoch) + 1))

    def gc(self, keep: dict[str, int | None] | None, crash: Crash | None) -> None:
        policy = None if keep is None else KeepPolicy(**keep)
        if keep is not None:
            self.model.keep(**keep)
        self._crashing(crash, lambda: ops.gc(self.reader, policy, grace_s=0))
        assert self.versions() == sorted(self.model.stored)

    def versions(self) -> list[int]:
        held = ops.scan_channel(self.reader)
        return [
            slot.version for slot, record in held.records.items() if record is not None and record.is_version
        ]

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

    def leave(self, left: tuple[Callable[[int, str, int], str], int, int, bool]) -> None:
        """What a dead publisher or tool left: an attempt that was given up, or an anchor that was not
        announced.
        """
        folder, version, attempt, tool = left
        author = keys.new_author() if tool else self.channel.epoch
        self.store.inner.put(f"{folder(version, author, attempt)}/left.safetensors", b"left")

    def compaction(self, base: int, version: int) -> None:
        stored = sorted(self.model.stored)
        base, version = sorted((stored[base % len(stored)], stored[version % len(stored)]))
        if base < version:
            ops.write_compaction(self.reader, base, version)
            self.model.compactions.add((base, version))

    def check(self) -> None:
        """Every version that is to stay has its bits, one after the other and from nothing."""
        walker = Replica(self.store)
        for number in sorted(self.model.stored):
            for replica in (walker, Replica(self.store)):
                assert replica.sync(number) == number
                assert replica.identity == self.model.versions[number]
                assert_same_bits(replica.state_dict(), self.channel.bits[self.model.versions[number].sha256])

    def end(self) -> None:
        """By then there was another writer, so that nobody waits for the files of those before."""
        self.reopen()
        self.publish(1, False, "")
        ops.gc(self.reader, grace_s=0)
        held = ops.scan_channel(self.reader)
        found = [
            record for record in (*held.records.values(), *held.shortcuts.values()) if record is not None
        ]
        named = {file.key for record in found for file in record.files}
        left = {info.key for prefix in (keys.PARTS, keys.ANCHORS) for info in self.store.list(prefix)}
        last = self.channel.tip
        assert last is not None
        ahead = {
            key
            for key in left
            if (of := keys.file_of(key)) and of.epoch == last.epoch and of.version > last.version
        }
        assert left - ahead == named
        report = ops.check(self.reader, read_data=True)
        assert report.problems == []
        assert report.proven == sorted(self.model.stored)
        assert not list(self.store.list("probe/"))


@given(st.sampled_from(["packed", "context"]), st.lists(_actions, min_size=1, max_size=14))
def test_what_is_kept_stays_and_what_is_not_goes(codec: str, actions: list[tuple]) -> None:
    life = Life(codec)
    for name, *arguments in actions:
        getattr(life, name)(*arguments)
        if name == "gc":
            life.check()
    life.check()
    life.end()
