"""mlx_lm's server, whose model follows a channel: python -m mlx_plugin.server MODEL --channel URL [its other options].

It adds `GET /deltasync/status`, `/deltasync/ready` (503 until a version that is new enough is served) and, with
DELTASYNC_DIGEST_ROUTE=1, `/deltasync/digest` (sha256 of each live array), and to replies the headers `x-deltasync-versions`
and `x-deltasync-spans`, as vLLM's replicas have them. No prompt cache outlives its version.
"""

import argparse
import hashlib
import itertools
import json
import sys
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm import server

import deltasync
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.following.requests import token_matches
from mlx_plugin.module import arrays, bits

following: deltasync.Following  # by the one model that is served
settings: ReplicaSettings


class Provider(server.ModelProvider):
    """Gives the model that follows, and no other."""

    def load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> Any:
        """Return the model and its tokenizer."""
        if self._model_map.get(model_path, model_path) != self.cli_args.model or adapter_path is not None:
            raise ConfigError(f"This server follows a channel and serves {self.cli_args.model} alone.")
        return super().load("default_model", None, "default_model")


class Caches(server.LRUPromptCache):
    """Prompt caches of the weights that were live when one was last asked for."""

    at = -1  # `Following.exchanges` then

    def fetch_failover_cache(self, model: Any, tokens: list[int]) -> Any:
        """Return the nearest cache of the live weights, and the tokens that it lacks."""
        if self.at != following.exchanges:
            self.trim_to(n_sequences=0)
            self.at = following.exchanges
        return super().fetch_failover_cache(model, tokens)

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: Any, **options: Any) -> None:
        """Keep a cache, unless the weights have changed since it was begun."""
        if prompt_cache and self.at == following.exchanges:
            super().insert_cache(model, tokens, prompt_cache, **options)


class Token(int):
    """A token, and the version that it was sampled with; None before the first."""

    version: int | None = None


class Batches(server.BatchGenerator):
    """Generates for several requests, each step with one version."""

    caches: Caches
    _since: dict[int, int] = {}  # noqa: RUF012 - replaced. `Caches.at` when each request got its cache
    _version: int | None = None  # of the last step, whose tokens the next one returns

    def insert_segments(self, *arguments: Any, **options: Any) -> Any:
        """Add a request, whose cache was just fetched."""
        uids, at = super().insert_segments(*arguments, **options), self.caches.at
        self._since = {uid: since for uid, since in self._since.items() if since == at} | dict.fromkeys(uids, at)
        return uids

    def _is_of_one_version(self, uid: int) -> bool:
        return self._since.get(uid) == following.exchanges

    def next(self) -> Any:
        """Take a step."""
        with following.hold() as version:
            prompts, generated = super().next()
        for each in generated:
            each.token = Token(each.token)
            each.token.version = self._version
            if each.finish_reason is not None and not self._is_of_one_version(each.uid):
                each.prompt_cache = []  # which is not kept
        self._version = version
        return prompts, generated

    def extract_cache(self, uids: list[int]) -> Any:
        """Return requests' caches, empty if they have seen several versions."""
        found = super().extract_cache(uids)
        return {uid: (cache if self._is_of_one_version(uid) else [], held) for uid, (cache, held) in found.items()}


class Handler(server.APIHandler):
    """Says which version is served, and which ones made a reply."""

    def generate_response(self, *arguments: Any, tokens: list[int] | None = None, **options: Any) -> Any:
        """Return a reply's body. The headers of one that is not streamed are still to be sent."""
        made: list[Any] = [getattr(token, "version", None) for token in tokens or ()]
        if not self.stream and made and None not in made:
            spans = [[version, len([*group])] for version, group in itertools.groupby(made)]
            self.send_header("x-deltasync-versions", f"{min(made)}..{max(made)}")
            self.send_header("x-deltasync-spans", json.dumps([spans], separators=(",", ":")))
        return super().generate_response(*arguments, tokens=tokens, **options)

    def do_GET(self) -> None:
        """Answer a GET request."""
        code, reason, token = 200, following.not_ready, settings.http_token
        body: dict[str, Any]
        is_open = token is None or token_matches(self.headers.get("authorization"), token)
        if self.path in ("/deltasync/status", "/deltasync/digest") and not is_open:
            code, body = 401, {"error": "Send DELTASYNC_HTTP_TOKEN as a bearer token."}
        elif self.path == "/deltasync/status":
            body = msgspec.to_builtins(following.status)
        elif self.path == "/deltasync/ready":
            code, body = 200 if reason is None else 503, {"ready": reason is None, "reason": reason}
        elif self.path == "/deltasync/digest" and settings.digest_route:
            with following.hold() as version:
                held = arrays(self.response_generator.model_provider.model).items()
                sha256 = {name: hashlib.sha256(bits(each).tobytes()).hexdigest() for name, each in held}
            body = {"version": version, "sha256": sha256}
        else:
            return super().do_GET()
        self._set_completion_headers(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


def _run(host: str, port: int, provider: Provider) -> None:
    global following
    args = provider.cli_args
    if args.adapter_path is not None or mx.distributed.init().size() > 1:
        raise ConfigError("A server that follows a channel takes no --adapter-path and runs in one process.")
    provider.load_default()
    following = deltasync.follow(provider.model, settings.channel or "", replica_id=settings.at_port(port).replica_id)
    Batches.caches = Caches(args.prompt_cache_size)
    server._run_http_server(host, port, server.ResponseGenerator(provider, Batches.caches), handler_class=Handler)


def main() -> None:
    """Serve."""
    global settings
    parser = argparse.ArgumentParser("python -m mlx_plugin.server", epilog="Other options are those of mlx_lm.server.")
    parser.add_argument("model", help="directory or name of the model")
    parser.add_argument("--channel", help="URL of the channel; by default DELTASYNC_CHANNEL")
    args, sys.argv[1:] = parser.parse_known_args()
    sys.argv[1:] = ["--model", args.model, *sys.argv[1:]]
    server.ModelProvider, server.run, server.BatchGenerator = Provider, _run, Batches
    try:
        settings = ReplicaSettings.from_env(channel=args.channel)
        if settings.channel is None:
            raise ConfigError("Name the channel by --channel or DELTASYNC_CHANNEL.")
        server.main()
    except DeltaSyncError as error:
        sys.exit(f"deltasync: {error}")


if __name__ == "__main__":
    main()
