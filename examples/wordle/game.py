"""Wordle without a network: word lists, marks, and one game. Deterministic by its seed."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import random
from collections import Counter

LENGTH = 5  # letters of a word
GUESSES = 6  # guesses of a game
REDUCED_LETTERS = "aelst"  # the alphabet of the reduced game

WORD_LISTS = ("reduced", "full")


@dataclasses.dataclass(frozen=True)
class WordList:
    """The words that may be the secret, and those that may be guessed."""

    secrets: tuple[str, ...]  # in alphabetical order
    letters: str  # all letters that occur in them
    listed_only: bool  # whether a guess has to be one of `secrets`, or any word of `LENGTH` of these letters

    def refusal(self, guess: str) -> str | None:
        """Why `guess` is none, as a sentence; None if it is one."""
        if len(guess) != LENGTH or not set(guess) <= set(self.letters):
            return f"A guess is {LENGTH} of the letters {self.letters}."
        if self.listed_only and guess not in _as_set(self.secrets):
            return f"{guess} is not in the word list."
        return None


@functools.cache
def _as_set(words: tuple[str, ...]) -> frozenset[str]:
    return frozenset(words)


@functools.cache
def word_list(name: str) -> WordList:
    """One of `WORD_LISTS`.

    `full` is the 3,461 common English words of `words.txt`, whose head names source and licence. `reduced` is
    those of them that have no other letters than `REDUCED_LETTERS`: few enough for a tiny model, which may
    guess any word of them.
    """
    text = importlib.resources.files(__package__).joinpath("words.txt").read_text(encoding="ascii")
    words = " ".join(line for line in text.splitlines() if not line.startswith("#")).split()
    if name == "full":
        return WordList(tuple(words), "".join(sorted(set().union(*words))), listed_only=True)
    return WordList(
        tuple(word for word in words if set(word) <= set(REDUCED_LETTERS)), REDUCED_LETTERS, listed_only=False
    )


def marks(guess: str, secret: str) -> str:
    """The marks of a guess: for each letter G (right), Y (elsewhere in the secret) or X (not in it).

    A letter of the secret is accounted for once: by a right guess of it first, then by the leftmost others.
    """
    pairs = list(zip(guess, secret, strict=True))
    left = Counter(theirs for ours, theirs in pairs if ours != theirs)
    found = []
    for ours, theirs in pairs:
        if ours == theirs:
            found.append("G")
        elif left[ours] > 0:
            left[ours] -= 1
            found.append("Y")
        else:
            found.append("X")
    return "".join(found)


def answer(guess: str, found: str, done: bool) -> str:
    """The text for a model after a guess: its marks written with its letters, and whether the game is over.

    A right letter is large, one that is elsewhere small, and one that is not in the word a dot; all dots if
    it was no guess.
    """
    if not found:
        return "." * LENGTH + (" over" if done else "")
    pairs = zip(guess, found, strict=True)
    text = "".join({"G": letter.upper(), "Y": letter}.get(mark, ".") for letter, mark in pairs)
    return text + (" over" if done else "")


@dataclasses.dataclass(frozen=True)
class Turn:
    """One guess and its answer: `marks` is empty and `refusal` says why if the guess was none."""

    guess: str
    marks: str
    refusal: str | None
    reward: float


class Game:
    """One game. A guess that is none of the word list's costs a turn and earns nothing.

    The reward of a turn is its fraction of right letters, divided by `GUESSES`; the turns that a solution
    saves count as all right. So the sum is between 0 and 1, grows with every letter, and is the higher the
    earlier the word is found. The seed determines the secret.
    """

    def __init__(self, words: WordList, seed: int) -> None:
        self._words = words
        self._secret = random.Random(seed).choice(words.secrets)
        self.turns: list[Turn] = []

    @property
    def solved(self) -> bool:
        """Whether the secret was guessed."""
        return bool(self.turns) and self.turns[-1].guess == self._secret

    @property
    def done(self) -> bool:
        """Whether no guess may follow."""
        return self.solved or len(self.turns) == GUESSES

    @property
    def secret(self) -> str | None:
        """The word, once the game is over."""
        return self._secret if self.done else None

    @property
    def score(self) -> float:
        """Sum of the rewards, between 0 and 1."""
        return sum(turn.reward for turn in self.turns)

    def guess(self, text: str) -> Turn:
        """Make a guess, in small or capital letters, unless the game is over."""
        if self.done:
            raise ValueError("the game is over")
        word = text.strip().lower()
        refusal = self._words.refusal(word)
        found = "" if refusal is not None else marks(word, self._secret)
        saved = GUESSES - 1 - len(self.turns) if word == self._secret else 0
        turn = Turn(word, found, refusal, (found.count("G") / LENGTH + saved) / GUESSES)
        self.turns.append(turn)
        return turn
