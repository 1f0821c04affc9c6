"""SGLang's schedulers as a target of the follow loop, which runs in a thread of the first one.

    stage -> pause(in place) -> commit -> confirm -> weight version -> continue

A call "beside" runs in a thread of each rank; a call "between steps" in each scheduler's thread, in the same iteration on all
ranks, because it takes the way of SGLang's own requests.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from deltasync.channel.documents import Version
from deltasync.channel.record import Stored
from deltasync.following import Commit, Identify
from sglang_plugin.rank import Handed, Rank

Call = tuple[str, str, tuple[Any, ...]]
"""What goes to all schedulers among SGLang's requests: a mark, a method of `Rank`, and its arguments."""

MARK = "deltasync"


class SchedulersTarget:
    """The weights of one group of schedulers. `wake` interrupts the sleep of an idle one."""

    def __init__(self, rank: Rank, wake: Callable[[], object]) -> None:
        self.version: Version | None = None
        self.calls: deque[Call] = deque()  # to be taken by the scheduler
        self._rank, self._wake = rank, wake
        self._answers: deque[Future[Any]] = deque()
        self._is_settled = False

    @property
    def progressed_s(self) -> float:
        """As `Target.progressed_s`."""
        return self._rank.follower.progressed_s if self._is_settled else 0.0

    def beside(self, method: str, *arguments: Any) -> Any:
        """Run a method of all ranks in this thread and in theirs."""
        self._rank.broadcast((method, arguments))
        return getattr(self._rank, method)(*arguments)

    def between_steps(self, method: str, *arguments: Any) -> Any:
        """Run a method of all ranks between two steps of the engine."""
        answer: Future[Any] = Future()
        self._answers.append(answer)
        self.calls.append((MARK, method, arguments))
        self._wake()
        return answer.result()

    def run(self, call: Call) -> None:
        """Run a call in the scheduler's thread."""
        answer = self._answers.popleft()
        try:
            answer.set_result(getattr(self._rank, call[1])(*call[2]))
        except BaseException as error:  # noqa: BLE001 - it is raised to the follow loop
            answer.set_exception(error)

    def open(self, identify: Identify) -> None:
        """As `Target.open`."""
        self.beside("prepare")
        self.between_steps("record")
        found = identify(self.beside("prove"))
        self.version = self.between_steps("identified", None if found is None else _handed(found))
        self._is_settled = True

    def is_settled(self, asked: bool) -> bool:
        """As `Target.is_settled`."""
        return self._is_settled and self._rank.follower.settled and not self._rank.held

    def settle(self) -> None:
        """As `Target.settle`. What is of no version is not computed with: full weights follow."""
        self.beside("settle")
        if self._rank.follower.version is not None or not self._rank.held:
            self.between_steps("settled")
        self.version, self._is_settled = self._rank.follower.version, True

    def stage(self, chain: Sequence[Stored]) -> Sequence[Stored] | None:
        """As `Target.stage`."""
        self._is_settled = bool(self.beside("stage", [_handed(stored) for stored in chain]))
        return chain if self._is_settled else None

    def commit(self, staged: Sequence[Stored]) -> Commit:
        """As `Target.commit`."""
        pause_s, running, changed, stage_s, scatter_s = self.between_steps("paused_commit")
        self.version = version = staged[-1].version
        return Commit(
            version=version.version,
            sha256=version.sha256,
            anchor=staged[0].use_anchor,
            changed=changed,
            stage_s=stage_s,
            pause_s=pause_s,
            scatter_s=scatter_s,
            running_requests=running,
        )

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor in live memory."""
        found: dict[str, str] = self.beside("digest")
        return found

    def close(self) -> None:
        """Do nothing."""


def serve_beside(rank: Rank) -> None:
    """Take part in what the first rank runs beside its scheduler, in a thread of this one."""

    def serve() -> None:
        while True:
            method, arguments = rank.broadcast()
            with contextlib.suppress(Exception):  # the first rank has met it too, and reports it
                getattr(rank, method)(*arguments)

    threading.Thread(target=serve, name="deltasync-rank", daemon=True).start()


def _handed(stored: Stored) -> Handed:
    return stored.key, stored.sha256, stored.data
