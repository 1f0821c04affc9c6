"""A replica whose weights are a `torch.nn.Module`'s own: they change in place, between two forward calls.

    with deltasync.follow(module, "s3://bucket/run") as following:
        following.wait(7)
        with following.hold():             # one version from here
            module.generate(...)           # transformers

A thread looks for versions and stages them while the module computes.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from deltasync.channel.nearest import open_nearest
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, ConfigError, ModelMismatchError, NotPublishedError, StageError
from deltasync.following.follower import StagedVersion
from deltasync.following.loop import Follow
from deltasync.following.module_map import Names, places, plain_name, segment
from deltasync.following.pin import Pin
from deltasync.following.replica import MemoryTarget
from deltasync.following.status import Commit, Status
from deltasync.following.target import Identify
from deltasync.live import LiveMemory
from deltasync.stores import Store
from deltasync.tensors.bits import int_view

_ALONE_S = 30.0  # how long a commit waits for calls that run
_WAIT_S = 5.0  # from when on such a wait is reported


class _Gate:
    """Keeps forward calls, of which many may run, and commits, which run alone, apart.

    While a commit waits, a call begins only in a thread that is inside already, in `hold()` or another forward call, or in
    one that was started since such a call began, which may wait for it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, set[int | None]] = {}  # the threads inside, and the threads that ran when each entered
        self._closed = False  # a commit waits or runs
        self._mine = threading.local()
        self.problem: str | None = None  # why no forward call may begin
        self.waits_since_s: float | None = None  # since when a commit waits for calls to end, by `time.monotonic`

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Return a context in which nothing is committed: for a forward call, or for several."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed or self._belongs_inside())
            if self.problem is not None:
                raise ApplyError(self.problem)
            if not self.depth:
                self._inside[threading.get_ident()] = {thread.ident for thread in threading.enumerate()}
        self._mine.depth = self.depth + 1
        try:
            yield
        finally:
            self._mine.depth -= 1
            if not self.depth:
                with self._changed:
                    del self._inside[threading.get_ident()]
                    self._changed.notify_all()

    def _belongs_inside(self) -> bool:
        own = threading.get_ident()
        return self.depth > 0 or any(own not in others for others in self._inside.values())

    @property
    def depth(self) -> int:
        """How often this thread is inside."""
        return int(getattr(self._mine, "depth", 0))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context in which nobody is inside. A thread that is inside would wait for itself.

        Raises:
            StageError: calls have not ended for `_ALONE_S`; others may begin again.
        """
        assert not self.depth
        try:
            with self._changed:
                self._closed, self.waits_since_s = True, time.monotonic()
                if not self._changed.wait_for(lambda: not self._inside, _ALONE_S):
                    raise StageError(
                        f"A forward call or a hold() has not ended for {_ALONE_S:g} s; the weights are as before."
                    )
                self.waits_since_s = None
            yield
        finally:
            with self._changed:
                self._closed, self.waits_since_s = False, None
                self._changed.notify_all()


class _ModuleTarget(MemoryTarget):
    """The memory of a module that may compute at any time."""

    def __init__(self, module: torch.nn.Module, reader: ChannelReader, names: Names, gate: _Gate) -> None:
        super().__init__(reader)
        self._module, self._names, self._gate = module, names, gate
        self._ties: dict[str, str] = {}
        self._served = False  # whether the module has ever had a version of the channel
        self._identify: Identify | None = None
        self._storages: dict[str, tuple[int, torch.device]] = {}  # where the tensors lay when they were mapped
        self._broken: str | None = None

    def open(self, identify: Identify) -> None:
        """Find the channel's tensors in the module, and which version they are, if any."""
        self._identify, self._storages = identify, self._found()
        self.tensors, self._ties = places(self._module, self.reader.specs, self._names)
        segments = {name: [segment(tensor)] for name, tensor in self.tensors.items()}
        self.adopt(LiveMemory(self.reader.specs, segments), identify)
        self._served = self.version is not None
        self._tell_gate()

    def _found(self) -> dict[str, tuple[int, torch.device]]:
        """Where the module's tensors lie now."""
        state = self._module.state_dict(keep_vars=True).items()
        return {name: (each.data_ptr(), each.device) for name, each in state if isinstance(each, torch.Tensor)}

    def is_settled(self, asked: bool) -> bool:
        """As `Target.is_settled`; not where the module has other storages than those that were mapped."""
        return super().is_settled(asked) and self._found() == self._storages

    def settle(self) -> None:
        """As `Target.settle`; storages that were replaced are mapped anew."""
        if self._found() != self._storages and self._identify is not None:
            served = self._served
            self.open(self._identify)
            self._served |= served
        else:
            super().settle()
        self._tell_gate()  # before anything is loaded in their place

    def stage(self, chain: Sequence[Stored]) -> StagedVersion:
        """As `Target.stage`."""
        return self._opened.stage(chain)

    def commit(self, staged: StagedVersion | Sequence[Stored]) -> Commit:
        """As `Target.commit`, between two forward calls."""
        assert isinstance(staged, StagedVersion)
        try:
            with self._gate.alone():
                for device in {tensor.device for tensor in self.tensors.values() if tensor.device.type != "cpu"}:
                    torch.accelerator.synchronize(device)  # what forward calls have launched
                if self._found() != self._storages:
                    raise StageError("The module's parameters were replaced meanwhile; they are mapped anew.")
                self._served = True
                commit = self._exchange(staged)
                for name, other in self._ties.items():
                    if not torch.equal(int_view(self.tensors[name]), int_view(self.tensors[other])):
                        self._broken = (
                            f"{name} and {other} are one tensor in the module, and differ in version {commit.version}."
                        )
                        raise ModelMismatchError(self._broken)
                return commit
        finally:
            self._tell_gate()

    def _tell_gate(self) -> None:
        """Let no forward call begin while the weights are of no known version, unless they never were of one."""
        follower = self.follower
        is_known = follower is None or (follower.settled and (follower.version is not None or not self._served))
        unknown = "The weights are in an unknown state: forward calls are blocked until the next sync succeeds."
        self._gate.problem = self._broken or (None if is_known else unknown)


_gates: weakref.WeakKeyDictionary[torch.nn.Module, _Gate] = weakref.WeakKeyDictionary()  # of followed modules
_followed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # these, and all modules in them


@functools.cache
def _gated(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a class like `kind` whose calls pass the gate of a followed module.

    The module's class is what tells: copies and pickles of it are of `kind`, and compute with their own weights. Hooks would
    not do, because an interrupt skips them; nor would an attribute `forward`, which copies take along.
    """

    # The gate is not compiled; what it lets through is.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def passed(self: torch.nn.Module, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        gate = _gates.get(self)
        if gate is None:
            return call(*arguments, **options)
        if torch.is_grad_enabled() and not gate.depth and any(each.requires_grad for each in self.parameters()):
            raise ConfigError(
                "A forward call with gradients needs the same weights until its backward: put both into `hold()`, or the "
                "call into torch.no_grad()."
            )
        with gate.inside():
            return call(*arguments, **options)

    class Gated(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return passed(self, super().__call__, *arguments, **options)

        def forward(self, *arguments: Any, **options: Any) -> Any:
            return passed(self, super().forward, *arguments, **options)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return copyreg._reconstructor, (kind, object, None), *super().__reduce_ex__(protocol)[2:]  # type: ignore[attr-defined]

    Gated.__name__, Gated.__qualname__, Gated.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    functools.update_wrapper(Gated.forward, kind.forward)
    return Gated


@contextlib.contextmanager
def _gating(module: torch.nn.Module, gate: _Gate) -> Iterator[None]:
    """Return a context in which the calls of a module pass a gate."""
    kind = type(module)
    _gates[module] = gate
    object.__setattr__(module, "__class__", _gated(kind))  # type: ignore[arg-type]
    try:
        yield
    finally:
        del _gates[module]
        object.__setattr__(module, "__class__", kind)


class Following:
    """A module that follows a channel; made by `deltasync.follow`. Use it as a context, or `close` it."""

    def __init__(
        self, module: torch.nn.Module, store: Store, settings: ReplicaSettings, names: Names, background: bool
    ) -> None:
        self._gate = _Gate()
        reader = ChannelReader(store, settings.trusted_keys)
        self._follow = Follow(reader, _ModuleTarget(module, reader, names, self._gate), settings)
        self._unwraps = contextlib.ExitStack()
        for each in module.modules():
            # In a wrapped model, the model inside has the `generate` that is called.
            if each is module or callable(getattr(type(each), "generate", None)):
                self._unwraps.enter_context(_gating(each, self._gate))
        _followed.update(module.modules())
        self._unwraps.callback(_followed.difference_update, [*module.modules()])
        try:
            with contextlib.suppress(NotPublishedError):
                self.sync()
        except BaseException:
            self.close()
            raise
        if background:
            self._follow.start()

    @property
    def version(self) -> int | None:
        """The number of the version that the weights are, None before the first."""
        return self._follow.version

    @property
    def digest(self) -> str | None:
        """The sha256 of this version's record."""
        identity = self._follow.identity
        return None if identity is None else identity.sha256

    @property
    def error(self) -> str | None:
        """What keeps the weights from newer versions, in one sentence; None if nothing does."""
        since_s = self._gate.waits_since_s
        waits_s = 0.0 if since_s is None else time.monotonic() - since_s
        if waits_s > _WAIT_S:
            return f"A version has waited for forward calls or a hold() to end for {waits_s:.0f} s."
        return None if self._follow.state == "waiting" else self._follow.error

    @property
    def status(self) -> Status:
        """State, versions and commits, as a server's `GET /deltasync/status`."""
        return self._follow.status()

    @property
    def pin(self) -> str:
        """Which versions it takes: `newest`, a number to stay at, `every 10`, `2 behind`. May be set at any time.

        Raises:
            MissingVersionError: when it is set to a number that the channel does not have; it stays as it was.
        """
        return str(self._follow.pin)

    @pin.setter
    def pin(self, text: str | int) -> None:
        self._follow.set_pin(Pin.parse(str(text)))

    def sync(self) -> int:
        """Refresh now, and take what there is; return the number of the version that the weights are.

        Raises:
            NotPublishedError: the channel has no version yet.
            DeltaSyncError: the newest version could not be taken; the version before stays.
        """
        self._refuse_inside()
        return self._follow.catch_up()

    def wait(self, version: int | None = None, timeout_s: float = 60.0) -> int:
        """Wait until the weights are this version or a later one; pinned to a number, exactly that one. By default any.

        Raises:
            AckTimeoutError: they are not after `timeout_s`; it says why.
            PinnedError: the pin keeps the module from that version.
        """
        return self._follow.wait(version, timeout_s)

    @contextlib.contextmanager
    def hold(self) -> Iterator[int | None]:
        """Return a context in which nothing changes: all forward calls inside see the version whose number it gives."""
        with self._gate.inside():
            yield self.version

    def close(self) -> None:
        """Stop following. The module keeps its weights."""
        self._refuse_inside()
        self._follow.stop()
        self._unwraps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_inside(self) -> None:
        if self._gate.depth:
            raise ConfigError("Weights cannot change while this thread holds them, or inside a forward call.")


def follow(
    module: torch.nn.Module,
    channel: str | os.PathLike[str] | Store,
    *,
    names: Names | Mapping[str, str | Sequence[str] | None] = plain_name,
    background: bool = True,
    **settings: Any,
) -> Following:
    """Patch a module's weights in place with the versions of a channel, between its forward calls.

    Returns once the module has the newest version, or at once if there is none yet. Only the parameters and buffers of
    `module` are mutated, and its `forward` is wrapped until `close`, to keep commits and forward calls apart. Meanwhile call
    its submodules by themselves only in `hold()`.

    Args:
        module: A module on any device, whose tensors have the channel's dtypes and shapes.
        channel: URL of the channel, or URLs of it and its copies with spaces between them; or an opened store.
        names: The channel's names for the tensors of the module's `state_dict`: a function, or a mapping that may leave out
            equal names. Several names are tensors that lie one after the other along the first dimension; None is a tensor
            that the channel does not have. By default names are equal, except for prefixes of torch.compile and peft, and
            adapters are left out.
        background: Whether to follow in a thread; otherwise only `sync` takes new versions.
        **settings: Fields of `ReplicaSettings`, such as `pin`, `trusted_keys` or `replica_id`.

    Raises:
        ModelMismatchError: the module is not the channel's model.
        DeltaSyncError: the newest version cannot be taken.

    Examples:
        >>> with deltasync.follow(module, "s3://bucket/run") as following:
        ...     with following.hold() as version:
        ...         module.generate(**inputs)
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"follow() takes a torch.nn.Module, not {module!r:.100}.")
    if any(each in _followed for each in module.modules()):
        raise ConfigError("This module, or a part of it, follows a channel already: close() that first.")
    named = names if callable(names) else lambda own: names.get(own, plain_name(own))
    chosen = ReplicaSettings.from_env(**settings)
    if "replica_id" not in settings:
        chosen = dataclasses.replace(chosen, replica_id=f"{chosen.replica_id[:80]}-{os.getpid()}")
    return Following(module, open_nearest(channel), chosen, named, background)
