"""The encodings of other systems, written for this benchmark from their public descriptions, as fairly as
those allow.

Systems whose own code can be installed are measured by `benchmarks.rivals` instead.

Each makes real bytes and can apply them again. Where a description leaves something open, the smaller choice
was taken: all tensors of a delta share one zstd frame, in which a large stream starts a block of its own (so
that its symbols are not coded with those of the stream before it), and each has a header of 12 bytes where
the systems have names and checksums. The comparison of old and new weights is ours for all of them. bfloat16
(any 16-bit dtype) only.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping

import numpy as np
import zstandard

from deltasync.kernels import native

_HEADER = struct.Struct("<IQ")  # changed elements, bytes
_OWN_BLOCK_BYTES = 1 << 14  # a zstd block costs up to some hundred bytes for its table


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One changed tensor."""

    old_N: np.ndarray  # uint16 bit patterns before
    new_N: np.ndarray  # uint16 bit patterns after
    index_K: np.ndarray  # int64, flat, ascending
    step_K: np.ndarray  # new minus old, modulo 2**16
    columns: int  # size of the tensor's last dimension


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One encoding.

    Attributes:
        apply_tensor: Applies the joined streams, given K, to bit patterns of shape N, in place; `columns` is
            last.
    """

    name: str  # its name, which says what it does
    systems: str  # the systems whose descriptions it follows
    encode_tensor: Callable[[Change], tuple[bytes, ...]]  # returns the streams of one changed tensor
    apply_tensor: Callable[[bytes, int, np.ndarray, int], None]
    compress: bool = True  # whether the whole payload is compressed into a zstd frame of level 1

    def encode(
        self, old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], columns: Mapping[str, int]
    ) -> bytes:
        """Compare old and new weights and return the payload."""
        streams: list[bytes] = []
        for name, old_N in old.items():
            index_K, step_K = native.diff(old_N, new[name])
            body: tuple[bytes, ...] = ()
            if index_K.size:
                body = self.encode_tensor(Change(old_N, new[name], index_K, step_K, columns[name]))
            streams += [_HEADER.pack(index_K.size, sum(map(len, body))), *body]
        return _zstd_frame(streams) if self.compress else b"".join(streams)

    def apply(self, payload: bytes, live: Mapping[str, np.ndarray], columns: Mapping[str, int]) -> None:
        """Turn the old bit patterns in `live` into the new ones, in place."""
        data = zstandard.ZstdDecompressor().decompress(payload) if self.compress else payload
        at = 0
        for name, live_N in live.items():
            changed, size = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            if changed:
                self.apply_tensor(data[at : at + size], changed, live_N, columns[name])
            at += size


def _zstd_frame(streams: list[bytes]) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=sum(map(len, streams)))
    parts = []
    for stream in streams:
        large = len(stream) >= _OWN_BLOCK_BYTES
        if large:
            parts.append(compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        parts.append(compressor.compress(stream))
        if large:
            parts.append(compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    return b"".join([*parts, compressor.flush()])


def _encode_raw(change: Change) -> tuple[bytes, ...]:
    return change.index_K.astype(np.int32).tobytes(), change.new_N[change.index_K].tobytes()


def _apply_raw(body: bytes, changed: int, live_N: np.ndarray, columns: int) -> None:
    live_N[np.frombuffer(body, np.int32, changed)] = np.frombuffer(body, np.uint16, changed, 4 * changed)


def _encode_gap_xor(change: Change) -> tuple[bytes, ...]:
    gap_K = np.diff(change.index_K, prepend=-1) - 1
    width = next(width for width in (2, 4, 8) if int(gap_K.max()) < 1 << 8 * width)
    xor_K = change.new_N[change.index_K] ^ change.old_N[change.index_K]
    return bytes([width]), gap_K.astype(f"u{width}").tobytes(), xor_K.tobytes()


def _apply_gap_xor(body: bytes, changed: int, live_N: np.ndarray, columns: int) -> None:
    width = body[0]
    index_K = np.cumsum(np.frombuffer(body, f"u{width}", changed, 1).astype(np.int64) + 1) - 1
    live_N[index_K] ^= np.frombuffer(body, np.uint16, changed, 1 + width * changed)


def _encode_coo(change: Change) -> tuple[bytes, ...]:
    row_K, column_K = np.divmod(change.index_K, change.columns)
    row_gap_K = np.diff(row_K, prepend=0)
    row_width = 1 if int(row_gap_K.max()) < 1 << 8 else 4
    # The gap to the element before it in the same row, the column itself for the first of a row.
    column_gap_K = np.where(row_gap_K == 0, np.diff(column_K, prepend=0), column_K)
    column_width = 2 if change.columns <= 1 << 16 else 4
    rows, columns = row_gap_K.astype(f"u{row_width}"), column_gap_K.astype(f"u{column_width}")
    return (
        bytes([row_width, column_width]),
        rows.tobytes(),
        columns.tobytes(),
        change.new_N[change.index_K].tobytes(),
    )


def _apply_coo(body: bytes, changed: int, live_N: np.ndarray, columns: int) -> None:
    row_width, column_width = body[:2]
    row_gap_K = np.frombuffer(body, f"u{row_width}", changed, 2).astype(np.int64)
    column_K = np.cumsum(
        np.frombuffer(body, f"u{column_width}", changed, 2 + row_width * changed), dtype=np.int64
    )
    # of a row; the very first element may lie in row 0, with nothing before it
    first_K = np.flatnonzero(row_gap_K)
    before = np.concatenate(([0], column_K[:-1]))[first_K]
    column_K -= np.repeat(np.concatenate(([0], before)), np.diff(first_K, prepend=0, append=changed))
    index_K = np.cumsum(row_gap_K) * columns + column_K
    live_N[index_K] = np.frombuffer(body, np.uint16, changed, 2 + (row_width + column_width) * changed)


def _encode_dense_xor(change: Change) -> tuple[bytes, ...]:
    return ((change.old_N ^ change.new_N).tobytes(),)


def _apply_dense_xor(body: bytes, changed: int, live_N: np.ndarray, columns: int) -> None:
    live_N ^= np.frombuffer(body, np.uint16)


PEERS = (
    Peer("int32 + bf16", "TRL draft, vLLM, verl", _encode_raw, _apply_raw, compress=False),
    Peer("int32 + bf16, zstd", "AReaL-DTE", _encode_raw, _apply_raw),
    Peer("dense XOR, zstd", "slime, SkyRL, Stitch", _encode_dense_xor, _apply_dense_xor),
    Peer("COO u8/u16 + bf16, zstd", "PULSE (grail v3.1)", _encode_coo, _apply_coo),
    Peer("u16 gap + XOR, zstd", "NeMo-DCR", _encode_gap_xor, _apply_gap_xor),
)
