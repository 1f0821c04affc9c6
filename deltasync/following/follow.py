"""A loop that runs in a thread, with a status, a pin that can be changed, and callers that wait for a version."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from deltasync import limits
from deltasync.channel.reading import ChannelReader
from deltasync.config import Pin, ReplicaSettings, pin_text
from deltasync.errors import AckTimeoutError, StageError, printable
from deltasync.following.loop import Loop, logger
from deltasync.following.state import State
from deltasync.following.status import SHOWN, Status
from deltasync.following.target import Heartbeats, Observer, Target
from deltasync.threads import NO_THREADS, daemon

_STOP_S = 5.0  # how long `stop` waits for the thread, which a store may hold


class Follow(Loop):
    """A loop whose steps run in the thread of `start`, or in the caller's. Everything else may be called from
    any thread.
    """

    def __init__(
        self,
        reader: ChannelReader,
        target: Target,
        settings: ReplicaSettings,
        *,
        observer: Observer | None = None,
        heartbeats: Heartbeats | None = None,
        prefetch: bool = True,
        log: logging.Logger = logger,
    ) -> None:
        super().__init__(reader, target, settings, observer=observer, prefetch=prefetch, log=log)
        self._heartbeats = heartbeats
        self._thread: threading.Thread | None = None

    @property
    def newest(self) -> int | None:
        """The number of the newest version that is known."""
        return self.cursor.tip.number or None

    @property
    def error(self) -> str | None:
        """The reason that keeps the replica from newer versions, in one sentence; None if nothing does."""
        return self.health.stale or self.health.error

    @property
    def why(self) -> str:
        """Why it is not at the newest version, for a wait that was in vain: the error, and a pin; may be
        empty.
        """
        return f"{self.error or ''}{'' if self.pin is None else f' It is pinned: {self.pin}.'}".strip()

    @property
    def state(self) -> str:
        """The state, one of those of `Status.state`."""
        return self.health.shown.value

    @property
    def not_ready(self) -> str | None:
        """Why this replica should get no requests, in one sentence; None if it serves a version that is new
        enough.
        """
        if self._heartbeats is not None and self._home.is_here:
            self._heartbeats.look()
        return self.health.not_ready(self.pin)

    def status(self, commit_count: int = limits.HISTORY) -> Status:
        """Return the status, with the last `commit_count` commits."""
        health, identity, trusted = self.health, self.identity, self.reader.trusted
        return Status(
            replica_id=health.settings.replica_id,
            boot=None if self._heartbeats is None else self._heartbeats.boot,
            channel=self.reader.store.url,
            run_id=self.reader.run_id,
            state=self.state,
            version=self.version,
            epoch=None if identity is None else identity.epoch,
            sha256=None if identity is None else identity.sha256,
            newest_version=self.newest,
            pin=None if self.pin is None else pin_text(self.pin),
            followed_s_ago=health.stuck_s if health.has_followed else None,
            state_s=health.state_s,
            error=self.error,
            trusted_keys=None if trusted is None else trusted.names,
            ignored_tensors=len(self.target.ignored),
            ignored=[printable(name) for name in self.target.ignored[:SHOWN]],
            commits=list(self.commits)[-commit_count:] if commit_count else [],
        )

    # Pins and waiting

    @property
    def pin(self) -> Pin:
        """The version that it stays at; None if it takes every new one."""
        return self.waits.pin

    def check_pin(self, pin: Pin) -> None:
        """Ask the store whether the version is there.

        Raises:
            MissingVersionError: it is not.
            StoreError: the store did not answer.
        """
        if pin is not None and self.version != pin:
            self.reader.numbered(pin)

    def set_pin(self, pin: Pin, *, checked: bool = False) -> None:
        """Take other versions from now on. Raises as `check_pin`, unless that was called; the pin then stays
        as it was.
        """
        if not checked:
            self.check_pin(pin)
        self.waits.set_pin(pin)
        self.poke()

    def poke(self) -> None:
        """Make the loop refresh now, because somebody waits.

        Raises:
            ConfigError: this process is a fork of the replica's, in which nothing follows.
        """
        self._home.check()
        self.waits.asked = True
        self._wake.set()

    def request(self, version: int | None = None, step: int | None = None) -> Future[int]:
        """Refresh now, and return a future of the version served once that version is reached. Cancel it
        after use.

        Args:
            version: This version or a later one; while the replica is pinned to a number exactly this one.
            step: A version of the newest epoch, of this step of the trainer or a later one.

        With neither, it waits for the version that the pin points to now. The future raises ApplyError if a
        pin, now or after a change, keeps the replica from there.

        Raises:
            ConfigError: as `poke`.
        """
        self._home.check()
        future = self.waits.future(version, step)
        self.poke()
        return future

    def wait(self, version: int | None = None, timeout_s: float = 60.0) -> int:
        """Wait until this version or a later one is live; by default any. Pinned to a number, exactly that
        version.

        Raises:
            AckTimeoutError: it is not after `timeout_s`; it says why.
            ApplyError: the pin keeps the replica from there.
        """
        wanted = 1 if version is None else version
        if version is None and self.version is not None:
            return self.version
        future = self.request(wanted if version is not None or self.pin is None else self.pin)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise AckTimeoutError(
                f"After {timeout_s:g} s the weights are version {self.version}, not {wanted}. {self.why}".rstrip()
            ) from None
        finally:
            future.cancel()

    # The thread

    def start(self) -> None:
        """Follow in a daemon thread until `stop`.

        Raises:
            StageError: no thread can be started now; a later call may.
        """
        thread = daemon("follow", self.run)
        try:
            thread.start()
        except RuntimeError as error:
            raise StageError(f"Nothing is followed: {NO_THREADS} ({error}).") from None
        self._thread = thread

    def end(self) -> None:
        """Have `run` return after the step that is under way."""
        self._ended.set()
        self._wake.set()

    def stop(self) -> None:
        """Stop following, and write the last heartbeat; for a bounded time, whatever the store does.

        In a fork of the replica's process nothing is done: the replica goes on there.
        """
        if not self._home.is_here:
            return
        self.end()
        self.target.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)
        self.health.stop()
        if self._heartbeats is not None:
            self._heartbeats.stop(self.status(0))

    def run(self) -> None:
        """Follow in this thread until `stop`."""
        if self._heartbeats is not None:
            self._heartbeats.run(lambda: self.status(0), self._ended, self._renewed)
        with self._poll.watching(self.reader.store, self._on_change):
            while not self._ended.is_set():
                self._wake.clear()
                before, failure = self.identity, None
                try:
                    self.step(audits=True)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - reported by `step`; the weights stay as they are
                    failure = error if self.health.state != State.WAITING else None
                if self._heartbeats is not None:
                    self._heartbeats.update(self.status(0))
                if self._ended.is_set():
                    return
                self._wake.wait(self._delay_s(before, failure))

    def _renewed(self) -> None:
        """Audit and refresh now: this process was suspended or restored."""
        self.health.lives += 1
        self.poke()
