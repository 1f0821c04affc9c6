"""Weights of a model that may compute at any time: where the channel's tensors are in it, and changes between
its calls.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.nn.parameter import is_lazy

from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import ApplyError, ConfigError, ModelMismatchError, StageError
from deltasync.following.replica import MemoryTarget
from deltasync.following.status import Commit
from deltasync.following.target import Identify
from deltasync.following.weights import StagedVersion
from deltasync.live import LiveMemory, Segment
from deltasync.serve import in_place
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import dtype_name, has_memory, int_view
from deltasync.threads import Home

logger = logging.getLogger(__name__)

ALONE_S = 30.0  # how long a commit waits for calls that run
_UNKNOWN = "The weights are in an unknown state: forward calls are blocked until the next sync succeeds."
_MOVED = (
    "The weights are in an unknown state, because something else wrote, converted or replaced them: forward "
    "calls are "
    "blocked until the next sync succeeds."
)
_WRITER = (
    "The module wrote into its own weights in a forward call, as layers in training and weights that are "
    "rescaled at first "
    "use do, so its bits are not the channel's any more: map the tensors that it keeps for itself to None in "
    "`names`, or "
    "follow with a module that writes none."
)

Names = Callable[[str], str | Sequence[str] | None]
"""Returns the channel's name for a tensor of a module's state_dict: one name, several for tensors that lie
one after the other, or are stacked, along the first dimension, or None for a tensor that the channel does not
have."""

_COMPILED = "_orig_mod."  # of torch.compile, around any part
_ADAPTED = "base_model.model."  # of peft
_AROUND_BASE = ".base_layer."  # peft's


def plain_name(name: str) -> str | None:
    """Return a tensor's checkpoint name in a module that torch.compile or peft has wrapped; None for an
    adapter's own.
    """
    name = name.replace(_COMPILED, "").removeprefix(_ADAPTED)
    return None if ".lora_" in name else name.replace(_AROUND_BASE, ".")


def places(
    state: Mapping[str, Any], specs: Mapping[str, TensorSpec], names: Names
) -> tuple[dict[str, torch.Tensor], dict[str, str], list[str]]:
    """Find the channel's tensors in a model's state_dict, whose tensors are live memory.

    Returns:
        A view of live memory for each tensor, with its shape and dtype; the ties; and the tensors that the
        model keeps to
        itself: `names` gives None for them, but the channel has them. A tensor that shares its memory with
        another is a copy instead of a view, and the second mapping has the name of the other. So is one that
        the model keeps to itself.

    Raises:
        ModelMismatchError: a tensor is on one side only, has another shape or dtype there, or overlaps
            another one; or there is a value that is no tensor.
    """
    found: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    owners: dict[tuple[int, int, torch.device], tuple[str, torch.Tensor]] = {}  # by memory
    strange: dict[str, torch.Tensor] = {}  # whose names the channel does not have
    private: dict[str, torch.Tensor] = {}
    for own, tensor in state.items():
        named = names(own)
        if named is None:
            if isinstance(tensor, torch.Tensor):
                private[plain_name(own) or own] = tensor
            continue
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ModelMismatchError(
                f"{own} in the module's state_dict is no tensor but a {type(tensor).__name__}, which no "
                "channel carries: "
                "map it to None in `names` if the module keeps its own, or follow with a module without it."
            )
        if not any(name in specs for name in ([named] if isinstance(named, str) else named)):
            strange[own] = tensor
            continue
        for name, part in _parts(own, tensor, named, specs):
            other, held = owners.setdefault(_memory(part), (name, part))
            if other != name:
                if (part.shape, part.stride(), part.dtype) != (held.shape, held.stride(), held.dtype):
                    raise ModelMismatchError(_OVERLAP.format(other, name))
                ties[name], part = other, part.detach().clone()
            elif name in found:
                raise ModelMismatchError(f"Two tensors of the module are {name}, the second of them {own}.")
            found[name] = part
    _check_overlaps({name: tensor for name, tensor in found.items() if name not in ties})
    unknown = [own for own, tensor in strange.items() if _memory(tensor) not in owners]
    kept = [name for name in private if name in specs.keys() - found.keys()]
    for name in kept:
        found |= {each: part.detach().clone() for each, part in _parts(name, private[name], name, specs)}
    lacking = specs.keys() - found.keys()
    if unknown or lacking:
        sides = (
            (lacking, "is in the channel and not in the module"),
            (unknown, "is in the module and not in the channel"),
        )
        more = [f" (and {len(side) - 1} more)" if len(side) > 1 else "" for side, _ in sides]
        problems = "; ".join(
            f"{min(side)}{and_} {where}" for (side, where), and_ in zip(sides, more, strict=True) if side
        )
        raise ModelMismatchError(f"{problems}. Map the names of the module to the channel's by `names`.")
    return found, ties, kept


_OVERLAP = "{} and {} overlap in the module's memory, so that a write into one changes the other: give each its own memory."


def _check_overlaps(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelMismatchError if two tensors, or two elements of one, share memory."""
    spans = []
    for name, tensor in tensors.items():
        dims = sorted(
            (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
        )
        last = 0  # the offset of the last element
        for stride, size in dims:
            if stride <= last:
                raise ModelMismatchError(
                    f"{name} overlaps itself in the module's memory, as expanded tensors do: give it memory "
                    "of its own."
                )
            last += stride * (size - 1)
        if tensor.numel():
            first = tensor.data_ptr()
            spans.append((str(tensor.device), first, first + (last + 1) * tensor.element_size(), name))
    group: list[str] = []  # tensors between whose first and last elements others lie
    end: tuple[str, int] = "", 0
    for device, first, behind, name in [*sorted(spans), ("", 0, 0, "")]:
        if group and device == end[0] and first < end[1]:
            group.append(name)
            end = device, max(end[1], behind)
        else:
            if len(group) > 1:
                _check_apart({each: tensors[each] for each in group})
            group, end = [name], (device, behind)


def _check_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    """As `_check_overlaps`, of tensors that lie between each other's elements, as columns of one matrix
    do.
    """
    first = min(tensor.data_ptr() for tensor in tensors.values())
    width = min(tensor.element_size() for tensor in tensors.values())
    taken = torch.zeros(0, dtype=torch.uint8, device="cpu")
    for name, tensor in tensors.items():
        offset, rest = divmod(tensor.data_ptr() - first, width)
        span = (
            offset
            + 1
            + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        )
        taken = torch.nn.functional.pad(taken, (0, max(0, span - len(taken))))
        place = taken.as_strided(tensor.shape, tensor.stride(), offset)
        if rest or tensor.element_size() != width or place.any():
            raise ModelMismatchError(
                _OVERLAP.format(min(tensors), name if name != min(tensors) else max(tensors))
            )
        place.fill_(1)


def check_memory(own: str, tensor: torch.Tensor) -> None:
    """Raise ModelMismatchError if the bits of a tensor are not in memory as its sizes, strides and dtype
    say.
    """
    if tensor.is_meta:
        raise ModelMismatchError(f"{own} is on the meta device: it has no memory to be patched.")
    is_nested, is_strided = tensor.is_nested, tensor.layout is torch.strided
    kind = (
        "nested tensor"
        if is_nested
        else "ZeroTensor"
        if is_strided and tensor._is_zerotensor()
        else type(tensor).__name__
    )
    if is_lazy(tensor) or not is_strided or not has_memory(tensor):
        layout = "" if is_nested or is_strided else f" of layout {str(tensor.layout).removeprefix('torch.')}"
        raise ModelMismatchError(
            f"{own} is a {kind}{layout}, which has no memory of its own to be patched: follow with a module "
            "of plain "
            "tensors."
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ModelMismatchError(
            f"{own} is a view whose memory has the negated values (torch's negative or conjugate bit): give "
            "the module "
            "resolve_neg() or resolve_conj() of it."
        )


def _parts(
    own: str, tensor: torch.Tensor, named: str | Sequence[str], specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the channel's tensors that lie in one of the module's, each checked against its spec."""
    check_memory(own, tensor)
    first = 0
    for name in [named] if isinstance(named, str) else named:
        spec = specs.get(name)
        is_stacked = spec is not None and not isinstance(named, str) and tensor.ndim > len(spec.shape)
        rows = (
            0
            if spec is None or isinstance(named, str) or not spec.shape
            else 1
            if is_stacked
            else spec.shape[0]
        )
        part = tensor if isinstance(named, str) else tensor.detach()[first : first + rows]
        part = part.squeeze(0) if is_stacked else part
        if spec is None or (dtype_name(part.dtype, own), tuple(part.shape)) != (spec.dtype, spec.shape):
            wanted = "nothing" if spec is None else f"{spec.dtype} of shape {list(spec.shape)}"
            cure = ""
            if spec is not None and tuple(part.shape) == spec.shape:
                cure = f" Convert it first, such as by module.to(torch.{spec.dtype}), or publish with dtype='keep'."
            raise ModelMismatchError(
                f"{own} is {dtype_name(part.dtype)} of shape {list(part.shape)} where {name} should lie, "
                f"which is {wanted} "
                f"in the channel.{cure}"
            )
        first += rows
        yield name, part
    if first not in (0, tensor.shape[0] if tensor.ndim else 0):
        raise ModelMismatchError(f"{own} has {tensor.shape[0]} rows, and what lies in it {first}.")


def _memory(tensor: torch.Tensor) -> tuple[int, int, torch.device]:
    """Return what identifies the memory of a tensor while that is held. An empty one has none, and is like no
    other.
    """
    return (
        tensor.data_ptr() if tensor.numel() else id(tensor),
        tensor.numel() * tensor.element_size(),
        tensor.device,
    )


class _GatedCall:
    """A forward call or a `hold()` that runs in a gate.

    Attributes:
        others: The threads that ran when the outermost one around it began.
    """

    __slots__ = ("gate", "holds", "is_open", "others")

    def __init__(self, gate: Gate, holds: bool, others: set[threading.Thread]) -> None:
        self.gate, self.holds, self.others, self.is_open = gate, holds, others, True


_calls: contextvars.ContextVar[tuple[_GatedCall, ...]] = contextvars.ContextVar("deltasync_calls", default=())
"""The calls of this thread, or asyncio task, and of those that copied its context. Some may have ended
elsewhere.
"""


class Gate:
    """Keeps forward calls, of which many may run, and commits, which run alone, apart.

    A `hold()` may end in another thread than it began in. While a commit waits, these may begin: calls inside
    of a call or a hold of the same context; forward calls while a hold is open, which the commit waits for
    anyway, since the threads of a pool may belong to it; and calls in a thread that is younger than a call
    that runs, which may wait for it.
    """

    def __init__(self) -> None:
        self._home = Home("followed module")
        self._changed = threading.Condition()
        self._inside: set[_GatedCall] = set()
        self._closed = False  # a commit waits or runs
        self.problem: str | None = None  # why no forward call may begin
        # whether the weights are where they were mapped; asked as calls begin
        self.check: Callable[[], bool] = lambda: True
        # called as a forward call begins: how often the weights were written
        self.begun: Callable[[], int] = lambda: 0
        # called with that as it ends: a new problem
        self.ended: Callable[[int], str | None] = lambda begun: None
        self.closings = 0  # how often it was closed for a commit
        # since when a commit waits for calls to end, by `time.monotonic`
        self.waits_since_s: float | None = None

    @contextlib.contextmanager
    def inside(self, wait_s: float = 0.0, *, holds: bool = False) -> Iterator[None]:
        """Return a context in which nothing is committed: for a forward call, or for several.

        It may be left in another thread.

        Args:
            wait_s: How long to wait while it is not known what the weights are.
            holds: Whether it is for several calls.

        Raises:
            ApplyError: it is still not known.
            ConfigError: this process is a fork of the module's, in which nothing follows.
        """
        self._home.check()
        mine = tuple(call for call in _calls.get() if call.is_open)
        around = [call for call in mine if call.gate is self]
        with self._changed:
            self._changed.wait_for(lambda: self._may_enter(holds))
            self._look()
            if self.problem is not None and wait_s:
                self._changed.wait_for(lambda: self.problem is None and self._may_enter(holds), wait_s)
            if self.problem is not None:
                raise ApplyError(self.problem)
            call = _GatedCall(self, holds, around[0].others if around else {*threading.enumerate()})
            self._inside.add(call)
        try:
            _calls.set((*mine, call))
            if holds or any(not each.holds for each in around):
                yield
            else:
                begun = self.begun()
                try:
                    yield
                finally:
                    if (problem := self.ended(begun)) is not None:
                        self.report(problem)
        finally:
            with self._changed:
                call.is_open = False
                self._inside.discard(call)
                self._changed.notify_all()
            _calls.set(tuple(each for each in _calls.get() if each.is_open))

    @property
    def fork(self) -> str | None:
        """Why nothing may be computed in this process, if it is a fork of the module's."""
        return self._home.refusal

    @property
    def refusal(self) -> str | None:
        """Why a forward call that began now would raise; None if it would not."""
        if self.fork is not None:
            return self.fork
        with self._changed:
            if not self._closed:
                self._look()
            return self.problem

    def _look(self) -> None:
        if not self.depth and self.problem is None and not self.check():
            self.problem = _MOVED

    def _may_enter(self, holds: bool) -> bool:
        # the identifier of a thread that has ended may be given to a new one
        own = threading.current_thread()
        if not self._closed or self.depth:
            return True
        return any(own not in call.others or (call.holds and not holds) for call in [*self._inside])

    def report(self, problem: str | None) -> None:
        """Block forward calls for this reason, or let them begin again."""
        with self._changed:
            self.problem = problem
            self._changed.notify_all()

    @property
    def depth(self) -> int:
        """How often this thread, or asyncio task, is inside."""
        return sum(call.is_open and call.gate is self for call in _calls.get())

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
                        f"A forward call or a hold() has not ended for {ALONE_S:g} s; the weights are as "
                        "before."
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
"""The channel's tensors in a model: live memory over them, and the tensors and ties, as `places` returns
them.
"""

Part = tuple[Mapping[str, Any], str, Any, object]
"""A part of a module: the mapping that holds it, its name there, the tensor or module, and the place of its
memory.
"""


class GatedTarget(MemoryTarget):
    """The weights of a model whose forward calls pass a gate.

    A subclass says which tensors the model has now and where they are, and puts its forward calls inside of
    the gate. It is noted only what was mapped without a refusal: a model that was changed is refused at each
    sync.
    """

    def __init__(self, module: Any, reader: ChannelReader, names: Names, gate: Gate) -> None:
        super().__init__(reader)
        self._module, self._given, self._gate = module, names, gate
        self._ties: dict[str, str] = {}
        # whether the channel holds an adapter, and the caller has given no names of its own
        self._is_adapter = False
        self._served = False  # whether the model has ever had a version of the channel
        self._identify: Identify | None = None
        self._storages: Mapping[str, Any] = {}  # where the tensors lay when they were mapped
        self._parts: Sequence[Part] = ()  # which modules and tensors there were then
        self._refusal: str | None = None  # why the model, or a version for it, was refused
        self._writer: str | None = None  # why it is refused until it follows anew: it writes its own weights
        self._first_ended = False  # whether a forward call has left the weights of a version as they were
        self._private: dict[str, torch.Tensor] = {}  # the channel's tensors of which the model keeps its own
        self._reading = threading.Lock()  # held while all bits are read, from any thread
        self.audit_s = 0.0  # see `ReplicaSettings.audit_s`
        self._audited_s = -math.inf
        gate.check, gate.begun, gate.ended = self._is_in_place, self._call_begun, self._call_ended

    def _note_kind(self) -> None:
        """Note whether the channel holds an adapter. A subclass calls it first when it opens."""
        self._is_adapter = self._given is plain_name and in_place.is_adapter(self.reader.specs)

    def _adapter_name(self, own: str) -> str | None:
        """Return the name by which PEFT saves a tensor of an adapter; None for one of the base."""
        return in_place.adapter_name(own)

    def _check_config(self, config: Mapping[str, Any]) -> None:
        """Raise ModelMismatchError if the model's adapter does not compute as one of this configuration does."""

    def _base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of an adapter's base by their names in a checkpoint."""
        for own, tensor in self._state().items():
            name = plain_name(own)
            if name is not None and isinstance(tensor, torch.Tensor):
                yield name, tensor

    @abstractmethod
    def _state(self) -> Mapping[str, Any]:
        """The model's tensors by its own names, `torch.Tensor`s over live memory; and the names that are
        ignored.
        """

    @abstractmethod
    def _found(self) -> Mapping[str, Any]:
        """Where the model's tensors are now."""

    @abstractmethod
    def _held(self) -> Sequence[Part]:
        """The parts that the model has now."""

    def _place(self, part: Any) -> object:
        """Return a value that changes when a part is moved or written, as far as that can be asked at each
        call.
        """
        return None

    def _writes(self) -> int:
        """Return a number that grows with each write into the weights that the framework counts."""
        return 0

    def _finish_calls(self) -> None:
        """Wait until nothing reads the weights any more; every forward call that has begun has ended."""

    def _is_untouched(self) -> bool:
        """Whether all bits are those of the version, or none of them is known. Reads every bit."""
        weights = self.weights
        if weights is None or not weights.settled or weights.version is None:
            return True
        return self._is_intact()

    def _is_intact(self) -> bool:
        with self._reading:
            return self._opened.memory.is_intact() and self._is_made()

    def _is_made(self) -> bool:
        """Whether what the framework has made of the version's weights, and computes with instead, is as it was
        made.
        """
        return True

    def _call_begun(self) -> int:
        """Compare all bits before the first forward call since the model was mapped.

        Raises:
            ApplyError: something else wrote into the weights.
        """
        if not self._first_ended and not self._is_untouched():
            self._opened.settled = False
            self._gate.report(_MOVED)
            raise ApplyError(_MOVED)
        return self._writes()

    def _call_ended(self, begun: int) -> str | None:
        """Find out whether a forward call has written weights, and say why the model is refused from now on.

        All bits are compared after the first call since the model was mapped; later, writes that the
        framework counts.
        """
        if self._writes() == begun and (self._first_ended or self._is_untouched()):
            self._first_ended = self._first_ended or self.version is not None
            return None
        self._writer = _WRITER
        return self._writer

    def _names(self, own: str) -> str | Sequence[str] | None:
        """As `Names`: the caller's; of an adapter those that PEFT saves, if the caller has given none."""
        return self._adapter_name(own) if self._is_adapter else self._given(own)

    def open(self, identify: Identify) -> None:
        """Find the channel's tensors in the model, and which version they are, if any.

        An adapter is always loaded anew, because its scaling and its base are said beside full weights.
        """
        storages, parts = self._found(), self._held()
        memory, tensors, ties = self._mapped(self._state())
        with self._reading:
            self.adopt(memory, identify)
        if self._is_adapter:
            self._opened.identified(None)
        self._audited_s, self._first_ended = time.monotonic(), False
        self.tensors, self._ties = tensors, ties
        self._identify, self._storages, self._parts, self._refusal = identify, storages, parts, None
        self._served |= self.version is not None
        self._update_gate()

    def _mapped(self, state: Mapping[str, Any]) -> Mapped:
        """Find the channel's tensors among a model's."""
        tensors, ties, self.ignored = places(state, self.reader.specs, self._names)
        self._private = {name: self._private.get(name, tensors[name]) for name in self.ignored}
        tensors |= self._private
        memory = LiveMemory(
            self.reader.specs, {name: [Segment.whole(tensor)] for name, tensor in tensors.items()}
        )
        return memory, tensors, ties

    def is_settled(self, asked: bool) -> bool:
        """Whether the live bits are known. They are not if the model has other storages than those that were
        mapped.

        If a caller asks, all bits are compared again: the framework does not count every write.
        """
        return (
            super().is_settled(asked)
            and not self._is_moved
            and self._writer is None
            and not (asked and self._is_due)
        )

    @property
    def _is_due(self) -> bool:
        return time.monotonic() - self._audited_s >= self.audit_s

    def _is_in_place(self) -> bool:
        return all(
            held.get(name) is part and self._place(part) == place for held, name, part, place in self._parts
        )

    @property
    def _is_moved(self) -> bool:
        return not self._is_in_place() or self._found() != self._storages

    @property
    def _is_as_staged(self) -> bool:
        """Whether the model has the tensors that it had when the version was staged."""
        return not self._is_moved

    def _note_places(self) -> None:
        """Note the parts of the model and where its tensors lie, after an exchange."""
        self._storages, self._parts = self._found(), self._held()

    def settle(self) -> None:
        """As `Target.settle`; storages that were replaced are mapped again."""
        before = self.version
        try:
            if self._writer is not None:
                raise ModelMismatchError(self._writer)
            if self._identify is not None and self._is_moved:
                self._opened.settled = False
                self.open(self._identify)
            else:
                with self._reading:
                    super().settle()
                    if not self._is_made():
                        self._opened.identified(None)
                self._audited_s = time.monotonic()
            if before is not None and self.version is None:
                logger.warning(
                    "Something else wrote into the model's weights: version %d is loaded again.",
                    before.version,
                )
        except ModelMismatchError as error:
            self._refusal = f"{_UNKNOWN} {error}"
            raise
        finally:
            self._update_gate()  # before anything is loaded in their place

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion | None:
        """Stage a chain (`Target.stage`). Compares all bits at the end, because the next version is built on
        them.
        """
        if self._is_adapter and chain[0].use_anchor:
            self._check_config(in_place.config_of(self.reader, chain[0]))
            in_place.check_base(self.reader, chain[0], self._base())
        staged = self._opened.stage(chain)
        if self._is_due:
            if not self._is_intact():
                self._opened.settled = False
            self._audited_s = time.monotonic()
            self._update_gate()
        return staged if self._opened.settled else None

    def commit(self, staged: StagedVersion | Sequence[StoredRecord]) -> Commit:
        """Commit between two forward calls (`Target.commit`)."""
        assert isinstance(staged, StagedVersion)
        try:
            with self._gate.alone():
                before = time.perf_counter()
                self._finish_calls()
                if not self._is_as_staged or self._writer is not None:
                    raise StageError(
                        "The model's parameters were replaced or written meanwhile; they are mapped again."
                    )
                self._served = True
                commit = self._exchange(staged)
                self._note_places()
                self._refusal = None
                return msgspec.structs.replace(commit, pause_s=time.perf_counter() - before)
        finally:
            self._update_gate()

    def _refuse(self, version: int) -> None:
        """Refuse a version that gives one tensor of the model two values."""
        for name, other in self._ties.items():
            if not torch.equal(int_view(self.tensors[name]), int_view(self.tensors[other])):
                self._refusal = (
                    f"{name} and {other} are one tensor in the module, and differ in version {version}."
                )
                raise ModelMismatchError(self._refusal)

    def _update_gate(self) -> None:
        """Let no forward call begin while the weights are of no known version, unless they never were of
        one.
        """
        weights = self.weights
        is_known = weights is None or (weights.settled and (weights.version is not None or not self._served))
        self._gate.report(self._writer or self._refusal or (None if is_known else _UNKNOWN))
