from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks.codec import bounds, data, measure, report, simulate
from benchmarks.codec.__main__ import main
from benchmarks.codec.peers import PEERS, Peer
from deltasync.config import CODECS

ELEMENTS = 1 << 16


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MEMCPY_BYTES", 1 << 24)


def _model(changed_fraction: float) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, int]]:
    """Tensors of every awkward kind: changed everywhere, nowhere, only in its first, only in its last
    element; NaNs; 0-d.
    """
    old_N, new_N = simulate.delta(changed_fraction, ELEMENTS)
    random = np.random.default_rng(0)
    anything = random.integers(0, 1 << 16, 3000).astype(np.uint16)
    first, last = anything.copy(), anything.copy()
    first[0] ^= 0x8000
    last[-1] += 0x7FFF
    old = {
        "w": old_N,
        "same": old_N[:100],
        "first": anything,
        "last": anything,
        "all": anything,
        "scalar": anything[:1],
    }
    new = {
        "w": new_N,
        "same": old_N[:100],
        "first": first,
        "last": last,
        "all": anything + random.integers(1, 1 << 16, 3000, np.uint16),
    }
    new["scalar"] = anything[:1] + np.uint16(1)
    return old, new, {"w": 256, "same": 10, "first": 3000, "last": 3, "all": 60, "scalar": 1}


@pytest.mark.parametrize("changed_fraction", [0.01])
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peers_bytes_bring_old_bits_to_the_new_ones(peer: Peer, changed_fraction: float) -> None:
    old, new, columns = _model(changed_fraction)
    live = {name: bits.copy() for name, bits in old.items()}
    peer.apply(peer.encode(old, new, columns), live, columns)
    for name, bits in new.items():
        np.testing.assert_array_equal(live[name], bits, err_msg=name)


def _by_context(found: list[bounds.Bound]) -> dict[str, bounds.Bound]:
    return {bound.context: bound for bound in found}


def test_bounds_of_a_case_counted_by_hand() -> None:
    # Two classes of four: of the first two change, one up and one down; of the second all, up.
    low, high = 0x3F80, 0x4000
    old_N = np.array([low] * 4 + [high] * 4, np.uint16)
    new_N = old_N + np.array([1, 0, 65535, 0, 1, 1, 1, 1], np.uint16)
    found = _by_context(bounds.bounds(old_N, new_N))
    assert found["none"].index_bits == pytest.approx(math.log2(math.comb(8, 6)) / 6)
    assert found["none"].step_bits == pytest.approx((5 * math.log2(6 / 5) + math.log2(6)) / 6)
    assert found["exponent"].index_bits == pytest.approx(math.log2(math.comb(4, 2)) / 6)
    assert found["exponent"].step_bits == pytest.approx(2 / 6)
    assert found["exponent"].total_bits == pytest.approx((math.log2(6) + 2) / 6)
    assert found["exponent"].model_bits == pytest.approx((math.log2(5) / 2 + math.log2(2) / 2) / 6)


def test_the_simulation_changes_as_much_as_asked_and_has_the_published_bound() -> None:
    old_N, new_N, history_N = simulate.delta_with_history(0.0107, 1 << 21)
    assert (old_N != new_N).mean() == pytest.approx(0.0107, rel=0.1)
    found = _by_context(bounds.bounds(old_N, new_N, history_N))
    assert found["exponent"].total_bits == pytest.approx(6.77, abs=0.1)
    assert found["exponent, changed before"].total_bits == pytest.approx(6.71, abs=0.1)


@pytest.mark.parametrize(
    ("master", "least", "most"), [("fp32", 4.5, 8), ("bf16 start", 4, 7), ("bf16", 1.5, 2)]
)
def test_a_compaction_of_eight_changes_as_much_as_its_master_does(
    master: simulate.Master, least: float, most: float
) -> None:
    step, compaction = simulate.changes(0.01, 1 << 18, 0, master, [(12, 13), (9, 17)])
    one, eight = (float((old_N != new_N).mean()) for old_N, new_N, _ in (step, compaction))
    assert one == pytest.approx(0.01, rel=0.1)
    assert least < eight / one < most


def test_history_counts_steps_since_the_last_change_and_keeps_its_direction() -> None:
    history_N = np.array([0, 0, 0, 5, -5, 127, -127], np.int8)
    old_N = np.full(7, 100, np.uint16)
    new_N = np.array([100, 101, 98, 100, 100, 100, 100], np.uint16)
    np.testing.assert_array_equal(
        simulate.update_history(history_N, old_N, new_N), [0, 1, -1, 6, -6, 127, -127]
    )


def test_ours_is_measured_beside_the_peers_and_the_plot_is_drawn(tmp_path) -> None:  # type: ignore[no-untyped-def]
    result = measure.run([data.simulation(0.01, 1 << 16), data.simulation(0.05, 1 << 16)])
    names = [row["name"] for row in result["samples"][0]["encodings"]]
    assert names == [*CODECS, *(peer.name for peer in PEERS)]
    assert any("NeMo-DCR" in line for line in report.lines(result))
    result["samples"][1]["source"] = "demo"
    report.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--elements", "200000", "--changed", "0.01", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"command", "date", "commit", "machine", "result"}
    (sample,) = found["result"]["samples"]
    assert {"source", "label", "changed_fraction", "encodings", "bounds"} <= sample.keys()
    for row in sample["encodings"]:
        assert {
            "name",
            "systems",
            "bits_per_changed",
            "encode_gb_s",
            "encode_of_memcpy",
            "apply_changed_per_s",
        } <= row.keys()
    raw = next(row for row in sample["encodings"] if row["name"] == "int32 + bf16")
    assert raw["bits_per_changed"] == pytest.approx(48, rel=0.01)


def test_the_deltas_of_a_channel_are_read_back(memory_url: str) -> None:
    torch = pytest.importorskip("torch")
    from deltasync import Publisher

    with Publisher(memory_url) as publisher:
        for step in range(3):
            publisher.publish({"w": torch.arange(12.0).reshape(3, 4) + step}.items())
            publisher.flush(timeout_s=60)  # otherwise waiting versions are merged into one
    sample = data.demo(memory_url)
    assert sample.element_count == 12
    assert len(sample.deltas) == 2
    old_N, new_N, history_N = sample.flat()
    assert (old_N != new_N).sum() == sample.changed == 24
    assert (history_N[12:] == 1).all()
