"""Compressed dense tensors, by themselves and in deltas."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from deltasync.codec import dense
from deltasync.errors import CorruptDataError
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import bits_of
from tests import strategies as our

N = 50_000
SPEC = TensorSpec("w", "bfloat16", (N,))


def _weights(dtype: str, seed: int = 0) -> np.ndarray:
    """Bits of values as weights have them, and a few that are none."""
    scale = 30 if dtype in our.INTEGERS else 20 if dtype.startswith("float8") else 0.02
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(N) * scale)
    if dtype == "uint8":
        values = values.abs()
    bits_N = bits_of(values.to(getattr(torch, dtype)))
    special = our.special_bits(dtype)
    bits_N[: len(special)] = special
    return bits_N


@given(our.specs(), st.data())
def test_planes_round_trip(spec: TensorSpec, data: st.DataObject) -> None:
    bits_N = data.draw(our.bit_arrays(spec.dtype, spec.element_count))
    found = dense.compress(bits_N)
    if found is None:
        return
    sizes, entry = found
    assert entry.nbytes == sum(sizes) < bits_N.nbytes
    again = dense.decompress(entry, sizes, spec)
    assert again.dtype == bits_N.dtype
    np.testing.assert_array_equal(again, bits_N)


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        ("bfloat16", 0.69),
        ("float16", 0.90),
        ("float32", 0.85),
        ("float64", 0.90),
        ("float8_e4m3fn", 0.84),
        ("float8_e5m2", 0.70),
        ("int8", 0.90),
        ("uint8", 0.80),
        ("int16", 0.70),
        ("int64", 0.30),
    ],
)
def test_weights_shrink_and_are_as_the_format_says(dtype: str, most: float) -> None:
    bits_N = _weights(dtype)
    sizes, entry = dense.compress(bits_N) or ([], torch.empty(0))
    assert entry.nbytes < most * bits_N.nbytes
    np.testing.assert_array_equal(dense.decompress(entry, sizes, TensorSpec("w", dtype, (N,))), bits_N)
    value_N = np.zeros(N, np.uint64)
    at = 0
    for plane, size in enumerate(sizes):
        data = zstandard.decompress(entry.numpy()[at : at + size].tobytes())
        value_N |= np.frombuffer(data, np.uint8).astype(np.uint64) << np.uint64(8 * plane)
        at += size
    np.testing.assert_array_equal(value_N, bits_N)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_what_does_not_shrink_is_left_alone(width: int) -> None:
    random = np.random.default_rng(0)
    assert dense.compress(random.integers(0, 256, N * width, np.uint8).view(f"u{width}")) is None
    assert dense.compress(np.empty(0, f"u{width}")) is None


def test_equal_elements_take_next_to_nothing() -> None:
    sizes, entry = dense.compress(np.full(N, 0x7FC1, np.uint16)) or ([], torch.empty(0))
    assert 0 < entry.nbytes < 100
    assert (dense.decompress(entry, sizes, SPEC) == 0x7FC1).all()


def test_the_planes_that_the_format_shows() -> None:
    frames = [bytes.fromhex("28b52ffd60e802431f00" + byte) for byte in ("80", "3f")]
    entry = torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8)
    assert (dense.decompress(entry, [11, 11], TensorSpec("w", "bfloat16", (10, 100))) == 0x3F80).all()


def _frame(claimed: int, *blocks: tuple[int, int], window: int | None = None, dictionary: int | None = None) -> bytes:
    """A zstandard frame of runs, (length, byte) each, that claims to hold so many bytes.

    With `window`, its descriptor's byte; otherwise the content is the window.
    """
    flags = 3 << 6 | (window is None) << 5 | (dictionary is not None)
    header = b"\x28\xb5\x2f\xfd" + bytes([flags]) + (b"" if window is None else bytes([window]))
    header += (b"" if dictionary is None else bytes([dictionary])) + claimed.to_bytes(8, "little")
    runs = [
        ((length << 3) | 1 << 1 | (number == len(blocks))).to_bytes(3, "little") + bytes([byte])
        for number, (length, byte) in enumerate(blocks, start=1)
    ]
    return header + b"".join(runs)


def _decompress(*frames: bytes, sizes: object = None) -> np.ndarray:
    entry = torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8)
    return dense.decompress(entry, [len(frame) for frame in frames] if sizes is None else sizes, SPEC)


GOOD = _frame(N, (N, 7))
SKIPPABLE = b"\x50\x2a\x4d\x18" + N.to_bytes(4, "little") + bytes(N)


def test_the_frames_of_these_tests_are_frames() -> None:
    assert (_decompress(GOOD, _frame(N, (N - 1, 1), (1, 1), window=80)) == 0x0107).all()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"x",
        b"nothing of the kind",
        GOOD[:-1],
        GOOD[:9],
        GOOD + b"x",
        GOOD + GOOD,
        _frame(N, (N - 1, 7)),
        _frame(N, (N, 7), (1, 7)),
        _frame(N, *[(N, 7)] * 1000),
        _frame(N - 1, (N - 1, 7)),
        _frame(N + 1, (N + 1, 7)),
        _frame(0),
        _frame(1 << 40, (N, 7)),
        _frame((1 << 64) - 1, (N, 7)),
        _frame((1 << 64) - 2, (N, 7)),
        _frame(N, (N, 7), window=0xFF),
        _frame(N, (N, 7), window=0x70),
        _frame(N, (N, 7), dictionary=9),
        SKIPPABLE,
        GOOD[:4] + bytes([0x00, 0x58]) + GOOD[-4:],
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(N)),
    ],
    ids=lambda frame: f"{frame[:16].hex()}+{len(frame)}",
)
@pytest.mark.parametrize("first", [True, False])
def test_a_damaged_or_hostile_frame_is_refused_before_there_is_room_for_it(frame: bytes, first: bool) -> None:
    frames = (frame, GOOD) if first else (GOOD, frame)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError):
            _decompress(*frames)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * N


SIZES = [[], [len(GOOD)], [len(GOOD)] * 3, [2 * len(GOOD), 0], [len(GOOD), -len(GOOD)], [len(GOOD) + 1] * 2]


@pytest.mark.parametrize(
    "sizes", [*SIZES, [2 * len(GOOD) - 1, True], [1e300, 17], ["17", "17"], [10**30, 1], "zstd", 1, {}, [None, None]]
)
def test_sizes_that_are_none_are_refused(sizes: object) -> None:
    with pytest.raises(CorruptDataError):
        _decompress(GOOD, GOOD, sizes=sizes)


@pytest.mark.parametrize("entry", [None, torch.zeros(34, dtype=torch.int8), torch.zeros(33, dtype=torch.uint8)])
def test_an_entry_that_is_none_is_refused(entry: torch.Tensor | None) -> None:
    with pytest.raises(CorruptDataError, match="uint8"):
        dense.decompress(entry, [17, 17], SPEC)


def test_damaged_planes_never_crash() -> None:
    sizes, entry = dense.compress(_weights("bfloat16")) or ([], torch.empty(0))
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = entry.clone()
        at = random.integers(len(damaged) if random.random() < 0.5 else 40, size=2)
        damaged[at] = torch.from_numpy(random.integers(0, 256, 2, np.uint8))
        moved = int(random.integers(-3, 4))
        try:
            found = dense.decompress(damaged, [sizes[0] + moved, sizes[1] - moved], SPEC)
        except CorruptDataError:
            continue
        assert moved == 0 and found.shape == (N,)
