"""The key-value store that the ranks of one publisher share, and a sign of life of each rank.

It is torch.distributed's, below a prefix of its own for each publisher: no process group is made, so the ranks may belong to
any others. A rank is lost when its process says nothing for a while, says that it ends, or is seen dead on the same host;
not when it takes long.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from deltasync.errors import ConfigError, PublishError, get_logger
from deltasync.threads import daemon

logger = get_logger(__name__)

BEAT_S = 1.0
SILENCE_S = 60.0
"""A rank whose process has said nothing for so long is lost, or for the timeout, if that is shorter."""

SAID_AFTER_S = 10.0
"""Who is waited for is logged after so long, and then every minute."""

WAY_ON = "This publisher can publish no more: end all ranks, start them again, and open the channel with resume=True."


class Mailbox:
    """Keys that all ranks of one publisher read and write. Every rank of a group makes one, at the same time.

    Args:
        group: A process group of any backend.
        timeout_s: How long to wait for a rank that lives, but does not come.

    Raises:
        ConfigError: this process is not in the group.
        PublishError: a rank did not come in time; names it.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ConfigError(
                f"Rank {dist.get_rank()} is not in the group that it publishes with. Give it a group of its own."
            )
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s = timeout_s
        self._silence_s = min(SILENCE_S, timeout_s)
        self._group_store = cast("Any", group.get_group_store())
        self._global = [dist.get_global_rank(group, rank) for rank in range(self.size)]
        # One for all threads, none of which blocks on it. Those of others may wait on the group's for long.
        self._connection = self._group_store.clone()
        self._session = self._meet(PrefixStore("deltasync", self._connection))
        self._beats = _Beats(self.connect(), self.rank)
        _open.add(self)
        self._hosts: dict[int, str] = {}

    def connect(self) -> Any:
        """Return the keys of this publisher. Ask only for those that are there, as who waits holds up all threads."""
        return PrefixStore(f"deltasync/{self._session}", self._connection)

    def connect_apart(self) -> Any:
        """Return the same by a connection of its own, which may wait."""
        return PrefixStore(f"deltasync/{self._session}", self._group_store.clone())

    def _meet(self, store: Any) -> str:
        """Agree with all ranks on a name for this publisher, however many of them have failed to open before."""
        if self.rank:
            own = uuid.uuid4().hex
            store.set(f"ask/{self.rank}", own)
            try:
                self._come(store, {0: f"go/{own}"})
            except PublishError:
                store.delete_key(f"ask/{self.rank}")
                raise
            name = str(store.get(f"go/{own}").decode())
            store.delete_key(f"go/{own}")
            return name
        name, keys = uuid.uuid4().hex, {rank: f"ask/{rank}" for rank in range(1, self.size)}
        self._come(store, keys)
        for key in keys.values():
            asked = store.get(key).decode()
            store.delete_key(key)
            store.set(f"go/{asked}", name)
        return name

    def _come(self, store: Any, keys: dict[int, str]) -> None:
        """Wait until these ranks have come to open their publishers."""
        missing, patience, left = keys, _Patience("open its publisher"), None
        while missing := {rank: key for rank, key in missing.items() if not _has(store, key)}:
            ended = []
            if patience.waited_s > 0.5 and patience.looks():
                left = left or PrefixStore(_LEFT, _world_store().clone())
                ended = [rank for rank in missing if _has(left, str(self._global[rank]))]
            if ended and not any(_has(store, missing[rank]) for rank in ended):
                raise PublishError(
                    f"{ranks_of(ended)} ended the process before opening the publisher. Look for the error of that rank."
                )
            if patience.waited_s > self.timeout_s:
                raise PublishError(
                    f"{ranks_of(missing)} did not open the publisher within {self.timeout_s:g} s. Make it on all ranks of "
                    "the group, and look for the error of the rank that did not."
                )
            patience.say(missing)

    def inside(self, is_inside: bool) -> None:
        """Say whether this rank is in a method of its publisher, so that nobody doubts that it comes."""
        self._beats.say(is_inside)

    def wait(self, store: Any, keys: dict[int, str], what: str, *, bounded: bool = True) -> list[bytes]:
        """Wait for one key of each of these ranks and return their values.

        `what` says what they have to do. With `bounded` a rank that lives has to be in a method of its publisher within the
        timeout.

        Raises:
            PublishError: a rank is lost, or does not come.
        """
        missing, patience, seen = keys, _Patience(what), dict[int, tuple[bytes, float]]()
        while missing := {rank: key for rank, key in missing.items() if not _has(store, key)}:
            ended = self._ended(store, missing, seen) if patience.looks() else {}
            if ended and not any(_has(store, missing[rank]) for rank in ended):  # its last words may have been this
                rank, how = next(iter(ended.items()))
                raise PublishError(f"Rank {rank} {how}. {WAY_ON}")
            outside = [rank for rank in missing if rank in seen and not seen[rank][0].endswith(b"in")]
            if bounded and outside and patience.waited_s > self.timeout_s:
                raise PublishError(
                    f"{ranks_of(outside)} lives, but did not {what} within {self.timeout_s:g} s. All ranks call the same "
                    f"methods of their publishers, in the same order. {WAY_ON}"
                )
            patience.say(missing)
        return [store.get(key) for key in keys.values()]

    def check(self, store: Any, rank: int, seen: dict[int, tuple[bytes, float]]) -> None:
        """Raise PublishError if a rank is lost; `seen` is what was known of it, from an empty dict on."""
        for lost, how in self._ended(store, [rank], seen).items():
            raise PublishError(f"Rank {lost} {how}. {WAY_ON}")

    def _ended(self, store: Any, ranks: Any, seen: dict[int, tuple[bytes, float]]) -> dict[int, str]:
        """Those of these ranks that are lost, and how."""
        ended = {}
        for rank in ranks:
            value = store.get(f"alive/{rank}") if store.check([f"alive/{rank}"]) else b""
            if value.startswith(b"end:"):
                ended[rank] = value[4:].decode()
            elif rank not in seen or seen[rank][0] != value:
                seen[rank] = value, time.monotonic()
            elif (silent_s := time.monotonic() - seen[rank][1]) > self._silence_s:
                ended[rank] = f"has said nothing for {silent_s:.0f} s, so its process died or hangs"
            if value and rank not in ended and self._is_dead(store, rank):
                ended[rank] = "has died"
        return ended

    def _is_dead(self, store: Any, rank: int) -> bool:
        """Whether a rank's process is seen dead, on the same host."""
        if rank not in self._hosts:
            self._hosts[rank] = store.get(f"host/{rank}").decode()
        host, _, pid = self._hosts[rank].partition(" ")
        return bool(host) and host == _host() and _process(pid.split()[0]) != pid

    def end(self, how: str) -> None:
        """Say that this rank answers no more, and why. No thread is left."""
        _open.discard(self)
        self._beats.end(how)


class _Beats:
    """Says every second that this rank's process lives, in a thread of its own."""

    def __init__(self, store: Any, rank: int) -> None:
        self._inside, self._number = True, 0
        self._store: Any = store
        self._key = f"alive/{rank}"
        self._ending, self._lock = threading.Event(), threading.Lock()
        pid = _process(str(os.getpid()))
        store.set(f"host/{rank}", f"{_host()} {pid}" if pid else "")
        self.say(True)
        self._thread = daemon("heartbeat", self._run)
        self._thread.start()

    def say(self, is_inside: bool) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # the store is gone; who waits for it finds out
            self._inside = is_inside
            if not self._ending.is_set():
                self._number += 1
                self._store.set(self._key, f"{self._number} {'in' if is_inside else 'out'}")

    def _run(self) -> None:
        while not self._ending.wait(BEAT_S):
            self.say(self._inside)

    def end(self, how: str) -> None:
        if self._ending.is_set():
            return
        self._ending.set()
        with self._lock, contextlib.suppress(RuntimeError):
            self._store.set(self._key, f"end:{how}")
        self._thread.join()
        self._store = None


class _Patience:
    """Waits a little longer each time, and says for whom."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began_s = self._checked_s = time.monotonic()
        self._said_s = self._began_s - 60 + SAID_AFTER_S

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def looks(self) -> bool:
        """Whether it is time to look for signs of life again."""
        if time.monotonic() - self._checked_s < 0.2:
            return False
        self._checked_s = time.monotonic()
        return True

    def say(self, ranks: Any) -> None:
        """Sleep; log the ranks when it is time to."""
        if time.monotonic() - self._said_s > 60:
            self._said_s = time.monotonic()
            logger.warning("Waiting for %s to %s, since %.0f s.", ranks_of(ranks).lower(), self._what, self.waited_s)
        time.sleep(min(0.1, max(0.0005, self.waited_s / 20)))


_open: weakref.WeakSet[Mailbox] = weakref.WeakSet()


_LEFT = "deltasync/left"


@atexit.register
def _ending() -> None:
    """Tell the others that this process ends, after its uploads were finished; also those who wait for it to open."""
    for mailbox in [*_open]:
        mailbox.end("has ended its process")
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):  # the process that held the store may have ended before
            PrefixStore(_LEFT, _world_store()).set(str(dist.get_rank()), "")


def _world_store() -> Any:
    return cast("Any", dist.group.WORLD).get_group_store()


def ranks_of(ranks: Any) -> str:
    """Return `Rank 1`, or `Ranks 1, 3`."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _has(store: Any, key: str) -> bool:
    return bool(store.check([key]))


def _host() -> str:
    """Name of this machine and of its space of process ids; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process(pid: str) -> str:
    """A process's id and when it began; empty if it has ended, or where that is not known."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{pid} {fields[18]}"
