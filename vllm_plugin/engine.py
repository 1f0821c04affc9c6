"""vLLM's engine client: stand-ins for it, and calls that go past it to all engines behind it, which `install` adds there."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from deltasync.errors import ConfigError
from vllm_plugin import logger


class IdleEngine:
    """Stands in for vLLM's engine client where nothing is generated while the follow loop steps: all that its target calls.

    A subclass has `collective_rpc`, which calls a method of every worker and returns the replies in the order of ranks.
    """

    engine_core: Any = None  # vLLM's own client behind its engine client

    async def is_paused(self) -> bool:
        """Return False: nobody else pauses."""
        return False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Do nothing."""

    async def resume_generation(self) -> None:
        """Do nothing."""

    async def update_weight_version(self, version: str) -> None:
        """Do nothing with the version, which elsewhere labels tokens and keeps the prefix cache apart."""


class Unguarded:
    """An engine client as its class has it, past what `Pauses.guard` put around this one for other callers."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self._engine), name, None)
        return method.__get__(self._engine) if callable(method) else getattr(self._engine, name)


def install() -> None:
    """Add the calls below to engines of this process. Call before the first is made. A second call does nothing."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "deltasync_guard"):
        return
    wake_up = EngineCore.wake_up

    def guard(self: Any) -> None:
        self.deltasync_guarded = True

    @functools.wraps(wake_up)
    def wake_up_paused(self: Any, tags: list[str] | None = None) -> Any:
        """Stay paused once awake, if somebody is there to look at the weights and resume."""
        awake = wake_up(self, tags)
        if awake and getattr(self, "deltasync_guarded", False):
            self.pause_scheduler(mode="keep", clear_cache=False)
        return awake

    def recompute(self: Any) -> None:
        """As vLLM does in a pause that clears its caches, but for that of inputs, which no weights have made."""
        if not self.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("vLLM could not drop the keys of running requests.")
        self.reset_encoder_cache()

    EngineCore.deltasync_guard = guard
    EngineCore.wake_up = wake_up_paused
    EngineCore.deltasync_recompute = recompute
    EngineCore.deltasync_asleep = lambda self: bool(self.model_executor.is_sleeping)


def is_pushed(engine: Any) -> bool:
    """Whether a trainer pushes versions to this engine, by vLLM's own weight-transfer routes."""
    transfer = getattr(getattr(engine, "vllm_config", None), "weight_transfer_config", None)
    return transfer is not None and transfer.backend == "deltasync"


async def guard(engine: Any) -> None:
    """Have all engines stay paused when they wake up from sleep, until somebody resumes them."""
    await _call_engines(engine, "deltasync_guard")


async def is_asleep(engine: Any) -> bool:
    """Whether an engine has memory that is not there."""
    return any(await _call_engines(engine, "deltasync_asleep"))


async def recompute(engine: Any) -> None:
    """Have paused engines drop keys and encoder outputs of all requests, which will compute them again."""
    await _call_engines(engine, "deltasync_recompute")


def check_salted(llm: Any) -> None:
    """Check that an offline `LLM` keeps its caches apart by version, so that none has to be dropped (`vllm_plugin.salt`).

    Raises:
        ConfigError: it was made without deltasync.
    """
    core = llm.llm_engine.engine_core
    try:
        salted = (
            core.call_utility("deltasync_salts") if hasattr(core, "call_utility") else core.engine_core.deltasync_salts()
        )
    except Exception:  # noqa: BLE001 - vLLM's, of any class, for an engine that has no such method
        salted = False
    if not salted:
        raise ConfigError(
            "This LLM would mix versions in its caches, because it was made without deltasync: set DELTASYNC_CHANNEL in the "
            "environment before, and leave VLLM_PLUGINS unset or add deltasync to it."
        )


async def call_workers(engine: Any, method: str, args: tuple[object, ...]) -> list[Any]:
    """Call a method of the workers of all engines. vLLM's own RPC returns the replies of the first engine only."""
    if len(getattr(engine.engine_core, "core_engines", ())) < 2:
        return list(await engine.collective_rpc(method, args=args))
    by_engine = await _call_engines(engine, "collective_rpc", method, None, args, None)
    return [reply for replies in by_engine for reply in replies]


async def is_salted(engine: Any) -> bool:
    """Whether all engines keep their prefix cache apart by version, see `vllm_plugin.salt`."""
    try:
        salted = await _call_engines(engine, "deltasync_salts")
    except Exception:  # of any class: vLLM's for an engine that has no such method
        logger.exception("deltasync could not ask an engine about its prefix cache")
        return False
    return bool(salted) and all(salted)


async def _call_engines(engine: Any, method: str, *args: object) -> list[Any]:
    core = engine.engine_core
    return await asyncio.gather(*(core._call_utility_async(method, *args, engine=each) for each in core.core_engines))
