"""Numbers as compressed byte planes: what comes back, and what a file may have in their place."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from deltasync.codec import planes
from deltasync.errors import CorruptDataError
from tests import strategies as our

N = 50_000


@given(st.integers(0, 700), st.data())
def test_planes_round_trip(count: int, data: st.DataObject) -> None:
    number_N = data.draw(our.bit_arrays("int32", count))
    if (found := planes.compress(number_N)) is not None:
        sizes, entry = found
        assert len(entry) == sum(sizes) < number_N.nbytes
        np.testing.assert_array_equal(
            planes.decompress(np.frombuffer(entry, np.uint8), sizes, "w", count), number_N
        )


def test_numbers_shrink_and_are_as_the_format_says() -> None:
    number_N = np.random.default_rng(0).poisson(600, N).astype(np.uint32)
    sizes, entry = planes.compress(number_N) or ([], b"")
    assert len(entry) < 0.6 * number_N.nbytes
    value_N, at = np.zeros(N, np.uint32), 0
    for plane, size in enumerate(sizes):
        value_N |= np.frombuffer(zstandard.decompress(entry[at : at + size]), np.uint8).astype(
            np.uint32
        ) << np.uint32(8 * plane)
        at += size
    np.testing.assert_array_equal(value_N, number_N)


def test_what_does_not_shrink_is_left_alone() -> None:
    assert planes.compress(np.random.default_rng(0).integers(0, 1 << 32, N, np.uint32)) is None
    assert planes.compress(np.empty(0, np.uint32)) is None


def test_the_planes_that_the_format_shows() -> None:
    frames = [bytes.fromhex("28b52ffd60e802431f00" + byte) for byte in ("80", "3f", "00", "00")]
    assert (planes.decompress(np.frombuffer(b"".join(frames), np.uint8), [11] * 4, "w", 1000) == 0x3F80).all()


def _frame(
    claimed: int, *blocks: tuple[int, int], window: int | None = None, dictionary: int | None = None
) -> bytes:
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


def _decompress(*frames: bytes) -> np.ndarray:
    return planes.decompress(
        np.frombuffer(b"".join(frames), np.uint8), [len(frame) for frame in frames], "w", N
    )


GOOD = _frame(N, (N, 7))
SKIPPABLE = b"\x50\x2a\x4d\x18" + N.to_bytes(4, "little") + bytes(N)


def test_the_frames_of_these_tests_are_frames() -> None:
    assert (_decompress(GOOD, _frame(N, (N - 1, 1), (1, 1), window=80), GOOD, GOOD) == 0x07070107).all()


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
    frames = (frame, GOOD, GOOD, GOOD) if first else (GOOD, GOOD, GOOD, frame)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError):
            _decompress(*frames)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * N


def test_damaged_planes_never_crash() -> None:
    sizes, entry = planes.compress(np.random.default_rng(0).poisson(600, N).astype(np.uint32)) or ([], b"")
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = np.frombuffer(entry, np.uint8).copy()
        at = random.integers(len(damaged) if random.random() < 0.5 else 40, size=2)
        damaged[at] = random.integers(0, 256, 2, np.uint8)
        moved = int(random.integers(-3, 4))
        try:
            found = planes.decompress(damaged, [sizes[0] + moved, sizes[1] - moved, *sizes[2:]], "w", N)
        except CorruptDataError:
            continue
        assert moved == 0 and found.shape == (N,)
