"""Blocks by `reference.Writer`, one obvious line after the other: what devices must write, for `benchmarks.gpu`."""

from __future__ import annotations

import numpy as np

from deltasync.kernels.rans import RATIO
from deltasync.kernels.reference import Writer, zigzag


def encode_packed(index_K: np.ndarray, step_K: np.ndarray, gap_freq: np.ndarray, step_freq: np.ndarray) -> np.ndarray:
    """Words of one block; indices count from its start."""
    writer, before = Writer(), -1
    for index, step in zip(index_K.tolist(), step_K.tolist(), strict=True):
        writer.number(index - before - 1, gap_freq)
        writer.number(zigzag(step, 8 * step_K.itemsize), step_freq)
        before = index
    return writer.words()


def members(field_R: np.ndarray, rows: list[tuple[int, int, int]]) -> list[list[int]]:
    """The elements of a block that are of each class (first and last value of the field, level)."""
    return [np.flatnonzero((field_R >= first) & (field_R <= last)).tolist() for first, last, _ in rows]


def encode_context(
    field_R: np.ndarray, index_K: np.ndarray, step_K: np.ndarray, rows: list[tuple[int, int, int]], freq_TS: np.ndarray
) -> np.ndarray:
    """Words of one block.

    Args:
        field_R: Field of the old value of each element of the block.
        index_K: Indices of the changes, counted from the block's start.
        step_K: Their steps.
        rows: The classes by descending level.
        freq_TS: The table of gaps and that of steps of each class.
    """
    held = members(field_R, rows)
    step = dict(zip(index_K.tolist(), step_K.tolist(), strict=True))
    writer = Writer()
    c = next((c for c, member in enumerate(held) if member), len(held) - 1)
    after = 0
    for to, member in enumerate(held):
        for at, index in enumerate(member):
            if index not in step:
                continue
            gap = at - after
            if to != c:
                between = sum(len(held[d]) * int(RATIO[rows[c][2] - rows[d][2]]) // 256 for d in range(c + 1, to))
                gap = len(held[c]) - after + between + (at + 1) * int(RATIO[rows[c][2] - rows[to][2]]) // 256 - 1
            writer.number(gap, freq_TS[2 * c])
            writer.number(zigzag(step[index], 8 * step_K.itemsize), freq_TS[2 * to + 1])
            c, after = to, at + 1
    return writer.words()
