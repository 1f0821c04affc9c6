"""`transformers serve` with a model that follows a run: an evaluator, or a rollout worker for any architecture.

    python examples/serve_transformers.py MODEL --channel s3://bucket/run [options of transformers serve]

Newer weights come between two forward calls, of `generate` and of `--continuous-batching` alike. It adds the routes
`GET /deltasync/status`, `/deltasync/ready` and `/deltasync/digest`, the sha256 of each live
tensor. Replies that are not streamed name the versions that were live meanwhile: `x-deltasync-versions: first..last`.
"""

from __future__ import annotations

import sys
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from transformers.cli import transformers as cli
from transformers.cli.serving import model_manager, server

import deltasync
from deltasync.config import ReplicaSettings
from deltasync.following import replies
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
        code, body = replies.answer(manager.following, manager.settings, path, token, live) or (404, {"error": "Not found."})
        return JSONResponse(body, code)

    @app.middleware("http")
    async def versions(request: Request, call_next: Any) -> Response:
        first = manager.following.version
        reply: Response = await call_next(request)
        if first is not None and not reply.headers.get("content-type", "").startswith("text/event-stream"):
            reply.headers[replies.VERSIONS_HEADER] = f"{first}..{manager.following.version}"
        return reply

    return app


_build_server = server.build_server


def main() -> None:
    """Serve."""
    model, Manager.settings, others = replies.server_settings("python examples/serve_transformers.py")
    model_manager.ModelManager, server.build_server = Manager, build_server  # type: ignore[misc]
    sys.argv[1:] = ["serve", model, *others]
    cli.app()


if __name__ == "__main__":
    main()
