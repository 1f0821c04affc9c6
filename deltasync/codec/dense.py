"""Dense tensors, compressed: the bytes of all elements by significance, each such plane one zstandard frame.

A tensor of W bytes an element has W planes: the lowest bytes of its elements in order, then their next bytes, and so on up
to the highest. The exponents of trained weights take few values, so their planes shrink to about a third; mantissas stay
as they are, and cost next to nothing. The planes' frames follow each other in one entry, U8[sum of their sizes]; the sizes
stand beside it.
"""

from __future__ import annotations

import numpy as np
import torch
import zstandard

from deltasync.errors import CorruptDataError
from deltasync.tensors import TensorSpec

# Weights have no repetitions that pay, apart from long runs, and looking for them costs both time and size: with a table of
# 64 positions the planes of bf16 weights are 8 % smaller than at level 1 and coded in less than half the time.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0, strategy=zstandard.STRATEGY_FAST
)
_MOST_WINDOW_BYTES = 8 << 20
"""What RFC 8878 wants every decoder to support."""


def compress(bits_N: np.ndarray) -> tuple[list[int], torch.Tensor] | None:
    """The sizes of a tensor's planes and its entry, or None if it would not be smaller than the bits.

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
    """Unsigned bit patterns of a tensor, shape N. No more is ever made than the tensor takes and one plane of it.

    Args:
        entry: What `compress` gave, or whatever a file holds in its place.
        sizes: The same; from JSON.
        spec: The tensor.

    Raises:
        CorruptDataError: it is not a tensor of this spec.
    """
    match sizes:
        case list() if len(sizes) == spec.item_bytes and all(isinstance(size, int) and size > 0 for size in sizes):
            pass
        case _:
            raise CorruptDataError(f"The planes of {spec.name!r} should be {spec.item_bytes} sizes, not {sizes!r:.100}.")
    if entry is None or entry.dtype != torch.uint8 or entry.numel() != sum(sizes):
        found = "nothing" if entry is None else f"{entry.dtype}[{entry.numel()}]"
        raise CorruptDataError(f"The planes of {spec.name!r} should be uint8[{sum(sizes)}], found {found}.")
    byte_NW = np.empty((spec.element_count, spec.item_bytes), np.uint8)
    for w, frame in enumerate(torch.split(entry.reshape(-1), sizes)):
        byte_NW[:, w] = np.frombuffer(_plane(frame.numpy().data, spec), np.uint8)
    bits_N: np.ndarray = byte_NW.reshape(-1).view(spec.bits_dtype)
    return bits_N


def _plane(frame: memoryview, spec: TensorSpec) -> bytes:
    """The bytes of one plane; the frame's header is checked before there is room for them."""
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size == spec.element_count and header.window_size <= max(_MOST_WINDOW_BYTES, header.content_size):
            plane = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
            if len(plane) == spec.element_count:
                return plane
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"A plane of {spec.name!r} is no zstandard frame: {error}.") from error
    raise CorruptDataError(f"A plane of {spec.name!r} has another size or window than it may.")
