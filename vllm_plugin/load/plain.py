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
from deltasync.serve.twin import memory_order, tensors_of
from deltasync.tensors import Delta
from deltasync.tensors.bits import bits_of, spec_of
from deltasync.tensors.fingerprint import MASK, tensor_key
from vllm_plugin import logger
from vllm_plugin.load.layers import restore

Quantize = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Returns the quantized elements, [N], and the scales of groups, [G], from the elements, the largest magnitudes of
the groups, and the group of each element.
"""

_AT_ONCE = 1 << 20

_FEW = 8
"""A twin takes less work if more than one in this many elements of a layer changes, or is in a group that is
quantized as a whole.
"""


def _channels(
    value_N: torch.Tensor, most_G: torch.Tensor, group_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.quantization.online import fp8

    scale_G1 = fp8._fp8_channel_scale(most_G[:, None])
    # a row for each element, because vLLM's function divides by the number of columns
    made_N1 = fp8._fp8_quant_per_channel(value_N[:, None], scale_G1.index_select(0, group_N))
    return made_N1[:, 0], scale_G1[:, 0]


def _blocks(
    value_N: torch.Tensor, most_G: torch.Tensor, group_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each element as one of two in a block, beside the largest one."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    cast = inspect.unwrap(per_block_cast_to_fp8)  # it is compiled, which takes seconds
    made_N2, _ = cast(torch.stack([value_N, most_G.index_select(0, group_N)], 1), block_size=[1, 2])
    _, scale_G1 = cast(most_G[:, None], block_size=[1, 1])
    return made_N2[:, 0].contiguous(), scale_G1[:, 0]


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

    def matrix(self) -> np.ndarray:
        """Return a view of its bits; [rows, columns]."""
        size, step = (self.rows, self.columns), self.bits_N.itemsize
        strides = (self.stride * step, step)
        return np.lib.stride_tricks.as_strided(self.bits_N[self.first :], size, strides, writeable=False)

    def to_weight(self, at_K: np.ndarray, width: int) -> tuple[slice | np.ndarray, np.ndarray]:
        """Return which of these elements of the tensor, which ascend, are in the part, and where those are in the
        weight, whose rows have `width` elements.
        """
        if self.columns == self.stride == width:
            low, high = np.searchsorted(at_K, (self.first, self.first + self.rows * width))
            return slice(low, high), at_K[low:high] + (self.place - self.first)
        at_K = at_K - self.first
        row_K = at_K // self.stride  # `np.divmod` takes five times as long as this and a product
        column_K = at_K - row_K * self.stride
        is_in_K = (row_K >= 0) & (row_K < self.rows) & (column_K < self.columns)
        return is_in_K, (self.place + row_K * width + column_K)[is_in_K]


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
        order = differs[np.argsort(at_N[differs], kind="stable")]  # merges what ascends
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
        self.names = tuple(held)
        # vLLM's kernels for FP8 take the weight transposed; memory has it as it was loaded
        self._weight, self._scale = (each.permute(memory_order(each)) for each in held.values())
        self._rows, self._columns = loaded.shape
        self._dtype, self._parts, self._quantize = loaded.dtype, parts, quantize
        self._matrices = [part.matrix() for part in parts]
        self._group = group
        down, self._across = (-(-size // step) for size, step in zip(loaded.shape, group, strict=True))
        self._count = down * self._across
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
        if self._weight.shape != (self._rows, self._columns) or self._scale.numel() != self._count:
            return False
        live_N, scale_G = (bits_of(each.detach().cpu()) for each in (self._weight, self._scale))
        live_RC, found = live_N.reshape(self._rows, self._columns), [np.empty(0, self._bits)]
        at_once = max(1, _AT_ONCE // (self._columns * rows)) * rows
        for first in range(0, self._rows, at_once):
            here = slice(first, min(first + at_once, self._rows))
            bits_RC = self._rows_of(np.arange(here.start, here.stop))
            most = self._magnitude(bits_RC)
            for axis, size in enumerate(self._group):
                most = np.maximum.reduceat(most, np.arange(0, most.shape[axis], size), axis)
            most_T = most.reshape(-1)
            group = np.arange(most_T.size).reshape(most.shape)
            group_RC = group.repeat(rows, 0)[: len(bits_RC)].repeat(columns, 1)[:, : self._columns]
            made_N, scale_T = self._made(bits_RC.reshape(-1), most_T, group_RC.reshape(-1))
            begin = sum(map(len, found))
            is_same = np.array_equal(live_RC[here].reshape(-1), made_N) and np.array_equal(
                scale_G[begin : begin + most_T.size], scale_T
            )
            if not is_same or (most_T >= self._infinite).any():
                return False
            found.append(most_T)
        self.most_G, self.has_failed = np.concatenate(found), False
        return True

    def _rows_of(self, row_R: np.ndarray) -> np.ndarray:
        """Return bits of rows of the weight, as it would be loaded from the mirror; [R, C]."""
        bits_RC = np.empty((row_R.size, self._columns), self._bits)
        for part, matrix in zip(self._parts, self._matrices, strict=True):
            row, column = divmod(part.place, self._columns)
            here = np.flatnonzero((row_R >= row) & (row_R < row + part.rows))
            bits_RC[here, column : column + part.columns] = matrix[row_R[here] - row]
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
        most_N = self.most_G.take(group_N)
        is_whole_G = np.zeros(self._count, bool)
        is_whole_G[group_N[(self._magnitude(old_N) == most_N) | (size_N > most_N)]] = True
        group_T = np.flatnonzero(is_whole_G).astype(group_N.dtype)
        if group_T.size * self._group[0] * self._group[1] > self._few:
            return None
        at_E, bits_E, group_T, size_T = self._elements(group_T)
        whole, order_E = np.flatnonzero(is_whole_G.take(group_N)), np.argsort(at_E, kind="stable")
        changed = order_E[np.searchsorted(at_E, at_N[whole], sorter=order_E)]
        new_E, most_G = bits_E.copy(), self.most_G.copy()
        new_E[changed] = new_N[whole]
        most_G[group_T] = np.maximum.reduceat(self._magnitude(new_E), np.cumsum(size_T) - size_T)
        at_N, group_N = np.concatenate([at_N, at_E]), np.concatenate([group_N, group_T.repeat(size_T)])
        before_N, before_G = self._made(np.concatenate([old_N, bits_E]), self.most_G, group_N)
        after_N, after_G = self._made(np.concatenate([new_N, bits_E]), most_G, group_N)
        again = changed + old_N.size  # they are among the first too
        after_N[again] = before_N[again]
        weight = ElementChanges.between(at_N, before_N, after_N)
        scale = ElementChanges.between(np.arange(self._count), before_G, after_G)
        return dict(zip(self.names, (weight, scale), strict=True)), most_G

    def _changed(self, delta: Delta) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where a version changes the weight, as it was loaded, and the bits before and after."""
        found = [(np.empty(0, np.int32), np.empty(0, self._bits), np.empty(0, self._bits))]
        for part in self._parts:
            at_K, step_K = delta.of(part.name)
            is_in_K, to_N = part.to_weight(at_K, self._columns)
            old_N = part.bits_N.take(at_K[is_in_K])
            found.append((to_N, old_N, old_N + step_K[is_in_K]))
        at_N, old_N, new_N = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        return at_N, old_N, new_N

    def _elements(self, group_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return where all elements of groups are in the weight, as it was loaded, and their bits, group by group;
        and the groups in this order, with how many each has.
        """
        index, (rows, columns) = group_T.dtype, self._group
        found = [(group_T[:0], np.empty(0, self._bits), group_T[:0], group_T[:0])]
        for across in np.unique(group_T % self._across).tolist():
            group_D = group_T[group_T % self._across == across]
            row_DR = np.add.outer(group_D // self._across * rows, np.arange(rows, dtype=index))
            row_R, column = row_DR[row_DR < self._rows], across * columns
            bits_RC = self._rows_of(row_R)[:, column : column + columns]
            width = bits_RC.shape[1]
            at_RC = np.add.outer(row_R * self._columns, np.arange(column, column + width, dtype=index))
            size_D = (row_DR < self._rows).sum(1) * width
            found.append((at_RC.reshape(-1), bits_RC.reshape(-1), group_D, size_D))
        at_E, bits_E, group_T, size_T = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        return at_E, bits_E, group_T, size_T

    def _groups(self, at_N: np.ndarray) -> np.ndarray:
        row_N = at_N // self._columns
        group_N: np.ndarray = row_N // self._group[0]
        if self._across > 1:
            group_N = group_N * self._across + (at_N - row_N * self._columns) // self._group[1]
        return group_N

    def _magnitude(self, bits_N: np.ndarray) -> np.ndarray:
        """Return bits without signs, which have the order of magnitudes; those of NaN come last."""
        found: np.ndarray = bits_N & ~self._sign
        return found

    def _made(
        self, bits_N: np.ndarray, most_G: np.ndarray, group_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the bits of quantized elements, and of the scales of all these groups."""
        groups = torch.from_numpy(group_N)
        made = self._quantize(self._values(bits_N), self._values(most_G), groups)
        made_N, scale_G = (bits_of(each.contiguous()) for each in made)
        return made_N, scale_G

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
