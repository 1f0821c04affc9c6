"""What goes on while a stream is read, and after `publish` has returned."""

from __future__ import annotations

import itertools
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltasync import Publisher, Replica, codec, kernels, limits, open_store
from deltasync.channel import keys, payloads
from deltasync.channel.reading import ChannelReader
from deltasync.codec import reader
from deltasync.codec.base import Encoded, NewBits
from deltasync.errors import PublishError
from deltasync.publish import encode
from deltasync.publish.upload import PUTS
from deltasync.stores import Store
from deltasync.tensors import Delta, Sparse
from deltasync.tensors.bits import bits_of
from tests.builders import assert_holds
from tests.faults import FaultyStore

Weights = dict[str, torch.Tensor]
MANY = 8


def states(count: int, elements: int = 1000, fraction: float = 0.1, tensors: int = MANY) -> list[Weights]:
    """Versions of a model of several tensors, each of which changes each time."""
    random = torch.Generator().manual_seed(0)
    found = [{f"w{at}": torch.randn(elements, generator=random).to(torch.bfloat16) for at in range(tensors)}]
    for _ in range(count - 1):
        moved = {name: tensor.clone() for name, tensor in found[-1].items()}
        for tensor in moved.values():
            tensor.view(torch.int16)[torch.rand(elements, generator=random) < fraction] += 1
        found.append(moved)
    return found


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


@pytest.fixture
def in_parts(in_groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changed tensor is a part."""
    monkeypatch.setattr("deltasync.publish.encode.INLINE_BYTES", 0)


@pytest.fixture
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changed tensor is a group."""
    monkeypatch.setattr("deltasync.publish.encode.GROUP_CHANGED", 1)


@pytest.mark.usefixtures("in_parts")
def test_parts_go_up_while_later_ones_are_encoded(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = states(2)
    with Publisher(store, codec="packed") as publisher:
        publisher.publish(first.items()).wait(60)
        gate, timed, on_its_way = store.hold_at("put", keys.PARTS), encode.encode, list[bool]()

        def noting(*arguments: Any) -> Any:
            encoded = timed(*arguments)
            on_its_way.append(gate.entered.wait(60 if on_its_way else 0))
            return encoded

        monkeypatch.setattr(encode, "encode", noting)
        receipt = publisher.publish(second.items())
        assert gate.entered.wait(60)
        assert not receipt.done
        gate.opened.set()
        receipt.wait(60)
        assert receipt.payload_bytes > 0
    # the first part is on its way before the next one is encoded
    assert on_its_way == [False] + [True] * (MANY - 1)
    assert len([info for info in store.list(keys.PARTS)]) == MANY
    assert_holds(store, second, 2)


@pytest.mark.usefixtures("in_groups")
def test_the_last_group_is_in_the_record_and_a_small_version_is_nothing_else(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = states(3)
    with Publisher(store) as publisher:
        publisher.publish(first.items()).wait(60)
        monkeypatch.setattr("deltasync.publish.encode.GROUP_CHANGED", 250)
        receipt = publisher.publish(second.items()).wait(60)
        record = ChannelReader(store).numbered(2)
        assert record.record.delta is not None and len(record.record.delta.parts) >= 2
        assert record.record.body_bytes > 0
        assert receipt.payload_bytes <= record.record.payload_bytes < receipt.payload_bytes + 300
        monkeypatch.undo()
        store.calls.clear()
        publisher.publish(third.items()).wait(60)
        written = [call for call in store.calls if call[0] != "read" and call[1] != keys.HEAD]
        assert written == [("create", keys.slot(3, record.record.epoch))]
    assert_holds(store, second, 2)
    assert_holds(store, third, 3)


class Meeting(FaultyStore):
    """Parts are stored only as long as others are being stored too."""

    def __init__(self, inner: Store, count: int) -> None:
        super().__init__(inner)
        self.barrier = threading.Barrier(count)

    def put(self, key: str, data: bytes) -> None:
        if key.startswith(keys.PARTS):
            self.barrier.wait(60)
        super().put(key, data)


@pytest.mark.usefixtures("in_parts")
def test_parts_are_stored_in_parallel(memory_url: str) -> None:
    first, second = states(2)
    store = Meeting(open_store(memory_url), PUTS)
    with Publisher(store) as publisher:
        publisher.publish(first.items()).wait(60)
        publisher.publish(second.items()).wait(120)
    assert MANY % PUTS == 0
    assert_holds(store, second, 2)


@pytest.mark.usefixtures("in_groups")
def test_a_stream_that_fails_leaves_nothing_and_the_next_attempt_is_right(store: FaultyStore) -> None:
    first, wrong, second = states(3)
    with Publisher(store) as publisher:
        publisher.publish(first.items()).wait(60)
        before = {info.key for info in store.list("")} - {keys.HEAD}
        shadow = publisher._shadow
        assert shadow is not None
        with pytest.raises(RuntimeError, match="the stream broke"):
            publisher.publish(broken(wrong))
        assert publisher.version == 1
        assert {info.key for info in store.list("")} - {keys.HEAD} == before
        for name, tensor in first.items():
            np.testing.assert_array_equal(shadow.bits[name], bits_of(tensor))
        receipt = publisher.publish(second.items()).wait(60)
        assert (receipt.version, receipt.kind) == (2, "delta")
    named = ChannelReader(store).numbered(2).record.files
    assert {info.key for info in store.list(keys.PARTS)} == {file.key for file in named}
    assert_holds(store, second, 2)


def broken(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield from itertools.islice(weights.items(), 5)
    raise RuntimeError("the stream broke")


@pytest.mark.parametrize("breaks", [False, True])
def test_versions_that_are_published_while_the_first_is_stored_have_their_bits(
    store: FaultyStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """Nobody knows the fingerprints of the first one's tensors before its files are made."""
    monkeypatch.setattr(limits, "WEIGHT_FILE_BYTES", 7000)
    versions = states(4, elements=3000)
    versions[0][f"w{MANY - 1}"][0] = float("nan")
    gate = store.hold_at("put", keys.ANCHORS)
    with Publisher(store) as publisher:
        receipts = [publisher.publish(versions[0].items())]
        assert gate.entered.wait(60)
        if breaks:
            with pytest.raises(RuntimeError):
                publisher.publish(broken(versions[3]))
        receipts.append(publisher.publish(versions[1].items()))
        gate.opened.set()
        assert [receipt.wait(60).version for receipt in receipts] == [1, 2]
        for weights in versions[2:]:
            publisher.publish(weights.items()).wait(60)
    for number, weights in enumerate(versions, 1):
        assert_holds(store, weights, number)
    nan = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert len(nan) == 1 and nan[0].startswith(
        f"Version 1 is published as it is, but has NaN in 1 tensors: w{MANY - 1}."
    )


@pytest.mark.parametrize("held", ["before", "after"])
def test_an_anchor_that_reads_a_tensor_holds_no_publish_and_has_the_bits_of_its_version(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    versions, entered, opened = states(4, elements=3000), threading.Event(), threading.Event()
    take = kernels.native.take

    def gated(*arguments: Any) -> int:
        if not threading.current_thread().name.startswith("deltasync-maintenance"):
            return take(*arguments)
        found = take(*arguments) if held == "after" else None
        entered.set()
        assert opened.wait(60)
        return take(*arguments) if found is None else found

    with Publisher(store, anchor_every=2) as publisher:
        for weights in versions[:2]:
            publisher.publish(weights.items()).wait(60)
        monkeypatch.setattr("deltasync.kernels.native.take", gated)
        publisher.publish(versions[2].items()).wait(60)
        assert entered.wait(60)
        publisher.publish(versions[3].items()).wait(60)
        opened.set()
    reader = ChannelReader(store)
    (info,) = [info for span, info in reader.announcements() if span.version == 3]
    found = {name: bits_N for name, bits_N, _ in payloads.weights(reader, reader.stored(info.key))}
    assert found.keys() == versions[2].keys()
    for name, tensor in versions[2].items():
        np.testing.assert_array_equal(found[name], bits_of(tensor))


def test_no_second_copy_of_the_model_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WEIGHT_FILE_BYTES", 1)
    # old bits that are wanted at once, by default more than this model
    monkeypatch.setattr(reader, "_PART_BYTES", 1 << 19)
    versions = states(4, elements=1 << 20, fraction=0.01, tensors=3 * MANY)  # 2 MiB each
    weight_bytes = sum(tensor.nbytes for tensor in versions[0].values())
    with Publisher(f"file://{tmp_path}", anchor_every=2) as publisher:
        for weights in versions[:2]:
            publisher.publish(weights.items()).wait(60)
        tracemalloc.start()
        try:
            for weights in versions[2:]:
                publisher.publish(weights.items()).wait(60)
            publisher.close()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # Three weight files, two of them on their way to the store, and what the next version is encoded with
    # beside them.
    assert peak_bytes < weight_bytes / 2
    assert_holds(open_store(f"file://{tmp_path}"), versions[-1], 4)


Encodes = tuple[Delta, NewBits, dict[str, int]]
"""What a codec encodes: the steps, the new bits, the fingerprints."""


def altered(delta: Delta, change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Delta:
    """A delta with other positions and steps in `w3`."""
    (at_K, step_K), (_, first, last) = delta.steps[2], delta.layout.span("w3")
    low, high = np.searchsorted(at_K, (first, last))
    at_3, step_3 = change(at_K[low:high], step_K[low:high])
    arrays = (
        np.concatenate((all_K[:low], other, all_K[high:]))
        for all_K, other in ((at_K, at_3), (step_K, step_3))
    )
    return Delta(delta.layout, {2: Sparse(*arrays)})


def wrong_step(delta: Delta, new: NewBits, fingerprints: dict[str, int]) -> Encodes:
    def moved(name: str) -> tuple[np.ndarray, int]:
        bits_N, start = new(name)
        return (bits_N + np.uint16(1) if name == "w3" else bits_N), start

    return altered(delta, lambda at_K, step_K: (at_K, step_K + np.uint16(1))), moved, fingerprints


def wrong_index(delta: Delta, new: NewBits, fingerprints: dict[str, int]) -> Encodes:
    _, _, last = delta.layout.span("w3")

    def change(at_K: np.ndarray, step_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        moved = at_K.copy()
        moved[-1] += 1 if moved[-1] + 1 < last else -1
        return moved, step_K

    return altered(delta, change), new, fingerprints


def wrong_fingerprint(delta: Delta, new: NewBits, fingerprints: dict[str, int]) -> Encodes:
    return delta, new, {**fingerprints, "w3": fingerprints["w3"] ^ 1}


def left_out(delta: Delta, new: NewBits, fingerprints: dict[str, int]) -> Encodes:
    return altered(delta, lambda at_K, step_K: (at_K[:0], step_K[:0])), new, fingerprints


@pytest.mark.parametrize("name", ["packed", "context", "raw"])
@pytest.mark.parametrize("wrong", [wrong_step, wrong_index, wrong_fingerprint, left_out])
def test_what_a_codec_encodes_wrong_is_not_published(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Encodes]
) -> None:
    first, second, third = states(3)
    kind = type(codec.get(name))
    right = kind.encode

    def damaged(self: Any, delta: Delta, new: NewBits, fingerprints: Any, *versions: int) -> Encoded:
        return right(self, *wrong(delta, new, fingerprints), *versions)

    with Publisher(store, codec=name) as publisher:
        publisher.publish(first.items()).wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "encode", damaged)
            receipt = publisher.publish(second.items())
            with pytest.raises(PublishError, match=r"decodes to other bits|lacks|malformed"):
                receipt.wait(60)
        assert Replica(store).sync() == 1
        assert [info.key for info in store.list(keys.VERSIONS)] == [ChannelReader(store).numbered(1).key]
        receipt = publisher.publish(third.items()).wait(60)
        assert (receipt.version, receipt.kind) == (2, "anchor")
    assert_holds(store, third, 2)


def test_connections_that_were_idle_are_opened_again_at_the_beginning_of_a_publish(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = states(3)
    with Publisher(store) as publisher:
        publisher.publish(first.items()).wait(60)
        publisher._opened.log.close()  # type: ignore[union-attr]  # head is there, and is not read again
        monkeypatch.setattr(publisher._opened.log.head, "follow", lambda: None)
        for weights, idle_s in ((second, 60.0), (third, 0.0)):
            publisher._uploader.finisher._used_s -= idle_s  # type: ignore[union-attr]
            store.calls.clear()

            def stream(
                weights: Weights = weights, reads: int = int(idle_s > 0)
            ) -> Iterator[tuple[str, torch.Tensor]]:
                while store.calls.count(("read", keys.HEAD)) < reads:
                    time.sleep(0.001)
                yield from weights.items()

            publisher.publish(stream()).wait(60)
            assert store.calls.count(("read", keys.HEAD)) == (idle_s > 0)


def test_a_small_version_of_several_widths_is_its_record_alone(store: FaultyStore) -> None:
    weights: Weights = {"half": torch.zeros(9).bfloat16(), "single": torch.zeros(9), "ids": torch.arange(9)}
    with Publisher(store, dtype="keep") as publisher:
        publisher.publish(weights).wait(60)
        weights = {name: tensor + 1 for name, tensor in weights.items()}
        publisher.publish(weights).wait(60)
    assert not list(store.list(keys.PARTS))
    assert_holds(store, weights, 2)
