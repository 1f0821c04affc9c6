"""A module that follows a channel, as its user sees it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Self

from deltasync.errors import ConfigError, NotPublishedError
from deltasync.following.gate import Gate
from deltasync.following.loop import Follow
from deltasync.following.pin import Pin
from deltasync.following.status import Status

_WAIT_S = 5.0  # from when on a commit that waits for forward calls is reported


class Following:
    """A module that follows a channel; made by `deltasync.follow`. Use it as a context, or `close` it."""

    def __init__(self, follow: Follow, gate: Gate, gated: contextlib.ExitStack, background: bool) -> None:
        self._follow, self._gate, self._gated = follow, gate, gated
        try:
            with contextlib.suppress(NotPublishedError):
                self.sync()
        except BaseException:
            self.close()
            raise
        if background:
            self._follow.start()

    @property
    def version(self) -> int | None:
        """The number of the version that the weights are, None before the first."""
        return self._follow.version

    @property
    def digest(self) -> str | None:
        """The sha256 of this version's record."""
        identity = self._follow.identity
        return None if identity is None else identity.sha256

    @property
    def error(self) -> str | None:
        """The reason why the weights are not newer, in one sentence; None if there is none."""
        since_s = self._gate.waits_since_s
        waits_s = 0.0 if since_s is None else time.monotonic() - since_s
        if waits_s > _WAIT_S:
            return f"A version has waited for forward calls or a hold() to end for {waits_s:.0f} s."
        return None if self._follow.state == "waiting" else self._follow.error

    @property
    def exchanges(self) -> int:
        """A number that grows whenever the weights may have changed: caches of another one are of other weights."""
        return self._gate.closings

    @property
    def not_ready(self) -> str | None:
        """Why a server should answer no requests with the module, in one sentence; None if its version is new enough."""
        return self._follow.not_ready

    @property
    def status(self) -> Status:
        """State, versions and commits, as a server's `GET /deltasync/status`."""
        return self._follow.status()

    @property
    def pin(self) -> str:
        """Which versions it takes: `newest`, a number to stay at, `every 10`, `2 behind`. May be set at any time.

        Raises:
            MissingVersionError: when it is set to a number that the channel does not have; it stays as it was.
        """
        return str(self._follow.pin)

    @pin.setter
    def pin(self, text: str | int) -> None:
        self._follow.set_pin(Pin.parse(str(text)))

    def sync(self) -> int:
        """Refresh now, apply new versions, and return the number of the version that the weights are.

        Raises:
            NotPublishedError: the channel has no version yet.
            DeltaSyncError: the newest version could not be taken; the version before stays.
        """
        self._refuse_inside()
        return self._follow.catch_up()

    def wait(self, version: int | None = None, timeout_s: float = 60.0) -> int:
        """Wait until the weights are this version or a later one; pinned to a number, exactly that one. By default any.

        Raises:
            AckTimeoutError: they are not after `timeout_s`; it says why.
            PinnedError: the pin keeps the module from that version.
        """
        return self._follow.wait(version, timeout_s)

    @contextlib.contextmanager
    def hold(self) -> Iterator[int | None]:
        """Return a context in which nothing changes: all forward calls inside see the version whose number it gives."""
        with self._gate.inside():
            yield self.version

    def close(self) -> None:
        """Stop following. The module keeps its weights."""
        self._refuse_inside()
        self._follow.stop()
        self._gated.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_inside(self) -> None:
        if self._gate.depth:
            raise ConfigError("Weights cannot change while this thread holds them, or inside a forward call.")
