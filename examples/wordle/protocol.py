"""The messages between client and server: OpenEnv's requests and replies (openenv 0.10) with the fields of
this game.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from wordle.game import GUESSES, Game, Turn

# environment variable with the bearer token of server and client
TOKEN_VARIABLE = "DELTASYNC_ENVIRONMENT_TOKEN"

LONGEST_ID = 255
LONGEST_GUESS = 64

EpisodeId = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_ID)]


class WordleAction(msgspec.Struct):
    """An action of a player: to guess a word."""

    guess: Annotated[str, msgspec.Meta(max_length=LONGEST_GUESS)]
    metadata: dict[str, Any] = {}


class WordleObservation(msgspec.Struct):
    """An observation of a player.

    Attributes:
        marks: For each letter of the guess G (right), Y (elsewhere) or X (not in the word); empty before the
            first guess and for a guess that was none.
    """

    episode_id: str  # names the game in later requests
    message: str  # one sentence
    marks: str
    guesses_left: int  # until the game is over
    score: float  # sum of the rewards so far, between 0 and 1


class WordleState(msgspec.Struct):
    """A game so far; `secret` is null until it is over."""

    episode_id: str
    step_count: int
    guesses: list[str]
    marks: list[str]
    solved: bool
    secret: str | None


class ResetRequest(msgspec.Struct):
    """Begin a game: the same word for the same seed; `episode_id` of an earlier game begins anew in its
    place.
    """

    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None
    episode_id: EpisodeId | None = None


class StepRequest(msgspec.Struct):
    """Make a guess in a game."""

    action: WordleAction
    episode_id: EpisodeId


class Reply(msgspec.Struct):
    """The answer to a reset or a step; `reward` is that of this guess."""

    observation: WordleObservation
    reward: float | None
    done: bool


class Message(msgspec.Struct):
    """One of OpenEnv's WebSocket messages, in either direction."""

    type: str
    data: Any = {}


def schemas() -> dict[str, Any]:
    """JSON schemas of action, observation and state."""
    kinds = {"action": WordleAction, "observation": WordleObservation, "state": WordleState}
    return {name: msgspec.json.schema(kind) for name, kind in kinds.items()}


def reply(episode_id: str, game: Game, message: str, reward: float | None, marks: str = "") -> Reply:
    """The answer to a reset, or to a guess with these marks."""
    left = GUESSES - len(game.turns)
    return Reply(WordleObservation(episode_id, message, marks, left, game.score), reward, game.done)


def sentence(game: Game, turn: Turn) -> str:
    """The observation of a player after this turn."""
    said = turn.refusal if turn.refusal is not None else f"{turn.guess} {turn.marks}."
    return f"{said} The word is {game.secret}." if game.done else said


def state(episode_id: str, game: Game) -> WordleState:
    """The game so far."""
    guesses, found = [turn.guess for turn in game.turns], [turn.marks for turn in game.turns]
    return WordleState(episode_id, len(game.turns), guesses, found, game.solved, game.secret)
