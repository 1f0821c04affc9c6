"""The games that a server keeps: a bounded number, each until it has been idle for too long."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable

from wordle.game import Game, WordList


class FullError(Exception):
    """So many games are being played already."""


@dataclasses.dataclass
class _Entry:
    game: Game
    used_s: float


class Sessions:
    """At most `limit` games by episode id. Not thread-safe: for one event loop.

    A game not used for `idle_s` may be given up. `clock` returns monotonic seconds.
    """

    def __init__(
        self, words: WordList, limit: int, idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._words, self._limit, self._idle_s, self._clock = words, limit, idle_s, clock
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def reset(self, episode_id: str | None, seed: int | None) -> tuple[str, Game]:
        """Begin a game, in place of the one with this id if there is one; a new id, which nobody can guess,
        if it is None.

        Raises FullError if there is no room; nothing changed.
        """
        self._forget_idle()
        if episode_id is None:
            episode_id = secrets.token_urlsafe(16)
        if episode_id not in self._entries and len(self._entries) >= self._limit:
            raise FullError(f"All {self._limit} games are in use; try again later.")
        game = Game(self._words, secrets.randbits(62) if seed is None else seed)
        self._entries[episode_id] = _Entry(game, self._clock())
        return episode_id, game

    def get(self, episode_id: str) -> Game:
        """The game with this id, which counts as used now. KeyError if there is none, or it was idle for too
        long.
        """
        self._forget_idle()
        entry = self._entries[episode_id]
        entry.used_s = self._clock()
        return entry.game

    def close(self, episode_id: str) -> None:
        """Forget this game, if there is one."""
        self._entries.pop(episode_id, None)

    def _forget_idle(self) -> None:
        oldest_s = self._clock() - self._idle_s
        for episode_id in [key for key, entry in self._entries.items() if entry.used_s < oldest_s]:
            del self._entries[episode_id]
