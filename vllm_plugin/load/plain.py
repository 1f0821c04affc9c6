"""Layers of plain quantizers: of a version's changes, only those elements are quantized again.

Such a quantizer takes the weight in groups, channels or blocks, and makes each element of a group from its
value and the group's largest magnitude alone. An element that changes is quantized by itself; a group whose
largest magnitude moves is quantized as a whole. vLLM's own function does it, on the host.

Shape suffixes: N elements; G groups of the layer; T groups that are quantized as a whole, with E elements.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch

from deltasync.kernels import native
from deltasync.live import Segment
from deltasync.serve import load_plan
from deltasync.tensors import Delta
from deltasync.tensors.bits import bits_of, signed_view, spec_of
from deltasync.tensors.fingerprint import MASK, tensor_key
from vllm_plugin import logger
from vllm_plugin.load.layers import restore, tensors_of

Quantize = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Returns the quantized elements and the scales of their groups, from the elements and the largest magnitudes
of their groups; all of shape [N]."""

_AT_ONCE = 1 << 20

_FEW = 8
"""A twin takes less work if more than one in this many elements of a layer changes, or is in a group that is
quantized as a whole.
"""


def _channels(value_N: torch.Tensor, most_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.quantization.online import fp8

    # a row for each, because vLLM's function divides by the number of columns
    scale_N1 = fp8._fp8_channel_scale(most_N[:, None])
    return fp8._fp8_quant_per_channel(value_N[:, None], scale_N1)[:, 0], scale_N1[:, 0]


def _blocks(value_N: torch.Tensor, most_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each element as one of two in a block, beside the largest one."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    cast = inspect.unwrap(per_block_cast_to_fp8)  # it is compiled, which takes seconds
    made_N2, scale_N1 = cast(torch.stack([value_N, most_N], 1), block_size=[1, 2])
    return made_N2[:, 0].contiguous(), scale_N1[:, 0]


def _quantizer(layer: Any) -> tuple[Quantize, tuple[int, int]] | None:
    """Return the plain quantizer of a layer, and the rows and columns of a group; None if it has none.

    Ranks that share a channel scale it by the largest magnitude of all of it, so they have none.
    """
    method = getattr(layer, "quant_method", None)
    if getattr(method, "requantization_source", None) is not None:
        return None
    kind = f"{type(method).__module__}.{type(method).__name__}".removeprefix(_METHODS)
    if kind == "Fp8PtpcOnlineLinearMethod" and layer.input_size == layer.input_size_per_partition:
        return _channels, (1, layer.input_size)
    if kind == "Fp8PerBlockOnlineLinearMethod":
        rows, columns = method.weight_block_size  # type: ignore[union-attr]
        return _blocks, (rows, columns)
    return None


_METHODS = "vllm.model_executor.layers.quantization.online.fp8."


def _row_column(at_N: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """As `np.divmod`, which takes five times as long."""
    row_N = at_N // width
    return row_N, at_N - row_N * width


@dataclasses.dataclass(frozen=True, slots=True)
class WeightPart:
    """A part of a mirrored tensor: a matrix that is a part of the layer's weight, as it was loaded.

    Attributes:
        name: The tensor.
        bits_N: Its bit patterns, in the mirror.
        first, stride: Where the part begins in the tensor, and how far apart its rows are.
        place: Where it begins in the weight.
        rows, columns: Its shape.
    """

    name: str
    bits_N: np.ndarray
    first: int
    stride: int
    place: int
    rows: int
    columns: int

    def to_weight(self, at_N: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which of these elements of the tensor are in the part, and where those are in the weight,
        whose rows have `width` elements.
        """
        return self._moved(at_N, self.first, self.stride, self.place, width)

    def from_weight(self, at_N: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """As `to_weight`, from elements of the weight to those of the tensor."""
        return self._moved(at_N, self.place, width, self.first, self.stride)

    def _moved(
        self, at_N: np.ndarray, first: int, stride: int, to: int, other: int
    ) -> tuple[np.ndarray, np.ndarray]:
        row_N, column_N = _row_column(at_N - first, stride)
        is_in_N = (row_N >= 0) & (row_N < self.rows) & (column_N < self.columns)
        return is_in_N, (to + row_N * other + column_N)[is_in_N]


@dataclasses.dataclass(frozen=True, slots=True)
class ElementChanges:
    """Changes of a tensor: flat indices, and bit patterns before and after."""

    at_N: np.ndarray
    old_N: np.ndarray
    new_N: np.ndarray

    @classmethod
    def between(cls, at_N: np.ndarray, old_N: np.ndarray, new_N: np.ndarray) -> ElementChanges:
        """Return those of elements that differ, in ascending order."""
        differs = np.flatnonzero(old_N != new_N)
        order = differs[np.argsort(at_N[differs])]
        return cls(at_N[order], old_N[order], new_N[order])

    def after(self, name: str, before: int) -> int:
        """Return the tensor's fingerprint after them, from that before."""
        at_N, key = self.at_N.astype(np.int64), tensor_key(name)
        new, old = (native.fingerprint_runs(key, at_N, each[:, None]) for each in (self.new_N, self.old_N))
        return (before + new - old) & MASK


class PlainLayer:
    """A layer with a plain quantizer.

    Args:
        held: Its weight and its scales in live memory, in this order, by their names in the layer.
        loaded: The weight as it was loaded: a matrix of any values.
        parts: The parts of the mirror that make up the weight.
        quantize: The quantizer.
        group: Rows and columns of a group.

    Attributes:
        names: The names of `held`.
        most_G: The largest magnitude of each group of the mirror, as bit patterns; None if they are not known.
        has_failed: Whether it is left to its twin, because `prove` found other bits or an error was raised.
    """

    def __init__(
        self,
        held: Mapping[str, torch.Tensor],
        loaded: torch.Tensor,
        parts: list[WeightPart],
        quantize: Quantize,
        group: tuple[int, int],
    ) -> None:
        self.names, (self._weight, self._scale) = tuple(held), held.values()
        self._rows, self._columns = loaded.shape
        self._dtype, self._parts, self._quantize = loaded.dtype, parts, quantize
        self._group = group
        down, self._across = (-(-size // step) for size, step in zip(loaded.shape, group, strict=True))
        self._count = down * self._across
        # vLLM's kernels for FP8 take the weight transposed; contiguous memory is not
        self._is_transposed = self._weight.shape != loaded.shape or not self._weight.is_contiguous()
        infinite_1 = bits_of(torch.full((1,), torch.inf, dtype=loaded.dtype, device="cpu"))
        self._bits, self._infinite = infinite_1.dtype, int(infinite_1[0])
        self._sign = self._bits.type(1 << (8 * self._bits.itemsize - 1))
        self._few = self._rows * self._columns // _FEW
        self.most_G: np.ndarray | None = None
        self.has_failed = False

    def prove(self) -> bool:
        """Note the largest magnitudes of the mirror's groups. Returns whether live memory is what is made of the
        mirror, bit for bit; if not, or if an element is not finite, they are not known, and it `has_failed`.
        """
        self.most_G, self.has_failed = None, True
        rows, columns = self._group
        live = self._weight.t() if self._is_transposed else self._weight
        live_N, scale_G = (bits_of(each.detach().cpu()) for each in (live, self._scale))
        if (live_N.size, scale_G.size) != (self._rows * self._columns, self._count):
            return False
        live_RC, found = live_N.reshape(self._rows, self._columns), [np.empty(0, self._bits)]
        at_once = max(1, _AT_ONCE // (self._columns * rows)) * rows
        for first in range(0, self._rows, at_once):
            here = slice(first, first + at_once)
            bits_RC = self._rows_of(here)
            most = self._magnitude(bits_RC)
            for axis, size in enumerate(self._group):
                most = np.maximum.reduceat(most, np.arange(0, most.shape[axis], size), axis)
            most_RC = most.repeat(rows, 0)[: len(bits_RC)].repeat(columns, 1)[:, : self._columns]
            made_N, most_T = self._made(bits_RC.reshape(-1), most_RC.reshape(-1)), most.reshape(-1)
            begin = sum(map(len, found))
            is_same = np.array_equal(live_RC[here].reshape(-1), made_N) and np.array_equal(
                scale_G[begin : begin + most_T.size], self._scales(most_T)
            )
            if not is_same or (most_T >= self._infinite).any():
                return False
            found.append(most_T)
        self.most_G, self.has_failed = np.concatenate(found), False
        return True

    def _rows_of(self, here: slice) -> np.ndarray:
        """Return bits of rows of the weight, as it would be loaded from the mirror; [R, C]."""
        first, last = here.start, min(here.stop, self._rows)
        bits_RC = np.empty((last - first, self._columns), self._bits)
        for part in self._parts:
            row, column = divmod(part.place, self._columns)
            low, high = max(first, row), min(last, row + part.rows)
            if low < high:
                size, stride = (high - low, part.columns), (part.stride, 1)
                source = signed_view(part.bits_N).as_strided(
                    size, stride, part.first + (low - row) * part.stride
                )
                bits_RC[low - first : high - first, column : column + part.columns] = bits_of(source).reshape(
                    size
                )
        return bits_RC

    def stage(self, delta: Delta) -> tuple[dict[str, ElementChanges], np.ndarray] | None:
        """Return what changes in each tensor of live memory, and `most_G` afterwards. None if an element of the
        mirror is not finite, or becomes so; if so much changes that a twin takes less work; or if `prove` fails,
        which is called if need be.
        """
        at_N, old_N, new_N = self._changed(delta)
        if at_N.size > self._few or (self.most_G is None and not self.prove()):
            return None
        assert self.most_G is not None
        group_N, size_N = self._groups(at_N), self._magnitude(new_N)
        if (size_N >= self._infinite).any():
            return None
        may_move_N = (self._magnitude(old_N) == self.most_G[group_N]) | (size_N > self.most_G[group_N])
        is_whole_G = np.zeros(self._count, bool)
        is_whole_G[group_N[may_move_N]] = True
        group_T, is_whole_N = np.flatnonzero(is_whole_G), is_whole_G[group_N]
        if group_T.size * self._group[0] * self._group[1] > self._few:
            return None
        at_E, group_E = self._elements(group_T)
        old_E = self._read(at_E)
        new_E, order_E = old_E.copy(), np.argsort(at_E, kind="stable")
        new_E[order_E[np.searchsorted(at_E, at_N[is_whole_N], sorter=order_E)]] = new_N[is_whole_N]
        most_G = self.most_G.copy()
        most_G[group_T] = self._largest(new_E, group_E)
        pairs = (at_N, at_E), (old_N, old_E), (new_N, new_E), (group_N, group_E)
        at_N, old_N, new_N, group_N = (np.concatenate([each[~is_whole_N], more]) for each, more in pairs)
        weight = ElementChanges.between(
            self._live(at_N), self._made(old_N, self.most_G[group_N]), self._made(new_N, most_G[group_N])
        )
        scale = ElementChanges.between(
            group_T, self._scales(self.most_G[group_T]), self._scales(most_G[group_T])
        )
        return dict(zip(self.names, (weight, scale), strict=True)), most_G

    def _changed(self, delta: Delta) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where a version changes the weight, as it was loaded, and the bits before and after."""
        found = [(np.empty(0, np.int64), np.empty(0, self._bits), np.empty(0, self._bits))]
        for part in self._parts:
            at_K, step_K = delta.of(part.name)
            is_in_K, to_N = part.to_weight(at_K.astype(np.int64), self._columns)
            old_N = part.bits_N[at_K[is_in_K]]
            found.append((to_N, old_N, old_N + step_K[is_in_K]))
        at_N, old_N, new_N = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        return at_N, old_N, new_N

    def _elements(self, group_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return all elements of groups in the weight, as it was loaded, and the group of each; in the order of
        the groups.
        """
        down_T, across_T = np.divmod(group_T, self._across)
        row_TR = down_T[:, None] * self._group[0] + np.arange(self._group[0])
        column_TC = across_T[:, None] * self._group[1] + np.arange(self._group[1])
        is_in = (row_TR < self._rows)[:, :, None] & (column_TC < self._columns)[:, None, :]
        at = row_TR[:, :, None] * self._columns + column_TC[:, None, :]
        return at[is_in], np.broadcast_to(group_T[:, None, None], at.shape)[is_in]

    def _read(self, at_N: np.ndarray) -> np.ndarray:
        """Return bits of the weight, as it would be loaded from the mirror."""
        bits_N = np.empty(at_N.size, self._bits)
        for part in self._parts:
            is_in_N, from_N = part.from_weight(at_N, self._columns)
            bits_N[is_in_N] = part.bits_N[from_N]
        return bits_N

    def _groups(self, at_N: np.ndarray) -> np.ndarray:
        row_N, column_N = _row_column(at_N, self._columns)
        group_N: np.ndarray = row_N // self._group[0] * self._across + column_N // self._group[1]
        return group_N

    def _live(self, at_N: np.ndarray) -> np.ndarray:
        """Return the flat indices in live memory's weight of elements of the weight, as it was loaded."""
        if not self._is_transposed:
            return at_N
        row_N, column_N = _row_column(at_N, self._columns)
        index_N: np.ndarray = column_N * self._rows + row_N
        return index_N

    def _magnitude(self, bits_N: np.ndarray) -> np.ndarray:
        """Return bits without signs, which have the order of magnitudes; those of NaN come last."""
        found: np.ndarray = bits_N & ~self._sign
        return found

    def _largest(self, bits_E: np.ndarray, group_E: np.ndarray) -> np.ndarray:
        """Return the largest magnitude of each group, whose elements follow each other."""
        first_T = np.flatnonzero(np.diff(group_E, prepend=-1))
        most_T: np.ndarray = np.maximum.reduceat(self._magnitude(bits_E), first_T)
        return most_T

    def _made(self, bits_N: np.ndarray, most_N: np.ndarray) -> np.ndarray:
        """Return the bits of quantized elements."""
        return bits_of(self._quantize(self._values(bits_N), self._values(most_N))[0])

    def _scales(self, most_T: np.ndarray) -> np.ndarray:
        return bits_of(self._quantize(self._values(most_T), self._values(most_T))[1].contiguous())

    def _values(self, bits_N: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(bits_N.view(f"i{bits_N.itemsize}")).view(self._dtype)


def find(
    model: torch.nn.Module,
    groups: Iterable[tuple[Mapping[torch.nn.Module, Set[str]], Set[str]]],
    tensors: Mapping[str, torch.Tensor],
) -> dict[torch.nn.Module, PlainLayer]:
    """Return the layers with twins that have a plain quantizer, after `prove`. The others keep their twins alone.

    Args:
        model: The model.
        groups: As `twin.Group`.
        tensors: The mirror.
    """
    found = dict[torch.nn.Module, PlainLayer]()
    try:
        quantizers = {
            layer: (quantizer, scale, names)
            for layers, names in groups
            for layer, changing in layers.items()
            if len(layers) == 1 and (quantizer := _quantizer(layer)) is not None
            for scale in changing - {"weight"}
            if changing == {"weight", scale}
        }
        of_names = [names for *_, names in quantizers.values()]
        loaded, plan = _recorded(model, quantizers.keys(), tensors, of_names)
        for layer, (quantizer, scale, names) in quantizers.items():
            weight, held = loaded[layer], tensors_of(layer)
            parts = [
                each for name in names for each in _parts(weight, plan.segments[name], name, tensors[name])
            ]
            if sum(part.rows * part.columns for part in parts) == weight.numel():
                two = {name: held[name] for name in ("weight", scale)}
                found[layer] = PlainLayer(two, weight, parts, *quantizer)
                found[layer].prove()
    except Exception as error:  # noqa: BLE001 - vLLM's, of any class
        logger.info("deltasync: quantized layers keep their twins: %r", error)
    return found


def _recorded(
    model: torch.nn.Module,
    layers: Set[torch.nn.Module],
    tensors: Mapping[str, torch.Tensor],
    names: Iterable[Set[str]],
) -> tuple[dict[torch.nn.Module, torch.Tensor], load_plan.LoadPlan]:
    """Return the weights of layers as they were before vLLM quantized them, of any values, and the load plan
    of these tensors, which has its segments there.
    """
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    loaded = dict[torch.nn.Module, torch.Tensor]()

    def restore_weight(twin: torch.nn.Module, layer: torch.nn.Module) -> None:
        restore(twin, layer)
        if layer in layers:
            with torch.device("cpu"):  # never touched, so it takes no memory
                loaded[layer] = materialize_meta_tensor(twin._parameters["weight"])
            twin._parameters["weight"] = loaded[layer]  # type: ignore[assignment]

    specs = {name: spec_of(name, tensors[name]) for name in sorted(set().union(*names))}
    return loaded, load_plan.record(model, specs, load_plan.Loader("vLLM", restore_weight))


def _parts(
    weight: torch.Tensor, segments: Iterable[Segment], name: str, tensor: torch.Tensor
) -> Iterator[WeightPart]:
    """Yield the parts of a weight that are matrices of a mirrored tensor, with rows like those of the weight."""
    for segment in segments:
        live = segment.live
        is_inside = live.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        if is_inside and live.ndim == 2 and live.stride() == (weight.shape[1], 1) and segment.stride[1] == 1:
            place = int(live.storage_offset())
            yield WeightPart(name, bits_of(tensor), segment.offset, segment.stride[0], place, *live.shape)
