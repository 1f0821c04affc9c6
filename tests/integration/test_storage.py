"""What a channel stores for each byte of delta, and what a late joiner fetches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import storage
from deltasync import Publisher, Retention, open_store
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import PublishPendingError, StoreError
from deltasync.ops.cli import main
from deltasync.ops.steps import Steps
from deltasync.tensors.bits import bits_of
from deltasync.tensors.delta import joined
from tests.builders import Compared, assert_holds, finish_maintenance
from tests.faults import FaultyStore


@pytest.mark.parametrize(("changed", "versions"), [(0.01, 60), (0.001, 130)])
def test_compactions_stay_a_third_of_the_deltas_and_shorten_a_late_join(
    changed: float, versions: int
) -> None:
    found = storage.measure(1_000_000, changed, versions)
    assert found["compactions"] and {base for base, _ in found["compactions"]} == {1}
    assert found["anchor_bytes"] == 0 < found["compaction_bytes"]
    assert found["stored_per_delta"] <= 1.35
    unfolded = 1 + found["delta_bytes"] / found["full_bytes"]
    assert 1 < found["joiner_of_full"] < unfolded - 0.05
    assert found["joiner_of_full"] <= 1.3


def test_what_is_kept_is_bounded(memory_url: str) -> None:
    """A publisher that keeps the last 20 versions, and deletes the others at once, as fast as they come."""
    random, weights, store = np.random.default_rng(6), storage.model(1_000_000), open_store(memory_url)
    sizes, delta_bytes, stored_bytes = list[int](), list[int](), 0
    with Publisher(store, retention=Retention(keep_last=20, grace_s=0.0)) as publisher:
        for _ in range(100):
            receipt = publisher.publish(weights).wait(60)
            stored_bytes += receipt.payload_bytes
            delta_bytes.append(receipt.payload_bytes)
            storage.move(random, weights, 0.01)
            finish_maintenance(publisher)
            sizes.append(sum(info.bytes for info in store.list("")))
    assert max(sizes) < stored_bytes * 0.97
    # The first weights, a compaction of at most half of them, and twice the versions to keep.
    assert max(sizes) < 1.5 * delta_bytes[0] + 2 * 20 * max(delta_bytes[1:])


def test_the_size_of_a_compaction_is_estimated_as_it_is() -> None:
    random, weights = np.random.default_rng(1), storage.model(1_000_000)
    first = {name: tensor.clone() for name, tensor in weights.items()}
    known = Compared(weights)
    layout = known.shadow.layout
    steps = Steps(layout, known.shadow.ranges, 1)
    assert steps.estimated_bytes() == 0
    for _ in range(40):
        storage.move(random, weights, 0.01)
        steps.add(joined(known.take(weights).pieces, layout))
    moved = np.concatenate(
        [bits_of(tensor).astype(np.int64) - bits_of(first[name]) for name, tensor in weights.items()]
    )
    _, counts = np.unique(moved, return_counts=True)
    entropy_bits = -float((counts * np.log2(counts / moved.size)).sum())
    assert steps.estimated_bytes() == pytest.approx(entropy_bits / 8, rel=0.02)


def test_a_joiner_of_a_channel_that_forgets_takes_the_compaction(memory_url: str) -> None:
    random, weights, store = np.random.default_rng(2), storage.model(200_000), open_store(memory_url)
    with Publisher(store) as publisher:
        for _ in range(90):
            publisher.publish(weights).wait(60)
            storage.move(random, weights, 0.02)
        last = {name: tensor.clone() for name, tensor in weights.items()}
        publisher.publish(last).wait(60)
    forgot = CliRunner().invoke(main, ["gc", memory_url, "--keep-last", "5", "--grace", "0", "--json"])
    assert forgot.exit_code == 0, forgot.output
    reader = ChannelReader(store)
    (compacted,) = [span for span, _ in reader.compactions()]
    assert json.loads(forgot.stdout)["kept"] == [1, *range(min(compacted.version, 87), 92)]
    assert_holds(store, last, 91)
    checked = CliRunner().invoke(main, ["check", memory_url, "--read-data"])
    assert checked.exit_code == 0, checked.output


def test_a_compaction_is_stored_in_parts_one_group_of_tensors_each(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.ops.steps.GROUP_ELEMENTS", 20_000)
    monkeypatch.setattr("deltasync.ops.steps.GROUP_CHANGED", 1)
    random, weights, store = np.random.default_rng(3), storage.model(200_000), open_store(memory_url)
    states = []
    with Publisher(store) as publisher:
        for _ in range(60):
            states.append({name: tensor.clone() for name, tensor in weights.items()})
            publisher.publish(weights).wait(60)
            storage.move(random, weights, 0.02)
    parts = [info.key for info in store.list(keys.PARTS)]
    ends = [span.version for span, _ in ChannelReader(store).compactions()]
    assert ends and parts and all(storage.is_compaction_part(key) for key in parts)
    assert_holds(store, states[max(ends) - 1], max(ends))


def test_a_compaction_has_the_steps_of_a_version_that_got_no_answer(memory_url: str) -> None:
    random, weights, store = (
        np.random.default_rng(4),
        storage.model(20_000),
        FaultyStore(open_store(memory_url)),
    )
    with Publisher(store, retries=0, retention=Retention(compact_every=4)) as publisher:
        for _ in range(2):
            publisher.publish(weights).wait(60)
            storage.move(random, weights, 0.02)
        fault = store.fail_at("create", keys.slot(3, "")[: -len(".safetensors")], error=StoreError)
        with pytest.raises(PublishPendingError):
            publisher.publish(weights).wait(60)
        assert fault.hits == 1
        for _ in range(4):
            storage.move(random, weights, 0.02)
            publisher.publish(weights).wait(60)
    assert [(span.base, span.version) for span, _ in ChannelReader(store).compactions()] == [(1, 5)]
    assert CliRunner().invoke(main, ["check", memory_url, "--read-data"]).exit_code == 0


def test_full_weights_that_cannot_be_read_get_new_ones_in_their_place(memory_url: str) -> None:
    random, weights, store = (
        np.random.default_rng(4),
        storage.model(200_000),
        FaultyStore(open_store(memory_url)),
    )
    with Publisher(store) as publisher:
        publisher.publish(weights).wait(60)
        for info in [*store.list(keys.ANCHORS)]:
            store.inner.put(info.key, b"damaged")
        for _ in range(60):
            storage.move(random, weights, 0.02)
            publisher.publish(weights).wait(60)
    reader = ChannelReader(store)
    assert not [span for span, _ in reader.compactions() if span.base == 1]
    assert len(reader.announcements()) == 1
    assert_holds(store, weights, 61)


def test_a_publisher_that_keeps_everything_says_so(
    tmp_path: Path, memory_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    Publisher(f"file://{tmp_path}/run").close()
    assert "Nothing is ever deleted" in caplog.text
    caplog.clear()
    Publisher(memory_url).close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTASYNC_KEEP_LAST", "100")
        Publisher(f"file://{tmp_path}/run2").close()
    assert "deleted" not in caplog.text
