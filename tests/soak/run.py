"""Run it: make trouble, look at everything, and say what is not as it should be."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deltasync import housekeeping, open_store
from deltasync.reader import ChannelReader
from tests.processes import PROCESSES
from tests.soak import ends
from tests.soak.settings import Soak, told
from tests.soak.watch import Watch

_STALL_S = 2.0
_END_S = 120.0
_SLACK_S = 300.0

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _Walk:
    seed: int

    def __call__(self) -> Iterator[ends.Weights]:
        return ends.random_walk(self.seed)


def run(soak: Soak, say: Say = lambda text: None) -> dict[str, Any]:
    """Replicas in host memory, on a directory.

    Returns:
        What `attend` does, `publisher` and `replicas` as they told last, and `problems` of the channel.
    """
    channel = f"file://{soak.folder}/channel"
    children = {"publisher": PROCESSES.Process(target=ends.publish, args=(soak, channel, _Walk(soak.seed), True))}
    for number in range(1, soak.replicas + 1):
        children[f"replica {number}"] = PROCESSES.Process(target=ends.follow, args=(soak, channel, number))
    watch = Watch()

    def look() -> None:
        assert all(child.is_alive() for child in children.values()), "a process has ended"
        for name, child in children.items():
            watch.process(name, [child.pid or 0])
        for name in ("channel", "cache"):
            watch.folder(name, soak.folder / name)

    for child in children.values():
        child.start()
    try:
        result = attend(soak, watch, [child.pid or 0 for child in children.values()], look, say)
        (soak.folder / "end").touch()
        for child in children.values():
            child.join(_END_S)
    finally:
        for child in children.values():
            child.kill()
    assert [child.exitcode for child in children.values()] == [0] * len(children)
    replicas = [told(soak.folder / f"replica-{number}") for number in range(1, soak.replicas + 1)]
    return result | {"publisher": told(soak.folder / "publisher"), "replicas": replicas, "problems": problems(channel)}


def problems(channel: str) -> list[str]:
    """What is wrong with any version that the channel still has, all bits of which are read."""
    report = housekeeping.check(ChannelReader(open_store(channel)), read_data=True)
    return [str(problem) for problem in report.problems]


def attend(soak: Soak, watch: Watch, pids: Sequence[int], look: Callable[[], None], say: Say) -> dict[str, Any]:
    """Make trouble and look, until the time is over and the versions are there.

    Args:
        soak: What to run.
        watch: What `look` notes to.
        pids: Processes that may be stopped for a while.
        look: Called every `sample_s`.
        say: Told how far it is.

    Returns:
        `seconds`, `versions`, `troubles`, and the `summary` of what was watched.
    """
    chance, troubles = random.Random(soak.seed), {"away": 0, "stopped": 0}
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
            troubles[_trouble(soak, chance, pids)] += 1
            trouble_s = time.monotonic() + chance.uniform(0, 2 * soak.trouble_s)
        if now >= said_s:
            said_s = now + 60
            say(f"{now - watch.started:.0f} s: version {version}")
        time.sleep(min(0.2, soak.sample_s))
    seconds = time.monotonic() - watch.started
    return {"seconds": seconds, "versions": version, "troubles": troubles, "summary": watch.summary(soak.warm_up_s)}


def _trouble(soak: Soak, chance: random.Random, pids: Sequence[int]) -> str:
    """Take the store away, or stop a process, for a while."""
    wait_s = chance.uniform(0.1, _STALL_S)
    if chance.random() < 0.5:
        soak.away.touch()
        time.sleep(wait_s)
        soak.away.unlink()
        return "away"
    pid = chance.choice(pids)
    with contextlib.ExitStack() as stack:
        os.kill(pid, signal.SIGSTOP)
        stack.callback(os.kill, pid, signal.SIGCONT)
        time.sleep(wait_s)
    return "stopped"


def failures(result: dict[str, Any], versions: int, growth: float = 0.05) -> list[str]:
    """What is not as it should be.

    Args:
        result: Of a run. After its warm-up, what is no memory may grow by a quarter.
        versions: Least number of them.
        growth: Most growth of a process's memory.
    """
    found: list[str] = list(result["problems"])
    if result["versions"] < versions:
        found.append(f"only {result['versions']} versions")
    for number, replica in enumerate(result["replicas"], 1):
        if replica["wrong"] or not replica["checked"]:
            found.append(f"replica {number}: {replica['wrong']} of {replica['checked']} versions had wrong bits")
    for what, numbers in result["summary"].items():
        limit = growth if what.endswith("memory") else 0.25
        if numbers["growth"] > limit and numbers["end"] - numbers["begin"] > 3:
            found.append(
                f"{what} grew by {100 * numbers['growth']:.1f} %, from {numbers['begin']:.0f} to {numbers['end']:.0f}"
            )
    return found
