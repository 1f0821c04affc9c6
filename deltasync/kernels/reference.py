"""The kernels in plain numpy, and the entropy coder in plain Python. Every other implementation must give the
same results.

They serve `native` where the extension is missing, which describes the arguments.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import numpy as np

from deltasync.kernels.rans import RATIO_BITS, STATE_MIN, TABLE_BITS, Blocks, Costs
from deltasync.tensors import Sparse, Vector, index_dtype
from deltasync.tensors.fingerprint import INDEX_STEP, MIX_1, MIX_2, VALUE_STEP

_INDEX_STEP, _VALUE_STEP, _MIX_1, _MIX_2 = map(np.uint64, (INDEX_STEP, VALUE_STEP, MIX_1, MIX_2))


def cell_hash(key: int, index_K: np.ndarray, bits_K: np.ndarray) -> np.ndarray:
    """Return a hash of each (index, bit pattern) under `key`, uint64[K]: splitmix64's finalizer of a linear
    combination.
    """
    with np.errstate(over="ignore"):
        z = np.uint64(key) + index_K.astype(np.uint64) * _INDEX_STEP + bits_K.astype(np.uint64) * _VALUE_STEP
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        hashed: np.ndarray = z ^ (z >> np.uint64(31))
    return hashed


def fingerprint(key: int, bits_N: np.ndarray) -> int:
    """Return the sum of the cell hashes of a whole tensor, modulo 2**64."""
    return int(cell_hash(key, np.arange(bits_N.size), bits_N).sum(dtype=np.uint64))


def diff(old_N: np.ndarray, new_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return flat indices (`index_dtype`, ascending) and steps (new minus old, modulo 2**width) of the
    changed elements.

    New elements are read once: whoever trains may write them meanwhile.
    """
    new_N = new_N.copy()
    index_K = np.flatnonzero(old_N != new_N).astype(index_dtype(old_N.size))
    return index_K, new_N[index_K] - old_N[index_K]


def fingerprint_runs(key: int, start_R: np.ndarray, bits_RL: np.ndarray, out_RL: np.ndarray | None) -> int:
    """See `native.fingerprint_runs`."""
    if out_RL is not None:
        np.copyto(out_RL.reshape(bits_RL.shape), bits_RL)
    total = 0
    for start, bits_L in zip(start_R.tolist(), bits_RL, strict=True):
        for first in range(0, bits_L.size, 1 << 20):
            part_P = bits_L[first : first + (1 << 20)]
            index_P = np.arange(start + first, start + first + part_P.size)
            total += int(cell_hash(key, index_P, part_P).sum(dtype=np.uint64))
    return total % (1 << 64)


def memory(address: int, count: int, width: int) -> np.ndarray:
    """Return memory as an array of unsigned integers of `width` bytes."""
    if not count:
        return np.empty(0, np.dtype(f"u{width}"))
    return np.ctypeslib.as_array((ctypes.c_uint8 * (count * width)).from_address(address)).view(f"u{width}")


def _gained(key: int, index_K: np.ndarray, old_K: np.ndarray, new_K: np.ndarray) -> int:
    with np.errstate(over="ignore"):
        return int((cell_hash(key, index_K, new_K) - cell_hash(key, index_K, old_K)).sum(dtype=np.uint64))


def compare(
    row_RF: np.ndarray, vector: Vector, bound_T2: np.ndarray, gain_T: np.ndarray, above_T: np.ndarray
) -> Sparse:
    """Compare rows (`native.compare` with the position of each); `gain_T` and `above_T` are mutated."""
    found = [(np.empty(0, vector.index_dtype), np.empty(0, vector.bits_dtype))]
    for t, first, count, old, new, position in row_RF.tolist():
        old_N, new_N = memory(old, count, vector.width), memory(new, count, vector.width)
        index_K, step_K = diff(old_N, new_N)
        index_K = index_K.astype(np.int64)
        found.append(((index_K + position).astype(vector.index_dtype), step_K))
        mask, largest = bound_T2[t]
        old_K = old_N[index_K]
        now_K = old_K + step_K  # not the new elements, which may be others by now
        with np.errstate(over="ignore"):
            gain_T[t] += np.uint64(_gained(int(vector.key_T[t]), index_K + first, old_K, now_K))
        above_T[t] += np.count_nonzero(now_K.astype(np.uint64) & mask > largest)
    return Sparse(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


def add(
    is_done: int,
    row_RF: np.ndarray,
    key_T: np.ndarray,
    bound_T2: np.ndarray,
    at_K: np.ndarray,
    step_K: np.ndarray,
    gain_T: np.ndarray,
    above_T: np.ndarray,
) -> None:
    """See `native.add`. A row: tensor, first change, behind the last, address of position 0, first position,
    end.
    """
    for _, low, high, _, first, last in row_RF.tolist():
        if ((at_K[low:high] < first) | (at_K[low:high] >= last)).any():
            raise ValueError("a position is outside of its tensor")
    for t, low, high, zero, first, last in row_RF.tolist():
        bits_N, index_C = (
            memory(zero + first * step_K.itemsize, last - first, step_K.itemsize),
            at_K[low:high] - first,
        )
        old_C = bits_N[index_C]
        if is_done:
            old_C -= step_K[low:high]
        else:
            bits_N[index_C] += step_K[low:high]
        mask, largest = bound_T2[t]
        with np.errstate(over="ignore"):
            gain_T[t] += np.uint64(_gained(int(key_T[t]), index_C, old_C, bits_N[index_C]))
        above_T[t] += np.count_nonzero(bits_N[index_C].astype(np.uint64) & mask > largest)


# The entropy coder: one obvious line after the other.


def bucket(value: int) -> tuple[int, int, int]:
    """Return symbol, extra bits and their value: below 16 the value itself, above it four buckets for each
    power of two.
    """
    if value < 16:
        return value, 0, 0
    exponent = value.bit_length() - 1
    extra = exponent - 2
    return 4 * exponent + (value >> extra & 3), extra, value & (1 << extra) - 1


def zigzag(step: int, width: int) -> int:
    """Return a step as a number: 1, -1, 2, -2 become 1, 0, 3, 2; `step` is not 0 and modulo 2**width."""
    return 2 * ((1 << width) - step) - 2 if step >> (width - 1) else 2 * step - 1


def unzigzag(value: int, width: int) -> int:
    """Return the inverse of `zigzag`."""
    magnitude = (value >> 1) + 1
    return magnitude if value & 1 else (1 << width) - magnitude


class Writer:
    """Collects (start, freq, bits) symbols in decoding order; `words` encodes them."""

    def __init__(self) -> None:
        self._symbols: list[tuple[int, int, int]] = []

    def number(self, value: int, freq: np.ndarray) -> None:
        """Add a number by the table `freq`, int[256]."""
        symbol, extra, low = bucket(value)
        self._symbols.append((int(freq[:symbol].sum()), int(freq[symbol]), TABLE_BITS))
        while extra:
            bits = min(extra, 24)
            extra -= bits
            self._symbols.append((low >> extra & (1 << bits) - 1, 1, bits))

    def words(self) -> np.ndarray:
        """Return the stream, uint32."""
        if not self._symbols:
            return np.empty(0, np.uint32)
        words: list[int] = []
        x = 1
        for start, freq, bits in reversed(self._symbols):
            if x >> (64 - bits) >= freq:
                words.append(x & 0xFFFFFFFF)
                x >>= 32
            x = (x // freq << bits) + x % freq + start
        state = [x & 0xFFFFFFFF] if x < STATE_MIN else [x >> 32, x & 0xFFFFFFFF]
        return np.array([*reversed([*words, *state])], np.uint32)


class RansReader:
    """Reads a stream. Raises ValueError where it is malformed."""

    def __init__(self, words: np.ndarray) -> None:
        if not words.size:
            raise ValueError("no state")
        self._x = words[0].item() | (words[1].item() << 32 if words.size > 1 else 0)
        if self._x < STATE_MIN and words.size > 1:
            raise ValueError("state too small")
        self._words: Iterator[int] = iter(words[2:].tolist())

    def number(self, freq: np.ndarray) -> int:
        """Read a number by the table `freq`, int[256]."""
        end = np.cumsum(freq)
        symbol = int(np.searchsorted(end, self._x & (1 << TABLE_BITS) - 1, side="right"))
        self._take(int(end[symbol] - freq[symbol]), int(freq[symbol]), TABLE_BITS)
        if symbol < 16:
            return symbol
        extra = symbol // 4 - 2
        value = 4 + symbol % 4
        while extra:
            bits = min(extra, 24)
            extra -= bits
            low = self._x & (1 << bits) - 1
            value = value << bits | low
            self._take(low, 1, bits)
        return value

    def finish(self) -> None:
        """Check that nothing is left."""
        if self._x != 1 or next(self._words, None) is not None:
            raise ValueError("stream does not end where its symbols do")

    def _take(self, start: int, freq: int, bits: int) -> None:
        self._x = freq * (self._x >> bits) + (self._x & (1 << bits) - 1) - start
        if self._x < STATE_MIN and (word := next(self._words, None)) is not None:
            self._x = self._x << 32 | word


def _first_class(size_C: np.ndarray) -> int:
    return next((c for c, size in enumerate(size_C.tolist()) if size), size_C.size - 1)


def gaps(
    size_C: np.ndarray, place_K: np.ndarray, class_K: np.ndarray, ratio_CC: np.ndarray
) -> Iterator[tuple[int, int, int]]:
    """Yield for each change of a block the class in which the gap before it begins, the gap, and its own
    class.

    `place_K` are numbers among the elements of a class, `size_C` how many of these there are, ascending by
    class and number.
    """
    begin, before, sizes = _first_class(size_C), -1, size_C.tolist()
    for place, c in zip(place_K.tolist(), class_K.tolist(), strict=True):
        gap = place - before - 1
        if c != begin:
            gap = sizes[begin] - before - 1
            gap += sum(sizes[d] * int(ratio_CC[begin, d]) >> RATIO_BITS for d in range(begin + 1, c))
            gap += ((place + 1) * int(ratio_CC[begin, c]) >> RATIO_BITS) - 1
        yield begin, gap, c
        begin, before = c, place


def _blocks(
    blocks: Blocks, at_K: np.ndarray, class_K: np.ndarray | None
) -> Iterator[tuple[slice, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the changes of each block, its sizes, the places of its changes and their classes."""
    for (low, high), base, size_C in zip(
        itertools.pairwise(blocks.bound_B.tolist()), *blocks[:2], strict=True
    ):
        part = slice(low, high)
        classes = np.zeros(high - low, np.uint8) if class_K is None else class_K[part]
        yield part, size_C, at_K[part].astype(np.int64) - base, classes


def count(
    run_R: np.ndarray,
    base_B: np.ndarray,
    size_BC: np.ndarray,
    bound_B: np.ndarray,
    at_K: np.ndarray,
    class_K: np.ndarray | None,
    step_K: np.ndarray,
    ratio_CC: np.ndarray,
    count_RTS: np.ndarray,
) -> None:
    """See `native.count_runs`; counts into the last array."""
    for b, (part, size_C, place_K, classes) in enumerate(
        _blocks(Blocks(base_B, size_BC, bound_B), at_K, class_K)
    ):
        count_TS = count_RTS[np.searchsorted(run_R, b, side="right") - 1]
        for (begin, gap, c), step in zip(
            gaps(size_C, place_K, classes, ratio_CC), step_K[part].tolist(), strict=True
        ):
            count_TS[2 * begin, bucket(gap)[0]] += 1
            count_TS[2 * c + 1, bucket(zigzag(step, 8 * step_K.itemsize))[0]] += 1


def encode(
    blocks: Blocks,
    at_K: np.ndarray,
    class_K: np.ndarray | None,
    step_K: np.ndarray,
    freq_TS: np.ndarray,
    ratio_CC: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """See `native.encode`."""
    streams = []
    for part, size_C, place_K, classes in _blocks(blocks, at_K, class_K):
        writer = Writer()
        for (begin, gap, c), step in zip(
            gaps(size_C, place_K, classes, ratio_CC), step_K[part].tolist(), strict=True
        ):
            writer.number(gap, freq_TS[2 * begin])
            writer.number(zigzag(step, 8 * step_K.itemsize), freq_TS[2 * c + 1])
        streams.append(writer.words())
    return np.concatenate([np.empty(0, np.uint32), *streams]), np.array(
        [words.size for words in streams], np.int64
    )


def read_block(
    words: np.ndarray, count: int, size_C: np.ndarray, width: int, freq_TS: np.ndarray, ratio_CC: np.ndarray
) -> list[tuple[int, int, int]]:
    """Return the class, the place in it and the step of each change of a block. Raises ValueError if it is
    malformed.
    """
    if not count:
        if words.size:
            raise ValueError("words without changes")
        return []
    reader, found, sizes, c, place = (
        RansReader(words),
        list[tuple[int, int, int]](),
        size_C.tolist(),
        _first_class(size_C),
        -1,
    )
    for _ in range(count):
        gap = reader.number(freq_TS[2 * c])
        if gap < sizes[c] - place - 1:
            place += 1 + gap
        else:
            gap -= sizes[c] - place - 1
            c, place = _crossed(c, gap, sizes, ratio_CC)
        step = reader.number(freq_TS[2 * c + 1])
        if step > (1 << 8 * width) - 2:
            raise ValueError("a step that is none")
        found.append((c, place, unzigzag(step, 8 * width)))
    reader.finish()
    return found


def _crossed(begin: int, gap: int, sizes: list[int], ratio_CC: np.ndarray) -> tuple[int, int]:
    for to in range(begin + 1, len(sizes)):
        ratio = int(ratio_CC[begin, to])
        if gap < sizes[to] * ratio >> RATIO_BITS:
            place = -(-((gap + 1) << RATIO_BITS) // ratio) - 1
            if (place + 1) * ratio >> RATIO_BITS == gap + 1:
                return to, place
            break
        gap -= sizes[to] * ratio >> RATIO_BITS
    raise ValueError("a gap that leads to no element")


def decode(
    words: np.ndarray,
    word_B2: np.ndarray,
    base_B: np.ndarray,
    size_BC: np.ndarray,
    bound_B: np.ndarray,
    freq_TS: np.ndarray,
    at_K: np.ndarray,
    step_K: np.ndarray,
) -> bool:
    """See `native.decode`."""
    ratio_CC, bounds = np.full((1, 1), 1 << RATIO_BITS), itertools.pairwise(bound_B.tolist())
    for (low, high), base, size_C, (start, end) in zip(
        bounds, base_B, size_BC, word_B2.tolist(), strict=True
    ):
        try:
            found = read_block(
                words[start:end].view(np.uint32), high - low, size_C, step_K.itemsize, freq_TS, ratio_CC
            )
        except ValueError:
            return False
        at_K[low:high] = [base + place for _, place, _ in found]
        step_K[low:high] = [step for *_, step in found]
    return True


def _elements(row_F: list[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of a block and the positions of its elements, both in their order."""
    address, columns, stride, rows, first, *_ = row_F
    offset_N = (np.arange(rows)[:, None] * stride + np.arange(columns)).reshape(-1)
    return memory(address, (rows - 1) * stride + columns, width)[offset_N], first + offset_N


def rank(
    row_BF: np.ndarray,
    bound_B: np.ndarray,
    at_K: np.ndarray,
    step_K: np.ndarray,
    class_E: np.ndarray,
    low_C: np.ndarray,
    span_C: np.ndarray,
    size_BC: np.ndarray,
    rank_K: np.ndarray,
    class_K: np.ndarray,
    to_step_K: np.ndarray,
) -> None:
    """See `native.rank`; writes the last four arrays."""
    for row_F, (low, high), size_C in zip(
        row_BF.tolist(), itertools.pairwise(bound_B.tolist()), size_BC, strict=True
    ):
        if low == high:
            continue
        bits_N, at_N = _elements(row_F, step_K.itemsize)
        place_K = np.searchsorted(at_N, at_K[low:high])
        bits_N[place_K] -= step_K[low:high]
        members = _members(bits_N, row_F, low_C, span_C)
        size_C[:] = [member.size for member in members]
        for c, member in enumerate(members):
            mine_K = np.flatnonzero(np.isin(place_K, member))
            into = slice(low, low := low + mine_K.size)
            rank_K[into], class_K[into] = np.searchsorted(member, place_K[mine_K]), c
            to_step_K[into] = step_K[high - place_K.size : high][mine_K]


def _members(bits_N: np.ndarray, row_F: list[int], low_C: np.ndarray, span_C: np.ndarray) -> list[np.ndarray]:
    """Return the numbers of the elements of each class in a block."""
    field_N = bits_N.astype(np.uint64) >> np.uint64(row_F[5]) & np.uint64(row_F[6])
    ranges = zip(low_C.tolist(), span_C.tolist(), strict=True)
    return [np.flatnonzero((field_N >= low) & (field_N <= low + span)) for low, span in ranges]


def decode_classes(
    row_BF: np.ndarray,
    bound_B: np.ndarray,
    words: np.ndarray,
    word_B2: np.ndarray,
    low_C: np.ndarray,
    span_C: np.ndarray,
    freq_TS: np.ndarray,
    ratio_CC: np.ndarray,
    at_K: np.ndarray,
    step_K: np.ndarray,
) -> bool:
    """See `native.decode_classes`."""
    bounds = itertools.pairwise(bound_B.tolist())
    for row_F, (low, high), (start, end) in zip(row_BF.tolist(), bounds, word_B2.tolist(), strict=True):
        bits_N, at_N = _elements(row_F, step_K.itemsize)
        members = _members(bits_N, row_F, low_C, span_C)
        size_C = np.array([member.size for member in members])
        try:
            found = read_block(
                words[start:end].view(np.uint32), high - low, size_C, step_K.itemsize, freq_TS, ratio_CC
            )
        except ValueError:
            return False
        placed = sorted((int(members[c][place]), step) for c, place, step in found)
        at_K[low:high] = [at_N[place] for place, _ in placed]
        step_K[low:high] = [step for _, step in placed]
    return True


def survey(
    run_R: np.ndarray,
    row_BF: np.ndarray,
    bound_B: np.ndarray,
    at_K: np.ndarray,
    step_K: np.ndarray,
    period_R: np.ndarray,
    element_RE: np.ndarray,
    step_RES: np.ndarray,
) -> None:
    """See `native.survey`; counts all elements into the last arrays, whatever the period."""
    for b, (row_F, (low, high)) in enumerate(
        zip(row_BF.tolist(), itertools.pairwise(bound_B.tolist()), strict=True)
    ):
        r = np.searchsorted(run_R, b, side="right") - 1
        bits_N, at_N = _elements(row_F, step_K.itemsize)
        shift, mask = np.uint64(row_F[5]), np.uint64(row_F[6])
        element_RE[r] += np.bincount(
            (bits_N.astype(np.uint64) >> shift & mask).astype(np.int64), minlength=256
        )
        old_K = bits_N[np.searchsorted(at_N, at_K[low:high])] - step_K[low:high]
        symbols = [bucket(zigzag(step, 8 * step_K.itemsize))[0] for step in step_K[low:high].tolist()]
        np.add.at(
            step_RES[r],
            ((old_K.astype(np.uint64) >> shift & mask).astype(np.int64), np.array(symbols, np.int64)),
            1,
        )


def regroup(
    bound_G: np.ndarray,
    band_GF: np.ndarray,
    by_tile: bool,
    at_K: np.ndarray,
    step_K: np.ndarray,
    to_at_K: np.ndarray,
    to_step_K: np.ndarray,
    count_B: np.ndarray,
) -> None:
    """See `native.regroup`; writes the last three arrays."""
    for (low, high), band_F in zip(itertools.pairwise(bound_G.tolist()), band_GF.tolist(), strict=True):
        first, stride, columns, across, _, tile = band_F
        offset_K = at_K[low:high].astype(np.int64) - first
        key_K = offset_K % stride // columns if by_tile else offset_K // stride
        order = np.argsort(key_K, kind="stable")
        to_at_K[low:high], to_step_K[low:high] = at_K[low:high][order], step_K[low:high][order]
        if by_tile:
            count_B[tile : tile + across] = np.bincount(key_K, minlength=across)


def groups(
    bound_P: np.ndarray,
    element_RE: np.ndarray,
    value_V: np.ndarray,
    step_RVS: np.ndarray,
    costs: Costs,
    begins_R: np.ndarray,
    first_RE: np.ndarray,
    last_RE: np.ndarray,
    mean_RE: np.ndarray,
) -> None:
    """See `native.groups`; writes whether a run begins a group, and in the line of that run its classes."""
    for low, high in itertools.pairwise(bound_P.tolist()):
        first, group, last_bits = low, (np.empty(0), np.empty(0)), 0.0
        for r in range(low, high):
            run = element_RE[r], step_RVS[r].astype(np.int64)
            bits = _run_bits(value_V, *run, costs)
            if r > low:
                both = group[0] + run[0], group[1] + run[1]
                joined = _run_bits(value_V, *both, costs)
                if joined <= last_bits + bits:
                    group, last_bits = both, joined
                    continue
                _fit(value_V, *group, costs, first_RE[first], last_RE[first], mean_RE[first])
            first, group, last_bits, begins_R[r] = r, run, bits, 1
        if low < high:
            _fit(value_V, *group, costs, first_RE[first], last_RE[first], mean_RE[first])


def _run_bits(value_V: np.ndarray, element_E: np.ndarray, step_VS: np.ndarray, costs: Costs) -> float:
    """Estimate the bits of the changes of a run of blocks, if each value of the field is a class."""
    used = step_VS.any(axis=1)
    return float(_class_bits(element_E[value_V[used]], step_VS[used], costs).sum())


def _fit(
    value_V: np.ndarray,
    element_E: np.ndarray,
    step_VS: np.ndarray,
    costs: Costs,
    first_C: np.ndarray,
    last_C: np.ndarray,
    mean_C: np.ndarray,
) -> None:
    """Write the classes of a group: first and last values, and elements for each change."""
    changed_E = np.zeros(256, np.int64)
    changed_E[value_V] = step_VS.sum(axis=1)
    below_E = np.append(0.0, np.cumsum(np.maximum(element_E, changed_E)))
    first, step_CS = value_V[step_VS.any(axis=1)], step_VS[step_VS.any(axis=1)]
    last = first.copy()
    bits_C = _class_bits(element_E[first], step_CS, costs)
    while first.size > 1:
        joined = _class_bits(below_E[last[1:] + 1] - below_E[first[:-1]], step_CS[:-1] + step_CS[1:], costs)
        gain = bits_C[:-1] + bits_C[1:] - joined + costs[2] * below_E[-1]
        c = int(gain.argmax())
        if gain[c] <= 0:
            break
        last[c], step_CS[c], bits_C[c] = last[c + 1], step_CS[c] + step_CS[c + 1], joined[c]
        first, last, bits_C = np.delete(first, c + 1), np.delete(last, c + 1), np.delete(bits_C, c + 1)
        step_CS = np.delete(step_CS, c + 1, axis=0)
    first_C[: first.size], last_C[: first.size] = first, last
    mean_C[: first.size] = (below_E[last + 1] - below_E[first]) / step_CS.sum(axis=1)


def _class_bits(element_C: np.ndarray, step_CS: np.ndarray, costs: Costs) -> np.ndarray:
    """Estimate the bits that the changes of each class take, with their tables, but without the extra bits of
    steps.
    """
    changed_C = step_CS.sum(axis=-1).astype(np.float64)
    bits_C = costs[0] + (costs[1] * (step_CS > 0) - _x_log_x(step_CS.astype(np.float64))).sum(axis=-1)
    element_C = np.maximum(element_C, changed_C)
    found: np.ndarray = bits_C + _x_log_x(element_C) - _x_log_x(element_C - changed_C)
    return found


def _x_log_x(value: np.ndarray) -> np.ndarray:
    found: np.ndarray = value * np.log2(np.maximum(value, 1.0))
    return found
