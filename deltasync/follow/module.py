"""A replica whose weights are a `torch.nn.Module`'s own: they change in place, between two forward calls.

    with deltasync.follow(module, "s3://bucket/run") as following:
        following.wait(7)
        with following.hold():             # one version from here
            module.generate(...)           # transformers

A thread looks for versions and stages them while the module computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from deltasync.channel import heartbeat
from deltasync.channel.heartbeat import Heartbeat
from deltasync.channel.nearest import open_nearest
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    AckTimeoutError,
    ApplyError,
    ConfigError,
    DeltaSyncError,
    ModelMismatchError,
    NotPublishedError,
    StoreError,
    get_logger,
    printable,
)
from deltasync.follow.follower import Follower
from deltasync.follow.module_map import Names, places, plain_name, segment
from deltasync.follow.pin import NEWEST, Pin
from deltasync.follow.poll import Poll
from deltasync.follow.replica import Replica
from deltasync.live import LiveMemory, model_fingerprint
from deltasync.stores import ObjectInfo, Store
from deltasync.tensors.bits import int_view

logger = get_logger(__name__)


class _Gate:
    """Keeps forward calls, of which many may run, and commits, which run alone, apart.

    While a commit waits, no forward call begins, except inside another one or beside one that runs.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False  # a commit waits or runs
        self._mine = threading.local()
        self.problem: str | None = None  # why no forward call may begin

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Return a context in which nothing is committed: for a forward call, or for several."""
        with self._changed:
            self._changed.wait_for(lambda: self._inside > 0 or not self._closed)
            if self.problem is not None:
                raise ApplyError(self.problem)
            self._inside += 1
        self._mine.depth = self.depth + 1
        try:
            yield
        finally:
            self._mine.depth -= 1
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @property
    def depth(self) -> int:
        """How often this thread is inside."""
        return int(getattr(self._mine, "depth", 0))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context in which nobody is inside. A thread that is inside would wait for itself."""
        assert not self.depth
        try:
            with self._changed:
                self._closed = True
                self._changed.wait_for(lambda: self._inside == 0)
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class _ModuleReplica(Replica):
    """A replica over the memory of a module that may compute at any time."""

    _is_alone = False

    def __init__(self, module: torch.nn.Module, reader: ChannelReader, names: Names, gate: _Gate) -> None:
        super().__init__(reader)
        self._module, self._names, self._gate = module, names, gate
        self._ties: dict[str, str] = {}
        self._served = False  # whether the module has ever had a version of the channel
        self._broken: str | None = None

    def _advance(self, pin: Pin, *, known: ObjectInfo | None = None, look: bool = True) -> int:
        try:
            if self._follower is None:
                self._open()
            return super()._advance(pin, known=known, look=look)
        finally:
            self._tell_gate()

    def _open(self) -> None:
        """Find the channel's tensors in the module, and which version they are, if any."""
        self._tensors, self._ties = places(self._module, self._reader.specs, self._names)
        segments = {name: [segment(tensor)] for name, tensor in self._tensors.items()}
        memory = LiveMemory(self._reader.specs, segments)
        memory.warm_up()
        memory.audit()
        found = self._course.identify(model_fingerprint(memory.fingerprints))
        self._follower = Follower(self._reader, memory)
        self._follower.identified(found)
        self._served = found is not None

    def _settle(self) -> bool:
        is_lost = super()._settle()
        self._tell_gate()  # before anything is loaded in their place
        return is_lost

    def _tell_gate(self) -> None:
        """Let no forward call begin while the weights are of no known version, unless they never were of one."""
        follower = self._follower
        is_known = follower is None or (follower.settled and (follower.version is not None or not self._served))
        unknown = "It is not known what the weights are, until a look at the channel has found out or loaded them anew."
        self._gate.problem = self._broken or (None if is_known else unknown)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        with self._gate.alone():
            for device in {tensor.device for tensor in self._tensors.values() if tensor.device.type != "cpu"}:
                torch.accelerator.synchronize(device)  # what forward calls have launched
            self._served = True
            yield
            for name, other in self._ties.items():
                if not torch.equal(int_view(self._tensors[name]), int_view(self._tensors[other])):
                    self._broken = f"{name} and {other} are one tensor in the module, and differ in version {self.version}."
                    raise ModelMismatchError(self._broken)


def _gated(module: torch.nn.Module, gate: _Gate) -> Callable[[], None]:
    """Let forward calls of a module pass a gate; return what undoes it. Hooks would not do: an interrupt skips them."""
    forward, held = module.forward, "forward" in vars(module)

    @functools.wraps(forward)
    def gated(*arguments: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and not gate.depth and any(each.requires_grad for each in module.parameters()):
            raise ConfigError(
                "A forward call with gradients needs the same weights until its backward: put both into `hold()`, or the "
                "call into torch.no_grad()."
            )
        with gate.inside():
            return forward(*arguments, **options)

    def unwrap() -> None:
        if held:
            module.forward = forward
        else:
            del module.forward

    module.forward = gated
    return unwrap


class Following:
    """A module that follows a channel; made by `deltasync.follow`. Use it as a context, or `close` it.

    `error` says in one sentence what is wrong; None if nothing is.
    """

    def __init__(
        self, module: torch.nn.Module, store: Store, settings: ReplicaSettings, names: Names, background: bool
    ) -> None:
        self._store, self._settings = store, settings
        self._gate, self._pin = _Gate(), Pin.parse(settings.pin)
        self._reader = ChannelReader(store, settings.trusted_keys)
        self._replica = _ModuleReplica(module, self._reader, names, self._gate)
        self._busy = threading.Lock()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._known: ObjectInfo | None = None  # what the store told of a new record
        self._moved = threading.Condition()
        self.error: str | None = None
        self._unwraps = contextlib.ExitStack()
        for each in module.modules():
            # In a wrapped model, the model inside has the `generate` that is called.
            if each is module or callable(getattr(type(each), "generate", None)):
                self._unwraps.callback(_gated(each, self._gate))
        self._thread = threading.Thread(target=self._run, name="deltasync-follow", daemon=True)
        try:
            with contextlib.suppress(NotPublishedError):
                self.sync()
        except BaseException:
            self.close()
            raise
        if background:
            self._thread.start()

    @property
    def version(self) -> int | None:
        """The number of the version that the weights are, None before the first."""
        return self._replica.version

    @property
    def digest(self) -> str | None:
        """The sha256 of this version's record."""
        return self._replica.digest

    @property
    def pin(self) -> str:
        """Which versions it takes: `newest`, a number to stay at, `every 10`, `2 behind`. May be set at any time."""
        return str(self._pin)

    @pin.setter
    def pin(self, text: str | int) -> None:
        self._pin = Pin.parse(str(text))
        self._wake.set()

    def sync(self) -> int:
        """Look now, and take what there is; return the number of the version that the weights are.

        Raises:
            NotPublishedError: the channel has no version yet.
            DeltaSyncError: the newest version could not be taken; the version before stays.
        """
        self._refuse_inside()
        return self._advance()

    def wait(self, version: int | None = None, timeout_s: float = 60.0) -> int:
        """Wait until the weights are this version or a later one; by default, until they are any version.

        Raises:
            AckTimeoutError: they are not after `timeout_s`; it says why.
        """
        wanted = 1 if version is None else version
        with self._moved:
            if not self._moved.wait_for(lambda: (self.version or 0) >= wanted, timeout_s):
                message = f"After {timeout_s:g} s the weights are version {self.version}, not {wanted}."
                raise AckTimeoutError(message if self.error is None else f"{message} {self.error}")
            assert self.version is not None
            return self.version

    @contextlib.contextmanager
    def hold(self) -> Iterator[int | None]:
        """Return a context in which nothing changes: all forward calls inside see the version whose number it gives."""
        with self._gate.inside():
            yield self.version

    def close(self) -> None:
        """Stop following. The module keeps its weights."""
        self._refuse_inside()
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._unwraps.close()
        if self._replica.identity is not None:
            self._beat(heartbeat.STOPPED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_inside(self) -> None:
        if self._gate.depth:
            raise ConfigError("Weights cannot change while this thread holds them, or inside a forward call.")

    def _advance(self, known: ObjectInfo | None = None, look: bool = True) -> int:
        with self._busy:
            before = self._replica.identity
            try:
                version = self._replica._advance(self._pin, known=known, look=look)
                self.error = None
                return version
            except DeltaSyncError as error:
                self.error = f"{type(error).__name__}: {error}"
                raise
            finally:
                if self._replica.identity != before:
                    with self._moved:
                        self._moved.notify_all()

    def _run(self) -> None:
        reported, beat_s = self.error, -math.inf

        def on_change(info: ObjectInfo | None) -> None:
            self._known = info
            self._wake.set()

        with Poll(self._store, self._settings.poll_interval_s, on_change) as poll:
            while not self._ended.is_set():
                self._wake.clear()
                before = self._replica.identity
                self._poll()
                if self.error is not None and self.error != reported:
                    logger.warning("deltasync: %s", self.error)
                moved, now_s = self._replica.identity != before, time.monotonic()
                if moved or self.error != reported or now_s - beat_s >= self._settings.heartbeat_interval_s:
                    self._beat("serving" if self.error is None else "failed")
                    beat_s = now_s
                reported = self.error
                self._wake.wait(poll.delay_s(moved, settled=self.error is None))

    def _poll(self) -> None:
        """Take one step, if there is one. An error is kept in `error`; the next poll tries again."""
        known, self._known = self._known, None
        try:
            self._advance(known, look=False)
        except DeltaSyncError:
            pass
        except Exception as error:  # the module keeps the weights it has, and says why
            self.error = printable(f"Unexpected {type(error).__name__}: {error}")
            logger.exception("deltasync failed unexpectedly")

    def _beat(self, state: str) -> None:
        serving = self._replica.identity
        document = Heartbeat(
            replica_id=self._settings.replica_id,
            run_id=self._reader.run_id,
            version=None if serving is None else serving.version,
            epoch=None if serving is None else serving.epoch,
            sha256=None if serving is None else serving.sha256,
            state=state if serving is not None or state == "failed" else "waiting",
            pin=None if self._pin == NEWEST else str(self._pin),
            error=self.error,
        )
        try:
            heartbeat.write(self._store, document)
        except StoreError as error:
            logger.warning("deltasync: heartbeat not written: %s", error)


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
    named = names if callable(names) else lambda own: names.get(own, plain_name(own))
    chosen = ReplicaSettings.from_env(**settings)
    if "replica_id" not in settings:
        chosen = dataclasses.replace(chosen, replica_id=f"{chosen.replica_id[:80]}-{os.getpid()}")
    return Following(module, open_nearest(channel), chosen, named, background)
