from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from deltasync.errors import ConfigError, DeltaSyncError
from demo.processes import Child
from tests.hosts.authority import Authority
from wordle.client import WordleClient, WordleEnvironment
from wordle.game import GUESSES, Game, marks, word_list
from wordle.server import ServerSettings, WordleServer
from wordle.sessions import FullError, Sessions

ROOT = Path(__file__).parents[2]


def counted_marks(guess: str, secret: str) -> str:
    """The rules in other words: of each letter as many are marked as the secret has, right ones first, then
    from left.
    """
    found = []
    for place, letter in enumerate(guess):
        if secret[place] == letter:
            found.append("G")
            continue
        right = sum(ours == theirs == letter for ours, theirs in zip(guess, secret, strict=True))
        earlier = sum(guess[other] == letter != secret[other] for other in range(place))
        found.append("Y" if earlier < secret.count(letter) - right else "X")
    return "".join(found)


def test_marks_agree_with_the_rules_for_every_pair_of_short_words() -> None:
    words = ["".join(letters) for letters in itertools.product("abc", repeat=4)]
    for guess, secret in itertools.product(words, repeat=2):
        assert marks(guess, secret) == counted_marks(guess, secret), (guess, secret)


def test_word_lists() -> None:
    full, reduced = word_list("full"), word_list("reduced")
    assert len(full.secrets) == 3461 and list(full.secrets) == sorted(set(full.secrets))
    assert all(
        len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in full.secrets
    )
    assert (
        reduced.secrets == tuple(word for word in full.secrets if set(word) <= set("aelst"))
        and len(reduced.secrets) == 27
    )
    assert reduced.refusal("sssss") is None and full.refusal("sssss") == "sssss is not in the word list."
    assert full.refusal("wordle") == f"A guess is 5 of the letters {full.letters}."


def secret_of(seed: int, words: str = "reduced") -> str:
    game = Game(word_list(words), seed)
    while not game.done:
        game.guess("")
    assert game.secret is not None
    return game.secret


def test_the_score_is_the_higher_the_earlier_the_word_is_found() -> None:
    secret = secret_of(7)
    scores = []
    for tries in range(GUESSES + 1):
        game = Game(word_list("reduced"), 7)
        for guess in [*["zzzzz"] * tries, secret][:GUESSES]:
            assert game.secret is None
            game.guess(guess.upper())
        assert game.done and game.solved == (tries < GUESSES) and game.secret == secret
        scores.append(game.score)
        with pytest.raises(ValueError, match="over"):
            game.guess(secret)
    assert scores == pytest.approx([1 - tries / GUESSES for tries in range(GUESSES)] + [0])


def test_idle_games_make_room() -> None:
    now_s = 0.0
    sessions = Sessions(word_list("reduced"), limit=2, idle_s=10, clock=lambda: now_s)
    first, _ = sessions.reset(None, 1)
    sessions.reset("mine", 2)
    with pytest.raises(FullError, match="All 2 games"):
        sessions.reset(None, 3)
    sessions.reset("mine", 3)  # in place of itself
    now_s = 6.0
    sessions.get(first)
    now_s = 12.0
    with pytest.raises(KeyError):
        sessions.get("mine")
    sessions.reset("other", 4)
    sessions.close(first)
    assert len(sessions) == 1


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """A server on a free port of loopback, in a thread; yields its URL."""
    loop, started, stop = asyncio.new_event_loop(), concurrent.futures.Future[str](), asyncio.Event()

    async def serve() -> None:
        try:
            async with WordleServer(ServerSettings(port=0, **settings)) as server:
                started.set_result(server.url)
                await stop.wait()
        except ConfigError as error:
            started.set_exception(error)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield started.result(30)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(sessions=40) as found:
        yield found


def test_a_game_over_http(url: str) -> None:
    player = WordleClient(url)
    begun = player.reset(seed=7)
    assert (begun.reward, begun.done, begun.observation.guesses_left) == (None, False, GUESSES)
    game, secret = Game(word_list("reduced"), 7), secret_of(7)
    for guess in ("stale", "zzz", "aaaaa", secret):
        reply, turn = player.step(guess), game.guess(guess)
        assert (reply.observation.marks, reply.reward, reply.done) == (turn.marks, turn.reward, game.done)
        assert reply.observation.score == game.score
        if turn.refusal is not None:
            assert reply.observation.message == turn.refusal
    assert reply.observation.message == f"{secret} GGGGG. The word is {secret}."
    state = player.state()
    assert (state.guesses, state.solved, state.secret) == (["stale", "zzz", "aaaaa", secret], True, secret)
    with pytest.raises(DeltaSyncError, match="409: The game is over; reset it to begin another"):
        player.step("stale")
    assert player.reset(seed=7).observation.episode_id == begun.observation.episode_id
    player.close()


def test_many_players_at_once_do_not_meet(url: str) -> None:
    guesses = ("sssss", "eeeee", "ttttt", "aaaaa", "lllll")

    def play(seed: int) -> list[str]:
        with WordleClient(url) as player:
            player.reset(seed)
            return [player.step(guess).observation.marks for guess in guesses]

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for seed, found in enumerate(pool.map(play, range(12))):
            assert found == [marks(guess, secret_of(seed)) for guess in guesses]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "sentence"),
    [
        ("POST", "/reset", "{", 400, "The request is not JSON: Input data was truncated."),
        ("POST", "/reset", '{"seed": -1}', 422, "Expected `int` >= 0 - at `$.seed`."),
        ("POST", "/reset", '{"seed": "7"}', 422, "Expected `int | null`, got `str` - at `$.seed`."),
        ("POST", "/reset", '{"episode_id": ""}', 422, "Expected `str` of length >= 1 - at `$.episode_id`."),
        ("POST", "/step", "{}", 422, "Object missing required field `action`."),
        (
            "POST",
            "/step",
            '{"action": {"guess": "stale"}}',
            422,
            "Object missing required field `episode_id`.",
        ),
        (
            "POST",
            "/step",
            '{"action": {"guess": 5}, "episode_id": "a"}',
            422,
            "Expected `str`, got `int` - at `$.action.guess`.",
        ),
        (
            "POST",
            "/step",
            '{"action": {"guess": "stale"}, "episode_id": "no"}',
            404,
            "There is no such game: it was not begun",
        ),
        ("GET", "/state", "", 404, "There is no such game: it was not begun, or idle for too long."),
        ("GET", "/nothing", "", 404, "Not Found."),
        ("GET", "/reset", "", 405, "Method Not Allowed."),
        ("POST", "/reset", " " * 20_000, 413, "Request Entity Too Large."),
    ],
)
def test_a_wrong_request_is_answered_with_one_sentence(
    url: str, method: str, path: str, body: str, status: int, sentence: str
) -> None:
    answer = httpx.request(method, url + path, content=body)
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(sentence)


def test_the_websocket_speaks_as_openenv_does(url: str) -> None:
    async def play() -> list[dict[str, Any]]:
        answers = []
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/ws") as socket:
            for message in (
                '{"type": "reset", "data": {"seed": 7}}',
                '{"type": "step", "data": {"guess": "stale"}}',
                '{"type": "state"}',
                '{"type": "step", "data": {"word": "stale"}}',
                '{"type": "dance"}',
                "stale",
            ):
                await socket.send_str(message)
                answers.append(await socket.receive_json(timeout=30))
            await socket.send_str('{"type": "close"}')
            assert (await socket.receive(timeout=30)).type is aiohttp.WSMsgType.CLOSE
        return answers

    begun, stepped, state, *errors = asyncio.run(play())
    assert begun["type"] == "observation" and begun["data"]["done"] is False
    assert stepped["data"]["observation"]["marks"] == marks("stale", secret_of(7))
    assert (state["type"], state["data"]["guesses"]) == ("state", ["stale"])
    assert [(error["type"], error["data"]["code"]) for error in errors] == [
        ("error", "VALIDATION_ERROR"), ("error", "UNKNOWN_TYPE"), ("error", "INVALID_JSON"),
    ]  # fmt: skip


def test_no_more_games_than_allowed() -> None:
    async def open_sockets(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.ws_connect(f"{url}/ws") as one, session.ws_connect(f"{url}/ws") as two:
                for socket in (one, two):
                    await socket.send_str('{"type": "reset"}')
                    assert (await socket.receive_json(timeout=30))["type"] == "observation"
                assert httpx.post(f"{url}/reset").status_code == 503
                async with session.ws_connect(f"{url}/ws") as third:
                    assert (await third.receive_json(timeout=30))["data"]["code"] == "CAPACITY_REACHED"
            assert httpx.post(f"{url}/reset").status_code == 200  # theirs ended with their sockets

    with serving(sessions=2) as url:
        asyncio.run(open_sockets(url))


def test_an_idle_socket_is_told_and_closed() -> None:
    async def wait(url: str) -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/ws") as socket:
            assert (await socket.receive_json(timeout=30))["data"][
                "message"
            ] == "The game was idle for too long."
            assert (await socket.receive(timeout=30)).type is aiohttp.WSMsgType.CLOSE

    with serving(idle_s=0.2) as url:
        asyncio.run(wait(url))


def test_the_environment_that_trl_calls(url: str) -> None:
    environment, secret = WordleEnvironment(url), secret_of(5)
    environment.reset(seed=5, prompt="ignored")
    assert environment.guess("zzzzz") == "....."
    assert (
        environment.guess(f" {secret.upper()}") == f"{secret.upper()} over"
        and environment.guess(secret) == "over"
    )
    assert environment.get_reward() == pytest.approx(1 - 1 / GUESSES)
    environment.reset(seed=5)
    assert [environment.guess("z" * 100) for _ in range(GUESSES)][-1] == "..... over"
    assert environment.get_reward() == 0
    environment._client.close()


def test_as_a_process_with_tls_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, token = Authority(tmp_path), tmp_path / "token"
    pem = authority.issue("wordle", "127.0.0.1")
    token.write_text("sesame\n")
    command = [sys.executable, "-m", "wordle", "--port", "0", "--words", "full", "--tls-cert", str(pem)]
    log = tmp_path / "log"
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"}
    with Child("The environment", [*command, "--token-file", token], environ, log) as child:
        child.wait_until(lambda: log.read_text().endswith("\n"), 60, "to start")
        url = log.read_text().splitlines()[0]
        assert url.startswith("https://127.0.0.1:")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        assert httpx.get(f"{url}/health").json() == {"status": "healthy"}
        for wrong in (None, "open", "sesame2"):
            with (
                WordleClient(url, wrong) as player,
                pytest.raises(DeltaSyncError, match="401: This server wants its"),
            ):
                player.reset(seed=1)
        with WordleClient(url, "sesame") as player:
            player.reset(seed=1)
            assert player.step("about").observation.marks == marks("about", secret_of(1, "full"))
    assert child.wait(0) == 0  # by SIGTERM


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tls-cert", __file__], "cannot be used as a certificate with its key"),
        (["--host", "192.0.2.1"], "Port 0 on 192.0.2.1 cannot be used"),
        (["--token-file", "/dev/null"], "The token is empty"),
    ],
    ids=["certificate", "address", "token"],
)
def test_a_server_that_cannot_start_says_why(arguments: list[str], sentence: str) -> None:
    from click.testing import CliRunner

    from wordle.__main__ import main

    ran = CliRunner().invoke(main, ["--port", "0", *arguments])
    assert ran.exit_code == 3 and sentence in ran.stderr


def test_a_client_says_what_it_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wordle.client._RETRY_S", 0.0)
    with serving() as url:
        pass
    with (
        WordleClient(url) as player,
        pytest.raises(DeltaSyncError, match=f"The environment at {url}.* cannot be reached"),
    ):
        player.reset(seed=1)
    with pytest.raises(ConfigError, match="must begin with http"):
        WordleClient("localhost:8000")
