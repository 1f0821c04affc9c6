"""`transformers serve` with a model that follows a run: an evaluator, or a rollout worker for any
architecture.

    python examples/serve_transformers.py MODEL --channel s3://bucket/run [options of transformers serve]

Newer weights come between two forward calls, of `generate` and of `--continuous-batching` alike. It adds the
routes `GET /deltasync/status`, `/deltasync/ready` and `/deltasync/digest`, the sha256 of each live tensor.
Replies that are not streamed name the versions that were live meanwhile: `x-deltasync-versions: first..last`.
A request may demand a version by `x-deltasync-version` (docs/operations/caches.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import MutableMapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from transformers.cli import transformers as cli
from transformers.cli.serving import model_manager, server

import deltasync
from deltasync.config import ReplicaSettings
from deltasync.errors import DeltaSyncError
from deltasync.serve import replies
from deltasync.serve.constraint import (
    App,
    Message,
    Receive,
    Send,
    VersionConstraint,
    constraint,
    reply_error,
    require_version,
)
from deltasync.tensors.bits import bits_of


class Manager(model_manager.ModelManager):
    """Loads the model that follows, and no other."""

    settings: ReplicaSettings
    following: deltasync.ModuleReplica

    def _load_model(self, *arguments: Any, **options: Any) -> Any:
        model = super()._load_model(*arguments, **options)
        type(self).following = deltasync.follow(model.eval(), self.settings.channel or "")
        self.model = model
        return model

    def shutdown(self) -> None:
        """Stop following; the server ends."""
        self.following.close()
        super().shutdown()


def named(app: App, manager: Manager) -> App:
    """ASGI middleware that names the versions which made a reply, and refuses it if its request demands
    another one.
    """

    async def call(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        first, held = manager.following.version, replies.held(manager.following, constraint.get())
        streams = refused = False

        async def send_if_held(message: Message) -> None:
            nonlocal streams, refused
            if refused:
                return
            why = held.refusal
            if message["type"] == "http.response.start":
                headers = {name.lower(): value for name, value in message["headers"]}
                streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
                if why is not None and not streams:
                    refused = True
                    return await reply_error(send, 409, why)
                if first is not None and not streams:
                    value = f"{first}..{manager.following.version}".encode()
                    message["headers"] = [*message["headers"], (replies.VERSIONS_HEADER.encode(), value)]
            elif why is not None and streams:
                refused = True
                error = {"error": {"message": why, "type": "ConflictError", "code": 409}}
                message = {"type": "http.response.body", "body": f"data: {json.dumps(error)}\n\n".encode()}
            await send(message)

        await app(scope, receive, send_if_held)

    return call


def build_server(manager: Manager, *arguments: Any, generation_state: Any, **options: Any) -> FastAPI:
    """Build transformers' application with the routes and the header."""
    app = _build_server(manager, *arguments, generation_state=generation_state, **options)
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", "") not in ("/reset", "/load_model")
    ]

    @app.get("/deltasync/{what}")
    def answer(what: str, request: Request) -> Response:
        def live() -> dict[str, Any]:
            return {name: bits_of(tensor) for name, tensor in manager.model.state_dict().items()}

        path, token = f"/deltasync/{what}?{request.url.query}", request.headers.get("authorization")
        code, body = replies.answer(manager.following, manager.settings, path, token, live) or (
            404,
            {"error": "Not found."},
        )
        return JSONResponse(body, code)

    async def reach(wanted: VersionConstraint) -> VersionConstraint:
        return await replies.reached(manager.following, wanted)

    app.add_middleware(named, manager=manager)
    app.add_middleware(require_version, wait_until_met=reach)
    return app


_build_server = server.build_server


def main() -> None:
    """Serve."""
    try:
        model, Manager.settings, others = replies.server_settings("python examples/serve_transformers.py")
    except DeltaSyncError as error:
        sys.exit(f"deltasync: {error}")
    model_manager.ModelManager, server.build_server = Manager, build_server  # type: ignore[misc]
    sys.argv[1:] = ["serve", model, *others]
    cli.app()


if __name__ == "__main__":
    main()
