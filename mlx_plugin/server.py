"""mlx_lm's server over a model that follows a channel: python -m mlx_plugin.server MODEL --channel URL [its
options].
"""

import asyncio
import io
import json
import sys
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
from mlx_lm import server

import deltasync
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.serve import replies
from deltasync.serve.constraint import ReplyGuard, read
from deltasync.serve.requests import until_ready
from mlx_plugin.module import MlxTarget

following: deltasync.ModuleReplica  # by the one model that is served
settings: ReplicaSettings


class _Provider(server.ModelProvider):
    """Gives the model that follows, and no other."""

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> Any:
        is_another = (
            self._model_map.get(model_path, model_path) != self.cli_args.model or adapter_path is not None
        )
        if is_another or draft_model_path not in (None, "default_model", self.cli_args.draft_model):
            raise ConfigError(f"This server follows a channel and serves {self.cli_args.model} alone.")
        return super().load("default_model", None, "default_model")


class _Caches(server.LRUPromptCache):
    """Prompt caches of the weights that were live when one was last asked for. None is kept of which a
    version changed.
    """

    at = -1  # `ModuleReplica.exchanges` then

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> Any:
        if self.at != following.exchanges:
            self.trim_to(n_sequences=0)
            self.at = following.exchanges
        return super().fetch_nearest_cache(model, tokens)

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: Any, **options: Any) -> None:
        if prompt_cache and self.at == following.exchanges:
            super().insert_cache(model, tokens, prompt_cache, **options)


# with the version that it was sampled with; None before the first
_Token: Any = type("Token", (int,), {"version": None})


class _Batches(server.BatchGenerator):
    """Generates for several requests, each step with one version."""

    caches: _Caches
    _since: dict[int, int] = {}  # noqa: RUF012 - replaced. `_Caches.at` when each request got its cache
    _version: int | None = None  # of the last step, whose tokens the next one returns

    def insert_segments(self, *arguments: Any, **options: Any) -> Any:
        uids, at = super().insert_segments(*arguments, **options), self.caches.at
        self._since = {uid: since for uid, since in self._since.items() if since == at} | dict.fromkeys(
            uids, at
        )
        return uids

    def _kept(self, uid: int, cache: list[Any]) -> list[Any]:
        return cache if self._since.get(uid) == following.exchanges else []

    def next(self) -> Any:
        with following.hold(600.0) as version:
            prompts, generated = super().next()
        for each in generated:
            each.token = _Token(each.token)
            each.token.version = self._version
            if each.finish_reason is not None:
                each.prompt_cache = self._kept(each.uid, each.prompt_cache)
        self._version = version
        return prompts, generated

    def extract_cache(self, uids: list[int]) -> Any:
        return {
            uid: (self._kept(uid, cache), held) for uid, (cache, held) in super().extract_cache(uids).items()
        }


class _RefusedReply(Exception):
    """Another version than the demanded one was live while a reply was made."""


class _Handler(server.APIHandler):
    """Says which version is served, and which ones made a reply."""

    refusal = staticmethod(until_ready(lambda: following.not_ready))

    held: ReplyGuard
    rfile: Any

    def generate_response(self, *arguments: Any, tokens: list[int] | None = None, **options: Any) -> Any:
        if reason := self.held.refusal:
            raise _RefusedReply(reason)
        made_by = [] if self.stream else [getattr(token, "version", None) for token in tokens or ()]
        for header in replies.version_headers(made_by).items():
            self.send_header(*header)
        return super().generate_response(*arguments, tokens=tokens, **options)

    def do_GET(self) -> None:
        target, token = cast(MlxTarget, following._follow.target), self.headers.get("authorization")
        found = replies.answer(following, settings, self.path, token, target.published, target.made)
        self._reply(super().do_GET) if found is None else self._send(*found)

    def do_POST(self) -> None:
        reason = self.refusal() if settings.wait_ready else None
        self._reply(super().do_POST) if reason is None else self._send(503, {"error": reason})

    def _reply(self, reply: Callable[[], None]) -> None:
        """Reply by the version that the request demands, or with 400 or 409."""
        size = self.headers.get("content-length", "")
        body: bytes = self.rfile.read(int(size)) if size.isdecimal() else b""
        self.rfile = io.BytesIO(body)
        try:
            wanted = read(self.headers.items(), self.path.partition("?")[2], body)
            self.held = replies.held(following, wanted and asyncio.run(replies.reached(following, wanted)))
        except DeltaSyncError as error:
            return self._send(400 if isinstance(error, ConfigError) else 409, {"error": str(error)})
        try:
            reply()
        except _RefusedReply as error:
            if self.stream:
                self.wfile.write(f"data: {json.dumps({'error': str(error)})}\n\n".encode())
            else:
                self._headers_buffer.clear()  # of the reply that was begun
                self._send(409, {"error": str(error)})

    def _send(self, code: int, body: Any) -> None:
        self._set_completion_headers(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


def _run(host: str, port: int, provider: _Provider) -> None:
    global following
    if provider.cli_args.adapter_path is not None or mx.distributed.init().size() > 1:
        raise ConfigError("A server that follows a channel takes no --adapter-path and runs in one process.")
    provider.load_default()
    following = deltasync.follow(
        provider.model, settings.channel or "", replica_id=settings.at_port(port).replica_id
    )
    _Batches.caches = _Caches(provider.cli_args.prompt_cache_size)
    server._run_http_server(
        host, port, server.ResponseGenerator(provider, _Batches.caches), handler_class=_Handler
    )


def main() -> None:
    """Serve."""
    global settings
    server.ModelProvider, server.run, server.BatchGenerator = _Provider, _run, _Batches
    try:
        model, settings, others = replies.server_settings("python -m mlx_plugin.server")
        sys.argv[1:] = ["--model", model, *others]
        server.main()
    except DeltaSyncError as error:
        sys.exit(f"deltasync: {error}")


if __name__ == "__main__":
    main()
