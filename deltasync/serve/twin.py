"""Twins: copies of layers, with storages of their own, that an engine loads while the layers compute.

A twin goes through the engine's own `load_weights` and its layer's own `process_weights_after_loading`, as a
reload of the layer does. The layer has to hold the tensors that come out.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import Enum
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from deltasync.errors import FingerprintMismatchError, ModelMismatchError, get_logger
from deltasync.kernels import native
from deltasync.kernels.backend import backend_of
from deltasync.live import LiveMemory, Segment, Staged
from deltasync.serve.load_plan import NOT_HELD, held_tensors
from deltasync.tensors import Changed, Delta, Layout, TensorSpec
from deltasync.tensors.bits import bits_of, dtype_name, int_view
from deltasync.tensors.delta import joined, of_tensor
from deltasync.tensors.fingerprint import tensor_key

logger = get_logger(__name__)

Weights = Mapping[str, torch.Tensor]
Made = dict[torch.nn.Module, dict[str, torch.Tensor]]
"""The tensors that layers have to hold."""

Group = tuple[Mapping[torch.nn.Module, Set[str]], Set[str]]
"""Layers that are loaded together, each with the names of its tensors that its weights change; and the names of
these weights."""


def parts(layer: torch.nn.Module) -> dict[str, Any]:
    """Return a layer, and the engine's objects that it computes with, such as its method, kernels and their
    settings, by the names of the attributes that lead to them. No other layer is among them.
    """
    found, known, todo = dict[str, Any](), set[int](), [("", layer)]
    for path, part in todo:
        if id(part) in known:
            continue
        known.add(id(part))
        found[path] = part
        for name, value in {**vars(part), **vars(part).get("_modules", {})}.items():
            leaves = {name: value}
            if isinstance(value, list | tuple | dict):
                leaves = {f"{name}.{number}": leaf for number, leaf in enumerate(tree_leaves(value))}
            if name not in NOT_HELD:
                todo += [(f"{path}{own}.", leaf) for own, leaf in leaves.items() if is_part(leaf)]
    return found


def is_part(value: object) -> bool:
    """Whether a layer's attribute is an object of the engine's, or of a class that extends one of its, which may
    hold values and can be copied: no other layer, no constant, and no owner of memory that it frees.
    """
    if isinstance(value, type | Enum) or not hasattr(value, "__dict__") or hasattr(value, "__del__"):
        return False
    if isinstance(value, torch.nn.Module):
        return hasattr(value, "create_weights")  # a method, some of which are modules
    if hasattr(value, "get_quant_method"):
        return False  # the model's configuration, which counts the time of loading
    return any(base.__module__.startswith(_OF_LAYERS) for base in type(value).__mro__)


_OF_LAYERS = "vllm.model_executor.", "vllm.v1.attention.", "sglang.srt.layers."


def tensors_within(value: object, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors that a value holds that is no part of a layer: weights that another library has packed,
    or those over which a function is closed.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, type | Enum | ModuleType | torch.nn.Module):
        if isinstance(value, Mapping):
            held: Iterable[object] = value.values()
        elif isinstance(value, list | tuple | set):
            held = value
        elif isinstance(value, FunctionType):
            held = closed_over(value)
        elif isinstance(value, functools.partial):
            held = (value.func, value.args, value.keywords)
        else:
            held = getattr(value, "__dict__", {}).values()
        for each in held:
            yield from tensors_within(each, depth - 1)


def closed_over(function: FunctionType) -> list[object]:
    """Return the values that a function has beside its code."""
    return [*(function.__defaults__ or ()), *inspect.getclosurevars(function).nonlocals.values()]


def tensors_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors that a layer computes with, by name: its own, and those of its `parts`."""
    return {
        path + name: tensor
        for path, part in parts(layer).items()
        for name, tensor in held_tensors(part).items()
    }


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return a tensor's dimensions as memory has them, from the largest stride on."""
    return sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True)


class Separate:
    """Gives copies of modules tensors of their own, and own copies of their `parts`.

    Args:
        twins: The copies of modules.
    """

    def __init__(self, twins: Mapping[torch.nn.Module, torch.nn.Module]) -> None:
        self._twins = twins
        self._copied: dict[int, tuple[Any, Any]] = {}  # by id, with what was copied, to keep it
        self._storages: dict[int, torch.UntypedStorage] = {}

    def module(self, twin: torch.nn.Module, layer: torch.nn.Module) -> None:
        """Separate a copy of a module, which has been made without its tensors, from the module."""
        own = {name: self._of(each) for name, each in vars(layer).items() if name not in _SHARED}
        vars(twin).update(own)
        vars(twin).pop("load_weights", None)

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            return self._twins.get(value, value)
        if type(value) in (dict, OrderedDict):
            return type(value)((name, self._of(each)) for name, each in value.items())
        if type(value) in (list, tuple, set):
            return type(value)(map(self._of, value))
        if isinstance(value, MethodType) and value.__self__ in self._twins:
            return MethodType(value.__func__, self._of(value.__self__))
        if not (isinstance(value, torch.Tensor) or is_part(value)):
            return value
        if id(value) not in self._copied:
            if isinstance(value, torch.Tensor):
                self._copied[id(value)] = value, self._tensor(value)
            else:
                own = copy.copy(value)
                self._copied[id(value)] = value, own
                vars(own).update({name: self._of(each) for name, each in vars(value).items()})
        return self._copied[id(value)][1]

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
        own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        own.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        own.__class__ = tensor.__class__
        vars(own).update(vars(tensor))
        return own


_SHARED = "_modules", "kv_cache"


def overlaps(layers: Iterable[torch.nn.Module]) -> bool:
    """Whether layers hold two different views of one storage, which cannot be exchanged one by one."""
    places = dict[int, set[object]]()
    for layer in layers:
        for tensor in tensors_of(layer).values():
            if not tensor.is_meta and tensor.numel():
                places.setdefault(tensor.untyped_storage().data_ptr(), set()).add(_place(tensor))
    return any(len(each) > 1 for each in places.values())


def _place(tensor: torch.Tensor) -> object:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of an expanded tensor that has each of its elements once."""
    return tensor[tuple(slice(1) if not stride else slice(None) for stride in tensor.stride())]


def values(layer: torch.nn.Module) -> dict[str, object]:
    """Return what attributes of a layer and of its `parts` hold that is neither a tensor nor one of these:
    plain values, and objects such as handles of packed weights, which are equal if they are the same.
    """
    return {
        f"{path}{name}[{number}]": leaf
        for path, part in parts(layer).items()
        for name, value in vars(part).items()
        if name not in NOT_HELD
        for number, leaf in enumerate(tree_leaves(value))
        if not (isinstance(leaf, _OTHERS) or is_part(leaf))
    }


def other_values(layer: torch.nn.Module, wanted: Mapping[str, object]) -> list[str]:
    """Return the names of these `values` that a layer does not have. A function is the same if its code is, with
    the same values.
    """
    found = values(layer)
    return [name for name, value in wanted.items() if name not in found or not _is_same(found[name], value)]


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        held = zip(closed_over(one), closed_over(other), strict=False)
        return one.__code__ is other.__code__ and all(mine is theirs for mine, theirs in held)
    return one is other or bool(one == other)


_OTHERS = torch.Tensor, torch.nn.Module, MethodType


class Plain(Protocol):
    """A layer that needs no twin for a delta (`vllm_plugin.load.plain.PlainLayer`)."""

    names: tuple[str, ...]
    most_G: np.ndarray | None
    has_failed: bool

    def stage(self, delta: Delta) -> tuple[Mapping[str, Any], np.ndarray] | None:
        """Return what changes in each tensor of live memory, and `most_G` afterwards; None for a twin."""


class Twins:
    """The tensors that twins make, in live memory: staged, exchanged and proven as weights are.

    Args:
        model: The model.
        groups: Layers in groups that are loaded together, each with the names of its tensors that its weights
            change; and the names of the weights.
        make: Returns the tensors of a group's layers from weights.
        without: The weights of groups that have no twins: the engine loads the layers themselves, and what it
            has loaded is audited.
        plain: The layers that need no twin for a delta.

    Attributes:
        layers: The layers of all groups.
        names: The names of the weights of layers with twins.
        failed: The names of weights of layers whose twins failed when the last version was staged: the
            engine has to load the layers themselves.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: Iterable[Group],
        make: Callable[[Set[torch.nn.Module], Weights], Made],
        without: Set[str] = frozenset(),
        plain: Mapping[torch.nn.Module, Plain] = MappingProxyType({}),
    ) -> None:
        self._groups, self._make = [*groups], make
        changing = {layer: names for layers, _ in self._groups for layer, names in layers.items()}
        self.layers: Set[torch.nn.Module] = changing.keys()
        self.names: set[str] = set().union(*(names for _, names in self._groups)) - without
        self.failed: set[str] = set()
        self._paths = {module: path for path, module in model.named_modules() if module in self.layers}
        self._live = {layer: tensors_of(layer) for layer in self._paths}
        owners = dict[object, str]()  # of a tensor that several layers hold, the first
        for name, tensor in self._named(self._live):
            owners.setdefault(_place(tensor), name)
        self._owners = {name: owners[_place(tensor)] for name, tensor in self._named(self._live)}
        specs, segments = dict[str, TensorSpec](), dict[str, list[Segment]]()
        made = {layer: {name: self._live[layer][name] for name in changing[layer]} for layer in self._paths}
        for name, tensor in self._named(made):
            if self._owners[name] != name:
                continue
            in_order = tensor.permute(memory_order(tensor))
            segments[name] = [Segment.whole(in_order)]
            specs[name] = TensorSpec(name, dtype_name(segments[name][0].live.dtype), tuple(in_order.shape))
        self._specs, self._layout = specs, Layout(specs)
        self._plain = {
            layer: each
            for layer, each in plain.items()
            if all(f"{self._paths[layer]}.{name}" in specs for name in each.names)
        }
        self._distrusted = set[torch.nn.Module]()  # plain layers in which an audit found other bits
        self._device = backend_of(next((p.device for p in model.parameters()), torch.device("cpu")))
        self._memory = LiveMemory(specs, segments)
        self._memory.audit()
        self._ready, self._done = list[Staged](), list[Staged]()
        # the largest magnitudes after what is ready, or before what is done; None if they are not known
        self._most = dict[Plain, np.ndarray | None]()

    @property
    def remark(self) -> str | None:
        """A sentence on plain layers that take their twins in each version; None if there are none."""
        failed = [self._paths[layer] for layer, plain in self._plain.items() if plain.has_failed]
        if not failed:
            return None
        return (
            f"{len(failed)} of {len(self._plain)} layers that could be quantized by elements, such as {failed[0]}, "
            "are quantized as a whole in each version, because that gave other bits."
        )

    def _named(self, made: Made) -> Iterator[tuple[str, torch.Tensor]]:
        for layer, tensors in made.items():
            for name, tensor in tensors.items():
                if not tensor.is_meta and tensor.numel():
                    yield f"{self._paths[layer]}.{name}", _once(tensor)

    def stage(self, names: Set[str], new: Callable[[str], torch.Tensor], delta: Delta | None = None) -> None:
        """Make ready what changes with these weights. `new` returns the new bits of a weight, on the host; they
        are what `delta` makes of them, if there is one.
        """
        self.drop()
        changed = [(layers, of) for layers, of in self._groups if of & names & self.names]
        self._most = {
            self._plain[layer]: None for layers, _ in changed for layer in layers if layer in self._plain
        }
        plain = set() if delta is None or not self._most else self._stage_plain(delta)
        if twinned := [(layers, of) for layers, of in changed if not layers.keys() & plain]:
            self._ready.append(self._memory.stage_weights(self._weights(twinned, new)))

    def _stage_plain(self, delta: Delta) -> set[torch.nn.Module]:
        """Make ready what a delta changes in plain layers, and return those of which it could."""
        known, fingerprints = self._memory.fingerprints, dict[str, int]()
        staged, parts = set[torch.nn.Module](), list[Delta]()
        for layer, plain in self._plain.items():
            if plain not in self._most or plain.has_failed:
                continue
            changes, why = None, "live memory is not what its weights become by elements"
            try:
                changes = plain.stage(delta)
            except Exception as error:  # noqa: BLE001 - the engine's, of any class
                plain.has_failed, why = True, repr(error)
            if plain.has_failed:
                logger.warning(
                    "deltasync: %s is quantized by its twin from now on: %s", self._paths[layer], why
                )
            if changes is None:
                continue
            staged.add(layer)
            changed, self._most[plain] = changes
            for name, steps in changed.items():
                path = f"{self._paths[layer]}.{name}"
                fingerprints[path] = steps.after(path, known[path])
                parts.append(of_tensor(self._layout, path, steps.at_N, steps.new_N - steps.old_N))
        if staged:
            self._ready.append(self._memory.stage(Changed(joined(parts, self._layout), fingerprints)))
        return staged

    def _weights(
        self, groups: Iterable[Group], new: Callable[[str], torch.Tensor]
    ) -> Iterator[tuple[str, np.ndarray, int]]:
        for layers, names in groups:
            weights = {name: new(name) for name in sorted(names)}
            try:
                with self._device.staging():
                    made = self._made(layers.keys(), weights)
            except Exception as error:  # noqa: BLE001 - the engine's, of any class
                logger.warning(
                    "deltasync: twins of the layers of %s failed, so they are loaded in this version's pause: %r",
                    min(names),
                    error,
                )
                self.failed |= names
                continue
            for name, bits_N in made.items():
                yield name, bits_N, native.fingerprint(tensor_key(name), bits_N)

    def _made(self, layers: Set[torch.nn.Module], weights: Weights) -> dict[str, np.ndarray]:
        """Return the bits of the tensors that twins of a group make, on the host, in the order of live memory, by
        their names there.

        Raises:
            ModelMismatchError: they are not those that its layers hold, and that its weights change.
            Exception: whatever the engine raises.
        """
        made = dict(self._named(self._make(layers, weights)))
        held = dict(self._named({layer: self._live[layer] for layer in layers}))
        for name, live in held.items():
            tensor, owner = made.get(name), self._owners[name]
            if tensor is None or (tensor.dtype, tensor.shape) != (live.dtype, live.shape):
                raise ModelMismatchError(f"{name} becomes {'nothing' if tensor is None else tensor.shape}")
            is_exchanged = owner in self._specs and owner in held
            if not is_exchanged and not torch.equal(int_view(tensor), int_view(live)):
                raise ModelMismatchError(f"{name} changes, which it did not when the server started")
        return {
            name: bits_of(made[name].permute(memory_order(live)).detach().cpu())
            for name, live in held.items()
            if name in self._specs
        }

    def exchange(self) -> None:
        """Write what is staged into live memory, or, if it is there, bring back what was before.

        Raises:
            StageError: live memory was written by someone else; the bits are as before.
            CommitError: the bits are uncertain.
        """
        ready, self._ready = self._ready, []
        self._undo()
        try:
            for staged in ready:
                self._memory.commit(staged)
                self._done.append(staged)
                wrong, _ = self._memory.compare(staged)
                if wrong:
                    raise FingerprintMismatchError(f"{wrong[0]} is not what its twin has made; rolled back.")
        except Exception:
            self._most = dict.fromkeys(self._most)
            self._undo()
            raise
        if ready:
            self._exchange_most()

    def _undo(self) -> None:
        done, self._done = self._done, []
        for staged in reversed(done):
            self._memory.rollback(staged)
        if done:
            self._exchange_most()

    def _exchange_most(self) -> None:
        """Have plain layers note the largest magnitudes of the mirror after an exchange, or before it."""
        for plain, most_G in self._most.items():
            self._most[plain], plain.most_G = plain.most_G, most_G

    def drop(self) -> None:
        """Forget what is staged, and how to undo what was exchanged last."""
        self._ready, self._done, self._most, self.failed = [], [], {}, set()

    def is_intact(self, layers: Set[torch.nn.Module] | None = None) -> bool:
        """Whether every bit, or those of these layers, is what was exchanged or `reloaded` last."""
        return self._memory.is_intact(None if layers is None else self._proven(layers))

    def distrust(self, old: Callable[[str], torch.Tensor]) -> bool:
        """Compare plain layers with twins of `old` weights. Returns whether any differs; it is not plain from
        now on.
        """
        trusted = {layer for layer, plain in self._plain.items() if not plain.has_failed}
        known, wrong = self._memory.fingerprints, list[torch.nn.Module]()
        for layers, names in self._groups:
            if not layers.keys() & trusted:
                continue
            try:
                with self._device.staging():
                    made = self._made(layers.keys(), {name: old(name) for name in sorted(names)})
            except Exception as error:  # noqa: BLE001 - the engine's, of any class
                logger.warning("deltasync: an audit could not make the twin of %s: %r", min(names), error)
                continue
            if any(native.fingerprint(tensor_key(name), made[name]) != known[name] for name in made):
                wrong += layers
        for layer in wrong:
            logger.error("deltasync: %s is not what its twin is, so it is loaded again", self._paths[layer])
            self._distrusted.add(layer)
        return bool(wrong)

    def reloaded(self, layers: Set[torch.nn.Module]) -> None:
        """Note that the engine has loaded these layers themselves: their bits are right as they are."""
        for layer in layers & self._plain.keys():
            self._plain[layer].most_G, self._plain[layer].has_failed = None, layer in self._distrusted
        self._memory.audit(self._proven(layers))

    def _proven(self, layers: Set[torch.nn.Module]) -> set[str]:
        """Return the names of those tensors of layers that weights change."""
        held = self._named({layer: self._live[layer] for layer in layers & self.layers})
        return {self._owners[name] for name, _ in held} & self._specs.keys()
