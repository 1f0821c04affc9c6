"""The client: one game after another on a server, and the same as an environment for TRL."""

from __future__ import annotations

import time
from typing import Any, Self

import httpx
import msgspec

from deltasync.errors import ConfigError, DeltaSyncError
from wordle import protocol
from wordle.game import answer

_TIMEOUT_S = 30.0
_ATTEMPTS = 5
_RETRY_S = 0.5


class WordleClient:
    """A connection to a server at `url`, with a bearer token, for one game at a time.

    TLS certificates are verified against the system's authorities, or those that `SSL_CERT_FILE` names.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"The environment's URL must begin with http:// or https://, not {url!r}.")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S)
        self._episode_id: str | None = None

    def reset(self, seed: int | None = None) -> protocol.Reply:
        """Begin a game; the same seed gives the same word."""
        body = {"seed": seed, "episode_id": self._episode_id}
        reply = msgspec.convert(self._ask("POST", "/reset", json=body), protocol.Reply)
        self._episode_id = reply.observation.episode_id
        return reply

    def step(self, guess: str) -> protocol.Reply:
        """Make a guess. Raises as `reset`."""
        body = {"action": {"guess": guess}, "episode_id": self._episode_id}
        return msgspec.convert(self._ask("POST", "/step", json=body), protocol.Reply)

    def state(self) -> protocol.WordleState:
        """The game so far. Raises as `reset`."""
        return msgspec.convert(
            self._ask("GET", "/state", params={"episode_id": self._episode_id}), protocol.WordleState
        )

    def close(self) -> None:
        """Close the connection; the server forgets the game when it was idle for long."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, path: str, **arguments: Any) -> Any:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = self._http.request(method, path, **arguments)
                break
            except httpx.ConnectError as error:  # nothing was sent, so it is safe to try again
                if attempt == _ATTEMPTS:
                    raise DeltaSyncError(
                        f"The environment at {self._http.base_url} cannot be reached: {error}."
                    ) from None
                time.sleep(_RETRY_S * attempt)
            except httpx.HTTPError as error:
                raise DeltaSyncError(
                    f"The environment at {self._http.base_url} did not answer: {error!r}."
                ) from None
        if answer.is_success:
            return answer.json()
        raise DeltaSyncError(
            f"The environment at {self._http.base_url} answered {answer.status_code}: {_detail(answer)}"
        )


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


class WordleEnvironment:
    """The client as TRL calls it: `environment_factory=functools.partial(WordleEnvironment, url, token)`.

    The model guesses with the tool `guess`. TRL passes the columns of the data set to `reset`; `get_reward`
    is the reward of the whole game.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._client = WordleClient(url, token)
        self._score, self._done = 0.0, False

    def reset(self, seed: int, **_: Any) -> None:
        """Begin the game of this seed."""
        self._client.reset(seed)
        self._score, self._done = 0.0, False

    def guess(self, word: str) -> str:
        """Guess the secret word.

        Args:
            word: The word to guess.

        Returns:
            The guess again, a right letter large, one that is elsewhere in the word small, one that is not in
            it as a dot; and "over" when the game is.
        """
        if self._done:
            return "over"
        word = word.strip().lower()
        reply = self._client.step(word[: protocol.LONGEST_GUESS])
        self._score, self._done = reply.observation.score, reply.done
        return answer(word, reply.observation.marks, self._done)

    def get_reward(self) -> float:
        """The score of the game, between 0 and 1."""
        return self._score
