"""vLLM's endpoint plugin `deltasync`: starts the driver with the server and adds its routes.

GET /deltasync/status    version served, lag, errors, and each commit's numbers
GET /deltasync/digest    sha256 of every live tensor (only with DELTASYNC_DIGEST_ROUTE=1)
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from typing import Any

from fastapi import FastAPI, HTTPException

from deltasync.config import ReplicaSettings
from vllm_plugin.driver import Driver

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares


class DeltaSyncEndpoints:
    """See `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "deltasync"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._settings = ReplicaSettings.from_env()
        self._driver: Driver | None = None
        self._task: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""

        @app.get("/deltasync/status")
        async def status() -> dict[str, Any]:
            return self._running().status()

        if self._settings.digest_route:

            @app.get("/deltasync/digest")
            async def digest() -> dict[str, Any]:
                return await self._running().digest()

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start the driver."""
        if self._settings.channel is None or engine_client is None:
            logger.warning("deltasync is loaded but follows nothing: set DELTASYNC_CHANNEL")
            return
        if not args.worker_extension_cls:
            raise ValueError(
                "DELTASYNC_CHANNEL is set, but vLLM was started without "
                "--worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension."
            )
        if self._settings.kv_cache == "keep" and args.enable_prefix_caching is not False:
            logger.warning(
                "deltasync keeps running requests' KV cache over a commit, and vLLM can only drop its prefix cache together "
                "with theirs; new requests may reuse prefixes of older weights. Start vLLM with --no-enable-prefix-caching, "
                "or set DELTASYNC_KV_CACHE=recompute."
            )
        self._driver = Driver(engine_client, self._settings)
        self._task = asyncio.create_task(self._driver.run(), name="deltasync-driver")

    def _running(self) -> Driver:
        if self._driver is None:
            raise HTTPException(503, "deltasync follows nothing: set DELTASYNC_CHANNEL.")
        return self._driver
