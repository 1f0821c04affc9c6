"""Values that a torch module keeps beside its weights: a new version must not meet those of an old one.

A module may compute something from its weights at its first call and keep it. If nothing was there when the
module began to follow, it is dropped, so that the next call makes it again. A value that was there already,
in a module that holds weights, may come from these, so the module is refused by the value's name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from deltasync.errors import ModelMismatchError
from deltasync.tensors.bits import has_memory

_INTERNAL = frozenset(vars(torch.nn.Module())) - {"training"} | {
    "_forward_module",
    "_orig_mod",
    "_compiled_call_impl",
}
# positions, token numbers and masks, also those of a generation that runs
_NOT_MADE = (torch.int64, torch.bool)
# builds modules without values, so that it makes no non-persistent buffer of weights
_REBUILT = "transformers."
# attributes that are true once a first forward call has changed the weights
_FLAGS = ("layers_are_rescaled",)
# hooks that set an attribute before each forward call
_REMAKES = (WeightNorm, SpectralNorm, prune.BasePruningMethod)
_PLAIN = (bool, int, float, str, type(None))
_NO_OBJECTS = (
    torch.nn.Module,
    torch.Tensor,
    type,
    types.ModuleType,
    types.FunctionType,
    functools.partial,
    dict,
    list,
)
_ABSENT = object()


_Key = tuple[int, str]


class _Slot(NamedTuple):
    """A named value of a module, or of an object that a module holds.

    Attributes:
        held: The mapping that holds it.
        where: Its name in the followed module.
        trust: How much is known of the module: see below.
    """

    held: MutableMapping[str, Any]
    name: str
    where: str
    trust: int

    @property
    def key(self) -> _Key:
        """Identifies it while its mapping is held."""
        return id(self.held), self.name

    @property
    def value(self) -> Any:
        """Its value now."""
        return self.held.get(self.name, _ABSENT)


_NONE, _BUILT, _SHAPE, _FULL = range(4)
"""No value may stay; those may that were there when the module began to follow, because its package makes
them without weights; those may that have no weight's shape, because the module has no weights; all may."""


class _Was(NamedTuple):
    """The value of a slot when the module began to follow: its tensors, and a copy of a value without any."""

    value: Any
    tensors: list[torch.Tensor]
    marks: list[object]
    plain: Any


_NOTHING = _Was(_ABSENT, [], [], _ABSENT)


class _Unit(NamedTuple):
    """A module, or an object that one holds, with its name in the followed module and how much is known of
    it.
    """

    owner: Any
    where: str
    trust: int


_Dropped = dict[_Key, tuple[_Slot, Any]]


class _Views:
    """Containers as they were when they were added: a comparison calls no Python for a value that is the
    same.
    """

    def __init__(self) -> None:
        self._views: list[Collection[Any]] = []
        self._units: list[int] = []
        self._values: list[list[Any]] = []

    def add(self, view: Collection[Any], unit: int = 0) -> None:
        """Note the values of a container, or of a dict as `values()`, which belongs to a unit."""
        self._views.append(view)
        self._units.append(unit)
        self._values.append([*view])

    def changed(self) -> set[int]:
        """Return the units of which a container has other values now. Numbers, flags and texts are no
        difference.
        """
        flat = [*itertools.chain.from_iterable(self._views)]
        before = itertools.chain.from_iterable(self._values)
        if [*map(len, self._views)] == [*map(len, self._values)] and all(map(operator.is_, flat, before)):
            return set()
        pairs = zip(self._units, self._views, self._values, strict=True)
        return {unit for unit, *sides in pairs if len({tuple(_identities([*each])) for each in sides}) > 1}


class _Scan:
    """What `KeptValues` has found while calls ran, and what tells whether they have changed it since.

    Attributes:
        dropped: Kept values to drop, by the position of their unit.
        hooks: Those that set an attribute before each forward call, with their modules.
        structure: Modules, parameters and hooks.
        values: All containers that may hold kept values.
        tensors: Those in them, with the positions of their units and what changes when they are written.
    """

    def __init__(self, units: list[_Unit], known: _ModuleParts, shapes: set[tuple[int, ...]]) -> None:
        self.units, self.known, self.shapes = units, known, shapes
        self.dropped: dict[int, _Dropped] = {}
        self.hooks: list[tuple[torch.nn.Module, Any]] = []
        self.structure, self.values = _Views(), _Views()
        self.tensors: list[tuple[int, torch.Tensor, object]] = []

    def changed(self) -> set[int]:
        """Return the positions of the units that have changed since."""
        return self.values.changed() | {at for at, tensor, mark in self.tensors if _mark(tensor) != mark}


class KeptValues:
    """The values of a module outside of its weights, compared with those of when it began to follow.

    Args:
        module: The module.
        is_own: Whether the module's owner says that a value has nothing to do with the channel, by its name.
    """

    def __init__(self, module: torch.nn.Module, is_own: Callable[[str], bool]) -> None:
        self._module, self._is_own = module, is_own
        self._was: dict[_Key, _Was] = {}
        self._holders: dict[int, Any] = {}  # held, so that they keep their identities
        self._objects: dict[int, Any] = {}  # those of them that are no modules
        self._kinds: set[type] = set()
        self._memos: list[functools._lru_cache_wrapper[Any]] = []  # of methods of these classes
        self._plain: dict[_Key, Any] = {}  # plain values as the first forward call began
        self._made: set[_Key] = set()  # plain values that it has changed
        self._scan: _Scan | None = None
        self._hooks: list[tuple[torch.nn.Module, Any]] = []
        self._note_new()

    def begin(self) -> None:
        """Note plain values as the first forward call begins."""
        self._plain = {
            slot.key: slot.value for slot in self._slots() if slot.trust < _SHAPE and _is_scalar(slot.value)
        }

    def end(self) -> None:
        """Note which plain values it has changed, when it ends."""
        for slot in self._slots():
            is_noted = slot.trust < _SHAPE and _is_scalar(slot.value) and id(slot.held) in self._holders
            if is_noted and not _is_same(slot.value, self._plain.get(slot.key, _ABSENT)):
                self._made.add(slot.key)

    def check(self) -> None:
        """Refuse what the module had when it began to follow and what may come from weights. Parts put in
        later count too.

        Raises:
            ModelMismatchError: with its name.
        """
        if getattr(sys.modules.get("torch._inductor.config"), "freezing", False):
            raise ModelMismatchError(
                "torch._inductor.config.freezing makes constants of weights in compiled code, so a new "
                "version would leave "
                "it as it is: turn it off and compile anew."
            )
        for path, module in self._module.named_modules():
            for flag in _FLAGS:
                if vars(module).get(flag) is True:
                    raise ModelMismatchError(
                        f"{path}.{flag}".lstrip(".")
                        + " says that a forward call has changed the module's weights, so "
                        "they are not those of a checkpoint: load it anew and follow before its first call."
                    )
        self._note_new()
        shapes = _shapes(self._weights())
        for slot in self._slots():
            was = self._was.get(slot.key)
            if was is None or slot.value is not was.value or slot.trust in (_BUILT, _FULL):
                continue
            if any(
                _may_be_made(each) for each in was.tensors if slot.trust == _NONE or _shape(each) in shapes
            ):
                raise ModelMismatchError(
                    _sentence(slot.where, "is no weight of the channel and may be made of weights")
                )

    def scan(self) -> None:
        """Find what is to be dropped while calls may run, so that `drop` only has to look at what they change
        until then.

        Raises:
            ModelMismatchError: as `drop`.
        """
        self._scan = None
        with contextlib.suppress(RuntimeError):  # a dict grew while it was read: `drop` looks again
            self._scan = self._scanned()

    @property
    def is_scanned(self) -> bool:
        """Whether there was a scan since the last drop, and modules, parameters and hooks are as they were
        then.
        """
        return self._scan is not None and not self._scan.structure.changed()

    def drop(self) -> None:
        """Drop what calls have made since. Nobody may compute meanwhile. Mutates attributes and buffers of
        the module.

        Raises:
            ModelMismatchError: there is something that cannot be dropped; nothing was.
        """
        scan = self._scan if self.is_scanned else None
        self._scan = None
        if scan is None:
            scan = self._scanned()
        else:
            for at in scan.changed():
                scan.dropped[at] = self._found(scan, at)
        dropped = {key: each for found in scan.dropped.values() for key, each in found.items()}
        for at, name in self._made:
            slot = _Slot(self._holders[at], name, name, _NONE)
            if type(slot.value) is float:
                dropped[slot.key] = slot, self._was.get(slot.key, _NOTHING).plain
        for held, where in {at: (slot.held, slot.where) for (at, _), (slot, _) in dropped.items()}.values():
            for name, value in [*held.items()]:
                slot = _Slot(held, name, name, _NONE)
                was = self._was.get(slot.key, _NOTHING)
                if (
                    slot.key in dropped
                    or name in _INTERNAL
                    or not _is_scalar(value)
                    or _is_same(value, was.value)
                ):
                    continue
                # it may say that the dropped value is there
                if slot.key not in self._made or not _is_plain(was.plain):
                    raise ModelMismatchError(
                        _sentence(where, f"was made by a forward call, and {name} changed beside it")
                    )
                dropped[slot.key] = slot, was.plain
        for slot, plain in dropped.values():
            _restore(slot, plain)
        for memo in self._memos:
            memo.cache_clear()
        cached = parametrize._cache  # of `parametrize.cached()`
        for key in [key for key in cached if key[0] in scan.known.modules]:
            cached.pop(key, None)
        self._hooks = scan.hooks

    def remake(self) -> None:
        """Have the hooks of `weight_norm`, `spectral_norm` and pruning set their attributes from the new
        weights.
        """
        with torch.no_grad():
            for module, hook in self._hooks:
                if not (isinstance(hook, SpectralNorm) and module.training):
                    hook(module, None)

    def _scanned(self) -> _Scan:
        """Look at all values. Mutates what is noted of the module's parts and classes."""
        weights = self._weights()
        scan = _Scan([*self._units(weights)], self._known(weights), _shapes(weights))
        for at, (owner, *_) in enumerate(scan.units):
            scan.values.add(vars(owner).values(), at)
            if isinstance(owner, torch.nn.Module):
                scan.values.add(owner._buffers.values(), at)
                for held in (owner._modules, owner._parameters, owner._forward_pre_hooks):
                    scan.structure.add(held.values())
                scan.hooks += (
                    (owner, hook)
                    for hook in [*owner._forward_pre_hooks.values()]
                    if isinstance(hook, _REMAKES)
                )
            scan.dropped[at] = self._found(scan, at)
        for kind in {
            type(owner) for owner, *_ in scan.units if isinstance(owner, torch.nn.Module)
        } - self._kinds:
            self._kinds.add(kind)
            found = (value for each in kind.__mro__ for value in vars(each).values())
            self._memos += [value for value in found if isinstance(value, functools._lru_cache_wrapper)]
        return scan

    def _found(self, scan: _Scan, at: int) -> _Dropped:
        """Return what is to be dropped of a unit.

        Raises:
            ModelMismatchError: there is something that cannot be.
        """
        unit, dropped = scan.units[at], _Dropped()
        is_new = id(vars(unit.owner)) not in self._holders
        if is_new and not isinstance(unit.owner, torch.nn.Module):
            return dropped  # the slot that it was put into has it whole
        for slot in self._slots_of(unit):
            value, was = slot.value, self._was.get(slot.key, _NOTHING)
            if (
                slot.trust == _FULL
                or _is_scalar(value)
                or (value is was.value and id(value) in self._objects)
            ):
                continue  # what an object holds has slots of its own
            tensors = _tensors(value, scan.known, lambda view: scan.values.add(view, at))
            scan.tensors += ((at, each, _mark(each)) for each in tensors)
            marks = [
                mark for each, mark in zip(was.tensors, was.marks, strict=True) if _counts(slot, each, scan)
            ]
            tensors = [each for each in tensors if _counts(slot, each, scan)]
            if was.tensors:
                if slot.trust != _BUILT and [*map(_mark, tensors)] != marks:
                    raise ModelMismatchError(_sentence(slot.where, "was changed by a forward call"))
            elif slot.trust == _SHAPE and tensors:
                raise ModelMismatchError(
                    _sentence(slot.where, "was made by a forward call and has a weight's shape")
                )
            elif tensors:
                if is_new or not _is_plain(was.plain):
                    raise ModelMismatchError(_sentence(slot.where, "was made by a forward call"))
                dropped[slot.key] = slot, was.plain
        if is_new:
            self._note_unit(unit, scan.known)
        return dropped

    def _note_new(self) -> None:
        """Note the values of the parts that are not known yet."""
        weights = self._weights()
        known = self._known(weights)
        for unit in [*self._units(weights)]:
            if id(vars(unit.owner)) not in self._holders:
                self._note_unit(unit, known)

    def _note_unit(self, unit: _Unit, known: _ModuleParts) -> None:
        held = vars(unit.owner)
        self._holders[id(held)] = held
        if isinstance(unit.owner, torch.nn.Module):
            self._holders[id(unit.owner._buffers)] = unit.owner._buffers
        else:
            self._objects[id(unit.owner)] = unit.owner
        for slot in self._slots_of(unit):
            value = slot.value
            tensors = _tensors(value, known)
            plain = copy.copy(value) if not tensors and isinstance(value, dict | list | set) else value
            self._was[slot.key] = _Was(value, tensors, [*map(_mark, tensors)], plain)

    def _known(self, weights: Mapping[str, torch.Tensor]) -> _ModuleParts:
        storages = {*map(_storage, weights.values())} - {0}
        return _ModuleParts({id(module) for module in self._module.modules()}, storages)

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers, by all their names."""
        found: dict[str, torch.Tensor] = dict(self._module.named_parameters(remove_duplicate=False))
        for path, module in self._module.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found[f"{path}.{name}".lstrip(".")] = buffer
        return found

    def _units(self, weights: Iterable[str]) -> Iterator[_Unit]:
        """Yield the module, its parts, and the objects that they hold; `weights` has the names of
        `_weights`.
        """
        weighted = {""}
        for name in weights:
            if not self._is_own(name):
                parts = name.split(".")
                weighted |= {".".join(parts[:end]) for end in range(1, len(parts))}
        seen = set[int]()
        for path, module in self._module.named_modules():
            unit = _Unit(
                module, path, _NONE if path in weighted else _FULL if _is_rebuilt(module) else _SHAPE
            )
            yield unit
            for slot in self._slots_of(unit):
                value = slot.value
                if (
                    slot.held is vars(module)
                    and id(value) not in seen
                    and not _is_scalar(value)
                    and _is_object(value)
                ):
                    seen.add(id(value))
                    yield _Unit(value, slot.where, slot.trust)

    def _slots(self) -> Iterator[_Slot]:
        """Yield what the module and its parts hold beside weights."""
        for unit in self._units(self._weights()):
            yield from self._slots_of(unit)

    def _slots_of(self, unit: _Unit) -> Iterator[_Slot]:
        owner, path, trust = unit
        if not isinstance(owner, torch.nn.Module):
            for name in [*vars(owner)]:
                yield _Slot(vars(owner), name, f"{path}.{name}", trust)
            return
        held: dict[str, Any] = owner._buffers
        for name in [*owner._non_persistent_buffers_set]:
            where = f"{path}.{name}".lstrip(".")
            built = _BUILT if trust == _NONE and _is_rebuilt(owner) else trust
            if name in held:
                yield _Slot(held, name, where, _FULL if self._is_own(where) else built)
        remade = {
            _target(hook) for hook in [*owner._forward_pre_hooks.values()] if isinstance(hook, _REMAKES)
        }
        for name, value in [*vars(owner).items()]:
            if name not in _INTERNAL:
                where = f"{path}.{name}".lstrip(".")
                own = name in remade or (not _is_scalar(value) and self._is_own(where))
                yield _Slot(vars(owner), name, where, _FULL if own else trust)


def _sentence(where: str, what: str) -> str:
    return (
        f"{where} {what}, so a new version would leave it as it is: this module cannot follow. If it has "
        "nothing to do with "
        f"weights, say so by names={{{where!r}: None}}; if a forward call makes it, follow before the first "
        "one."
    )


def _restore(slot: _Slot, plain: Any) -> None:
    value = slot.value
    if plain is _ABSENT:
        del slot.held[slot.name]
    elif type(value) is type(plain) and isinstance(value, dict | set):
        value.clear()
        value.update(plain)
    elif type(value) is type(plain) and isinstance(value, list):
        value[:] = plain
    else:
        slot.held[slot.name] = plain


class _ModuleParts(NamedTuple):
    """The identities of a module and its parts, and where its weights lie."""

    modules: Set[int]
    storages: Set[int]


def _shapes(weights: Mapping[str, torch.Tensor]) -> set[tuple[int, ...]]:
    return {shape for shape in map(_shape, weights.values()) if len(shape) > 1}


def _tensors(
    value: Any, known: _ModuleParts, watch: Callable[[Collection[Any]], object] = id
) -> list[torch.Tensor]:
    """Return the tensors that a value holds and that may be made of weights, without views of the weights
    themselves.

    `watch` is called with each container in it that may change, of a dict with its `values()`.
    """
    if _is_scalar(value):
        return []
    return [
        each
        for each in _within(value, known.modules, set(), 1, watch)
        if each.dtype not in _NOT_MADE and _has_values(each) and _storage(each) not in known.storages
    ]


def _within(
    value: Any, modules: Set[int], seen: set[int], objects: int, watch: Callable[[Collection[Any]], object]
) -> Iterator[torch.Tensor]:
    if _is_scalar(value) or id(value) in seen or id(value) in modules:
        return
    seen.add(id(value))
    inner: list[Collection[Any]] = []
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, np.ndarray):
        with contextlib.suppress(TypeError):  # of text and objects
            yield torch.from_numpy(value)
    elif isinstance(value, torch.nn.Module):  # that is not registered
        for module in value.modules():
            own = {name: each for name, each in vars(module).items() if name not in _INTERNAL}
            watch(vars(module).values())
            watch(module._modules.values())
            inner += [module._parameters.values(), module._buffers.values(), tuple(own.values())]
    elif isinstance(value, dict):
        inner = [value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = [value]
    elif isinstance(value, functools.partial):
        inner = [(value.func, *value.args), value.keywords.values()]
    elif inspect.isfunction(value):
        inner = [_Cells(value.__closure__ or ())]
    elif objects and _is_object(value):
        inner, objects = [vars(value).values()], objects - 1
    for view in inner:
        if not isinstance(view, tuple | frozenset):
            watch(view)
        for each in [*view]:
            yield from _within(each, modules, seen, objects, watch)


class _Cells(Collection[Any]):
    """The values that a closure holds."""

    def __init__(self, cells: Collection[types.CellType]) -> None:
        self._cells = cells

    def __contains__(self, value: object) -> bool:
        return any(each is value for each in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Any]:
        for cell in self._cells:
            with contextlib.suppress(ValueError):  # of an empty one
                yield cell.cell_contents


def _counts(slot: _Slot, tensor: torch.Tensor, scan: _Scan) -> bool:
    """Whether a tensor in a slot may be made of weights, as far as its shape says."""
    return slot.trust != _SHAPE or _shape(tensor) in scan.shapes


def _identities(values: Iterable[Any]) -> Iterator[int]:
    return (id(each) for each in values if not _is_scalar(each))


def _is_rebuilt(module: torch.nn.Module) -> bool:
    return f"{type(module).__module__}.".startswith(_REBUILT)


def _is_object(value: object) -> bool:
    """Whether a value may hold tensors in attributes of its own, without being a module."""
    return hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS)


def _is_plain(value: Any) -> bool:
    """Whether a value has no tensors, so that it can be put back."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is _ABSENT or _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other or one != one)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's sizes in the order that all its transposes share."""
    return () if tensor.is_nested else tuple(sorted(tensor.shape))


def _mark(tensor: torch.Tensor) -> object:
    """Return what changes when a tensor is replaced, or written by torch."""
    place = tensor.data_ptr() if has_memory(tensor) else id(tensor)
    return place, () if tensor.is_nested else tensor.shape, 0 if tensor.is_inference() else tensor._version


def _may_be_made(tensor: torch.Tensor) -> bool:
    """Whether values may come from weights: not one or two repeated ones, as defaults and masks are."""
    if not has_memory(tensor):
        return True
    if tensor.numel() < 2:
        return False
    flat = tensor.detach().dequantize().reshape(-1) if tensor.is_quantized else tensor.detach().reshape(-1)
    return bool(((flat != flat[0]) & (flat != flat.flip(0)[0]) & (flat == flat)).any())


def _has_values(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not is_lazy(tensor) and (not has_memory(tensor) or _storage(tensor) != 0)


def _storage(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage is; 0 if it is of no elements, or not a tensor with memory of its
    own.
    """
    return tensor.untyped_storage().data_ptr() if not is_lazy(tensor) and has_memory(tensor) else 0


def _target(hook: Any) -> str:
    return str(getattr(hook, "_tensor_name", None) or hook.name)
