"""vLLM's engine client, as far as deltasync uses it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from vllm_plugin import logger


class Engine(Protocol):
    """What the driver calls. `engine_core` is vLLM's own client behind it, None where there is none."""

    engine_core: Any

    async def collective_rpc(self, method: str, *, args: tuple[object, ...]) -> list[Any]:
        """Call a method of every worker. Returns the replies in the order of their ranks."""

    async def is_paused(self) -> bool:
        """Whether generation is paused."""

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Pause generation between two steps."""

    async def resume_generation(self) -> None:
        """Resume generation."""

    async def update_weight_version(self, version: str) -> None:
        """Set the weight version, which labels tokens and keeps the prefix cache apart."""


class IdleEngine:
    """Base of engines that generate nothing during a call of the driver. A subclass has `collective_rpc`."""

    engine_core: Any = None

    async def is_paused(self) -> bool:
        """Return False: nobody else pauses."""
        return False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Do nothing."""

    async def resume_generation(self) -> None:
        """Do nothing."""

    async def update_weight_version(self, version: str) -> None:
        """Do nothing."""


async def call_workers(engine: Engine, method: str, args: tuple[object, ...]) -> list[Any]:
    """Call a method of the workers of all engines. vLLM's own RPC returns the replies of the first engine only."""
    if len(getattr(engine.engine_core, "core_engines", ())) < 2:
        return await engine.collective_rpc(method, args=args)
    by_engine = await _call_engines(engine, "collective_rpc", method, None, args, None)
    return [reply for replies in by_engine for reply in replies]


async def is_salted(engine: Engine) -> bool:
    """Whether all engines keep their prefix cache apart by version, see `vllm_plugin.salt`."""
    try:
        salted = await _call_engines(engine, "deltasync_salts")
    except Exception:  # of any class: vLLM's for an engine that has no such method
        logger.exception("deltasync could not ask an engine about its prefix cache")
        return False
    return bool(salted) and all(salted)


async def _call_engines(engine: Engine, method: str, *args: object) -> list[Any]:
    core = engine.engine_core
    return await asyncio.gather(*(core._call_utility_async(method, *args, engine=each) for each in core.core_engines))
