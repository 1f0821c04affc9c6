"""All workers of a server as one: RPCs to every one of them, and their shards put together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deltasync.bits import signed_view
from deltasync.channel.record import Stored
from deltasync.errors import ApplyError, SleepingError
from deltasync.live import Region
from deltasync.printable import printable
from deltasync.types import TensorSpec
from vllm_plugin.worker import Handed

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

# Between two looks at work in the background: each is an RPC that runs between two engine steps.
_POLL_S = (0.002, 0.05)
_HANDED_BYTES = 8 << 20  # of records in one call; that goes to each worker


class Workers:
    """RPCs to the workers behind one engine client; each returns one reply per worker, in the order of their ranks."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def rpc(self, method: str, *args: object, check: bool = True) -> list[dict[str, Any]]:
        """Call a method of the worker extension.

        Raises:
            ApplyError: one of them failed, if `check`.
        """
        replies = await self._everywhere(method, args)
        errors = [reply["error"] for reply in replies if "error" in reply and "state" not in reply]
        if check and errors:
            raise told(errors[0])
        return replies

    async def _everywhere(self, method: str, args: tuple[object, ...]) -> list[dict[str, Any]]:
        """Ask the workers of all engines. vLLM's client does too, but tells only what those of the first one reply."""
        if len(self._engines()) < 2:
            return await self._engine.collective_rpc(method, args=args)
        by_engine = await self._ask_engines("collective_rpc", method, None, args, None)
        return [reply for replies in by_engine for reply in replies]

    def _engines(self) -> Sequence[Any]:
        return getattr(getattr(self._engine, "engine_core", None), "core_engines", ())

    async def _ask_engines(self, method: str, *args: object) -> list[Any]:
        """Call a method of every engine."""
        ask = self._engine.engine_core._call_utility_async
        return await asyncio.gather(*(ask(method, *args, engine=engine) for engine in self._engines()))

    async def salted(self) -> bool:
        """Whether all engines keep their prefix cache apart by version, see `vllm_plugin.salt`."""
        try:
            salted = await self._ask_engines("deltasync_salts")
        except Exception:  # of any class: vLLM's for an engine that has no such method
            logger.exception("deltasync asked an engine about its prefix cache")
            return False
        return bool(salted) and all(salted)

    async def call(self, method: str, *args: object, check: bool = True) -> list[dict[str, Any]]:
        """Call a method of every `WorkerReplica`; errors as in `rpc`."""
        return await self.rpc("deltasync_call", method, *args, check=check)

    async def work(self, method: str, *args: object) -> list[dict[str, Any]]:
        """Have all workers do something in the background while tokens are generated; what each ended with.

        Raises:
            ApplyError: one of them failed, and not at what was to be staged.
        """
        wait_s, longest_s = _POLL_S
        replies = await self.call(method, *args)
        while any(reply["state"] == "working" for reply in replies):
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)
            # Those that have ended told so once, and say `idle` from then on.
            later = await self.call("poll")
            replies = [new if old["state"] == "working" else old for old, new in zip(replies, later, strict=True)]
        errors = [reply["error"] for reply in replies if reply["state"] == "failed" and "failed" not in reply]
        if errors:
            raise told(errors[0])
        return replies


def told(error: str) -> ApplyError:
    """The exception for what a worker told."""
    name, _, sentence = error.partition(": ")
    return SleepingError(sentence) if name == SleepingError.__name__ else ApplyError(error)


def by_reason(reasons: dict[str, str]) -> list[dict[str, Any]]:
    """Why tensors take the fallback: for each reason how many do, and the first one's name."""
    names: dict[str, list[str]] = {}
    for name, reason in sorted(reasons.items()):
        names.setdefault(reason, []).append(name)
    return [
        {"reason": printable(reason), "tensors": len(found), "first": printable(found[0])} for reason, found in names.items()
    ]


def log_plan(tensor_count: int, reloaded: dict[str, str]) -> None:
    """Log what was proven about the tensors, and why some take the fallback."""
    logger.info(
        "deltasync load plan is proven: patched_in_place=%d reloaded=%d", tensor_count - len(reloaded), len(reloaded)
    )
    for each in by_reason(reloaded):
        logger.warning(
            "deltasync: %d tensors (%s, ...) take the fallback, because %s: a commit that changes them has vLLM load "
            "their layers again, which takes longer",
            each["tensors"],
            each["first"],
            each["reason"],
        )


def handed(way: Sequence[Stored]) -> list[Handed]:
    """Records as the workers get them, with their bytes as long as those are few: they read the others by themselves."""
    found: list[Handed] = []
    left = _HANDED_BYTES
    for stored in way:
        data = stored.data if stored.size <= left else None
        left -= 0 if data is None else stored.size
        found.append((stored.key, stored.sha256, data))
    return found


def regions_of(reply: dict[str, Any]) -> dict[str, list[Region]]:
    """A worker's regions out of its reply, on the way of which tuples became lists."""
    return {
        name: [(offset, tuple((size, stride) for size, stride in dims)) for offset, dims in regions]
        for name, regions in reply["regions"].items()
    }


def assemble(spec: TensorSpec, regions: list[list[Region]], shards: list[list[bytes]]) -> np.ndarray:
    """A tensor's bits, flat and unsigned, from the bits of the segments that the workers hold.

    Raises:
        ApplyError: two copies of the same elements differ.
    """
    flat_N = np.zeros(spec.element_count, spec.bits_dtype)
    view = signed_view(flat_N)
    seen: dict[Region, bytes] = {}
    for held, data in zip(regions, shards, strict=True):
        for region, bits in zip(held, data, strict=True):
            if seen.setdefault(region, bits) != bits:
                raise ApplyError(f"Two workers hold different copies of the same elements of {spec}.")
            offset, dims = region
            source = torch.frombuffer(bytearray(bits), dtype=view.dtype) if bits else view[:0]
            shape = [size for size, _ in dims]
            view.as_strided(shape, [stride for _, stride in dims], offset).copy_(source.reshape(shape))
    return flat_N
