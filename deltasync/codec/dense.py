"""Compressed dense tensors: byte planes, each one zstandard frame.

A tensor of W bytes per element has W planes: the lowest byte of each element in order, then the next byte, up to the
highest. Exponents of trained weights take few values, so their planes shrink to about a third; mantissas do not compress,
and trying takes next to no time. The frames follow each other in one entry, uint8[sum of sizes], stored beside the sizes.
"""

from __future__ import annotations

import numpy as np
import torch
import zstandard

from deltasync.errors import CorruptDataError
from deltasync.tensors import TensorSpec

# Apart from long runs, weights have no repetitions that pay, and searching for them costs time and size. With a hash table
# of 64 positions, planes of bf16 weights are 8 % smaller than at level 1 and take less than half the time.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0, strategy=zstandard.STRATEGY_FAST
)
MOST_WINDOW_BYTES = 8 << 20
"""Window that RFC 8878 recommends every decoder to support."""


def compress(bits_N: np.ndarray) -> tuple[list[int], torch.Tensor] | None:
    """Return the sizes of a tensor's planes, and the entry of the planes; None if it is not smaller than the bits.

    Args:
        bits_N: Unsigned bit patterns on the host.
    """
    byte_NW = np.ascontiguousarray(bits_N).view(np.uint8).reshape(-1, bits_N.itemsize)
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    frames = [compressor.compress(np.ascontiguousarray(plane_N).data) for plane_N in byte_NW.T]
    sizes = [len(frame) for frame in frames]
    if sum(sizes) >= bits_N.nbytes:
        return None
    return sizes, torch.frombuffer(bytearray().join(frames), dtype=torch.uint8)


def decompress(entry: torch.Tensor | None, sizes: object, spec: TensorSpec) -> np.ndarray:
    """Return a tensor's unsigned bit patterns, shape N. Allocates at most the tensor and one of its planes.

    Args:
        entry: The entry of `compress`, or whatever a file has in its place.
        sizes: The sizes of `compress`, or whatever a file's JSON has in their place.
        spec: The tensor.

    Raises:
        CorruptDataError: these are not the planes of such a tensor.
    """
    match sizes:
        case list() if len(sizes) == spec.item_bytes and all(isinstance(size, int) and size > 0 for size in sizes):
            pass
        case _:
            raise CorruptDataError(f"The planes of {spec.name!r} should have {spec.item_bytes} sizes, not {sizes!r:.100}.")
    if entry is None or entry.dtype != torch.uint8 or entry.numel() != sum(sizes):
        found = "nothing" if entry is None else f"{entry.dtype}[{entry.numel()}]"
        raise CorruptDataError(f"The planes of {spec.name!r} should be uint8[{sum(sizes)}], found {found}.")
    byte_NW = np.empty((spec.element_count, spec.item_bytes), np.uint8)
    for w, frame in enumerate(torch.split(entry.reshape(-1), sizes)):
        byte_NW[:, w] = np.frombuffer(_plane(frame.numpy().data, spec), np.uint8)
    bits_N: np.ndarray = byte_NW.reshape(-1).view(spec.bits_dtype)
    return bits_N


def _plane(frame: memoryview, spec: TensorSpec) -> bytes:
    """Return the bytes of one plane. The frame's header is checked before memory is allocated for them."""
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size == spec.element_count and header.window_size <= max(MOST_WINDOW_BYTES, header.content_size):
            plane = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
            if len(plane) == spec.element_count:
                return plane
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"A plane of {spec.name!r} is no zstandard frame: {error}.") from error
    raise CorruptDataError(f"A plane of {spec.name!r} has a wrong size or too large a window.")
