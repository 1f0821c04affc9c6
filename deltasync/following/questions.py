"""Questions of routes to a follow loop in another process. They begin there; answers are read from its state later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from deltasync.following.loop import Follow
from deltasync.following.pin import Pin

_MOST = 64  # questions that are remembered

STATUS_CODES = {"ConfigError": 422, "MissingVersionError": 409, "PinnedError": 409}
"""HTTP status of a reply whose `error` begins with the name of a class; 504 for others."""


class Questions:
    """Questions to one loop. `digest` returns the sha256 of every tensor, while the loop does not step.

    Whoever can put questions past the routes has to know `token`, if there is one.
    """

    def __init__(self, follow: Follow, digest: Callable[[], dict[str, str]], token: str | None = None) -> None:
        self._follow, self._digest, self._token = follow, digest, token
        self._answers: dict[str, dict[str, Any]] = {}

    def takes(self, question: Any) -> bool:
        """Whether this is a question, and by one who may ask."""
        if not isinstance(question, dict) or not isinstance(question.get("id"), str):
            return False
        return isinstance(question.get("timeout_s"), float) and question.get("token") == self._token

    def ask(self, question: dict[str, Any]) -> None:
        """Begin to answer in a thread. A question has an `id` and `timeout_s`.

        It also has `digest`; or a `version`, a trainer's `step` or neither to wait for, as `Follow.request`, and maybe a
        `pin` to set first.
        """
        self._answers = dict([*self._answers.items()][1 - _MOST :]) | {question["id"]: {}}
        threading.Thread(target=self._answer, args=(question,), name="deltasync-question", daemon=True).start()

    def _answer(self, question: dict[str, Any]) -> None:
        follow, deadline = self._follow, time.monotonic() + question["timeout_s"]
        answer: dict[str, Any]
        try:
            if question.get("digest"):
                with follow.between_steps():
                    answer = {"version": follow.version, "sha256": self._digest()}
            else:
                if question.get("pin") is not None:
                    follow.set_pin(Pin.parse(question["pin"]))
                reached = follow.request(question.get("version"), question.get("step"))
                while (served := reached()) is None and time.monotonic() < deadline:
                    time.sleep(0.005)
                late = f"After {question['timeout_s']:g} s version {follow.version} is served. {follow.error or ''}".rstrip()
                answer = {"error": late} if served is None else {"version": served}
        except Exception as error:  # noqa: BLE001 - the route replies with it
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._answers[question["id"]] = answer

    def state(self, is_held: bool) -> dict[str, Any]:
        """Return the loop's status, why it is not ready, and the answers, empty while there is none.

        `is_held` says that the engine does not compute, because its weights are not known.
        """
        held = f"This server does not generate now. {self._follow.error or ''}".rstrip()
        return {
            "status": msgspec.to_builtins(self._follow.status()),
            "not_ready": held if is_held else self._follow.not_ready,
            "answers": self._answers,
        }
