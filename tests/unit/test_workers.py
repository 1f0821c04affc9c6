"""Several workers at once: what may be asked of one, and that none is left behind with uncertain weights in
silence.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from deltasync import limits
from deltasync.channel.documents import VersionId
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    ApplyError,
    CommitError,
    ConfigError,
    DeltaSyncError,
    FingerprintMismatchError,
    SleepingError,
    StageError,
)
from deltasync.following import Commit
from deltasync.live import Union
from deltasync.serve.engine import Failure, answer, is_safe
from deltasync.serve.shard import BACKGROUND, CALLS, Done, Shard
from deltasync.serve.shards import ShardsTarget
from deltasync.tensors import TensorSpec
from tests import driving
from tests.driving import Engine, Trainer, target_of
from vllm_plugin.offline import OfflineReplica

engine, trainer = driving.engine, driving.trainer  # fixtures

DONE = Done(1, 0.5, 0.25, 0.125)


class Two:
    """Two workers that fail as they are told to."""

    def __init__(self, **failing: list[Exception | None]) -> None:
        self.failing = failing
        self.called: list[str] = []

    def call(self, method: str, *args: Any) -> list[Any]:
        assert method == "deltasync_call"
        called = str(args[0])
        self.called.append(called)

        def body(error: Exception | None) -> Any:
            if error is not None:
                raise error
            return DONE if called == "commit" else None

        return [answer(lambda: body(error)) for error in self.failing.get(called, [None, None])]  # noqa: B023


def commit(two: Two) -> Commit:
    target = target_of(two.call, SimpleNamespace(specs={}, store=SimpleNamespace(url="memory://none")))  # type: ignore[arg-type]
    target._regions = [{}, {}]
    target._union = Union([], target._regions)
    record = SimpleNamespace(version=VersionId(2, "0" * 16, "0" * 64), use_anchor=False)
    return target.commit([record])  # type: ignore[list-item]


UNCERTAIN, STAGE, MISMATCH = (
    CommitError("half-way"),
    StageError("untouched"),
    FingerprintMismatchError("rolled back"),
)


@pytest.mark.parametrize(
    ("failing", "kind"),
    [
        ({"commit": [STAGE, None]}, StageError),
        ({"commit": [STAGE, UNCERTAIN]}, CommitError),
        ({"commit": [UNCERTAIN, STAGE]}, CommitError),
        ({"commit": [STAGE, KeyError("x")]}, ApplyError),
        ({"commit": [STAGE, None], "undo": [None, StageError("someone else wrote there")]}, CommitError),
        ({"confirm": [MISMATCH, MISMATCH]}, FingerprintMismatchError),
        ({"confirm": [MISMATCH, UNCERTAIN]}, CommitError),
        ({"confirm": [None, MISMATCH]}, CommitError),
    ],
)
def test_the_gravest_failure_of_a_commit_is_the_one_that_counts(
    failing: dict[str, list[Exception | None]], kind: type[DeltaSyncError]
) -> None:
    two = Two(**failing)
    with pytest.raises(DeltaSyncError) as caught:
        commit(two)
    assert type(caught.value) is kind
    assert is_safe(caught.value) is (kind in (StageError, FingerprintMismatchError))
    assert two.called == ["commit", "undo"] if "commit" in failing else ["commit", "confirm"]


def test_times_are_the_longest_and_changes_add_up() -> None:
    found = commit(Two())
    assert (found.changed, found.stage_s, found.scatter_s, found.reload_s) == (2, 0.5, 0.25, 0.125)


class Halves:
    """Two workers with half of a tensor each, which they need whole before they stage, and a third without a
    part of it.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.came = bytearray()

    def call(self, method: str, *args: Any) -> list[Any]:
        called, *rest = args
        if called == "read":
            return [{"result": [bytes([half]) * 6]} for half in (1, 2)] + [{"result": []}]
        if called == "complete":
            name, at, data = rest
            assert (name, at) == ("w", len(self.came))
            self.came += data
            return [{"result": None}] * 3
        assert called == "stage"
        lacks = not (self.keeps and self.came)
        first = (
            {"error": {"kind": "StageError", "message": "", "tensors": ["w"]}} if lacks else {"result": True}
        )
        return [first, {"result": True}, {"result": True}]


def halves(engine: Halves) -> ShardsTarget:
    specs, store = {"w": TensorSpec("w", "bfloat16", (2, 3))}, SimpleNamespace(url="memory://none")
    workers = target_of(engine.call, SimpleNamespace(specs=specs, store=store))  # type: ignore[arg-type]
    workers._regions = [{"w": [(start, ((3, 1),))]} for start in (0, 3)] + [{"w": []}]
    return workers


def test_a_tensor_that_a_worker_lacks_is_handed_to_it_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HANDED_BYTES", 5)
    engine = Halves()
    assert halves(engine).stage([]) == []
    assert engine.came == bytes([1] * 6 + [2] * 6)


def test_a_worker_that_lacks_what_it_was_handed_is_an_error() -> None:
    with pytest.raises(ApplyError, match="was handed w, and lacks it"):
        halves(Halves(keeps=False)).stage([])


def test_only_what_is_listed_can_be_called(engine: Engine, trainer: Trainer, memory_url: str) -> None:
    trainer.publish()
    worker = engine.worker
    assert worker.deltasync_call("settled")["error"]["kind"] == "NotPublishedError"
    assert worker.deltasync_open(memory_url) == {"result": None}
    assert worker.deltasync_call("settled") == {"result": True}
    for method in ("_audit", "fall_asleep", "call", "__init__", "gone"):
        told = msgspec.convert(worker.deltasync_call(method)["error"], Failure).error()
        assert isinstance(told, ConfigError) and repr(method) in str(told)
    assert all(callable(getattr(Shard, method)) for method in CALLS - {"poll"})
    assert BACKGROUND < CALLS


def test_work_that_nobody_waited_for_is_not_taken_for_the_next(
    engine: Engine, trainer: Trainer, memory_url: str
) -> None:
    trainer.publish()
    engine.worker.deltasync_open(memory_url)
    opened = engine.worker._deltasync_shard
    first = engine.worker.deltasync_call("stage", [])  # which fails
    engine.worker.deltasync_call("verify")
    opened._thread.submit(lambda: None).result(driving.PATIENCE_S)
    found = engine.worker.deltasync_call("poll")
    assert ("working" in first or "error" in first, "regions" in found["result"]) == (True, True)
    assert engine.worker.deltasync_call("poll") == {"result": None}


def test_a_worker_that_sleeps_touches_nothing(engine: Engine, trainer: Trainer, memory_url: str) -> None:
    trainer.publish()
    engine.worker.deltasync_open(memory_url)
    opened = engine.worker._deltasync_shard
    opened.fall_asleep()
    for method in ("settled", "poll", "audit", "stage", "commit", "confirm", "read", "prove"):
        with pytest.raises(SleepingError):
            opened.call(method)
    opened.wake_up()
    assert opened.call("settled") is False


class LLM:
    """vLLM's offline `LLM` as far as it is used."""

    def __init__(self, engine: Engine) -> None:
        self.worker = engine.worker
        self.llm_engine = SimpleNamespace(set_weight_version=lambda version: None)

    def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[Any]:
        return [getattr(self.worker, method)(*args)]


@pytest.mark.parametrize("audit_fails", [False, True])
def test_an_offline_model_is_audited_after_a_commit_that_could_not_be_undone(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch, audit_fails: bool
) -> None:
    replica = OfflineReplica(LLM(engine), ReplicaSettings(channel=memory_url, replica_id="unit"))
    trainer.publish()
    assert replica.sync() == 1
    trainer.publish()
    memory = engine.worker._deltasync_shard.weights.memory
    with monkeypatch.context() as patch:

        def fail(staged: Any) -> Any:
            patch.undo()
            if audit_fails:
                patch.setattr(memory, "audit", lambda: 1 // 0)
            raise CommitError("the weights are uncertain")

        patch.setattr(memory, "commit", fail)
        if audit_fails:
            with pytest.raises(CommitError, match="generate nothing"):
                replica.sync(timeout_s=0)
        else:  # it is known what the weights are, although the time was over before
            with pytest.raises(ApplyError) as caught:
                replica.sync(timeout_s=0)
            assert caught.type is ApplyError
            assert not replica._follow.target.client.held
    assert replica.sync() == 2
    assert torch.equal(engine.model.w, trainer.weights["w"])
    replica.close()


def test_an_offline_model_waits_for_a_version_only_so_long(
    engine: Engine, trainer: Trainer, memory_url: str
) -> None:
    replica = OfflineReplica(LLM(engine), ReplicaSettings(channel=memory_url, replica_id="unit"))
    with pytest.raises(ApplyError, match="is not live, but version None"):
        replica.sync(timeout_s=0.1)
    trainer.publish()
    with pytest.raises(ApplyError, match="Version 2 is not live, but version 1"):
        replica.sync(2, timeout_s=0.1)
    assert replica.version == 1
    replica.close()
