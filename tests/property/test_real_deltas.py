"""The codecs on real deltas: every step of two GRPO runs, of a few tensors (tests/corpus).

Payloads are so small here that headers, tables and counts take a quarter of them; `benchmarks.corpus`
measures whole models.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deltasync import Publisher, Replica
from deltasync.codec.base import Encoded
from deltasync.tensors import Layout
from deltasync.tensors.bits import bits_of, tensor_of
from deltasync.tensors.delta import merge
from tests import corpus, deltas

RUNS = pytest.mark.parametrize("run", corpus.RUNS)
PATIENCE_S = 60.0


def _encoded(codec_name: str, old_N: np.ndarray, new_N: np.ndarray) -> Encoded:
    return deltas.encode(codec_name, corpus.specs(), corpus.by_tensor(old_N), corpus.by_tensor(new_N))


def _bits(codec_name: str, states: list[np.ndarray]) -> tuple[float, float]:
    """Bits per changed element over consecutive states: of all payloads, and of their entropy-coded words
    alone.
    """
    payload_bytes = word_bytes = changed = 0
    for old_N, new_N in itertools.pairwise(states):
        encoded = _encoded(codec_name, old_N, new_N)
        payload_bytes += len(encoded.to_bytes())
        word_bytes += sum(array.nbytes for name, array in encoded.arrays.items() if name.endswith("words"))
        changed += int((old_N != new_N).sum())
    return 8 * payload_bytes / changed, 8 * word_bytes / changed


@RUNS
def test_the_fixture_is_the_run_that_the_page_describes(run: str) -> None:
    states = list(corpus.states(run))
    assert len(states) == {"1e-6": 41, "3e-6": 44}[run]
    fractions = [(old_N != new_N).mean() for old_N, new_N in itertools.pairwise(states)]
    assert np.mean(fractions) == pytest.approx({"1e-6": 0.00304, "3e-6": 0.00620}[run], rel=0.01)


@RUNS
def test_real_steps_take_few_bits(run: str) -> None:
    states = list(corpus.states(run))
    packed, packed_words = _bits("packed", states)
    context, context_words = _bits("context", states)
    raw, _ = _bits("raw", states[:4])
    assert context < {"1e-6": 9.6, "3e-6": 8.0}[run] and context_words < {"1e-6": 6.9, "3e-6": 6.2}[run]
    assert packed < {"1e-6": 16.3, "3e-6": 13.1}[run] and packed_words < {"1e-6": 14.2, "3e-6": 12.0}[run]
    assert context < 0.62 * packed and packed < raw / 3


@RUNS
def test_a_compaction_of_all_steps_takes_fewer(run: str) -> None:
    first_N, *_, last_N = corpus.states(run)
    context, _ = _bits("context", [first_N, last_N])
    packed, _ = _bits("packed", [first_N, last_N])
    assert context < {"1e-6": 5.4, "3e-6": 4.5}[run] and packed < {"1e-6": 10.8, "3e-6": 8.7}[run]


@RUNS
@pytest.mark.parametrize("codec_name", ["raw", "packed", "context"])
def test_real_steps_round_trip(codec_name: str, run: str) -> None:
    for old_N, new_N in itertools.islice(itertools.pairwise(corpus.states(run)), 0, None, 6):
        old, new = corpus.by_tensor(old_N), corpus.by_tensor(new_N)
        delta, fingerprints = deltas.decode(
            _encoded(codec_name, old_N, new_N).to_bytes(), corpus.specs(), old
        )
        deltas.check(delta)
        reached = deltas.applied(delta, old)
        assert all(np.array_equal(reached[name], bits) for name, bits in new.items())
        assert fingerprints.items() <= deltas.digests(new).items()


@RUNS
def test_merged_real_steps_are_the_difference_of_the_ends(run: str) -> None:
    layout = Layout(corpus.specs())
    states = [corpus.by_tensor(bits_N) for bits_N in corpus.states(run)]
    steps = [deltas.between(layout, old, new) for old, new in itertools.pairwise(states)]
    for first, last in ((0, 8), (4, 36), (0, len(steps))):
        merged, wanted = merge(steps[first:last]), deltas.between(layout, states[first], states[last])
        assert merged.counts() == wanted.counts()
        for found, expected in zip(merged.steps[2], wanted.steps[2], strict=True):
            np.testing.assert_array_equal(found, expected)


@RUNS
def test_a_replica_follows_a_real_run(run: str) -> None:
    url, specs = f"memory://real-{run}", corpus.specs()
    replica = Replica(url)
    with Publisher(url) as publisher:
        for step, bits_N in enumerate(itertools.islice(corpus.states(run), 0, None, 4)):
            bits = corpus.by_tensor(bits_N)
            publisher.publish(
                {name: tensor_of(bits[name], spec) for name, spec in specs.items()}, step=step
            ).wait(PATIENCE_S)
            replica.sync()
            live = replica.state_dict()
            assert all(np.array_equal(bits_of(live[name]), bits[name]) for name in specs)
