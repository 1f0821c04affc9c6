"""The server. Routes as in OpenEnv, whose clients work with `/ws`:

    GET  /health     {"status": "healthy"}, without a token
    GET  /metadata   name, description, version
    GET  /schema     JSON schemas of action, observation and state
    POST /reset      {"seed": 7, "episode_id": ...}                        begins a game; both are optional
    POST /step       {"action": {"guess": "slate"}, "episode_id": ...}
    GET  /state      ?episode_id=...
    GET  /ws         a WebSocket with a game of its own: reset, step, state, close

OpenEnv's own HTTP routes make a new environment for every request; here the id in the reply of `/reset` keeps
the game. A request that is wrong is answered with 4xx and {"detail": one sentence}, 503 means that all games
are in use.
"""

from __future__ import annotations

import dataclasses
import hmac
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from aiohttp import WSMsgType, web

from deltasync import __version__
from deltasync.errors import ConfigError
from wordle import protocol
from wordle.game import GUESSES, LENGTH, Game, word_list
from wordle.sessions import FullError, Sessions

_LARGEST_REQUEST = 1 << 14
_OPEN_PATHS = ("/health",)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server runs.

    Attributes:
        token: What requests must present as a bearer token; None leaves the server open. Never shown.
    """

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # 0 for a free one
    words: str = "reduced"  # one of `WORD_LISTS`
    sessions: int = 1000  # most games at a time
    idle_s: float = 600.0  # a game not used for so long may be given up
    token: str | None = dataclasses.field(default=None, repr=False)
    tls_cert: Path | None = None  # certificate chain, PEM; with it the server speaks HTTPS only
    tls_key: Path | None = None  # its private key, PEM, if not in the same file


class WordleServer:
    """Serves while the `async with` block lasts."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        words = word_list(settings.words)
        self._sessions = Sessions(words, settings.sessions, settings.idle_s)
        self._rules = f"Guess the secret word: {LENGTH} of the letters {words.letters}, in {GUESSES} guesses."
        app = web.Application(
            client_max_size=_LARGEST_REQUEST, middlewares=[self._check_token, _say_what_is_wrong]
        )
        app.add_routes([
            web.get("/health", self._health),
            web.get("/metadata", self._metadata),
            web.get("/schema", self._schema),
            web.post("/reset", self._reset),
            web.post("/step", self._step),
            web.get("/state", self._state),
            web.get("/ws", self._websocket),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        self.url = ""

    async def __aenter__(self) -> Self:
        settings = self._settings
        context = _tls(settings)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, settings.host, settings.port, ssl_context=context).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"Port {settings.port} on {settings.host} cannot be used: {error.strerror}."
            ) from None
        port = self._runner.addresses[0][1]
        self.url = f"http{'s' if context else ''}://{settings.host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = self._settings.token
        if token is not None and request.path not in _OPEN_PATHS:
            scheme, _, found = request.headers.get("Authorization", "").partition(" ")
            right = hmac.compare_digest(found.strip().encode("utf-8", "replace"), token.encode())
            if scheme.lower() != "bearer" or not right:
                headers = {"WWW-Authenticate": "Bearer"}
                return _json(
                    {"detail": "This server wants its token as a bearer token."}, status=401, headers=headers
                )
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"status": "healthy"})

    async def _metadata(self, _: web.Request) -> web.Response:
        return _json({"name": "wordle", "description": self._rules, "version": __version__})

    async def _schema(self, _: web.Request) -> web.Response:
        return _json(protocol.schemas())

    async def _reset(self, request: web.Request) -> web.Response:
        wanted = _decode(await request.read() or b"{}", protocol.ResetRequest)
        return _json(self._begin(wanted.episode_id, wanted.seed))

    async def _step(self, request: web.Request) -> web.Response:
        wanted = _decode(await request.read(), protocol.StepRequest)
        return _json(self._guess(wanted.episode_id, wanted.action))

    async def _state(self, request: web.Request) -> web.Response:
        return _json(self._state_of(request.query.get("episode_id", "")))

    async def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=_LARGEST_REQUEST, heartbeat=30.0)
        await socket.prepare(request)
        try:
            episode_id = self._begin(None, None).observation.episode_id
        except _Refused as refused:
            await socket.send_str(_error(refused))
            return socket
        try:
            while (incoming := await socket.receive(timeout=self._settings.idle_s)).type is WSMsgType.TEXT:
                try:
                    message = _decode(incoming.data.encode(), protocol.Message)
                    if message.type == "close":
                        break
                    await socket.send_str(self._answer(episode_id, message))
                except _Refused as refused:
                    await socket.send_str(_error(refused))
        except TimeoutError:
            await socket.send_str(_error(_Refused(408, "The game was idle for too long.", "SESSION_ERROR")))
        finally:
            self._sessions.close(episode_id)
            await socket.close()
        return socket

    def _answer(self, episode_id: str, message: protocol.Message) -> str:
        data: Any
        if message.type == "reset":
            data = self._begin(episode_id, _convert(message.data, protocol.ResetRequest).seed)
        elif message.type == "step":
            data = self._guess(episode_id, _convert(message.data, protocol.WordleAction))
        elif message.type == "state":
            data = self._state_of(episode_id)
        else:
            raise _Refused(422, f"There is no message type {message.type!r}.", "UNKNOWN_TYPE")
        kind = "state" if message.type == "state" else "observation"
        return msgspec.json.encode(protocol.Message(kind, data)).decode()

    def _begin(self, episode_id: str | None, seed: int | None) -> protocol.Reply:
        try:
            episode_id, game = self._sessions.reset(episode_id, seed)
        except FullError as error:
            raise _Refused(503, str(error), "CAPACITY_REACHED") from None
        return protocol.reply(episode_id, game, self._rules, reward=None)

    def _guess(self, episode_id: str, action: protocol.WordleAction) -> protocol.Reply:
        game = self._game(episode_id)
        if game.done:
            raise _Refused(409, "The game is over; reset it to begin another.", "EXECUTION_ERROR")
        turn = game.guess(action.guess)
        return protocol.reply(episode_id, game, protocol.sentence(game, turn), turn.reward, turn.marks)

    def _state_of(self, episode_id: str) -> protocol.WordleState:
        return protocol.state(episode_id, self._game(episode_id))

    def _game(self, episode_id: str) -> Game:
        try:
            return self._sessions.get(episode_id)
        except KeyError:
            raise _Refused(
                404, "There is no such game: it was not begun, or idle for too long.", "SESSION_ERROR"
            ) from None


class _Refused(Exception):
    """A request that is not carried out: HTTP status, and OpenEnv's code for a WebSocket."""

    def __init__(self, status: int, sentence: str, code: str = "VALIDATION_ERROR") -> None:
        super().__init__(sentence)
        self.status, self.code = status, code


@web.middleware
async def _say_what_is_wrong(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _Refused as refused:
        return _json({"detail": str(refused)}, status=refused.status)
    except web.HTTPError as error:  # aiohttp's own: no such route, wrong method, too large
        return _json({"detail": f"{error.reason}."}, status=error.status)


def _error(refused: _Refused) -> str:
    return msgspec.json.encode(
        protocol.Message("error", {"message": str(refused), "code": refused.code})
    ).decode()


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data), status=status, headers=headers, content_type="application/json"
    )


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return _convert(msgspec.json.decode(body), kind)
    except msgspec.DecodeError as error:
        raise _Refused(400, f"The request is not JSON: {error}.", "INVALID_JSON") from None


def _convert(data: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _Refused(422, f"{error}.") from None


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{settings.tls_cert} cannot be used as a certificate with its key: {error}."
        ) from None
    return context
