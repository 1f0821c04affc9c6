"""The encodings of other systems, written for this benchmark from their public descriptions, as fairly as those allow.

Each makes real bytes and can apply them again. Where a description leaves something open, the smaller choice was taken:
all tensors of a delta share one zstd frame, in which a large stream starts a block of its own (so that its symbols are not
coded with those of the stream before it), and each has a header of 12 bytes where the systems have names and checksums.
The comparison of old and new weights is ours for all of them. bfloat16 (any 16-bit dtype) only.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping

import numpy as np
import zstandard

from benchmarks.codec import rice
from deltasync.kernels import native

_HEADER = struct.Struct("<IQ")  # changed elements, bytes
_CLASS = struct.Struct("<BBI")  # exponent, parameter and complement flag, listed elements
_ESCAPE = 255
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
        apply_tensor: Applies the joined streams, given K, to bit patterns of shape N, in place; `columns` is last.
    """

    name: str  # its name, which says what it does
    systems: str  # the systems that use it
    encode_tensor: Callable[[Change], tuple[bytes, ...]]  # returns the streams of one changed tensor
    apply_tensor: Callable[[bytes, int, np.ndarray, int], None]
    compress: bool = True  # whether the whole payload is compressed into a zstd frame of level 1

    def encode(self, old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], columns: Mapping[str, int]) -> bytes:
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
    return bytes([row_width, column_width]), rows.tobytes(), columns.tobytes(), change.new_N[change.index_K].tobytes()


def _apply_coo(body: bytes, changed: int, live_N: np.ndarray, columns: int) -> None:
    row_width, column_width = body[:2]
    row_gap_K = np.frombuffer(body, f"u{row_width}", changed, 2).astype(np.int64)
    column_K = np.cumsum(np.frombuffer(body, f"u{column_width}", changed, 2 + row_width * changed), dtype=np.int64)
    first_K = np.flatnonzero(row_gap_K)  # of a row; the very first element may lie in row 0, with nothing before it
    before = np.concatenate(([0], column_K[:-1]))[first_K]
    column_K -= np.repeat(np.concatenate(([0], before)), np.diff(first_K, prepend=0, append=changed))
    index_K = np.cumsum(row_gap_K) * columns + column_K
    live_N[index_K] = np.frombuffer(body, np.uint16, changed, 2 + (row_width + column_width) * changed)


def _encode_dense_xor(change: Change) -> tuple[bytes, ...]:
    return ((change.old_N ^ change.new_N).tobytes(),)


def _apply_dense_xor(body: bytes, changed: int, live_N: np.ndarray, columns: int) -> None:
    live_N ^= np.frombuffer(body, np.uint16)


def _encode_zigzag(step_K: np.ndarray) -> bytes:
    """Encode numbers as one byte each, 255 for one that does not fit; these follow as u16."""
    signed_K = step_K.view(np.int16)
    zigzag_K = ((signed_K << 1) ^ (signed_K >> 15)).view(np.uint16)
    wide = zigzag_K[zigzag_K >= _ESCAPE]
    return np.minimum(zigzag_K, _ESCAPE).astype(np.uint8).tobytes() + wide.tobytes()


def _decode_zigzag(data: bytes, changed: int) -> np.ndarray:
    zigzag_K = np.frombuffer(data, np.uint8, changed).astype(np.uint16)
    zigzag_K[zigzag_K == _ESCAPE] = np.frombuffer(data[changed:], np.uint16)
    return (zigzag_K >> 1) ^ np.negative((zigzag_K & 1).view(np.int16)).view(np.uint16)


def _encode_rice(change: Change) -> tuple[bytes, ...]:
    gap_K = np.diff(change.index_K, prepend=-1) - 1
    k = rice.best_k(gap_K)
    stream = rice.encode([(gap_K, k)])
    return struct.pack("<BQ", k, len(stream)), stream, _encode_zigzag(change.step_K)


def _apply_rice(body: bytes, changed: int, live_N: np.ndarray, columns: int) -> None:
    k, size = struct.unpack_from("<BQ", body)
    gap_K = rice.decode(np.frombuffer(body, np.uint8, size, 9), [(changed, k)])
    live_N[np.cumsum(gap_K + 1) - 1] += _decode_zigzag(body[9 + size :], changed)


def _encode_class_rice(change: Change) -> tuple[bytes, ...]:
    gap_L, start_C, complement_C = rice.class_gaps(change.old_N, change.index_K)
    classes, parts = [], []
    for c in np.flatnonzero((np.diff(start_C) > 0) | complement_C).tolist():
        part = gap_L[start_C[c] : start_C[c + 1]]
        k = rice.best_k(part)
        parts.append((part, k))
        classes.append(_CLASS.pack(c, k | int(complement_C[c]) << 7, part.size))
    stream = rice.encode(parts)
    header = struct.pack("<HQ", len(classes), len(stream)) + b"".join(classes)
    return header, stream, _encode_zigzag(change.step_K)


def _apply_class_rice(body: bytes, changed: int, live_N: np.ndarray, columns: int) -> None:
    class_count, size = struct.unpack_from("<HQ", body)
    stream_at = 10 + class_count * _CLASS.size
    listed_C, complement_C, parts = np.zeros(256, np.int64), np.zeros(256, np.bool_), []
    for c, flags, listed in _CLASS.iter_unpack(body[10:stream_at]):
        listed_C[c], complement_C[c] = listed, bool(flags >> 7)
        parts.append((listed, flags & 127))
    gap_L = rice.decode(np.frombuffer(body, np.uint8, size, stream_at), parts)
    start_C = np.concatenate(([0], np.cumsum(listed_C)))
    index_K = rice.class_indices(live_N, gap_L, start_C, complement_C, changed)
    live_N[index_K] += _decode_zigzag(body[stream_at + size :], changed)


PEERS = (
    Peer("int32 + bf16", "TRL draft, vLLM, verl", _encode_raw, _apply_raw, compress=False),
    Peer("int32 + bf16, zstd", "AReaL-DTE", _encode_raw, _apply_raw),
    Peer("dense XOR, zstd", "slime, SkyRL, Stitch, modelexpress", _encode_dense_xor, _apply_dense_xor),
    Peer("COO u8/u16 + bf16, zstd", "PULSE (grail v3.1)", _encode_coo, _apply_coo),
    Peer("u16 gap + XOR, zstd", "NeMo-DCR", _encode_gap_xor, _apply_gap_xor),
    Peer("Rice + zigzag, zstd", "PULSEPT v2", _encode_rice, _apply_rice),
    Peer("exponent-class Rice + zigzag, zstd", "PULSEPT v3", _encode_class_rice, _apply_class_rice),
)
