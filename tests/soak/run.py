"""Run it: make trouble, look at everything, and say what is not as it should be."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from deltasync import maintenance, open_store
from deltasync.channel.reading import ChannelReader
from tests.processes import PROCESSES
from tests.soak import chaos, ends
from tests.soak.settings import Soak, noted, told
from tests.soak.watch import Watch

_DISK_BYTES = 64 << 20
_STALL_S = 2.0
_END_S = 300.0  # a busy machine is no failure
_SLACK_S = 300.0

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _Walk:
    seed: int
    start: int

    def __call__(self) -> Iterator[ends.Weights]:
        return ends.random_walk(self.seed, self.start)


class Cast:
    """The processes of a soak, each of which may be killed and started again; without servers.

    Attributes:
        disk: What may be filled, where it is a disk of its own.
    """

    def __init__(self, soak: Soak) -> None:
        self.disk = soak.folder / "disk"
        self.channel = self.disk / "channel"
        self._soak = soak
        self._starts = 0
        self._running: dict[str, BaseProcess] = {}
        self._ended: list[BaseProcess] = []
        self._backup = soak.folder / "backup"

    def start(self, name: str) -> None:
        """Start `publisher` or a replica; of publishers, the one before goes on until it notices."""
        if name in self._running:
            self._ended.append(self._running[name])
        self._starts += name == "publisher"
        child = PROCESSES.Process(target=ends.publish if name == "publisher" else ends.follow, args=self._arguments(name))
        child.start()
        self._running[name] = child

    def _arguments(self, name: str) -> tuple[object, ...]:
        url = f"file://{self.channel}"
        if name != "publisher":
            return self._soak, url, int(name.split()[1])
        return self._soak, url, _Walk(self._soak.seed, self._starts), True, self._starts

    def may_kill(self, name: str) -> bool:
        """Whether it runs."""
        return name in self._running

    def kill(self, name: str) -> None:
        """SIGKILL."""
        child = self._running.pop(name)
        child.kill()
        child.join()

    def revive(self) -> None:
        """Start again whatever has ended."""
        for name in self.names:
            if name not in self._running or not self._running[name].is_alive():
                self.start(name)

    @property
    def names(self) -> list[str]:
        """All that should run."""
        return ["publisher", *(f"replica {number}" for number in range(1, self._soak.replicas + 1))]

    @property
    def alive(self) -> dict[str, int]:
        """Processes that run, by name."""
        return {name: child.pid or 0 for name, child in self._running.items() if child.is_alive()}

    @property
    def pids(self) -> list[int]:
        """All processes."""
        return list(self.alive.values())

    def save(self) -> None:
        """Take a backup of the channel."""
        shutil.copytree(self.channel, self._backup)

    def restore(self) -> None:
        """Put it in the place of the channel."""
        shutil.rmtree(self.channel)
        shutil.copytree(self._backup, self.channel)

    def join(self) -> dict[str, int | None]:
        """Wait for the end of all; their exit codes."""
        for child in (*self._ended, *self._running.values()):
            child.join(_END_S)
        return {name: child.exitcode for name, child in self._running.items()}

    def end(self) -> None:
        """Kill what is left."""
        for child in (*self._ended, *self._running.values()):
            child.kill()


def run(soak: Soak, say: Say = lambda text: None) -> dict[str, Any]:
    """Replicas in host memory, on a directory.

    Returns:
        What `attend` does, `publisher` and `replicas` as they told last, and `problems` of the channel.
    """
    cast, watch = Cast(soak), Watch()
    disk = chaos.small_disk(cast.disk, _DISK_BYTES) if soak.chaos else contextlib.nullcontext()

    def look() -> None:
        assert soak.chaos or set(cast.alive) == set(cast.names), "a process has ended"
        if soak.chaos:
            cast.revive()
        for name, pid in cast.alive.items():
            watch.process(name, [pid])
        for name, folder in (("channel", cast.channel), ("cache", soak.folder / "cache")):
            watch.folder(name, folder)

    with disk, contextlib.ExitStack() as stack:
        stack.callback(cast.end)
        troubles = chaos.Troubles(soak, cast).all if soak.chaos else {}
        for name in cast.names:
            cast.start(name)
        result = attend(soak, watch, lambda: cast.pids, look, say, troubles)
        if soak.chaos:
            result["summary"] = {}  # who is started anew begins small
            cast.revive()
        (soak.folder / "end").touch()
        codes = cast.join()
        assert set(codes.values()) == {0}, codes
        numbers = range(1, soak.replicas + 1)
        replicas = [told(soak.folder / f"replica-{number}") for number in numbers]
        served = {str(number): set(noted(soak.folder / f"served-{number}")) for number in numbers}
        found = {"publisher": told(soak.folder / "publisher"), "replicas": replicas, "acks": acks(soak, served)}
        return result | found | {"problems": problems(f"file://{cast.channel}")}


def acks(soak: Soak, served: Mapping[str, Collection[str]]) -> dict[str, int]:
    """How many heartbeats counted for an acknowledgement, and how many of them told of bits that the replica never had.

    Args:
        soak: What was run.
        served: Digests of the versions that each replica had, by its id.
    """
    found = noted(soak.folder / "acks")
    return {"counted": len(found), "false": sum(digest not in served[replica] for replica, digest in found)}


def problems(channel: str) -> list[str]:
    """What is wrong with any version that the channel still has, all bits of which are read."""
    report = maintenance.check(ChannelReader(open_store(channel)), read_data=True)
    return [str(problem) for problem in report.problems]


def attend(
    soak: Soak,
    watch: Watch,
    pids: Callable[[], Sequence[int]],
    look: Callable[[], None],
    say: Say,
    others: Mapping[str, Callable[[], bool]] | None = None,
) -> dict[str, Any]:
    """Make trouble and look, until the time is over and the versions are there.

    Args:
        soak: What to run.
        watch: What `look` notes to.
        pids: Processes that may be suspended for a while.
        look: Called every `sample_s`.
        say: Told how far it is.
        others: More troubles, by name; each tells whether it came about.

    Returns:
        `seconds`, `versions`, `troubles`, and the `summary` of what was watched.
    """
    chance = random.Random(soak.seed)
    known = {"away": lambda: _away(soak, chance), "suspended": lambda: _suspended(chance, pids()), **(others or {})}
    troubles = dict.fromkeys(known, 0)
    deadline = watch.started + max(soak.seconds, 2 * soak.versions / soak.rate) + _SLACK_S
    look_s = trouble_s = said_s = watch.started
    while True:
        now = time.monotonic()
        version = told(soak.folder / "publisher").get("version", 0)
        if now > deadline or (now - watch.started >= soak.seconds and version >= soak.versions):
            break
        if now >= look_s:
            look()
            look_s = now + soak.sample_s
        if now >= trouble_s and version:
            name = chance.choice(list(known))
            troubles[name] += known[name]()
            trouble_s = time.monotonic() + chance.uniform(0, 2 * soak.trouble_s)
        if now >= said_s:
            said_s = now + 60
            say(f"{now - watch.started:.0f} s: version {version}")
        time.sleep(min(0.2, soak.sample_s))
    seconds = time.monotonic() - watch.started
    return {"seconds": seconds, "versions": version, "troubles": troubles, "summary": watch.summary(soak.warm_up_s)}


def _away(soak: Soak, chance: random.Random) -> bool:
    """Take the store away for a while."""
    soak.away.touch()
    time.sleep(chance.uniform(0.1, _STALL_S))
    soak.away.unlink()
    return True


def _suspended(chance: random.Random, pids: Sequence[int]) -> bool:
    """Stop a process for a while."""
    if not pids:
        return False
    pid = chance.choice(pids)
    with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as stack:
        os.kill(pid, signal.SIGSTOP)
        stack.callback(os.kill, pid, signal.SIGCONT)
        time.sleep(chance.uniform(0.1, _STALL_S))
    return True


def failures(result: dict[str, Any], versions: int, growth: float = 0.05) -> list[str]:
    """What is not as it should be.

    Args:
        result: The result of a run. After its warm-up, what is no memory may grow by a quarter.
        versions: Least number of them.
        growth: Most growth of a process's memory.
    """
    found: list[str] = list(result["problems"])
    if result.get("acks", {}).get("false"):
        found.append(f"{result['acks']['false']} of {result['acks']['counted']} acknowledgements were false")
    if result["versions"] < versions:
        found.append(f"only {result['versions']} versions")
    for number, replica in enumerate(result["replicas"], 1):
        if replica["version"] != result["publisher"]["version"]:
            found.append(f"replica {number} ended with version {replica['version']}")
        if replica["wrong"] or not replica["checked"]:
            found.append(f"replica {number}: {replica['wrong']} of {replica['checked']} versions had wrong bits")
    for what, numbers in result["summary"].items():
        limit = growth if what.endswith("memory") else 0.25
        if numbers["growth"] > limit and numbers["end"] - numbers["begin"] > 3:
            found.append(
                f"{what} grew by {100 * numbers['growth']:.1f} %, from {numbers['begin']:.0f} to {numbers['end']:.0f}"
            )
    return found
