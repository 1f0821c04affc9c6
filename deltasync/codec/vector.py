"""`packed` and `context`: positions as gaps, and ULP steps, entropy coded block by block over whole vectors.

A *vector* is all elements of one width W in bytes, in the order of the channel's tensor table
(`tensors.layout`). For each vector of which elements changed, a payload has the metadata `vectors`, tables of
its changed tensors (`.W.tensors`, `.W.counts`, `.W.fingerprints`), and the blocks (`.W.blocks`, `.W.tables`,
`.W.words`): a gap and a step for each change.

With `context`, tensors of which enough changes are cut into tiles instead (`.W.tiles`, `.W.tile_tables`,
`.W.tile_words`; `tiles`), in which changes are coded by the classes of their old bits (`classes`).

docs/format.md, section 10, is the format, with pseudocode and test vectors.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deltasync.codec import classes, tables, tiles
from deltasync.codec.base import Encoded, NewBits, OldBits, Payload, Wanted
from deltasync.codec.parts import GAPS, TILES, Coded, coded, packed
from deltasync.codec.reader import readers_of
from deltasync.codec.tiles import Cut, whole
from deltasync.errors import CorruptDataError, StageError
from deltasync.kernels import native
from deltasync.kernels.rans import LOG2, LOG_BITS, LOG_ONE_BITS, Blocks, ratios
from deltasync.tensors import Delta, Layout, Sparse, Vector, bounds, count_below

GROUP_CHANGED = 1 << 15
"""Changed elements that are worth tables of their own."""

MOST_RUNS = 64  # of which tables are counted before they are joined
SAMPLED = 1 << 16  # elements of a run whose classes are counted
_RUNS = 256  # whose symbols are counted by one launch
_ONE_CLASS = ratios(np.zeros(1, np.int64))


class VectorCodec:
    """The codecs `packed` and `context`.

    Attributes:
        name: Its name.
        needs_old: Whether tensors are coded by the classes of their old bits.
    """

    def __init__(self, name: str, needs_old: bool) -> None:
        self.name = name
        self.needs_old = needs_old

    def encode(
        self, delta: Delta, new: NewBits, fingerprints: Mapping[str, int], version: int, base_version: int
    ) -> Encoded:
        """Return a payload.

        Args:
            delta: The steps from the base version on. Not mutated.
            new: Returns the range of a tensor that is held, with its new bits.
            fingerprints: Those of the changed tensors after the delta.
            version: The version that it leads to.
            base_version: The one that it leads from.
        """
        arrays: dict[str, torch.Tensor] = {}
        vectors: dict[str, dict[str, Any]] = {}
        for width, steps in delta.steps.items():
            vector = delta.layout.vectors[width]
            count_T = vector.count(steps.at_K)
            held = _held(vector, count_T, new) if self.needs_old else {}
            changed_T = np.flatnonzero(count_T)
            digest_T = np.array([fingerprints[vector.names[t]] for t in changed_T.tolist()], np.uint64)
            by_class, by_gap = _split(vector, steps, list(held))
            range_T2 = np.zeros((count_T.size, 2), np.int64)
            range_T2[[*held]] = np.array([(cut.start, cut.stop) for cut, _ in held.values()]).reshape(-1, 2)
            parts = _by_gap(vector, by_gap), _by_class(vector, range_T2, held, by_class) if held else None
            found, vectors[str(width)] = entries(vector, count_T, changed_T, digest_T, *parts, range_T2)
            arrays |= found
        return payload_of(self.name, version, base_version, delta.changed, arrays, vectors)

    def decode(
        self, payload: Payload, layout: Layout, old: OldBits | None = None, wanted: Wanted | None = None
    ) -> tuple[Delta, dict[str, int]]:
        """Return the changes, and the fingerprints of changed tensors after them.

        Args:
            payload: An opened payload of this codec.
            layout: The channel's tensors.
            old: Returns the bits of a tensor before the delta, flat and unsigned, as an array or by ranges
                (`Bits`); elements that are not wanted may have any bits. Only `context` needs it.
            wanted: Returns the regions of a tensor that the caller holds, or None for the whole tensor.
                Blocks without a wanted element are not decoded; other changes outside may be included.

        Raises:
            StageError: the payload needs `old`.
            StageError: it needs more of some tensors than the caller holds: whole tiles, or all where there
                are none.
            CorruptDataError: the payload contradicts itself or the tensor table.
        """
        steps: dict[int, Sparse] = {}
        fingerprints: dict[str, int] = {}
        counted, readers = 0, readers_of(payload, layout)
        if wanted is not None and (
            names := [name for reader in readers.values() for name in reader.choose(wanted)]
        ):
            error = StageError(
                f"Decoding needs more than is held of {len(names)} tensors, such as {names[0]}."
            )
            error.tensors = names
            raise error
        for width, reader in readers.items():
            vector = layout.vectors[width]
            number_T, count_T, digest_T = reader.number_T, reader.count_T, reader.digest_T
            counted += int(count_T.sum(dtype=np.uint64))
            fingerprints |= dict(
                zip((vector.names[t] for t in number_T.tolist()), digest_T.tolist(), strict=True)
            )
            found = reader.decode(wanted, old)
            if found.at_K.size:
                steps[width] = found
            found_T = vector.count(found.at_K)
            left_T = np.zeros_like(found_T)
            left_T[number_T] = count_T
            left_T -= found_T
            if (left_T < 0).any() or (count_T <= 0).any() or (wanted is None and left_T.any()):
                raise CorruptDataError(
                    "Payload changes tensors that it does not name, or counts their changes wrong."
                )
        if counted != payload.changed:
            raise CorruptDataError("Payload counts the changes of its tensors wrong.")
        return Delta(layout, steps), fingerprints


def entries(
    vector: Vector,
    count_T: np.ndarray,
    changed_T: np.ndarray,
    digest_T: np.ndarray,
    by_gap: Coded,
    in_tiles: Coded | None,
    range_T2: np.ndarray,
) -> Coded:
    """Return what a payload has of one vector, for all encoders.

    Args:
        vector: The vector.
        count_T: Number of changes of each tensor of the vector.
        changed_T: Numbers of the changed tensors of the payload.
        digest_T: Fingerprints of these after the delta, uint64.
        by_gap: Their blocks of gaps, if any.
        in_tiles: Their blocks by class.
        range_T2: The range of each tensor of the vector of which those are; empty if they are not of it.
    """
    first, is_tiled_T = int(changed_T[0]), range_T2[changed_T, 0] < range_T2[changed_T, 1]
    flag_T = np.zeros(int(changed_T[-1]) + 1 - first, np.bool_)
    flag_T[changed_T - first] = True
    found = dict[str, torch.Tensor]()
    row: dict[str, Any] = {"tensor": first, "tensors": flag_T.size}
    if not flag_T.all():
        found["tensors"] = packed(flag_T)
    found |= by_gap[0]
    if in_tiles is not None:
        found |= in_tiles[0]
        row["tiles"] = in_tiles[1]
        tiled_T = changed_T[is_tiled_T]
        if (range_T2[tiled_T] != whole(vector)[tiled_T]).any():
            found["ranges"] = torch.from_numpy(range_T2[tiled_T])
        if not is_tiled_T.all():
            found["tiled"] = packed(is_tiled_T)
    found["counts"] = torch.from_numpy(count_T[changed_T].astype(vector.index_dtype))
    found["fingerprints"] = torch.from_numpy(digest_T.view(np.int64))
    return {f".{vector.width}.{entry}": array for entry, array in found.items()}, row | by_gap[1]


def payload_of(
    name: str,
    version: int,
    base_version: int,
    changed: int,
    arrays: dict[str, torch.Tensor],
    vectors: dict[str, dict[str, Any]],
) -> Encoded:
    """Build a payload from the arrays and the metadata that `entries` returned for each width."""
    extra = {"block_elements": str(tiles.BLOCK), "vectors": json.dumps(vectors, separators=(",", ":"))}
    if any("tiles" in row for row in vectors.values()):
        extra["tile_elements"] = str(tiles.TILE)
    return Encoded.of(name, version, base_version, changed, arrays, extra)


def _by_gap(vector: Vector, steps: Sparse) -> Coded:
    """Return blocks of gaps."""
    at_K, step_K = steps
    if not at_K.size:
        return {}, {}
    first, last = int(at_K[0]) // tiles.BLOCK, int(at_K[-1]) // tiles.BLOCK + 1
    bound_B = count_below(at_K, np.minimum(np.arange(first, last + 1) * tiles.BLOCK, vector.element_count))
    blocks = Blocks.of(vector.element_count, tiles.BLOCK, bound_B, first)
    group_G, count_GTS = _groups(blocks, steps)
    words, tables_ = [np.empty(0, np.uint32)], bytearray()
    row_B2 = np.stack((np.diff(bound_B), np.zeros(last - first, np.int64)), axis=1).astype(np.int32)
    for (low, high), count_TS in zip(itertools.pairwise([*group_G, last - first]), count_GTS, strict=True):
        part, held = _part(blocks, low, high)
        freq_TS = tables.fit(count_TS)
        found, row_B2[low:high, 1] = native.encode(part, at_K[held], None, step_K[held], freq_TS, _ONE_CLASS)
        words.append(found)
        tables_ += tables.all_bytes(freq_TS)[0].tobytes()
    entries_, row = coded(
        GAPS, row_B2, group_G, tables_, torch.from_numpy(np.concatenate(words).view(np.int32))
    )
    return entries_, {"block": first, "blocks": last - first} | row


def _part(blocks: Blocks, low: int, high: int) -> tuple[Blocks, slice]:
    """Return blocks from number `low` on and below `high`, and which changes they have."""
    bound_B = blocks.bound_B[low : high + 1]
    part = Blocks(blocks.base_B[low:high], blocks.size_BC[low:high], bound_B - bound_B[0])
    return part, slice(int(bound_B[0]), int(bound_B[-1]))


def _groups(blocks: Blocks, steps: Sparse) -> tuple[list[int], list[np.ndarray]]:
    """Return the first block of each group, and the symbols that it has, int64[2, 256].

    Runs of blocks with about `GROUP_CHANGED` changes are joined as long as common tables take fewer bits than
    two of them.
    """
    starts, given = runs(blocks.bound_B).tolist(), (steps.at_K, None, steps.data_K, _ONE_CLASS)
    firsts, found, last_bits = list[int](), list[np.ndarray](), 0
    for at in range(0, len(starts), _RUNS):
        run_R = np.array([*starts, blocks.bound_B.size - 1][at : at + _RUNS + 1])
        for first, count_TS in zip(
            starts[at : at + _RUNS], native.count_runs(run_R, blocks, *given), strict=True
        ):
            bits = _table_bits(count_TS)
            if found and (joined := _table_bits(found[-1] + count_TS)) <= last_bits + bits:
                found[-1], last_bits = found[-1] + count_TS, joined
                continue
            firsts.append(first)
            found.append(count_TS)
            last_bits = bits
    return firsts, found


def _table_bits(count_TS: np.ndarray) -> int:
    """Return the bits that symbols take beside their extra bits, with their tables, in 2**-16."""
    some = count_TS[count_TS > 0]
    own, total = _log_bits(some).sum(), _log_bits(count_TS.sum(axis=1)).sum()
    return int(total - own) + (12 * some.size << LOG_ONE_BITS)


def _log_bits(count_N: np.ndarray) -> np.ndarray:
    """Return each count times its logarithm, in 2**-16."""
    exponent_N = np.maximum(np.frexp(count_N)[1], 1).astype(np.int64) - 1
    place_N = (count_N << LOG_BITS >> exponent_N) & LOG2.size - 1
    found: np.ndarray = count_N * ((exponent_N << LOG_ONE_BITS) + LOG2[place_N])
    return found


def runs(bound_B: np.ndarray, least: int = 0) -> np.ndarray:
    """Return the first block of each run of blocks with about `GROUP_CHANGED` changes, or `least`, if that is
    more.
    """
    run_B = bound_B[:-1] // max(GROUP_CHANGED, least)
    firsts: np.ndarray = np.append(0, np.flatnonzero(run_B[1:] != run_B[:-1]) + 1)
    return firsts


def _held(vector: Vector, count_T: np.ndarray, new: NewBits) -> dict[int, tuple[Cut, np.ndarray]]:
    """Return the blocks and the new bits of each tensor that is coded by classes."""
    found = {}
    is_large_T = np.diff(vector.first_T) >= min(tiles.LEAST, tiles.SMALL)
    for t in np.flatnonzero((count_T >= max(tiles.FEW, 1)) & is_large_T).tolist():
        spec = vector.specs[t]
        bits_N, start = new(spec.name)
        cut = tiles.cut(spec.shape, start, start + bits_N.size, tiles.TILE, tiles.BLOCK)
        if count_T[t] >= tiles.FEW * cut.count and cut.is_large(spec.element_count):
            found[t] = cut, bits_N
    return found


def _split(vector: Vector, steps: Sparse, tensors: list[int]) -> tuple[Sparse, Sparse]:
    """Return the changes of these tensors, and the others."""
    if not tensors:
        return Sparse(steps.at_K[:0], steps.data_K[:0]), steps
    low_T, high_T = (count_below(steps.at_K, vector.first_T[np.array(tensors) + side]) for side in (0, 1))
    if (high_T - low_T).sum() == steps.at_K.size:
        return steps, Sparse(steps.at_K[:0], steps.data_K[:0])
    edge_K = np.zeros(steps.at_K.size + 1, np.int8)
    edge_K[low_T] += 1  # every one of them has changes
    edge_K[high_T] -= 1
    inside_K = np.cumsum(edge_K[:-1], dtype=np.int8).view(np.bool_)
    return Sparse(steps.at_K[inside_K], steps.data_K[inside_K]), Sparse(
        steps.at_K[~inside_K], steps.data_K[~inside_K]
    )


def _by_class(
    vector: Vector, range_T2: np.ndarray, held: Mapping[int, tuple[Cut, np.ndarray]], steps: Sparse
) -> Coded:
    """Return the blocks of tensors that are coded by classes; see `_held`."""
    tiling, is_in_T = tiles.tiling_of(vector, range_T2), range_T2[:, 0] < range_T2[:, 1]
    address_T = np.zeros(len(vector.specs), np.int64)
    address_T[[*held]] = [bits_N.ctypes.data for _, bits_N in held.values()]
    row_BF, band_GF = tiling.chosen(is_in_T, address_T - range_T2[:, 0] * vector.width)
    bound_G = np.append(count_below(steps.at_K, band_GF[:, 0]), steps.at_K.size)
    at_K, step_K, count_B = native.regroup(bound_G, band_GF, True, *steps, len(row_BF))
    bound_B = bounds(count_B)
    run_R = np.append(runs(bound_B, at_K.size // MOST_RUNS), count_B.size)
    element_RE, step_RES = native.survey(run_R, row_BF, bound_B, at_K, step_K, SAMPLED)
    value_V, used_S = (np.flatnonzero(step_RES.any(axis=each)) for each in ((0, 2), (0, 1)))
    one_payload, step_RVS = np.array([0, len(element_RE)]), step_RES[:, value_V][:, :, used_S]
    first_G, groups = native.groups(one_payload, element_RE, value_V, step_RVS, classes.COSTS)
    firsts = run_R[first_G].tolist()
    words, freqs, word_count_B = [], [], np.zeros_like(count_B)
    for group, (low, high) in enumerate(itertools.pairwise([*firsts, count_B.size])):
        here, of = slice(int(bound_B[low]), int(bound_B[high])), groups.group(group)
        part_B = bound_B[low : high + 1] - bound_B[low]
        ranked = native.rank(row_BF[low:high], part_B, at_K[here], step_K[here], of)
        freqs.append(tables.fit(native.count(*ranked, of.ratio_CC)))
        found, word_count_B[low:high] = native.encode(*ranked, freqs[-1], of.ratio_CC)
        words.append(found)
    row_B2 = np.stack((count_B, word_count_B), axis=1).astype(np.int32)
    tables_ = b"".join(classes.to_bytes(groups, np.concatenate(freqs)))
    return coded(TILES, row_B2, firsts, tables_, torch.from_numpy(np.concatenate(words).view(np.int32)))
