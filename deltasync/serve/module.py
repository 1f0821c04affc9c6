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
import importlib.metadata
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch.nn.parameter import is_lazy

from deltasync.channel.failover import open_failover
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import ReplicaSettings, parse_pin, pin_text
from deltasync.errors import ConfigError, ModelMismatchError, NotPublishedError
from deltasync.following import Follow
from deltasync.following.status import Commit, Status
from deltasync.following.target import Identify
from deltasync.following.weights import StagedVersion
from deltasync.serve import in_place
from deltasync.serve.gate import Gate, GatedTarget, Mapped, Names, Part, check_memory, plain_name, reclassed
from deltasync.serve.heartbeats import HeartbeatWriter
from deltasync.serve.kept import KeptValues
from deltasync.stores import Store

_WAIT_S = 5.0  # from when on a commit that waits for forward calls is reported


class ModuleReplica:
    """A module that follows a channel; made by `deltasync.follow`. Use it as a context, or `close` it."""

    def __init__(self, follow: Follow, gate: Gate, gated: contextlib.ExitStack, background: bool) -> None:
        self._follow, self._gate, self._gated = follow, gate, gated
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
        """The reason why the weights are not newer, in one sentence; None if there is none."""
        if self._gate.fork is not None:
            return self._gate.fork
        since_s = self._gate.waits_since_s
        waits_s = 0.0 if since_s is None else time.monotonic() - since_s
        if waits_s > _WAIT_S:
            return f"A version has waited for forward calls or a hold() to end for {waits_s:.0f} s."
        return None if self._follow.state == "waiting" else self._follow.error

    @property
    def exchanges(self) -> int:
        """A number that grows whenever the weights may have changed: caches of another one are of other
        weights.
        """
        return self._gate.closings

    @property
    def not_ready(self) -> str | None:
        """Why a server should answer no requests with the module, in one sentence; None if its version is new
        enough.
        """
        return self._gate.refusal or self._follow.not_ready

    @property
    def status(self) -> Status:
        """State, versions and commits, as a server's `GET /deltasync/status`."""
        status, refusal = self._follow.status(), self._gate.refusal
        if refusal is not None and (status.state == "serving" or self._gate.fork is not None):
            status.state, status.error = "failed", refusal
        return status

    @property
    def pin(self) -> str:
        """The version that it stays at, or `newest`. May be set at any time.

        Raises:
            MissingVersionError: when it is set to a number that the channel does not have; it stays as it
                was.
        """
        return pin_text(self._follow.pin)

    @pin.setter
    def pin(self, text: str | int) -> None:
        self._follow.set_pin(parse_pin(str(text)))

    def sync(self) -> int:
        """Refresh now, apply new versions, and return the number of the version that the weights are.

        Raises:
            NotPublishedError: the channel has no version yet.
            DeltaSyncError: the newest version could not be taken; the version before stays.
        """
        self._refuse_inside()
        return self._follow.catch_up()

    def wait(self, version: int | None = None, timeout_s: float = 60.0) -> int:
        """Wait until the weights are this version or a later one; pinned to a number, exactly that one. By
        default any.

        Raises:
            AckTimeoutError: they are not after `timeout_s`; it says why.
            ApplyError: the pin keeps the module from that version.
        """
        return self._follow.wait(version, timeout_s)

    @contextlib.contextmanager
    def hold(self, wait_s: float = 0.0) -> Iterator[int | None]:
        """Return a context in which nothing changes: all forward calls inside see the version whose number it
        gives.

        Args:
            wait_s: How long to wait while it is not known what the weights are.

        Raises:
            ApplyError: it is still not known.
        """
        with self._gate.inside(wait_s, holds=True):
            yield self.version

    def close(self) -> None:
        """Stop following. The module keeps its weights."""
        self._refuse_inside()
        self._follow.stop()
        self._gated.close()

    def __repr__(self) -> str:
        follow = self._follow
        return f"ModuleReplica({follow.reader.store.url!r}, version={follow.version}, state={follow.state!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_inside(self) -> None:
        if self._gate.fork is None and self._gate.depth:
            raise ConfigError("Weights cannot change while this thread holds them, or inside a forward call.")


class ModuleTarget(GatedTarget):
    """The memory of a torch module."""

    def __init__(self, module: torch.nn.Module, reader: ChannelReader, names: Names, gate: Gate) -> None:
        super().__init__(module, reader, names, gate)
        self._kept = KeptValues(module, self._is_own)
        self._mine = [*self._followed().values()]
        # those as a version was staged, if they were in place
        self._staged: dict[str, torch.Tensor] | None = None
        # These frames are not of the model, and not compiled with it.
        uncompiled: Any = torch.compiler.disable
        gate.begun, gate.ended = uncompiled(gate.begun), uncompiled(gate.ended)

    def open(self, identify: Identify) -> None:
        """Find the channel's tensors in the module, and which version they are, if any."""
        self._note_kind()
        self._kept.check()
        self._kept.scan()
        with self._gate.alone():
            self._kept.drop()
        super().open(identify)
        self._mine = [*self._followed().values()]

    def _check_config(self, config: Mapping[str, Any]) -> None:
        held = getattr(self._module, "peft_config", {})
        for name in getattr(self._module, "active_adapters", ()):
            if name in held:
                in_place.check_config(config, held[name].to_dict())

    def _is_own(self, name: str) -> bool:
        """Whether `names`, which may know those of the state_dict alone, gives None, and not because of an
        adapter.
        """
        try:
            return plain_name(name) is not None and self._names(name) is None
        except Exception:  # noqa: BLE001 - of the caller's function
            return False

    def _mapped(self, state: Mapping[str, Any]) -> Mapped:
        held = [*self._module.parameters(), *self._module.buffers()]
        own, storages = {*map(id, held)}, {*map(_storage, held)}
        for name, tensor in state.items():
            if self._names(name) is None or not isinstance(tensor, torch.Tensor):
                continue
            check_memory(name, tensor)
            if not tensor.numel():
                continue
            if id(tensor) not in own and _storage(tensor) not in storages:
                raise ModelMismatchError(
                    f"{name} in the module's state_dict is a copy, made by get_extra_state or a hook, of "
                    "what the module "
                    "computes with, so it cannot be written: map it to None in `names` if the module keeps "
                    "its own."
                )
            if _is_shared(tensor):
                raise ModelMismatchError(
                    f"{name} is in memory that other processes may read, which no gate keeps from them while "
                    "a version is "
                    "written: follow with a module of its own memory, such as copy.deepcopy makes, in each "
                    "process."
                )
        for path, module in self._module.named_modules():
            if getattr(module, _MERGED, None):
                raise ModelMismatchError(
                    f"An adapter is merged into the weights of {path}, so they are not the channel's: call "
                    "unmerge_adapter() on the module."
                )
        return super()._mapped(state)

    def _state(self) -> Mapping[str, Any]:
        return self._module.state_dict(keep_vars=True)

    def _followed(self) -> dict[str, torch.Tensor]:
        named = ((own, each) for own, each in self._state().items() if isinstance(each, torch.Tensor))
        return {own: each for own, each in named if self._names(own) is not None}

    def _found(self) -> dict[str, object]:
        return {own: self._place(each) for own, each in self._followed().items()}

    def _held(self) -> list[Part]:
        followed = {id(each) for each in self._followed().values()}
        found: list[Part] = []
        for module in self._module.modules():
            found += ((module._modules, name, child, None) for name, child in module._modules.items())
            for held in (module._parameters, module._buffers):
                found += (
                    (held, name, each, self._place(each))
                    for name, each in held.items()
                    if id(each) in followed
                )
            if (merged := vars(module).get(_MERGED)) is not None:
                found.append((vars(module), _MERGED, merged, self._place(merged)))
        return found

    def _place(self, part: Any) -> object:
        """As `GatedTarget._place`. An address identifies memory only while that is held, as `Segment`s hold
        it.
        """
        if isinstance(part, list):
            return tuple(part)
        if not isinstance(part, torch.Tensor) or is_lazy(part):
            return None
        version = 0 if part.is_inference() else part._version  # grows with most writes by others
        try:
            return part.data_ptr(), part.device, part.dtype, part.shape, part.stride(), version
        except RuntimeError:  # sparse and nested ones
            return None

    def _writes(self) -> int:
        return sum(each._version for each in self._mine if not each.is_inference())

    def _call_begun(self) -> int:
        if not self._first_ended:
            self._kept.begin()
        return super()._call_begun()

    def _call_ended(self, begun: int) -> str | None:
        if not self._first_ended:
            self._kept.end()
        return super()._call_ended(begun)

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion | None:
        """Stage a chain (`GatedTarget.stage`). Looks for kept values at the end, so that the commit's pause
        need not.
        """
        staged = super().stage(chain)
        if staged is not None:
            self._kept.scan()
            followed = self._followed()
            is_in_place = {own: self._place(each) for own, each in followed.items()} == self._storages
            self._staged = followed if is_in_place else None
        return staged

    @property
    def _is_as_staged(self) -> bool:
        if self._staged is None or not self._kept.is_scanned:
            self._staged = None
            return not self._is_moved
        held = {id(part) for _, _, part, _ in self._parts}
        # made by hooks of state_dict
        others = ((own, each) for own, each in self._staged.items() if id(each) not in held)
        return self._is_in_place() and all(self._place(each) == self._storages[own] for own, each in others)

    def _note_places(self) -> None:
        if self._staged is None:
            super()._note_places()
            return
        found = {id(each): self._place(each) for each in self._staged.values()}
        self._storages = {own: found[id(each)] for own, each in self._staged.items()}
        self._parts = [
            (held, name, part, found[id(part)] if id(part) in found else self._place(part))
            for held, name, part, _ in self._parts
        ]
        self._staged = None

    def _exchange(self, staged: StagedVersion) -> Commit:
        self._kept.drop()
        try:
            commit = super()._exchange(staged)
        finally:
            # of the weights in another dtype, which a context of torch.autocast keeps
            torch.clear_autocast_cache()
        self._kept.remake()
        followed = self._followed() if self._staged is None else self._staged
        written = [each for each in followed.values() if not each.is_inference()]
        torch.autograd.graph.increment_version(written)  # a backward that needs the bits of before raises
        return commit

    def _finish_calls(self) -> None:
        for device in {tensor.device for tensor in self.tensors.values() if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)  # kernels that forward calls have launched


_MERGED = "merged_adapters"  # attribute of a layer of PEFT: the adapters that were added to its weight


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # it has no memory of its own
        return 0


def _is_shared(tensor: Any) -> bool:
    """Whether another process can reach a tensor's memory, by torch's means."""
    if not tensor.is_cuda:
        return bool(tensor.is_shared())
    known = sys.modules.get("torch.multiprocessing.reductions")
    held = tensor.untyped_storage()._cdata
    return known is not None and any(
        getattr(ref, "cdata", None) == held for ref in [*known.shared_cache.values()]
    )


_gates: weakref.WeakKeyDictionary[torch.nn.Module, Gate] = weakref.WeakKeyDictionary()  # of followed modules
_followed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # these, and all modules in them


_FULLGRAPH = (
    "deltasync: the gate of a followed module is not compiled. For fullgraph=True compile what is inside of "
    "it: call "
    "module.compile(fullgraph=True) before deltasync.follow(module)"
)


def _batching(given: Any) -> Any:
    """Return options of transformers' continuous batching with which nothing of an older version is computed
    with.

    Shared prefixes are found by their tokens alone, and a CUDA graph is replayed without a forward call that
    could wait.
    """
    if given is None:
        given = importlib.import_module("transformers").ContinuousBatchingConfig()
    return dataclasses.replace(given, allow_block_sharing=False, use_cuda_graph=False)


# The gate is not compiled; the forward call inside it is.
@torch.compiler.disable(recursive=False, reason=_FULLGRAPH)  # type: ignore[untyped-decorator, no-untyped-call]
def _passed(module: torch.nn.Module, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a call of a module gives inside of its gate, if it follows."""
    gate = _gates.get(module)
    if gate is None:
        return call(*arguments, **options)
    if getattr(options.get("cache"), "allow_block_sharing", False):  # of transformers' continuous batching
        raise ConfigError(
            "Continuous batching shares the blocks of equal prefixes, also of an older version's: make its "
            "manager by "
            "model.init_continuous_batching() after follow(), or with allow_block_sharing=False."
        )
    if torch.is_grad_enabled() and not gate.depth and any(each.requires_grad for each in module.parameters()):
        raise ConfigError(
            "A forward call with gradients needs the same weights until its backward: put both into "
            "`hold()`, or the "
            "call into torch.no_grad()."
        )
    with gate.inside():
        return call(*arguments, **options)


@functools.cache
def _gated(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a class like `kind` whose calls pass the gate of a followed module.

    The module's class is what tells: deep copies and pickles of it are of `kind`, and compute with their own
    weights. Hooks would not do, because an interrupt skips them; nor would an attribute `forward`, which
    copies take along.
    """

    class Gated(kind):  # type: ignore[misc, valid-type]
        deltasync_kind = kind

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return _passed(self, super().__call__, *arguments, **options)

        # what a bound `__call__` of before leads to
        def _call_impl(self, *arguments: Any, **options: Any) -> Any:
            return _passed(self, super()._call_impl, *arguments, **options)

        def forward(self, *arguments: Any, **options: Any) -> Any:
            return _passed(self, super().forward, *arguments, **options)

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "forward" and self in _gates:
                _gate_forward(self)

        if hasattr(kind, "init_continuous_batching"):

            def init_continuous_batching(
                self,
                generation_config: Any = None,
                continuous_batching_config: Any = None,
                *arguments: Any,
                **options: Any,
            ) -> Any:
                given = continuous_batching_config
                if self in _gates:
                    given = _batching(given or getattr(generation_config, "continuous_batching_config", None))
                return super().init_continuous_batching(generation_config, given, *arguments, **options)

        def __reduce_ex__(self, protocol: Any) -> Any:
            _, _, state, *more = super().__reduce_ex__(protocol)
            own = getattr(vars(self).get("forward"), _OWN, None)
            if own is not None and isinstance(state, dict):
                state = state | {"forward": own}
            return copyreg._reconstructor, (kind, object, None), state, *more  # type: ignore[attr-defined]

        def __copy__(self) -> Any:
            """Return a shallow copy, which has the same weights and so passes the same gate."""
            if hasattr(kind, "__copy__"):
                made = super().__copy__()
            else:
                make, given, state, *_ = self.__reduce_ex__(4)
                made = make(*given)
                made.__setstate__(state)
            gate = _gates.get(self)
            if gate is not None and made not in _gates:
                _gates[made] = gate
                known: Any = type(made)
                object.__setattr__(made, "__class__", _gated(getattr(known, "deltasync_kind", known)))
                _gate_forward(made)
            return made

    Gated.__name__, Gated.__qualname__, Gated.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    functools.update_wrapper(Gated.forward, kind.forward)
    return Gated


_OWN = "deltasync_own"  # attribute of a function that stands for a module's attribute `forward`: that one


def _gate_forward(module: torch.nn.Module) -> None:
    """Have an attribute `forward` of a followed module, as accelerate sets one, pass its gate."""
    own = vars(module).get("forward")
    if own is None or hasattr(own, _OWN):
        return

    def forward(*arguments: Any, **options: Any) -> Any:
        return _passed(module, own, *arguments, **options)

    functools.update_wrapper(forward, own)
    setattr(forward, _OWN, own)
    vars(module)["forward"] = forward


def _release(gate: Gate) -> None:
    """Let nothing pass a gate any more: the modules that do, and shallow copies of them."""
    for each in [each for each, passed in _gates.items() if passed is gate]:
        del _gates[each]
        if (own := getattr(vars(each).get("forward"), _OWN, None)) is not None:
            vars(each)["forward"] = own
        if (kind := getattr(type(each), "deltasync_kind", None)) is not None:
            object.__setattr__(each, "__class__", kind)


@contextlib.contextmanager
def _gating(module: torch.nn.Module, gate: Gate) -> Iterator[None]:
    """Return a context in which a module, and each model in it that has a `generate`, passes a gate."""
    if any(each in _followed for each in module.modules()):
        raise ConfigError("This module, or a part of it, follows a channel already: close() that first.")
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            "A scripted or traced module has no Python call that could wait for a version: follow with its "
            "source."
        )
    with contextlib.ExitStack() as stack:
        stack.callback(_release, gate)
        for each in module.modules():
            # In a wrapped model, the model inside has the `generate` that is called.
            if each is module or callable(getattr(type(each), "generate", None)):
                _gates[each] = gate
                stack.enter_context(reclassed(each, _gated(type(each))))  # type: ignore[arg-type]
                _gate_forward(each)
        _followed.update(module.modules())
        stack.callback(_followed.difference_update, [*module.modules()])
        yield


class AnyModule(Protocol):
    """A `torch.nn.Module` or an `mlx.nn.Module`, which need not be installed."""

    def parameters(self) -> Any:
        """Return its parameters."""


def follow(
    module: AnyModule,
    channel: str | os.PathLike[str] | Store,
    *,
    names: Names | Mapping[str, str | Sequence[str] | None] = plain_name,
    background: bool = True,
    **settings: Any,
) -> ModuleReplica:
    """Patch a module's weights in place with the versions of a channel, between its forward calls.

    Returns once the module has the newest version, or at once if there is none yet. Only the parameters and
    buffers of `module` are mutated, and its `forward` is wrapped until `close`, to keep commits and forward
    calls apart. Meanwhile call its submodules by themselves only in `hold()`.

    Args:
        module: A `torch.nn.Module` on any device, or an `mlx.nn.Module`, whose tensors have the channel's
            dtypes and shapes.
        channel: URL of the channel, or URLs of it and its copies with spaces between them; or an opened
            store.
        names: The channel's names for the tensors of the module's `state_dict`: a function, or a mapping that
            may leave out equal names. Several names are tensors that lie one after the other along the first
            dimension; None is a tensor that the channel does not have. By default names are equal, except for
            prefixes of torch.compile and peft, and adapters are left out.
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
    make, gating = _adapter(module)
    named = names if callable(names) else lambda own: names.get(own, plain_name(own))
    chosen = ReplicaSettings.from_env(**settings)
    if "replica_id" not in settings:
        chosen = dataclasses.replace(chosen, replica_id=f"{chosen.replica_id[:80]}-{os.getpid()}")
    gate, gated = Gate(), contextlib.ExitStack()
    reader = ChannelReader(open_failover(channel), chosen.trusted_keys)
    target = make(module, reader, named, gate)
    target.audit_s = chosen.audit_s
    following = Follow(reader, target, chosen, heartbeats=HeartbeatWriter(reader.store))
    gated.enter_context(gating(module, gate))
    return ModuleReplica(following, gate, gated, background)


_Adapter = tuple[type[GatedTarget], Callable[[Any, Gate], contextlib.AbstractContextManager[None]]]


def _adapter(module: Any) -> _Adapter:
    """Return the target of a framework's modules, and its context in which a module's calls pass a gate."""
    if isinstance(module, torch.nn.Module):
        return ModuleTarget, _gating
    frameworks = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    for entry in importlib.metadata.entry_points(group="deltasync.modules"):
        if entry.name in frameworks:
            found: _Adapter = entry.load()
            return found
    raise ConfigError(f"follow() takes a torch.nn.Module or an mlx.nn.Module, not {module!r:.100}.")
