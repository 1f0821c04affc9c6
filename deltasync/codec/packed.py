"""`packed`: gaps and ULP steps in byte streams, compressed block by block; needs no old value to decode.

A tensor is cut into blocks of `BLOCK` elements; a block without changes takes 12 bytes. Within a block

- the gap stream: for each changed element the number of unchanged ones before it, as base-255 digits: as many bytes 255
  as it contains times 255, then the rest;
- the step stream: z = zigzag(new - old) - 1 as one byte each, 255 for z >= 255, followed by the latter's z in full width,
  little-endian;

each a zstd frame (level 1). All blocks of all tensors lie in one pair of arrays, so that small tensors cost little:

    gaps    uint8     gap frames, concatenated
    steps   uint8     step frames, concatenated
    blocks  int32[B, 3]  changed elements, bytes in `gaps`, bytes in `steps`; tensors in table order, blocks in tensor order

A tensor for which that is larger than its plain bits is stored as `{name}` in the served dtype and shape, marked
`"dense": true` in the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import zstandard

from deltasync.bits import tensor_of
from deltasync.codec.base import Payload, Table, spec_for, take
from deltasync.errors import CorruptDataError
from deltasync.types import Patch, TensorSpec

BLOCK = 1 << 20
LEVEL = 1
_ESCAPE = 255


def _zigzag(step_K: np.ndarray) -> np.ndarray:
    """Signed steps near zero to small unsigned numbers: 1, -1, 2, -2 -> 2, 1, 4, 3; modulo 2**width."""
    signed = step_K.view(f"i{step_K.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(step_K.dtype)


def _unzigzag(zigzag_K: np.ndarray) -> np.ndarray:
    one = zigzag_K.dtype.type(1)
    sign_K = np.negative((zigzag_K & one).view(f"i{zigzag_K.itemsize}")).view(zigzag_K.dtype)
    return (zigzag_K >> one) ^ sign_K


def encode_gaps(local_K: np.ndarray) -> np.ndarray:
    """Gap stream of ascending indices that count from the block's start."""
    gap_K = np.diff(local_K, prepend=-1) - 1
    end_K = np.cumsum(gap_K // _ESCAPE + 1) - 1
    stream = np.full(end_K[-1] + 1, _ESCAPE, np.uint8)
    stream[end_K] = gap_K % _ESCAPE
    return stream


def decode_gaps(stream: np.ndarray, count: int) -> np.ndarray:
    """Indices, counted from the block's start, of a gap stream; ascending by construction.

    Raises:
        CorruptDataError: the stream does not hold `count` gaps.
    """
    end_K = np.flatnonzero(stream != _ESCAPE)
    if end_K.size != count or end_K[-1] != stream.size - 1:
        raise CorruptDataError(f"Payload block holds {end_K.size} gaps instead of {count}.")
    return np.cumsum(stream, dtype=np.int64)[end_K] + np.arange(count)


def encode_steps(step_K: np.ndarray) -> bytes:
    """Step stream of non-zero steps."""
    z_K = _zigzag(step_K) - step_K.dtype.type(1)
    wide = z_K[z_K >= _ESCAPE]
    narrow = np.minimum(z_K, _ESCAPE).astype(np.uint8).tobytes()
    return narrow + wide.astype(wide.dtype.newbyteorder("<")).tobytes()


def decode_steps(stream: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
    """Steps of a step stream.

    Raises:
        CorruptDataError: the stream is not as long as its escapes say.
    """
    narrow_K = stream[:count]
    wide_at = np.flatnonzero(narrow_K == _ESCAPE)
    if stream.size != count + wide_at.size * dtype.itemsize:
        raise CorruptDataError(f"Payload block holds {stream.size} bytes of steps, not what its {count} steps need.")
    z_K = narrow_K.astype(dtype)
    z_K[wide_at] = stream[count:].view(dtype.newbyteorder("<"))
    return _unzigzag(z_K + dtype.type(1))


class PackedEncoder:
    """See `DeltaEncoder`."""

    def __init__(self) -> None:
        self._table = Table()
        self._zstd = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)
        self._gaps: list[bytes] = []
        self._steps: list[bytes] = []
        self._blocks: list[tuple[int, int, int]] = []

    def add(self, spec: TensorSpec, index_K: np.ndarray, step_K: np.ndarray, new_N: np.ndarray, fingerprint: str) -> None:
        """See `DeltaEncoder.add`."""
        row = {"changed": index_K.size, "fingerprint": fingerprint}
        self._table.rows[spec.name] = row
        gaps, steps, blocks = self._encode(spec, index_K, step_K)
        if sum(block[1] + block[2] for block in blocks) + 12 * len(blocks) >= new_N.nbytes:
            row["dense"] = True
            self._table.arrays[spec.name] = tensor_of(new_N.copy(), spec)
            return
        self._gaps += gaps
        self._steps += steps
        self._blocks += blocks

    def _encode(
        self, spec: TensorSpec, index_K: np.ndarray, step_K: np.ndarray
    ) -> tuple[list[bytes], list[bytes], list[tuple[int, int, int]]]:
        gaps, steps, blocks = [], [], []
        starts = range(0, spec.element_count, BLOCK)
        bounds = [*np.searchsorted(index_K, starts), index_K.size]
        for start, low, high in zip(starts, bounds[:-1], bounds[1:], strict=True):
            if low == high:
                blocks.append((0, 0, 0))
                continue
            gaps.append(self._zstd.compress(encode_gaps(index_K[low:high] - start).data))
            steps.append(self._zstd.compress(encode_steps(step_K[low:high])))
            blocks.append((int(high - low), len(gaps[-1]), len(steps[-1])))
        return gaps, steps, blocks

    def finish(self, version: int, base_version: int) -> bytes:
        """See `DeltaEncoder.finish`."""
        for key, frames in (("gaps", self._gaps), ("steps", self._steps)):
            # Empty if every tensor went dense, which torch.frombuffer refuses.
            self._table.arrays[f".{key}"] = torch.from_numpy(np.frombuffer(bytearray(b"".join(frames)), np.uint8))
        self._table.arrays[".blocks"] = torch.tensor(self._blocks, dtype=torch.int32).reshape(-1, 3)
        return self._table.save(PackedCodec.name, version, base_version, {"block_elements": str(BLOCK)})


class PackedCodec:
    """See `Codec`."""

    name = "packed"

    def encoder(self) -> PackedEncoder:
        """See `Codec.encoder`."""
        return PackedEncoder()

    def decode(self, payload: Payload, specs: Mapping[str, TensorSpec]) -> Iterator[Patch]:
        """See `Codec.decode`."""
        declared = payload.metadata.get("block_elements", "")
        if not re.fullmatch("[0-9]{1,10}", declared) or not 1 <= (block_elements := int(declared)) <= 1 << 30:
            raise CorruptDataError(f"Payload has blocks of {declared!r} elements.")
        streams = _Streams(payload, block_elements)
        for name, row in payload.patches.items():
            spec = spec_for(specs, name, row["changed"])
            if row.get("dense"):
                yield Patch(name, None, take(payload, name, spec.dtype, spec.element_count), absolute=True)
            else:
                yield streams.next_patch(spec, row["changed"])
        streams.check_exhausted()


class _Streams:
    """Reads the block streams of a payload from front to back."""

    def __init__(self, payload: Payload, block_elements: int) -> None:
        self._zstd = zstandard.ZstdDecompressor()
        self._block_elements = block_elements
        table = payload.arrays.get(".blocks")
        if table is None or table.dtype != torch.int32 or table.shape[1:] != (3,) or (table < 0).any():
            raise CorruptDataError("Payload block table is not int32[B, 3] of non-negative numbers.")
        self._blocks = table.numpy()
        self._ends = np.cumsum(self._blocks[:, 1:], axis=0, dtype=np.int64)
        gap_bytes, step_bytes = self._ends[-1].tolist() if len(self._blocks) else (0, 0)
        self._gaps = take(payload, ".gaps", "uint8", gap_bytes)
        self._steps = take(payload, ".steps", "uint8", step_bytes)
        self._next = 0

    def next_patch(self, spec: TensorSpec, changed: int) -> Patch:
        indices, steps = [], []
        for start in range(0, spec.element_count, self._block_elements):
            size = min(self._block_elements, spec.element_count - start)
            if self._next >= len(self._blocks):
                raise CorruptDataError(f"Payload ends within {spec.name!r}.")
            count, gap_bytes, step_bytes = self._blocks[self._next].tolist()
            gap_end, step_end = self._ends[self._next].tolist()
            self._next += 1
            if count == 0:
                continue
            if count > size:
                raise CorruptDataError(f"Payload block of {spec.name!r} changes {count} of {size} elements.")
            gaps = self._frame(self._gaps[gap_end - gap_bytes : gap_end], count + size // _ESCAPE + 1)
            local_K = decode_gaps(gaps, count)
            if local_K[-1] >= size:
                raise CorruptDataError(f"Payload block of {spec.name!r} reaches past its end.")
            width = spec.bits_dtype.itemsize
            stream = self._frame(self._steps[step_end - step_bytes : step_end], count * (1 + width))
            indices.append(local_K + start)
            steps.append(decode_steps(stream, count, spec.bits_dtype))
        index_K = np.concatenate(indices) if indices else np.empty(0, np.int64)
        if index_K.size != changed:
            raise CorruptDataError(f"Payload changes {index_K.size} elements of {spec.name!r}, its table says {changed}.")
        return Patch(spec.name, index_K, np.concatenate(steps), absolute=False)

    def check_exhausted(self) -> None:
        if self._next != len(self._blocks):
            raise CorruptDataError("Payload has more blocks than its table of patches.")

    def _frame(self, frame: np.ndarray, limit: int) -> np.ndarray:
        """Decompress one frame into at most `limit` bytes, the most its block can need."""
        try:
            declared = zstandard.frame_content_size(frame.data)
            if not 0 <= declared <= limit:
                raise CorruptDataError(f"Payload block declares {declared} bytes, it can need {limit} at most.")
            stream = np.frombuffer(self._zstd.decompress(frame.data), np.uint8)
        except zstandard.ZstdError as error:
            raise CorruptDataError(f"Payload block cannot be decompressed: {error}.") from error
        if stream.size != declared:
            raise CorruptDataError(f"Payload block holds {stream.size} bytes instead of {declared}.")
        return stream
