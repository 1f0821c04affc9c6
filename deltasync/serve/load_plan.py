"""The load plan: where each checkpoint element lies in this worker's memory, recorded from the engine's own
loader.

The loader is run once on meta tensors of the checkpoint's names and shapes under a dispatch mode that records
writes to the model's memory instead of executing them. A recorded copy is a segment: a strided view of one
checkpoint tensor and the strided view of the parameter it goes to. Fused, stacked and sliced parameters need
no table per architecture.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from deltasync.errors import ModelMismatchError
from deltasync.live.segments import Segment
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import int_view


@dataclasses.dataclass(frozen=True)
class Loader:
    """How an engine loads its models.

    Attributes:
        engine: The engine's name, for messages.
        restore: Changes a copy of a module, the first argument, to what the loader expects; the second is the
            module.
        computed: Returns the parameters of a module that the engine computed from others after loading.
    """

    engine: str
    restore: Callable[[torch.nn.Module, torch.nn.Module], object] = lambda twin, module: None
    computed: Callable[[torch.nn.Module], dict[str, torch.Tensor]] = lambda _: {}

    def as_loaded(
        self, model: torch.nn.Module, *, restored: bool = True
    ) -> tuple[torch.nn.Module, dict[torch.nn.Module, torch.nn.Module]]:
        """Return a loaded model as its `load_weights` expects it, without LoRA's wrappers.

        Its modules are copies that share all other tensors with `model`, which is not touched. Also returns
        their originals. `restored` is False where the caller restores the layers that it loads: `restore` is
        then called for modules with a `load_weights` of their own alone.
        """
        copies: dict[torch.nn.Module, torch.nn.Module] = {}

        def copy_of(module: torch.nn.Module) -> torch.nn.Module:
            if any(base.__name__ == "BaseLayerWithLoRA" for base in type(module).__mro__):
                module = module.base_layer  # type: ignore[assignment]
            if module not in copies:
                held = vars(module)
                twin = copies[module] = module.__new__(type(module))
                own = {name: dict(held[name]) for name in ("_parameters", "_buffers")}
                vars(twin).update(held | own)
                if restored or "load_weights" in held:
                    self.restore(twin, module)
                vars(twin)["_modules"] = {
                    name: child and copy_of(child) for name, child in module._modules.items()
                }
            return copies[module]

        return copy_of(model), {twin: module for module, twin in copies.items()}


NOT_HELD = ("_parameters", "_buffers", "_modules", "kv_cache")
"""Attributes that hold no tensor by themselves, and the KV cache."""


def held_tensors(holder: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a module, or another object, holds by name: registered, or in an attribute of
    any kind.

    The KV cache is left out.
    """
    attributes = {name: value for name, value in vars(holder).items() if name not in NOT_HELD}
    if isinstance(holder, torch.nn.Module):
        attributes |= {**holder._buffers, **holder._parameters}
    found = {}
    for name, value in attributes.items():
        leaves = tree_leaves(value) if isinstance(value, list | tuple | dict) else [value]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                found[name if leaf is value else f"{name}[{number}]"] = leaf
    return found


class _Write(NamedTuple):
    """A write to memory that outlives the loader: `live` is what it would change.

    Attributes:
        names: The checkpoint's tensors whose values it writes.
        source: The meta tensor that it copies; None if it computes.
    """

    names: set[str]
    live: torch.Tensor
    source: torch.Tensor | None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class is untyped
    """Records writes to memory that was there before, and copies of the checkpoint's meta tensors. Runs
    everything else.

    `sources` are those meta tensors by name; `owners` has the modules of each parameter's storage.
    """

    def __init__(
        self,
        sources: Mapping[str, torch.Tensor],
        owners: Mapping[int, Collection[torch.nn.Module]],
        engine: str,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._engine = engine
        self.writes: list[_Write] = []
        self._owners = owners
        self._names = {_storage(tensor): {name} for name, tensor in sources.items()}
        # by storage: whole, parts, dimension
        self._joined: dict[int, tuple[torch.Tensor, list[torch.Tensor], int]] = {}
        # by storage; kept, so that no new storage has the address of a freed one
        self._made: dict[int, torch.Tensor] = {}

    def names(self, tensor: torch.Tensor) -> set[str]:
        """Return which of the checkpoint's tensors a tensor was computed from."""
        return self._names.get(_storage(tensor), set())

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the loader has made a tensor."""
        return _storage(tensor) in self._made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors, written = _tensors((args, kwargs)), _tensors(_written(func, args, kwargs))
        has_meta = any(each.is_meta for each in tensors)
        if any(not self._is_scratch(each) or (has_meta and not each.is_meta) for each in written):
            return self._record(func, written, tensors)
        if has_meta and not written:
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        result = func(*args, **kwargs)
        if func is torch.ops.aten.cat.default and has_meta:
            self._joined[_storage(result)] = result, list(args[0]), args[1] if len(args) > 1 else 0
        names = set().union(*map(self.names, tensors))
        known = {_storage(each) for each in tensors}
        for each in _tensors(result):
            if _storage(each) not in known:
                self._made[_storage(each)] = each
            self._add(each, names)
        return result

    def _is_scratch(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) not in self._owners and (tensor.is_meta or self.is_made(tensor))

    def _add(self, tensor: torch.Tensor, names: set[str]) -> None:
        if not self.names(tensor) >= names:
            self._names[_storage(tensor)] = self.names(tensor) | names

    def _record(self, func: Any, written: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        names = set().union(*(self.names(each) for each in tensors if each is not written[0]))
        if func is torch.ops.aten.copy_.default and tensors[1].is_meta:
            self.writes += [
                _Write(self.names(source), live, source) for live, source in self._parts(*tensors[:2])
            ]
        else:
            self.writes += [_Write(names, each, None) for each in written]
        for each in written:
            self._add(each, names)
        returned = len(func._schema.returns)
        if returned > len(written):
            raise ModelMismatchError(f"{self._engine}'s loader runs {func} on the weights.")
        return None if not returned else written[0] if returned == 1 else tuple(written[:returned])

    def _parts(self, live: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a copy's target and source, one by one for tensors that the loader has joined and copies
        together.
        """
        whole, parts, dim = self._joined.get(_storage(source), (source, [], 0))
        if not parts or _layout(whole) != _layout(source) or live.shape != source.shape:
            yield live, source
            return
        for place, part in zip(
            torch.split(live, [each.shape[dim] for each in parts], dim), parts, strict=True
        ):
            yield from self._parts(place, part)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return those arguments of an operator that it writes to."""
    found = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[at] if at < len(args) else kwargs.get(argument.name))
    return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """Where a checkpoint's tensors, or this worker's shards of them, lie.

    Attributes:
        segments: The places that hold each tensor's elements unchanged, in its dtype. `proof.check_coverage`
            finds what is missing in all workers.
        layers: The modules that the loader copies each tensor into.
        reasons: Why tensors cannot be patched in place.
        engine: The name of the engine, for messages.
    """

    segments: dict[str, list[Segment]]
    layers: dict[str, set[torch.nn.Module]]
    reasons: dict[str, str]
    engine: str = "the engine"


def record(model: torch.nn.Module, specs: Mapping[str, TensorSpec], loader: Loader) -> LoadPlan:
    """Find where the checkpoint's tensors, which are served as `specs`, lie in a loaded model. Changes
    nothing.

    Raises:
        ModelMismatchError: the loader refuses a name or a shape, puts a tensor where it is not part of the
            model, or the model keeps weights computed from others.
    """
    meta = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in specs.items()
    }
    loaded, originals = loader.as_loaded(model)
    owners: dict[int, set[torch.nn.Module]] = {}
    for module, original in originals.items():
        for tensor in held_tensors(module).values():
            owners.setdefault(_storage(tensor), set()).add(original)
    recorder = _Recorder(meta, owners, loader.engine)
    asked: list[str] = []
    weights = ((name, tensor) for name, tensor in meta.items() if not asked.append(name))  # type: ignore[func-returns-value]
    plan = LoadPlan({name: [] for name in specs}, {name: set() for name in specs}, {}, loader.engine)
    with _put_back(originals) as before:
        try:
            with torch.no_grad(), recorder:
                loaded.load_weights(weights)  # type: ignore[operator]
        except Exception as error:
            at = f" at {specs[asked[-1]]}" if asked else ""
            raise ModelMismatchError(
                f"{loader.engine}'s loader refuses the channel's tensors{at}: {error!r}"
            ) from error
        moved = _find_made(plan, recorder, originals, before, owners)
    _add_writes(plan, recorder, meta, owners, moved)
    computed = {module: loader.computed(module) for module in originals.values()}
    _find_computed(plan, computed, {_storage(write.live) for write in recorder.writes})
    for name, reason in plan.reasons.items():
        plan.segments[name].clear()
        if not plan.layers[name]:
            raise ModelMismatchError(
                f"{specs[name]} cannot be updated: {reason}, and no layer of {plan.engine} loads it again."
            )
    return plan


def writes(model: torch.nn.Module, call: Callable[[], object]) -> set[int]:
    """Return the addresses of the storages that a method of a model would write. Changes nothing.

    Raises:
        Exception: whatever the method raises.
    """
    recorder = _Recorder({}, {}, type(model).__name__)
    with _put_back({module: module for module in model.modules()}), torch.no_grad(), recorder:
        call()
    return {write.live.untyped_storage().data_ptr() for write in recorder.writes}


_Held = dict[torch.nn.Module, dict[str, torch.Tensor]]


@contextlib.contextmanager
def _put_back(originals: Mapping[torch.nn.Module, torch.nn.Module]) -> Iterator[_Held]:
    """Put modules' attributes, and the memory of their tensors, back after the body. Yields those tensors as
    they were.
    """
    modules = {*originals, *originals.values()}
    names = [(held, dict(held)) for each in modules for held in (vars(each), each._parameters, each._buffers)]
    held = {each: held_tensors(each) for each in modules}
    before = {each: {name: tensor.data for name, tensor in tensors.items()} for each, tensors in held.items()}
    try:
        yield before
    finally:
        for now, was in names:
            if now.keys() != was.keys() or any(now[name] is not was[name] for name in was):
                now.clear()
                now.update(was)
        for each, tensors in held.items():
            for name, tensor in tensors.items():
                if _storage(tensor) != _storage(before[each][name]):
                    tensor.data = before[each][name]


def _find_made(
    plan: LoadPlan,
    recorder: _Recorder,
    originals: Mapping[torch.nn.Module, torch.nn.Module],
    before: _Held,
    owners: dict[int, set[torch.nn.Module]],
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Find tensors of modules in whose place the loader put others, by the storage of those: the new one and
    the old one.
    """
    moved = {}
    for twin, original in originals.items():
        for module in (twin, original):
            for attribute, tensor in held_tensors(module).items():
                if not recorder.is_made(tensor):
                    continue
                if tensor.is_meta:
                    why = f"{plan.engine}'s loader makes {type(original).__name__}.{attribute} of it"
                    plan.reasons.update(dict.fromkeys(recorder.names(tensor), why))
                    continue
                owners.setdefault(_storage(tensor), set()).add(original)
                old = before[module].get(attribute)
                if old is not None and _layout(old) == _layout(tensor):
                    moved[_storage(tensor)] = tensor.data, old
    return moved


def _add_writes(
    plan: LoadPlan,
    recorder: _Recorder,
    meta: Mapping[str, torch.Tensor],
    owners: Mapping[int, Collection[torch.nn.Module]],
    moved: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Add what the loader would have written to a plan: segments, or reasons why there are none."""
    placed: dict[int, list[tuple[torch.Tensor, str]]] = {}
    outside = set()
    for names, live, source in recorder.writes:
        at, place = _storage(live), _in_place_of(live, moved.get(_storage(live)))
        held = placed.setdefault(_storage(place), [])
        if at not in owners:
            outside |= names
            continue
        for name in names:
            plan.layers[name].update(owners[at])
        is_view = source is not None and [(_storage(source), source.dtype)] == [
            (_storage(meta[name]), meta[name].dtype) for name in names
        ]
        if source is None or not is_view:
            changed = {name for other, name in held if _overlap(place, other)}
            plan.reasons.update(dict.fromkeys(names | changed, f"{plan.engine}'s loader computes with it"))
            continue
        (name,) = names
        problem = _problem(place, source, plan.engine)
        if recorder.is_made(place):
            problem = f"{plan.engine}'s loader makes another tensor for it"
        if problem is not None:
            plan.reasons[name] = problem
            continue
        segment = segment_of(place, source)
        if not any(segment.place == other.place for other in plan.segments[name]):
            plan.segments[name].append(segment)
            held.append((place, name))
    for held in placed.values():
        for one, other in _overlapping(held):
            if one != other:
                raise ModelMismatchError(
                    f"{plan.engine}'s loader puts {one} and {other} into the same memory, so their changes "
                    "cannot be told "
                    "apart: publish one of them, as `save_pretrained` does of tied weights."
                )
            plan.reasons[one] = f"{plan.engine}'s loader puts several of its elements into one place"
    for name in outside:
        if not plan.segments[name]:
            plan.reasons.setdefault(name, f"{plan.engine}'s loader puts it where it is no part of the model")


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _in_place_of(live: torch.Tensor, moved: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Return the view of the old tensor that `live` is of the new one."""
    if moved is None:
        return live
    new, old = moved
    return old.as_strided(
        live.shape, live.stride(), live.storage_offset() - new.storage_offset() + old.storage_offset()
    )


def segment_of(live: torch.Tensor, source: torch.Tensor) -> Segment:
    """Return the segment at which `live` holds the elements of `source`, a view of a checkpoint's tensor, of
    any device.
    """
    if live.shape != source.shape:
        live, source = live.squeeze(), source.squeeze()
    integers = live.detach().view(int_view(live[:0] if live.ndim else live).dtype)
    return Segment(integers, source.stride(), int(source.storage_offset()))


def _span(view: torch.Tensor) -> tuple[int, int]:
    """Return the first position of a view in its storage, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    first = int(view.storage_offset())
    return first, first + (int(last) + 1 if view.numel() else 0)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two views of one storage share an element."""
    (first, end), (other_first, other_end) = _span(one), _span(other)
    start = max(first, other_first)
    if start >= min(end, other_end):
        return False
    if one.dtype != other.dtype:
        return True
    start = min(first, other_first)
    taken = torch.zeros(max(end, other_end) - start, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), first - start).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other_first - start).any())


def _overlapping(held: list[tuple[torch.Tensor, str]]) -> list[tuple[str, str]]:
    """Return the names of tensors, two by two, that share an element of one storage."""
    found = []
    end = 0
    spans = sorted((*_span(view), at) for at, (view, _) in enumerate(held) if view.numel())
    for number, (first, stop, at) in enumerate(spans):
        if first < end:
            before = [other for _, other_end, other in spans[:number] if other_end > first]
            found += [
                (held[other][1], held[at][1]) for other in before if _overlap(held[other][0], held[at][0])
            ]
        end = max(end, stop)
    return found


def _problem(live: torch.Tensor, source: torch.Tensor, engine: str) -> str | None:
    """Return why a copy does not put elements unchanged into live memory, or None if it does."""
    if live.device.type == "meta":
        return f"{engine} holds its layer in another dtype or shape, quantized for example"
    if live.dtype != source.dtype:
        return f"{engine} holds it as {str(live.dtype).removeprefix('torch.')}"
    if live.squeeze().shape != source.squeeze().shape:
        return f"{engine}'s loader repeats it"
    return None


def _find_computed(
    plan: LoadPlan, by_layer: Mapping[torch.nn.Module, dict[str, torch.Tensor]], loaded: Collection[int]
) -> None:
    """Give reasons to tensors that the engine computed others from.

    Raises:
        ModelMismatchError: the engine computed a layer's tensor from other layers' tensors.
    """
    for layer, computed in by_layer.items():
        if all(_storage(tensor) in loaded for tensor in computed.values()):
            continue
        names = [name for name, of in plan.layers.items() if layer in of]
        if not names:
            raise ModelMismatchError(
                f"{plan.engine} computed {', '.join(computed)} of {type(layer).__name__} from weights of "
                "other layers, and "
                "would not do so again, so this model cannot be updated."
            )
        plan.reasons.update(dict.fromkeys(names, f"{plan.engine} computes {', '.join(computed)} from it"))
