"""The fallback for tensors that an engine keeps in its own layout (repacked, quantized): they are patched in a
mirror on the host, from which the engine loads twins of their layers (`twin`) while tokens are generated.

A commit exchanges what differs. Layers that have no twin are loaded again in the pause, twice, because what
the first time gave is proven by the second. Staging takes work in proportion to the layers that changed.
"""

from __future__ import annotations

import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltasync.channel.documents import sha256_hex
from deltasync.errors import CommitError, FingerprintMismatchError, ModelMismatchError, get_logger
from deltasync.live import Segment
from deltasync.serve.derived import is_made
from deltasync.serve.load_plan import Loader, LoadPlan
from deltasync.serve.shard import Engine
from deltasync.serve.twin import (
    Group,
    Made,
    Plain,
    Separate,
    Twins,
    other_values,
    overlaps,
    parts,
    tensors_of,
    tensors_within,
    values,
)
from deltasync.tensors import Delta, TensorSpec
from deltasync.tensors.bits import bits_of, cast, int_view

logger = get_logger(__name__)

Layers = Mapping[str, Set[torch.nn.Module]]
Weights = Mapping[str, torch.Tensor]


def mirrored(
    plan: LoadPlan, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return host copies of the checkpoint's tensors that have a reason in the plan, and of the others in
    their layers.

    The others get a reason too, because they are loaded again with their layers.

    Raises:
        ModelMismatchError: the checkpoint lacks one of them, or has it in another shape.
    """
    layers = {layer for name in plan.reasons for layer in plan.layers[name]}
    wanted = {name for name, of in plan.layers.items() if of & layers}
    copies = {
        name: on_host(cast(tensor, specs[name].dtype))
        for name, tensor in tensors
        if name in wanted and tuple(tensor.shape) == specs[name].shape
    }
    for name in wanted:
        plan.reasons.setdefault(name, "others of its layer are loaded again")
    if missing := sorted(wanted - copies.keys()):
        raise ModelMismatchError(
            f"The checkpoint that {plan.engine} loaded has no {specs[missing[0]]}, and {plan.reasons[missing[0]]}, so "
            "its layer "
            "cannot be loaded again: serve the checkpoint that the channel starts from."
        )
    return copies


class LayerLoader(ABC):
    """How an engine loads some of a model's layers again.

    Attributes:
        loader: How it loads models.
    """

    loader: Loader

    @abstractmethod
    def load(self, model: torch.nn.Module, layers: Set[torch.nn.Module], weights: Weights) -> None:
        """Load layers from these weights, and process them, in place. Mutates live weights.

        Raises:
            Exception: whatever the engine raises; the layers then hold unknown values.
        """

    @abstractmethod
    def load_twins(
        self, loaded: torch.nn.Module, twins: Mapping[torch.nn.Module, torch.nn.Module], weights: Weights
    ) -> None:
        """Load twins from these weights, and process them; `loaded` is a copy of the model that has them, and
        they have tensors of their own. `twins` has the layer of each.
        """

    @contextlib.contextmanager
    def noting(self, layers: Iterable[torch.nn.Module]) -> Iterator[Made]:
        """Yield the tensors, on the host, with which these layers are processed when the body loads them; none
        if the engine does not show them.
        """
        yield {}

    def plain(
        self, model: torch.nn.Module, groups: Iterable[Group], tensors: Weights
    ) -> Mapping[torch.nn.Module, Plain]:
        """Return layers of these groups that need no twin for a delta of the mirrored `tensors`."""
        return {}

    def make(self, model: torch.nn.Module, layers: Set[torch.nn.Module], weights: Weights) -> Made:
        """Return the tensors that a reload of layers from these weights would leave in them. Changes no layer.

        Raises:
            ModelMismatchError: it would leave other values in them too that are no tensors (`values`).
            Exception: whatever the engine raises.
        """
        loaded, originals = self.loader.as_loaded(model, restored=False)
        of = {layer: twin for twin, layer in originals.items()}
        separate = Separate(of)
        with torch.no_grad():
            for twin in {each for layer in layers for each in of[layer].modules()}:
                separate.module(twin, originals[twin])
            self.load_twins(loaded, {of[layer]: layer for layer in layers}, weights)
        for layer in layers:
            if other := other_values(of[layer], values(layer)):
                raise ModelMismatchError(f"{type(layer).__name__}.{other[0]} is another, and is no tensor")
        return {layer: tensors_of(of[layer]) for layer in layers}


class Mirror:
    """Host copies of tensors as in the checkpoint, which commits mutate, and the engine's reload of layers from
    them.

    `loading` is the engine's. `layers` has the modules that tensors are loaded into, `reasons` why they
    are mirrored.

    Attributes:
        dirty: Modules that hold unknown values, because reloading them failed.
        twins: The twins of layers; none before `prove`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loading: LayerLoader,
        layers: Layers,
        tensors: Weights,
        reasons: Mapping[str, str] | None = None,
    ) -> None:
        self._model, self._loading, self._engine = model, loading, loading.loader.engine
        self._layers, self._tensors, self._reasons = layers, tensors, reasons or {}
        self.dirty: set[torch.nn.Module] = set()
        self._numbers = dict[torch.nn.Module, dict[str, object]]()
        self.twins = Twins(model, (), self._make)

    @property
    def segments(self) -> dict[str, list[Segment]]:
        """The places of the mirrored tensors."""
        return {name: [Segment.whole(tensor)] for name, tensor in self._tensors.items()}

    @property
    def modules(self) -> set[torch.nn.Module]:
        """The modules that are loaded again."""
        return set().union(*self._layers.values())

    def prove(self, covered: Set[int] = frozenset()) -> None:
        """Make sure that reloading a changed tensor changes its layers, and that the unchanged mirror
        restores live memory.

        Of layers that are alike, tensor by tensor in the first, and with all tensors at once in the others.
        `covered` are addresses of storages that commits write by themselves.

        Raises:
            ModelMismatchError: it does not; live memory is as before.
        """
        known, groups, without = set(), list[Group](), set[str]()
        self._numbers = {layer: _numbers(layer) for layer in self.modules}
        for layers, names in _together(self._layers):  # in groups, to hold fewer copies on the host at once
            kind = (
                *sorted(re.sub("[0-9]+", "#", name) for name in names),
                *sorted(type(layer).__name__ for layer in layers),
            )
            changing, has_twins = self._prove(layers, sorted(names), kind not in known, covered)
            groups.append((changing, names))
            without |= set() if has_twins else names
            known.add(kind)
        twinned = [(changing, names) for changing, names in groups if not names & without]
        plain = self._loading.plain(self._model, twinned, self._tensors)
        self.twins = Twins(self._model, groups, self._make, without, plain)

    def _prove(
        self, layers: Set[torch.nn.Module], names: Sequence[str], one_by_one: bool, covered: Set[int]
    ) -> tuple[dict[torch.nn.Module, set[str]], bool]:
        """Prove a group of layers. Returns the names of the tensors of each that changed with all weights; and
        whether the layers have twins.
        """
        live = {
            layer: {name: each for name, each in tensors_of(layer).items() if not each.is_meta}
            for layer in layers
        }
        before = {
            layer: {name: on_host(tensor) for name, tensor in tensors.items()}
            for layer, tensors in live.items()
        }
        places = {
            layer: {name: tensor.data_ptr() for name, tensor in tensors.items()}
            for layer, tensors in live.items()
        }
        attributes = _attributes(layers)
        hidden = _Hidden(layers)
        registered = {layer: (dict(layer._parameters), dict(layer._buffers)) for layer in layers}
        problem = cause = None
        try:
            with _Collectives() as asked:  # type: ignore[no-untyped-call]
                stale, changing, has_twins = self._stale(names, before, covered)
            elsewhere = hidden.changed()
            if asked.found:
                raise RuntimeError(
                    "its workers exchange scales, which they cannot do while they compute: serve it with one "
                    "worker, or without quantization"
                )
            idle = stale + (self._idle(names, before) if one_by_one else [])
            if idle:
                problem = f"does not change {idle[0]}"
            self.reload(names)
            if wrong := sorted(
                f"{type(layer).__name__}.{name}"
                for layer in layers
                for name in _differences(layer, before[layer])
            ):
                problem = problem or f"gives another {', '.join(wrong[:5])}"
            for layer in layers:
                now = tensors_of(layer)
                if moved := [name for name, place in places[layer].items() if now[name].data_ptr() != place]:
                    problem = problem or f"puts {type(layer).__name__}.{moved[0]} elsewhere"
            if elsewhere is not None:
                problem = (
                    problem or f"makes another {elsewhere}, which has weights where nothing can prove them"
                )
        except Exception as error:  # noqa: BLE001 - the engine's, of any class
            problem, cause = f"fails ({str(error) or repr(error)})", error
        finally:
            for held, was in attributes:  # a reload that failed may have left others
                held.update(was)
            for layer, tensors in before.items():
                layer._parameters, layer._buffers = registered[layer]
                for name in _differences(layer, tensors):
                    tensors_of(layer)[name].data.copy_(tensors[name])
            self.dirty = set()
        if problem is not None:
            reasons = f" ({self._reasons[names[0]]})" if names[0] in self._reasons else ""
            raise ModelMismatchError(
                f"{self._engine} does not keep {len(self._tensors)} tensors as they are in the checkpoint{reasons}, "
                f"and having it load them again {problem}, so this model cannot be updated."
            ) from cause
        return changing, has_twins

    def _stale(
        self, names: Sequence[str], before: Mapping[torch.nn.Module, Weights], covered: Set[int]
    ) -> tuple[list[str], dict[torch.nn.Module, set[str]], bool]:
        """Reload with all tensors changed. Returns the layers, and what loading made in them, that this does
        not change; what it changes in each layer; and whether twins of the layers are then as these are.
        """
        model, found = self._model, list[str]()
        with self._changed(names):
            kept = {layer: values(layer) for layer in before}
            twins = self._twins_of(names, before)
            self.reload(names)
            has_twins = (
                twins is not None
                and not any(_differences(layer, twins[layer]) for layer in before)
                and not any(other_values(layer, was) for layer, was in kept.items())
            )
            changing = {layer: _differences(layer, held) for layer, held in before.items()}
        for layer, held in before.items():
            changed, now, kind = changing[layer], tensors_of(layer), type(layer).__name__
            made = [name for name in held.keys() - changed if is_made(model, layer, name)]
            stale = [name for name in made if now[name].untyped_storage().data_ptr() not in covered]
            found += [kind] if not changed else [f"{kind}.{name}" for name in sorted(stale)]
        return found, changing, has_twins

    def _twins_of(self, names: Sequence[str], before: Mapping[torch.nn.Module, Weights]) -> Made | None:
        """Return what twins of layers make from the mirror, on the host; None if they cannot be made without
        a trace in the layers.
        """
        if overlaps(before):
            return None
        attributes = _attributes(before)
        try:
            made = self._make(before.keys(), {name: self._tensors[name] for name in names})
        except Exception as error:  # noqa: BLE001 - the engine's, of any class
            logger.info("deltasync: %s has no twin: %r", type(next(iter(before))).__name__, error)
            return None
        if any(
            _differences(layer, held) or made[layer].keys() != tensors_of(layer).keys()
            for layer, held in before.items()
        ) or any(held.get(name) is not value for held, was in attributes for name, value in was.items()):
            return None
        return {
            layer: {name: on_host(tensors[name]) for name in before[layer]} for layer, tensors in made.items()
        }

    def _make(self, layers: Set[torch.nn.Module], weights: Weights) -> Made:
        return self._loading.make(self._model, layers, weights)

    def stage(self, changes: Delta | Mapping[str, np.ndarray], names: Set[str]) -> None:
        """Make ready what a version's changes, or new bits, of mirrored tensors change in layers with twins.
        Layers whose twins fail are loaded again by `refresh`. The mirror and live memory are untouched.
        """

        def new(name: str) -> torch.Tensor:
            tensor = self._tensors[name].clone()
            if isinstance(changes, Delta):
                changes.apply(name, bits_of(tensor))
            elif name in changes:
                bits_of(tensor)[:] = changes[name]
            return tensor

        self.twins.stage(names, new, changes if isinstance(changes, Delta) else None)

    def refresh(self, changed: Iterable[str]) -> float:
        """Exchange what is staged in layers with twins, or bring it back; load other layers of changed
        tensors, and what is `dirty`, again, twice. Without changed tensors nothing is exchanged. Mutates live
        weights. Returns the seconds that loading took.

        Raises:
            FingerprintMismatchError: loading gave other bits the second time; the layers are `dirty`.
            Exception: as `Twins.exchange` and `reload`.
        """
        changed, twins = set(changed), self.twins
        if not changed:
            twins.drop()
        try:
            twins.exchange()
        except CommitError:
            self.dirty = self.dirty | twins.layers
            raise
        names = changed - (twins.names - twins.failed)
        layers = self._layers_of(names)
        if not layers:
            return 0.0
        reload_s = self.reload(names)
        self._prove_numbers(layers)
        twins.reloaded(layers)
        self.dirty = layers
        reload_s += self.reload(())
        if not twins.is_intact(layers):
            self.dirty = layers
            raise FingerprintMismatchError(
                f"{self._engine} loaded layers of {min(names, default='damaged weights')} twice, with two results."
            )
        return reload_s

    def _prove_numbers(self, layers: Iterable[torch.nn.Module]) -> None:
        """Make sure that numbers in layers, which captured graphs and compiled code have as constants, are those
        with which the server started.
        """
        for layer in layers:
            if other := other_values(layer, self._numbers.get(layer, {})):
                raise FingerprintMismatchError(
                    f"These weights make {type(layer).__name__}.{other[0]} another number, which {self._engine} keeps "
                    "as a constant of its graphs: start the server again from a checkpoint of this version."
                )

    def _layers_of(self, names: Iterable[str]) -> set[torch.nn.Module]:
        """Return the layers of tensors that are mirrored, and what is `dirty`."""
        return self.dirty.union(*(self._layers[name] for name in names if name in self._layers))

    def made(self) -> dict[str, str]:
        """Return the sha256 of each tensor of the `modules`, in row-major order, by its name in the model."""
        return {
            f"{path}.{name}": sha256_hex(bits_of(tensor.detach().cpu()).data)
            for path, layer in self._model.named_modules()
            if layer in self.modules
            for name, tensor in tensors_of(layer).items()
            if not tensor.is_meta and tensor.numel()
        }

    def audit(self) -> bool:
        """Return whether every bit is what twins, or the engine's reload, have made; if not, all layers are `dirty`."""
        is_intact = self.twins.is_intact() and not self.twins.distrust(self._tensors.__getitem__)
        if not is_intact:
            self.dirty = self.dirty | self.twins.layers
        return is_intact

    def _idle(self, names: Sequence[str], before: Mapping[torch.nn.Module, Weights]) -> list[str]:
        """Reload with half of the tensors changed, as many times as their numbers have bits.

        Elements that each of them alone makes up show its number by when they change. Returns the tensors
        whose numbers are not found, and that alone change nothing.
        """
        found: set[int] = set()
        codes = {
            (layer, name): torch.zeros(0, device="cpu") for layer, held in before.items() for name in held
        }
        for bit in range(len(names).bit_length()):
            with self._changed([name for number, name in enumerate(names, 1) if number >> bit & 1]):
                self.reload(names)
            for (layer, name), code in codes.items():
                now, was = tensors_of(layer)[name], before[layer][name]
                changed = (_bits(now).cpu() != _bits(was)).int() << bit
                codes[layer, name] = changed if not bit else code | changed
        for code in codes.values():
            found.update(torch.unique(code).tolist())
        idle = []
        alone = [name for number, name in enumerate(names, 1) if number not in found]
        loaded = self._loaded(names, before) if alone else {}
        for name in alone:
            with self._changed([name]):
                is_loaded = any(
                    _differ(held, loaded[layer]) for layer, held in self._loaded(names, before).items()
                )
            if not is_loaded and not any(_differences(layer, held) for layer, held in before.items()):
                idle.append(name)
        return idle

    def _loaded(self, names: Sequence[str], layers: Iterable[torch.nn.Module]) -> Made:
        """Reload, and return the tensors that the engine's methods of these layers are given, on the host; elements
        that are not loaded are zero. From equal ones a method makes what it makes in a fresh server: it may take
        the largest of several scales, or leave a tensor unused.
        """
        with self._loading.noting(layers) as found:
            self.reload(names)
        return found

    @contextlib.contextmanager
    def _changed(self, names: Iterable[str]) -> Iterator[None]:
        """Change every element of these tensors, its sign and its size, for the body."""
        before = {name: self._tensors[name].clone() for name in names}
        try:
            for name, tensor in before.items():
                wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
                one = torch.ones((), dtype=wide.dtype, device=wide.device)
                half = -wide / 2 if wide.is_floating_point() else -wide
                other = ~wide if wide.dtype == torch.bool else torch.where(wide == 0, one, half)
                self._tensors[name].copy_(other)
            yield
        finally:
            for name, tensor in before.items():
                self._tensors[name].copy_(tensor)

    def reload(self, changed: Iterable[str]) -> float:
        """Load the layers of those changed tensors that are mirrored, and what is `dirty`. Mutates live
        weights.

        Returns the seconds it took.

        Raises:
            Exception: whatever the engine raises; the layers then hold unknown values, and are `dirty`.
        """
        layers = self._layers_of(changed)
        if not layers:
            return 0.0
        self.dirty = layers
        before = time.perf_counter()
        weights = {name: self._tensors[name] for name, of in self._layers.items() if of & layers}
        with torch.no_grad():
            self._loading.load(self._model, layers, weights)
        self.dirty = set()
        return time.perf_counter() - before


class MirroringEngine(Engine):
    """The part of an engine that loads layers again which it does not keep as they are in the checkpoint.

    Attributes:
        layers: How it does.
    """

    layers: LayerLoader
    _mirror: Mirror | None = None  # before `reloads`

    def reloads(self, recorded: LoadPlan, specs: Mapping[str, TensorSpec]) -> dict[str, list[Segment]]:
        """As `Engine.reloads`."""
        tensors = mirrored(recorded, specs, self.checkpoint()) if recorded.reasons else {}
        layers = {name: recorded.layers[name] for name in tensors}
        self._mirror = Mirror(self.model, self.layers, layers, tensors, recorded.reasons)
        self.mirrored = tensors.keys()
        return self._mirror.segments

    def prove(self, covered: Set[int], reloaded: Set[torch.nn.Module] = frozenset()) -> None:
        """As `Engine.prove`."""
        if self._mirror is not None:
            self._mirror.prove(covered)
            self.twinned = self._mirror.twins.names
            reloaded |= self._mirror.modules
        super().prove(covered, reloaded)

    def stage(self, changes: Delta | Mapping[str, np.ndarray], names: Set[str]) -> None:
        """As `Engine.stage`."""
        if self._mirror is not None:
            self._mirror.stage(changes, names)
            self.remark = self._mirror.twins.remark

    def refresh(self, changed: Iterable[str]) -> float:
        """As `Engine.refresh`."""
        reload_s = 0.0 if self._mirror is None else self._mirror.refresh(changed)
        return reload_s + super().refresh(changed)

    def made(self) -> dict[str, str]:
        """As `Engine.made`."""
        return super().made() | ({} if self._mirror is None else self._mirror.made())

    def is_intact(self) -> bool:
        """As `Engine.is_intact`."""
        return (self._mirror is None or self._mirror.audit()) and super().is_intact()


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class is untyped
    """Notes whether this thread asks other workers.

    Twins are made by each worker alone, while all of them compute. A collective would wait for a worker whose
    twin has failed, or would be taken for one of the computation.
    """

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


class _Hidden:
    """Values of layers that are neither tensors nor parts of them, and have weights: a handle of memory outside
    of torch, or tensors in objects of another library or in functions. Nothing patches or proves these.
    """

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self._values = {
            layer: {
                name: value
                for name, value in values(layer).items()
                if hasattr(value, "__del__") or any(True for _ in tensors_within(value))
            }
            for layer in layers
        }
        self._copies = [
            (f"{type(layer).__name__}.{name}", tensor, on_host(tensor))
            for layer, held in self._values.items()
            for name, value in held.items()
            for tensor in tensors_within(value)
            if not tensor.is_meta
        ]

    def changed(self) -> str | None:
        """Return the name of one that is another, or that has other bits."""
        for layer, held in self._values.items():
            if other := other_values(layer, held):
                return f"{type(layer).__name__}.{other[0]}"
        changed = (name for name, now, before in self._copies if _differ({name: now.cpu()}, {name: before}))
        return next(changed, None)


def _attributes(layers: Iterable[torch.nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes of layers and of their `parts`, which change with them, and as they are now."""
    return [(vars(part), dict(vars(part))) for layer in layers for part in parts(layer).values()]


def _together(layers: Layers) -> list[tuple[set[torch.nn.Module], set[str]]]:
    """Group layers, with the tensors that are loaded into them, so that no two groups share a layer."""
    groups: list[tuple[set[torch.nn.Module], set[str]]] = []
    for name, of in layers.items():
        joined, names = set(of), {name}
        for group in [group for group in groups if group[0] & joined]:
            groups.remove(group)
            joined |= group[0]
            names |= group[1]
        groups.append((joined, names))
    return groups


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the host."""
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _differences(layer: torch.nn.Module, tensors: Weights) -> set[str]:
    """Return the names of a layer's tensors whose bits differ from these, which are on the host."""
    return _differ(tensors_of(layer), tensors)


def _differ(now: Weights, tensors: Weights) -> set[str]:
    return {
        name
        for name in tensors
        if name not in now or not torch.equal(_bits(now[name]).cpu(), _bits(tensors[name]))
    }


def _numbers(layer: torch.nn.Module) -> dict[str, object]:
    return {name: value for name, value in values(layer).items() if isinstance(value, float)}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return int_view(tensor.detach())
