"""vLLM's engine client: stand-ins for it, and calls that go past it to all engines behind it."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm_plugin import logger


class IdleEngine:
    """Stands in for vLLM's engine client where nothing is generated while the driver runs: all that the driver calls.

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
