"""TRL's AsyncGRPO with its own rollout worker, in its own process, knows which version made each token."""

from __future__ import annotations

import functools
import queue
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from accelerate import PartialState

from deltasync import open_store
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError
from tests.integration import trainers
from tests.integration.async_trainers import Completions, grpo_sample, make_async_trainer, needs_vllm
from tests.integration.trainers import TOKEN_METRICS, Fleet
from trl_callback import DeltaSyncCallback
from trl_callback.compat import _watch_queue
from trl_callback.tokens import UNKNOWN, TokenAges, VersionedLogProb, VersionedMetrics

checkpoint = trainers.checkpoint

pytestmark = pytest.mark.trl


def _halves(fleet: Fleet, asked: dict[str, Any]) -> tuple[list[int], list[tuple[int, int]]]:
    """The same tokens for each prompt: half of them from version 1, half from the one that the fleet
    serves.
    """
    (live,) = (replica.version for replica in fleet.replicas.values())
    assert live is not None
    return [5 + asked["seed"] % 20] * 8, [(1, 4), (live, 4)]


def _ended_halves(fleet: Fleet, asked: dict[str, Any]) -> tuple[Any, ...]:
    """The same in two requests, of which the server ends the first."""
    (live,) = (replica.version for replica in fleet.replicas.values())
    if asked["max_tokens"] == 8:
        return [5 + asked["seed"] % 20] * 4, [(1, 4)], "ended"
    assert asked["max_tokens"] == 4 and len(set(asked["prompt"][-4:])) == 1
    return asked["prompt"][-4:], [(live, 4)]


@needs_vllm
@pytest.mark.parametrize(
    ("max_token_lag", "oldest"), [pytest.param(None, [0, 1, 2], marks=pytest.mark.slow), (0, [0, 1, 1])]
)
def test_lag_is_that_of_the_tokens_when_they_are_trained(
    max_token_lag: int | None, oldest: list[int], checkpoint: Path, tmp_path: Path
) -> None:
    """The batch of each step but the first is taken one step ahead, which the lag at the step includes."""
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url, ack_timeout_s=60, max_behind=0, max_token_lag=max_token_lag)
    with (
        Fleet(url, "replica") as fleet,
        Completions(
            fleet.replicas["replica"],
            functools.partial(_halves if max_token_lag is None else _ended_halves, fleet),
        ) as server,
    ):
        trainer = make_async_trainer(
            checkpoint,
            sync,
            [],
            stub=False,
            vllm_server_base_url=server.url,
            max_inflight_tasks=6,
            queue_maxsize=6,
            max_staleness=9,
        )
        trainer.train()
    # What the fleet served when it was asked: a server that started anew would answer with the weights of its
    # checkpoint.
    assert {">=1", ">=2"} <= {demanded for demanded, _ in server.asked}
    assert all(demanded == f">={served}" for demanded, served in server.asked if served == 1)
    assert all(int(demanded[2:]) <= served for demanded, served in server.asked)
    assert server.lags == {None if max_token_lag is None else str(max_token_lag)}
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["delta_sync/token_lag_max"] for line in logs] == oldest
    reader = ChannelReader(open_store(url))
    told = {
        found.step: found.token_lag
        for version in reader.versions()
        for found in [reader.record(version).record]
    }
    assert told.pop(0) is msgspec.UNSET
    assert [told[line["step"]][2] for line in logs] == oldest
    assert all(line["delta_sync/unversioned_token_fraction"] == 0 for line in logs)
    for line in logs:
        names = {name.removeprefix("delta_sync/") for name in line if name.startswith("delta_sync/")}
        assert names & TOKEN_METRICS == TOKEN_METRICS - (
            {"masked_tokens"} if max_token_lag is None else set()
        )
    # What TRL drops stale samples by is what the tokens say. It takes samples for the step after this one.
    if max_token_lag is None:
        assert [line["sample/staleness_max"] for line in logs] == [0, 1, 2]
        assert all(line["delta_sync/stale_token_fraction"] == 0 for line in logs)
    else:
        assert [line["delta_sync/stale_token_fraction"] for line in logs] == [0, 1, 1]
        # without the bound half of them would be of version 1
        assert logs[-1]["delta_sync/token_lag_mean"] == 1
        assert sum(line["delta_sync/masked_tokens"] for line in logs) > 0


def test_versions_stay_with_their_tokens_when_trl_aligns_turns() -> None:
    """The second turn's prompt re-tokenizes the end of the first answer, the third one forks."""
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

    def turn(prompt: list[int], answer: list[int], version: int) -> TurnRecord:
        return TurnRecord(prompt, answer, [VersionedLogProb(-1.0, version)] * len(answer))

    turns = [turn([1, 2], [3, 4, 5], 7), turn([1, 2, 3, 4, 9, 6], [8, 8], 8), turn([5, 5], [6], 9)]
    sequences, _ = _chain_to_sequences(turns, "rollout", 1024)
    metrics = [VersionedMetrics.of({}, sequence.old_log_probs) for sequence in sequences]
    assert [one.versions.tolist() for one in metrics] == [[0, 0, 7, 7, 0, 0, 8, 8], [0, 0, 9]]
    for one, sequence in zip(metrics, sequences, strict=True):
        assert ((one.versions != UNKNOWN) == np.asarray(sequence.completion_mask, dtype=bool)).all()


def test_trl_drops_a_sample_by_its_oldest_token_and_trains_no_masked_one() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

    PartialState()  # for TRL's logger

    def queued(group: int, *versions: int) -> Any:
        mask = np.asarray([0] + [1] * len(versions), dtype=np.int64)
        fields = {"prompt": [], "completion": [], "input_ids": np.arange(len(mask)), "completion_mask": mask}
        sample = grpo_sample(group, 1, **fields, model_version=5)
        log_probs = [0.0, *(VersionedLogProb(-1.0, version) for version in versions)]
        sample.metrics = VersionedMetrics.of(sample.metrics, log_probs)
        return sample

    def taken(max_lag: int | None) -> tuple[list[tuple[int, list[int]]], dict[str, list[float]]]:
        ages, metrics, source = TokenAges(max_lag), defaultdict[str, list[float]](list), queue.Queue[Any]()
        ages.begin(lambda: 5, 2)
        for sync in range(1, 6):
            ages.synced(sync, sync)
        for sample in (queued(0, 5, 5), queued(1, 2, 5), queued(2, 4, 3), queued(3, 2, 2), queued(4, 4)):
            source.put(sample)
        _watch_queue(source, ages)
        dataset = RolloutQueueDataset(source, lambda: 5, lambda _: None, 60, metrics, max_staleness=2)
        found: list[tuple[int, list[int]]] = []
        for sample in dataset:
            found.append((sample["group_id"], sample["completion_mask"].tolist()))
            if sample["group_id"] == 4:
                break
        return found, metrics

    found, metrics = taken(None)
    assert found == [(0, [0, 1, 1]), (2, [0, 1, 1]), (4, [0, 1])]
    assert metrics["sample/staleness_mean"] == [0, 2, 1]
    assert metrics["sample/dropped_stale_total"] == [1, 1]
    found, metrics = taken(1)
    assert found == [(0, [0, 1, 1]), (1, [0, 0, 1]), (2, [0, 1, 0]), (4, [0, 1])]
    assert metrics["sample/staleness_mean"] == [0, 0, 1, 1]
    assert metrics["sample/dropped_stale_total"] == []


def test_a_bound_is_refused_where_no_reply_tells_versions(checkpoint: Path, memory_url: str) -> None:
    trainer = make_async_trainer(checkpoint, DeltaSyncCallback(memory_url, max_token_lag=2), [])
    with pytest.raises(
        ConfigError, match="max_token_lag needs AsyncGRPOTrainer with TRL's own rollout worker"
    ):
        trainer.train()
