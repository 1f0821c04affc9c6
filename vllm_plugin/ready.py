"""`DELTASYNC_WAIT_READY`: a server that has just started answers no request with the weights that it happened to load."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_plugin.versions import PATHS

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares


class WaitReady:
    """ASGI middleware that answers 503 to requests for tokens, until the server was ready once.

    Args:
        app: What is wrapped.
        not_ready: Why the server is not ready, None if it is.
    """

    def __init__(self, app: ASGIApp, not_ready: Callable[[], str | None]) -> None:
        self._app = app
        self._not_ready = not_ready
        self._opened = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or whatever else a server has to say."""
        if not self._opened and scope["type"] == "http" and scope["path"].endswith(PATHS):
            try:
                reason = self._not_ready()
            except Exception:  # nobody knows whether it is
                logger.exception("deltasync could not tell whether this server is ready")
                reason = "It cannot be told whether this server is ready."
            if reason is not None:
                error = {"message": reason, "type": "ServiceUnavailableError", "code": 503}
                await JSONResponse({"error": error}, 503, {"retry-after": "1"})(scope, receive, send)
                return
            self._opened = True
        await self._app(scope, receive, send)
