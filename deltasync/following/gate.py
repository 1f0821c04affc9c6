"""Weights of a model that may compute at any time: where the channel's tensors are in it, and changes between its calls."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import ApplyError, ConfigError, ModelMismatchError, StageError
from deltasync.following.replica import MemoryTarget
from deltasync.following.status import Commit
from deltasync.following.target import Identify
from deltasync.following.weights import StagedVersion
from deltasync.live import LiveMemory, Segment
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import dtype_name, int_view

ALONE_S = 30.0  # how long a commit waits for calls that run
_UNKNOWN = "The weights are in an unknown state: forward calls are blocked until the next sync succeeds."
_MOVED = (
    "The weights are in an unknown state, because something else wrote, converted or replaced them: forward calls are "
    "blocked until the next sync succeeds."
)


Names = Callable[[str], str | Sequence[str] | None]
"""Returns the channel's name for a tensor of a module's state_dict: one name, several for tensors that lie one after the
other, or are stacked, along the first dimension, or None for a tensor that the channel does not have."""

_WRAPPERS = ("_orig_mod.", "base_model.model.")  # torch.compile's, peft's
_AROUND_BASE = ".base_layer."  # peft's


def plain_name(name: str) -> str | None:
    """Return a tensor's checkpoint name in a module that torch.compile or peft has wrapped; None for an adapter's own."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return None if ".lora_" in name else name.replace(_AROUND_BASE, ".")


def places(
    state: Mapping[str, Any], specs: Mapping[str, TensorSpec], names: Names
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Find the channel's tensors in a model's state_dict, whose tensors are live memory.

    Returns:
        A view of live memory for each tensor, with its shape and dtype; and the ties. A tensor that shares its memory with
        another is a copy instead of a view, and the second mapping has the name of the other.

    Raises:
        ModelMismatchError: a tensor is on one side only, or has another shape or dtype there.
    """
    found: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    owners: dict[tuple[int, int, torch.device], str] = {}  # by memory
    strange: dict[str, torch.Tensor] = {}  # whose names the channel does not have
    for own, tensor in state.items():
        named = names(own)
        if named is None or not isinstance(tensor, torch.Tensor):
            continue
        if not any(name in specs for name in ([named] if isinstance(named, str) else named)):
            strange[own] = tensor
            continue
        for name, part in _parts(own, tensor, named, specs):
            other = owners.setdefault(_memory(part), name)
            if other != name:
                ties[name], part = other, part.detach().clone()
            elif name in found:
                raise ModelMismatchError(f"Two tensors of the module are {name}, the second of them {own}.")
            found[name] = part
    unknown = [own for own, tensor in strange.items() if _memory(tensor) not in owners]
    lacking = specs.keys() - found.keys()
    if unknown or lacking:
        sides = ((lacking, "is in the channel and not in the module"), (unknown, "is in the module and not in the channel"))
        more = [f" (and {len(side) - 1} more)" if len(side) > 1 else "" for side, _ in sides]
        problems = "; ".join(f"{min(side)}{and_} {where}" for (side, where), and_ in zip(sides, more, strict=True) if side)
        raise ModelMismatchError(f"{problems}. Map the names of the module to the channel's by `names`.")
    return found, ties


def _parts(
    own: str, tensor: torch.Tensor, named: str | Sequence[str], specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the channel's tensors that lie in one of the module's, each checked against its spec."""
    if tensor.is_meta:
        raise ModelMismatchError(f"{own} is on the meta device: it has no memory to be patched.")
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if is_wrapper or is_lazy(tensor):
        raise ModelMismatchError(
            f"{own} is a {type(tensor).__name__}, which has no memory of its own to be patched: follow with a module of "
            "plain tensors."
        )
    first = 0
    for name in [named] if isinstance(named, str) else named:
        spec = specs.get(name)
        is_stacked = spec is not None and not isinstance(named, str) and tensor.ndim > len(spec.shape)
        rows = 0 if spec is None or isinstance(named, str) or not spec.shape else 1 if is_stacked else spec.shape[0]
        part = tensor if isinstance(named, str) else tensor.detach()[first : first + rows]
        part = part.squeeze(0) if is_stacked else part
        if spec is None or (dtype_name(part.dtype, own), tuple(part.shape)) != (spec.dtype, spec.shape):
            wanted = "nothing" if spec is None else f"{spec.dtype} of shape {list(spec.shape)}"
            cure = ""
            if spec is not None and tuple(part.shape) == spec.shape:
                cure = f" Convert it first, such as by module.to(torch.{spec.dtype}), or publish with dtype='keep'."
            raise ModelMismatchError(
                f"{own} is {dtype_name(part.dtype)} of shape {list(part.shape)} where {name} should lie, which is {wanted} "
                f"in the channel.{cure}"
            )
        first += rows
        yield name, part
    if first not in (0, tensor.shape[0] if tensor.ndim else 0):
        raise ModelMismatchError(f"{own} has {tensor.shape[0]} rows, and what lies in it {first}.")


def _memory(tensor: torch.Tensor) -> tuple[int, int, torch.device]:
    """Return what identifies the memory of a tensor while that is held. An empty one has none, and is like no other."""
    return tensor.data_ptr() if tensor.numel() else id(tensor), tensor.numel() * tensor.element_size(), tensor.device


def segment(tensor: torch.Tensor) -> Segment:
    """Return the segment of a whole tensor in its own memory, with any strides."""
    live = tensor.detach()
    if live.is_contiguous():
        return Segment(int_view(live), (1,), 0)
    strides = torch.empty(live.shape, device="meta").stride()
    return Segment(live.view(int_view(live[:0]).dtype), strides, 0)


class Gate:
    """Keeps forward calls, of which many may run, and commits, which run alone, apart.

    While a commit waits, a call begins only in a thread that is inside already, in `hold()` or another forward call, or in
    one that was started since such a call began, which may wait for it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, set[threading.Thread]] = {}  # the threads inside, and the threads that ran when each entered
        self._closed = False  # a commit waits or runs
        self._mine = threading.local()
        self.problem: str | None = None  # why no forward call may begin
        self.check: Callable[[], bool] = lambda: True  # whether the weights are where they were mapped; asked as calls begin
        self.closings = 0  # how often it was closed for a commit
        self.waits_since_s: float | None = None  # since when a commit waits for calls to end, by `time.monotonic`

    @contextlib.contextmanager
    def inside(self, wait_s: float = 0.0) -> Iterator[None]:
        """Return a context in which nothing is committed: for a forward call, or for several.

        Args:
            wait_s: How long to wait while it is not known what the weights are.

        Raises:
            ApplyError: it is still not known.
        """
        with self._changed:
            self._changed.wait_for(self._may_enter)
            self._look()
            if self.problem is not None and wait_s:
                self._changed.wait_for(lambda: self.problem is None and self._may_enter(), wait_s)
            if self.problem is not None:
                raise ApplyError(self.problem)
            if not self.depth:
                self._inside[threading.get_ident()] = {*threading.enumerate()}
        self._mine.depth = self.depth + 1
        try:
            yield
        finally:
            self._mine.depth -= 1
            if not self.depth:
                with self._changed:
                    del self._inside[threading.get_ident()]
                    self._changed.notify_all()

    @property
    def refusal(self) -> str | None:
        """Why a forward call that began now would raise; None if it would not."""
        with self._changed:
            if not self._closed:
                self._look()
            return self.problem

    def _look(self) -> None:
        if not self.depth and self.problem is None and not self.check():
            self.problem = _MOVED

    def _may_enter(self) -> bool:
        own = threading.current_thread()  # the identifier of a thread that has ended may be given to a new one
        return not self._closed or self.depth > 0 or any(own not in others for others in self._inside.values())

    def report(self, problem: str | None) -> None:
        """Block forward calls for this reason, or let them begin again."""
        with self._changed:
            self.problem = problem
            self._changed.notify_all()

    @property
    def depth(self) -> int:
        """How often this thread is inside."""
        return int(getattr(self._mine, "depth", 0))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context in which nobody is inside. A thread that is inside would wait for itself.

        Raises:
            StageError: calls have not ended for `ALONE_S`; others may begin again.
        """
        assert not self.depth
        try:
            with self._changed:
                self._closed, self.waits_since_s = True, time.monotonic()
                self.closings += 1
                if not self._changed.wait_for(lambda: not self._inside, ALONE_S):
                    raise StageError(
                        f"A forward call or a hold() has not ended for {ALONE_S:g} s; the weights are as before."
                    )
                self.waits_since_s = None
            yield
        finally:
            with self._changed:
                self._closed, self.waits_since_s = False, None
                self._changed.notify_all()


@contextlib.contextmanager
def reclassed(module: Any, kind: type) -> Iterator[None]:
    """Return a context in which a module is of a class that is like its own."""
    before = type(module)
    object.__setattr__(module, "__class__", kind)
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", before)


def gated_calls(module: Any, gate: Gate, names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a model's methods pass a gate: those of these names that its class has.

    Raises:
        ConfigError: the model passes a gate already.
    """
    kind = type(module)
    if hasattr(kind, "deltasync_gate"):
        raise ConfigError("This model follows a channel already: close() that first.")

    def gated(call: Callable[..., Any]) -> Callable[..., Any]:
        def passed(*arguments: Any, **options: Any) -> Any:
            with gate.inside():
                return call(*arguments, **options)

        return passed

    own: dict[str, Any] = {name: gated(getattr(kind, name)) for name in names if hasattr(kind, name)}
    own |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "deltasync_gate": gate}
    return reclassed(module, type(kind.__name__, (kind,), own))


Mapped = tuple[LiveMemory, dict[str, torch.Tensor], dict[str, str]]
"""The channel's tensors in a model: live memory over them, and the tensors and ties, as `places` returns them."""

Part = tuple[Mapping[str, Any], str, Any, object]
"""A part of a module: the mapping that holds it, its name there, the tensor or module, and the place of its memory."""


class GatedTarget(MemoryTarget):
    """The weights of a model whose forward calls pass a gate.

    A subclass says which tensors the model has now and where they are, and puts its forward calls inside of the gate. It is
    noted only what was mapped without a refusal: a model that was changed is refused at each sync.
    """

    def __init__(self, module: Any, reader: ChannelReader, names: Names, gate: Gate) -> None:
        super().__init__(reader)
        self._module, self._names, self._gate = module, names, gate
        self._ties: dict[str, str] = {}
        self._served = False  # whether the model has ever had a version of the channel
        self._identify: Identify | None = None
        self._storages: Mapping[str, Any] = {}  # where the tensors lay when they were mapped
        self._parts: Sequence[Part] = ()  # which modules and tensors there were then
        self._refusal: str | None = None  # why the model, or a version for it, was refused
        gate.check = self._is_in_place

    @abstractmethod
    def _state(self) -> Mapping[str, Any]:
        """The model's tensors by its own names, `torch.Tensor`s over live memory; and the names that are ignored."""

    @abstractmethod
    def _found(self) -> Mapping[str, Any]:
        """Where the model's tensors are now."""

    @abstractmethod
    def _held(self) -> Sequence[Part]:
        """The parts that the model has now."""

    def _place(self, part: Any) -> object:
        """Return a value that changes when a part is moved or written, as far as that can be asked at each call."""
        return None

    def _finish_calls(self) -> None:
        """Wait until nothing reads the weights any more; every forward call that has begun has ended."""

    def open(self, identify: Identify) -> None:
        """Find the channel's tensors in the model, and which version they are, if any."""
        storages, parts = self._found(), self._held()
        memory, tensors, ties = self._mapped(self._state())
        self.adopt(memory, identify)
        self.tensors, self._ties = tensors, ties
        self._identify, self._storages, self._parts, self._refusal = identify, storages, parts, None
        self._served |= self.version is not None
        self._update_gate()

    def _mapped(self, state: Mapping[str, Any]) -> Mapped:
        """Find the channel's tensors among a model's."""
        tensors, ties = places(state, self.reader.specs, self._names)
        memory = LiveMemory(self.reader.specs, {name: [segment(tensor)] for name, tensor in tensors.items()})
        return memory, tensors, ties

    def is_settled(self, asked: bool) -> bool:
        """Whether the live bits are known. They are not if the model has other storages than those that were mapped."""
        return super().is_settled(asked) and not self._is_moved

    def _is_in_place(self) -> bool:
        return all(held.get(name) is part and self._place(part) == place for held, name, part, place in self._parts)

    @property
    def _is_moved(self) -> bool:
        return not self._is_in_place() or self._found() != self._storages

    def settle(self) -> None:
        """As `Target.settle`; storages that were replaced are mapped again."""
        try:
            if self._identify is not None and self._is_moved:
                self._opened.settled = False
                self.open(self._identify)
            else:
                super().settle()
        except ModelMismatchError as error:
            self._refusal = f"{_UNKNOWN} {error}"
            raise
        finally:
            self._update_gate()  # before anything is loaded in their place

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion:
        """Stage a chain (`Target.stage`)."""
        return self._opened.stage(chain)

    def commit(self, staged: StagedVersion | Sequence[StoredRecord]) -> Commit:
        """Commit between two forward calls (`Target.commit`)."""
        assert isinstance(staged, StagedVersion)
        try:
            with self._gate.alone():
                self._finish_calls()
                if self._is_moved:
                    raise StageError("The model's parameters were replaced meanwhile; they are mapped again.")
                self._served = True
                commit = self._exchange(staged)
                self._storages, self._parts, self._refusal = self._found(), self._held(), None
                return commit
        finally:
            self._update_gate()

    def _refuse(self, version: int) -> None:
        """Refuse a version that gives one tensor of the model two values."""
        for name, other in self._ties.items():
            if not torch.equal(int_view(self.tensors[name]), int_view(self.tensors[other])):
                self._refusal = f"{name} and {other} are one tensor in the module, and differ in version {version}."
                raise ModelMismatchError(self._refusal)

    def _update_gate(self) -> None:
        """Let no forward call begin while the weights are of no known version, unless they never were of one."""
        weights = self.weights
        is_known = weights is None or (weights.settled and (weights.version is not None or not self._served))
        self._gate.report(self._refusal or (None if is_known else _UNKNOWN))
