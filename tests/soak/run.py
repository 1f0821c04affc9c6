"""Run it: make trouble, look at everything, and say what is not as it should be."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from deltasync import housekeeping, open_store
from deltasync.channel.reading import ChannelReader
from tests.processes import PROCESSES
from tests.soak import chaos, ends
from tests.soak.settings import Soak, told
from tests.soak.watch import Watch

_STALL_S = 2.0
_END_S = 120.0
_SLACK_S = 300.0

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _Walk:
    seed: int
    start: int

    def __call__(self) -> Iterator[ends.Weights]:
        return ends.random_walk(self.seed, self.start)


class Cast:
    """The processes of a soak without servers, each of which may be killed and started again.

    Attributes:
        channel: The directory of the channel.
    """

    def __init__(self, soak: Soak) -> None:
        self.channel = soak.folder / "disk" / "channel"
        self._soak = soak
        self._starts = 0
        self._running: dict[str, BaseProcess] = {}
        self._ended: list[BaseProcess] = []

    def start(self, name: str) -> None:
        """Start `publisher` or `replica N`; of publishers, the one before goes on until it notices."""
        if name in self._running:
            self._ended.append(self._running[name])
        url = f"file://{self.channel}"
        if name == "publisher":
            self._starts += 1
            walk = _Walk(self._soak.seed, self._starts)
            child = PROCESSES.Process(target=ends.publish, args=(self._soak, url, walk, True, self._starts))
        else:
            child = PROCESSES.Process(target=ends.follow, args=(self._soak, url, int(name.split()[1])))
        child.start()
        self._running[name] = child

    def kill(self, name: str) -> None:
        """SIGKILL."""
        child = self._running.pop(name)
        child.kill()
        child.join()

    def revive(self, name: str) -> bool:
        """Start it again if it has ended; whether it had."""
        ended = name not in self._running or not self._running[name].is_alive()
        if ended:
            self.start(name)
        return ended

    @property
    def names(self) -> list[str]:
        """All that should run."""
        return ["publisher", *(f"replica {number}" for number in range(1, self._soak.replicas + 1))]

    @property
    def pids(self) -> dict[str, int]:
        """Of what runs."""
        return {name: child.pid or 0 for name, child in self._running.items() if child.is_alive()}

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
    disk = chaos.small_disk(cast.channel.parent) if soak.chaos else contextlib.nullcontext()

    def look() -> None:
        assert soak.chaos or set(cast.pids) == set(cast.names), "a process has ended"
        for name in cast.names if soak.chaos else ():
            cast.revive(name)
        for name, pid in cast.pids.items():
            watch.process(name, [pid])
        for name, folder in (("channel", cast.channel), ("cache", soak.folder / "cache")):
            watch.folder(name, folder)

    with disk, contextlib.ExitStack() as stack:
        stack.callback(cast.end)
        troubles = chaos.Troubles(soak, cast).all if soak.chaos else {}
        for name in cast.names:
            cast.start(name)
        result = attend(soak, watch, lambda: list(cast.pids.values()), look, say, troubles)
        if soak.chaos:
            result["summary"] = {}  # who is started anew begins small
            for name in cast.names:
                cast.revive(name)
        (soak.folder / "end").touch()
        codes = cast.join()
        assert set(codes.values()) == {0}, codes
        replicas = [told(soak.folder / f"replica-{number}") for number in range(1, soak.replicas + 1)]
        found = {"publisher": told(soak.folder / "publisher"), "replicas": replicas}
        return result | found | {"acks": acks(soak), "problems": problems(f"file://{cast.channel}")}


def acks(soak: Soak) -> dict[str, int]:
    """How many heartbeats counted for an acknowledgement, and how many of them told of bits that the replica never had."""
    found = ends.noted(soak.folder / "acks")
    served = {str(number): set(ends.noted(soak.folder / f"served-{number}")) for number in range(1, soak.replicas + 1)}
    return {"counted": len(found), "false": sum(digest not in served[replica] for replica, digest in found)}


def problems(channel: str) -> list[str]:
    """What is wrong with any version that the channel still has, all bits of which are read."""
    report = housekeeping.check(ChannelReader(open_store(channel)), read_data=True)
    return [str(problem) for problem in report.problems]


def attend(
    soak: Soak,
    watch: Watch,
    pids: Callable[[], Sequence[int]],
    look: Callable[[], None],
    say: Say,
    others: Mapping[str, Callable[[], None]] | None = None,
) -> dict[str, Any]:
    """Make trouble and look, until the time is over and the versions are there.

    Args:
        soak: What to run.
        watch: What `look` notes to.
        pids: Processes that may be suspended for a while.
        look: Called every `sample_s`.
        say: Told how far it is.
        others: More troubles, by name.

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
            known[name]()
            troubles[name] += 1
            trouble_s = time.monotonic() + chance.uniform(0, 2 * soak.trouble_s)
        if now >= said_s:
            said_s = now + 60
            say(f"{now - watch.started:.0f} s: version {version}")
        time.sleep(min(0.2, soak.sample_s))
    seconds = time.monotonic() - watch.started
    return {"seconds": seconds, "versions": version, "troubles": troubles, "summary": watch.summary(soak.warm_up_s)}


def _away(soak: Soak, chance: random.Random) -> None:
    """Take the store away for a while."""
    soak.away.touch()
    time.sleep(chance.uniform(0.1, _STALL_S))
    soak.away.unlink()


def _suspended(chance: random.Random, pids: Sequence[int]) -> None:
    """Stop a process for a while."""
    if not pids:
        return
    pid = chance.choice(pids)
    with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as stack:
        os.kill(pid, signal.SIGSTOP)
        stack.callback(os.kill, pid, signal.SIGCONT)
        time.sleep(chance.uniform(0.1, _STALL_S))


def failures(result: dict[str, Any], versions: int, growth: float = 0.05) -> list[str]:
    """What is not as it should be.

    Args:
        result: Of a run. After its warm-up, what is no memory may grow by a quarter.
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
