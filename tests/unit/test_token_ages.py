"""How old trained tokens are: the arithmetic. With TRL: `test_trl_tokens`."""

from __future__ import annotations

import logging
import pickle
import queue
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deltasync.errors import ConfigError
from tests.unit.test_versions import Engine, drain, request
from trl_callback import DeltaSyncConfig, compat
from trl_callback.tokens import (
    UNKNOWN,
    TokenAges,
    VersionedLogProb,
    VersionedMetrics,
    lag_metrics,
    read_versions,
)


def sample(versions: list[int], mask: list[int] | None = None, stamp: int = 0) -> Any:
    """As TRL's `RolloutSample`; without versions if these are empty."""
    mask = [1] * len(versions) if mask is None else mask
    log_probs = [VersionedLogProb(-1.0, version) for version in versions]
    metrics = VersionedMetrics.of({"reward": 1.0}, log_probs) if versions else {"reward": 1.0}
    return SimpleNamespace(
        completion_mask=np.asarray(mask, dtype=np.int64), metrics=metrics, model_version=stamp
    )


def ages_at(
    now: int, max_lag: int | None = None, max_staleness: int = 3, ahead: int = 0, unversioned: bool = False
) -> TokenAges:
    """With one version for each sync, or numbers of versions that are ahead of those of syncs."""
    ages = TokenAges(max_lag, unversioned)
    ages.begin(lambda: now, max_staleness)
    for sync in range(1, now + 1):
        ages.synced(sync + ahead, sync)
    return ages


def trained(ages: TokenAges, *samples: Any) -> dict[str, float]:
    ages.add_batch({"completion_mask": one.completion_mask, "metrics": one.metrics} for one in samples)
    ages.train()
    return {name.removeprefix("delta_sync/"): value for name, value in ages.metrics().items()}


# --- what replies tell
# -----------------------------------------------------------------------------------------------


def test_versions_are_read_from_what_the_servers_middleware_writes() -> None:
    engine = Engine()

    async def body() -> None:
        await drain(engine.generate("", "cmpl-0", [("5", 2), ("6", 3)]))

    assert read_versions(request(body)[0], 5) == [5, 5, 6, 6, 6]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-deltasync-spans": "[[[5,2],[6,1]]]", "x-deltasync-versions": "4..7"}, [5, 5, 6]),
        ({"x-deltasync-versions": "4..7"}, [4, 4, 4]),  # none can be older
        ({"x-deltasync-versions": "4.."}, [4, 4, 4]),
        ({"x-deltasync-spans": "[[[5,2]]]", "x-deltasync-versions": "4..7"}, [4, 4, 4]),  # of other tokens
        ({"x-deltasync-spans": "[[[5,3]],[[6,3]]]"}, [UNKNOWN] * 3),  # of two choices
        ({"x-deltasync-spans": "[[[5,1000000000000]]]"}, [UNKNOWN] * 3),
        ({"x-deltasync-spans": "5"}, [UNKNOWN] * 3),
        ({"x-deltasync-spans": "[[[5,4],[6,-1]]]", "x-deltasync-versions": "4..7"}, [4, 4, 4]),
        ({"x-deltasync-spans": "[[[5,1000000000000],[6,-999999999997]]]"}, [UNKNOWN] * 3),
        ({"x-deltasync-spans": "[[[1e999,3]]]"}, [UNKNOWN] * 3),
        ({"x-deltasync-spans": f"[[[{10**30},3]]]"}, [UNKNOWN] * 3),
        ({"x-deltasync-versions": "nonsense"}, [UNKNOWN] * 3),
        ({}, [UNKNOWN] * 3),
    ],
)
def test_without_spans_a_token_is_as_old_as_it_can_be(headers: dict[str, str], expected: list[int]) -> None:
    assert read_versions(headers, 3) == expected


def test_versions_go_with_a_samples_metrics_into_another_process() -> None:
    log_probs = [0.0, VersionedLogProb(-0.5, 3), VersionedLogProb(-1.5, 4)]
    assert np.asarray(log_probs, dtype=np.float32).tolist() == [0.0, -0.5, -1.5]
    metrics = pickle.loads(pickle.dumps(VersionedMetrics.of({"reward": 2.0}, log_probs)))
    assert metrics == {"reward": 2.0}
    assert metrics.versions.tolist() == [UNKNOWN, 3, 4]


# --- lag
# -------------------------------------------------------------------------------------------------------------


def test_lags_are_told_of_the_tokens_that_are_trained() -> None:
    told = trained(
        ages_at(5, max_staleness=1),
        sample([UNKNOWN, 5, 4, 2], mask=[0, 1, 1, 1]),
        sample([5, 1], mask=[1, 0]),
    )
    assert told == {
        "token_lag_mean": 1.0,  # 0, 1, 3 and 0
        "token_lag_p95": 3,
        "token_lag_max": 3,
        "stale_token_fraction": 0.25,
        "unversioned_token_fraction": 0.0,
    }


def test_the_bound_counts_as_stale_what_is_older() -> None:
    assert trained(ages_at(5, max_lag=0, max_staleness=9), sample([5, 4]))["stale_token_fraction"] == 0.5


def test_tokens_of_unknown_versions_are_counted_apart() -> None:
    told = trained(ages_at(5), sample([4, UNKNOWN]), sample([], mask=[1, 1]))
    assert (told["token_lag_max"], told["unversioned_token_fraction"]) == (1, 0.75)
    assert trained(ages_at(5), sample([], mask=[1, 1])) == {"unversioned_token_fraction": 1.0}


@pytest.mark.parametrize("foreign", [6, 10**18])
def test_a_version_that_this_trainer_has_not_published_is_unknown(foreign: int) -> None:
    """A server that follows another channel; its tokens are not younger than those of the newest version."""
    ages = ages_at(5)
    assert trained(ages, sample([4, foreign]))["unversioned_token_fraction"] == 0.5
    assert ages.of_version() == (1.0, 1, 1)
    bound = ages_at(5, max_lag=1)
    mixed = sample([5, foreign])
    assert bound.admit(mixed) and mixed.completion_mask.tolist() == [1, 0] and mixed.model_version == 5
    assert not bound.admit(sample([foreign]))


def test_metrics_are_those_since_the_last_look() -> None:
    ages = ages_at(5)
    assert trained(ages, sample([2]))["token_lag_max"] == 3
    assert ages.metrics() == {}
    assert trained(ages, sample([4]))["token_lag_max"] == 1
    assert ages.of_version() == (2.0, 3, 3), "of both, since no version was published between"
    assert ages.of_version() is None


def test_batches_are_counted_when_they_are_trained_not_when_they_are_made() -> None:
    ages, now = TokenAges(None), [1]
    ages.begin(lambda: now[0], 3)
    ages.synced(1, 1)
    for _ in range(2):
        ages.add_batch([{"completion_mask": np.ones(1), "metrics": sample([1]).metrics}])
    lags = []
    for now[0] in (1, 2):
        ages.train()
        lags.append(ages.metrics()["delta_sync/token_lag_max"])
    assert lags == [0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_percentile_and_mean_are_numpys(seed: int) -> None:
    lags = np.random.default_rng(seed).geometric(0.3, size=seed * 37 + 1)
    told = lag_metrics(Counter(lags.tolist()), bound=2)
    assert told["token_lag_p95"] == np.percentile(lags, 95, method="inverted_cdf")
    assert told["token_lag_mean"] == pytest.approx(lags.mean())
    assert told["stale_token_fraction"] == (lags > 2).mean()


# --- versions and syncs
# ----------------------------------------------------------------------------------------------


def test_a_channel_that_goes_on_counts_from_the_trainers_first_sync() -> None:
    """Version 58 is the first sync of this trainer; 56 was published by the one before."""
    told = trained(ages_at(3, ahead=57), sample([60, 58, 56]))
    assert (told["token_lag_mean"], told["token_lag_max"]) == (2.0, 4)


def test_a_version_that_covers_several_syncs_is_as_old_as_the_last_of_them() -> None:
    ages = ages_at(5)
    ages.begin(lambda: 5, 3)
    for version, sync in [(1, 1), (2, 2), (2, 3), (2, 4), (3, 5)]:
        ages.synced(version, sync)
    told = trained(ages, sample([2, 1]))
    assert (told["token_lag_mean"], told["token_lag_max"]) == (2.5, 4)


# --- what is taken
# ---------------------------------------------------------------------------------------------------


def test_the_oldest_trained_token_stamps_the_sample() -> None:
    ages = ages_at(5, ahead=10, unversioned=True)
    for versions, mask, stamp in [
        ([14, 13], [1, 1], 3),
        ([11, 14], [0, 1], 4),
        ([15, UNKNOWN], [1, 1], 2),  # TRL's own stamp, which is older
        ([], [1, 1], 2),
        ([11, 12], [0, 0], 2),  # nothing of it is trained, which is TRL's affair
    ]:
        taken = sample(versions, mask, stamp=2)
        assert ages.admit(taken)
        assert taken.model_version == stamp
        assert taken.completion_mask.tolist() == mask


def test_a_bound_masks_older_tokens_and_drops_samples_without_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ages = ages_at(5, max_lag=1)
    mixed = sample([3, 5, 2, 4], mask=[1, 1, 0, 1])
    assert ages.admit(mixed)
    assert mixed.completion_mask.tolist() == [0, 1, 0, 1]
    assert mixed.model_version == 4
    assert not ages.admit(sample([3, 2]))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert not ages.admit(sample([], mask=[1, 1, 1]))
        assert not ages.admit(sample([], mask=[1, 1, 1]))
    assert [record.getMessage().count("x-deltasync-spans") for record in caplog.records] == [1]
    assert ages.metrics() == {"delta_sync/masked_tokens": 1 + 2 + 3 + 3}


def test_a_bound_below_zero_is_refused() -> None:
    assert DeltaSyncConfig("memory://x", max_token_lag=0).max_token_lag == 0
    with pytest.raises(ConfigError, match="max_token_lag must not be negative, not -1"):
        DeltaSyncConfig("memory://x", max_token_lag=-1)


def test_a_trainer_that_trains_again_counts_a_batch_once() -> None:
    """The first training's hook gives way to the second's."""
    trainer: Any = SimpleNamespace(compute_loss=lambda model, inputs: model(inputs["x"]).sum())
    ages = ages_at(5)
    for _ in range(2):
        compat._watch_loss(trainer, ages)
    for version in (5, 4):
        ages.add_batch([{"completion_mask": np.ones(1), "metrics": sample([version]).metrics}])
    for lag in (0, 1):
        trainer.compute_loss(torch.nn.Linear(1, 1), {"x": torch.ones(1)})
        assert ages.metrics()["delta_sync/token_lag_max"] == lag


def test_a_trainer_that_trains_again_asks_its_queue_once() -> None:
    source, asked = queue.Queue[Any](), list[Any]()
    ages: Any = SimpleNamespace(admit=lambda given: asked.append(given) or given != "stale")
    for _ in range(2):
        compat._watch_queue(source, ages)
    for each in ("stale", "fresh"):
        source.put(each)
    assert source.get(timeout=1) == "fresh" and asked == ["stale", "fresh"]
