"""A table of numbers as byte planes, each one zstandard frame.

An array of uint32 has four planes: the lowest byte of each element in order, then the next byte, up to the
highest. The frames follow each other in one entry, uint8[sum of sizes], stored beside the sizes.
"""

from __future__ import annotations

import numpy as np
import zstandard

from deltasync.errors import CorruptDataError

# Apart from long runs, these numbers have no repetitions that pay, and searching for them costs time and
# size.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
)
MOST_WINDOW_BYTES = 8 << 20
"""Window that RFC 8878 recommends every decoder to support."""


def compress(number_N: np.ndarray) -> tuple[list[int], bytes] | None:
    """Return the sizes of the planes of numbers, uint32[N], and the planes; None if they are not smaller."""
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    planes = number_N.view(np.uint8).reshape(-1, 4).T
    frames = [compressor.compress(np.ascontiguousarray(plane_N).data) for plane_N in planes]
    sizes = [len(frame) for frame in frames]
    return None if sum(sizes) >= number_N.nbytes else (sizes, b"".join(frames))


def decompress(entry_B: np.ndarray, sizes: list[int], key: str, count: int) -> np.ndarray:
    """Return numbers, uint32[count]. Allocates at most these and one of their planes.

    Args:
        entry_B: The planes, as a file has them; as many bytes as the sizes say.
        sizes: Their sizes, as a file says.
        key: Name of the entry, for errors.
        count: How many numbers there are.

    Raises:
        CorruptDataError: these are not the planes of so many numbers.
    """
    if len(sizes) != 4:
        raise CorruptDataError(f"The planes of {key!r} should have 4 sizes, not {sizes!r:.100}.")
    byte_N4, at = np.empty((count, 4), np.uint8), 0
    for plane, size in enumerate(sizes):
        byte_N4[:, plane] = np.frombuffer(_plane(entry_B[at : at + size].data, key, count), np.uint8)
        at += size
    number_N: np.ndarray = byte_N4.reshape(-1).view(np.uint32)
    return number_N


def _plane(frame: memoryview, key: str, count: int) -> bytes:
    """Return the bytes of one plane. The frame's header is checked before memory is allocated for them."""
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size == count and header.window_size <= max(MOST_WINDOW_BYTES, header.content_size):
            plane = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
            if len(plane) == count:
                return plane
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"A plane of {key!r} is no zstandard frame: {error}.") from error
    raise CorruptDataError(f"A plane of {key!r} has a wrong size or too large a window.")
