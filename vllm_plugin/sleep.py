"""vLLM's sleep mode: a worker that sleeps has no weights in memory, and touching them would end its process."""

from __future__ import annotations

from typing import Any, Protocol


class Sleeper(Protocol):
    """Who wants to be told."""

    def fall_asleep(self) -> None:
        """Called before the weights go."""

    def wake_up(self) -> None:
        """Called when they are in memory again, though maybe not with the bits of before."""


def tell(worker: Any, sleeper: Sleeper) -> None:
    """Tell of the sleep of a vLLM worker from now on. It has no hook for that, so this wraps two of its methods."""
    if not hasattr(worker, "sleep"):
        return
    sleep, wake_up = worker.sleep, worker.wake_up

    def told_sleep(level: int = 1) -> None:
        sleeper.fall_asleep()
        sleep(level)

    def told_wake_up(tags: list[str] | None = None) -> None:
        wake_up(tags)
        if tags is None or "weights" in tags:
            sleeper.wake_up()

    worker.sleep, worker.wake_up = told_sleep, told_wake_up
