"""Weights that somebody writes while they are published, and a trainer's memory that fails: no version is
unreadable.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from deltasync import Publisher, Replica
from deltasync.channel.reading import ChannelReader
from deltasync.errors import CorruptDataError, PublishError
from deltasync.kernels import native, reference
from deltasync.ops import check
from deltasync.ops.cli import main
from deltasync.publish import encode
from deltasync.publish import shadow as shadows
from deltasync.trainer.stream import Stream, TensorRange
from tests import builders
from tests.builders import Weights, assert_holds

RUNS = 5


def _ranges(weights: Weights) -> Mapping[str, Any]:
    return {name: TensorRange(tensor.view(-1), 0, tuple(tensor.shape)) for name, tensor in weights.items()}


STREAMS: dict[str, Callable[[Weights], Stream]] = {
    "a mapping": lambda weights: weights,
    "a generator": lambda weights: iter(weights.items()),
    "ranges": _ranges,
}


@pytest.fixture
def in_numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DELTASYNC_SIMD", "none")
    native.extension.cache_clear()
    yield
    native.extension.cache_clear()


def _all_are_readable(url: str, version: int) -> None:
    for each in range(1, version + 1):
        assert Replica(url).sync(each) == each


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as it is", "float32"])
@pytest.mark.parametrize("stream", STREAMS)
def test_every_version_is_readable_though_somebody_writes(
    memory_url: str, stream: str, dtype: torch.dtype
) -> None:
    """Three publishes beside a writer, then a quiet one, which has the model."""
    weights = {f"w{n}": torch.zeros(150, 150, dtype=dtype) for n in range(4)}
    for run in range(RUNS):
        url, ended = f"{memory_url}/{run}", threading.Event()
        with Publisher(url) as publisher:
            publisher.publish(STREAMS[stream](weights)).wait(builders.PATIENCE_S)
            writer = threading.Thread(target=_write, args=(weights, ended))
            writer.start()
            try:
                for _ in range(3):
                    publisher.publish(STREAMS[stream](weights)).wait(builders.PATIENCE_S)
            finally:
                ended.set()
                writer.join()
            publisher.publish(STREAMS[stream](weights)).wait(builders.PATIENCE_S)
            _all_are_readable(url, 5)
            assert_holds(url, {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})


def _write(weights: Weights, ended: threading.Event) -> None:
    number = 0
    while not ended.is_set():
        number += 1
        for tensor in weights.values():
            tensor.fill_(float(number % 3))


def test_bits_that_change_between_two_reads_are_published_as_they_were_first(
    memory_url: str, in_numpy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In numpy, where the moment between two reads can be named."""
    after = torch.zeros(100)
    weights = {"w": torch.zeros(100, dtype=torch.bfloat16)}
    index_dtype = reference.index_dtype

    def written(size: int) -> np.dtype:
        weights["w"].copy_(after)
        return index_dtype(size)

    with Publisher(memory_url) as publisher:
        builders.publish(publisher, weights)
        for first, last in ((1.0, 0.0), (3.0, 2.0)):
            now = torch.full((100,), first)
            weights["w"].copy_(now)
            after.fill_(last)
            with monkeypatch.context() as patched:
                patched.setattr(reference, "index_dtype", written)
                publisher.publish(weights).wait(builders.PATIENCE_S)
            assert_holds(memory_url, {"w": now.to(torch.bfloat16)})
        publisher.publish(weights).wait(builders.PATIENCE_S)
        assert_holds(memory_url, weights)


@pytest.mark.parametrize("codec", ["packed", "context", "raw"])
def test_steps_that_do_not_lead_to_the_fingerprint_are_not_published(
    memory_url: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing has read other bits for the gain than for the step: full weights follow."""
    compare, states = native.compare, [builders.weights()]
    states += [builders.trained(states[-1], seed) for seed in (1, 2, 3)]

    def wrong(*given: Any) -> Any:
        steps, gain_T, above_T = compare(*given)
        gain_T[np.flatnonzero(gain_T)[:1]] += np.uint64(1)
        return steps, gain_T, above_T

    with Publisher(memory_url, codec=codec) as publisher:
        builders.publish(publisher, states[0])
        with monkeypatch.context() as patched:
            patched.setattr(native, "compare", wrong)
            lost = publisher.publish(states[1])
            with pytest.raises(PublishError, match="decodes to other bits"):
                lost.wait(builders.PATIENCE_S)
        assert builders.publish(publisher, states[2]).kind == "anchor"
        assert builders.publish(publisher, states[3]).kind == "delta"
        assert_holds(memory_url, states[3])


def test_a_failure_of_the_trainers_memory_is_found_and_full_weights_follow(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shadows, "AUDITED_IN", 3)
    weights = builders.weights()
    with Publisher(memory_url) as publisher:
        builders.publish(publisher, weights)
        for _ in range(4):
            builders.publish(publisher, weights)
        assert publisher._shadow is not None
        publisher._shadow.bits["layer.weight"][7] ^= 1
        losses, kinds = 0, list[str]()
        for seed in range(6):
            weights = builders.trained(weights, seed)
            try:
                kinds.append(builders.publish(publisher, weights).kind)
            except PublishError:
                losses += 1
        (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert "layer.weight" in told and "full weights" in told
        assert (losses, kinds.count("anchor")) == (1, 1)
        assert_holds(memory_url, weights)


def test_an_audit_takes_a_share_of_the_bits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many elements as were due, the largest tensor included, and all of them once in a pass."""
    monkeypatch.setattr(shadows, "AUDITED_IN", 10)
    sizes = {"large": 500, "empty": 0, "small": 3, "other": 97, "last": 400}
    known = builders.Compared({name: torch.arange(size) for name, size in sizes.items()}).shadow
    read, digests = list[list[str]](), known._memory.digests

    def noted(names: list[str]) -> list[int]:
        read.append([*names])
        return digests(names)

    known.fingerprints  # noqa: B018 - which reads all
    monkeypatch.setattr(known._memory, "digests", noted)
    for calls in range(1, 31):
        known.audit()
        done = sum(sizes[name] for names in read for name in names)
        assert 100 * calls - 500 <= done <= 100 * calls
    assert [name for names in read for name in names].count("last") == 3
    known.bits["small"][2] ^= 1
    with pytest.raises(CorruptDataError, match="small"):
        for _ in range(10):
            known.audit()
    known.forget_fingerprints()
    for _ in range(10):
        known.audit()


def test_check_finds_a_version_whose_fingerprints_are_of_other_bits(
    channel_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a publisher without the proof would have left it. Records alone do not tell, and `check` says so."""
    compare, weights = native.compare, builders.weights()

    def wrong(*given: Any) -> Any:
        steps, gain_T, above_T = compare(*given)
        gain_T[np.flatnonzero(gain_T)[:1]] += np.uint64(1)
        return steps, gain_T, above_T

    monkeypatch.setattr(encode, "differing_gains", lambda *_: [])
    with Publisher(channel_url) as publisher:
        builders.publish(publisher, weights)
        with monkeypatch.context() as patched:
            patched.setattr(native, "compare", wrong)
            builders.publish(publisher, builders.trained(weights, 1))
        builders.publish(publisher, builders.trained(weights, 2))
        reader = ChannelReader(publisher.store)
    listed = check(reader)
    assert (listed.problems, listed.proven) == ([], None)
    told = CliRunner().invoke(main, ["check", channel_url]).output
    assert "proven" in told and "--read-data" in told
    replayed = check(reader, read_data=True)
    assert (replayed.proven, replayed.unproven) == ([1], [2, 3])
    assert str(replayed.problems[0]).startswith("Version 2 did not give the published bits")
    assert CliRunner().invoke(main, ["check", channel_url, "--read-data"]).exit_code
