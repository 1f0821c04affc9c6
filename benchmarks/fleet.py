"""What a fleet of replicas costs the store and the trainer, counted between real clients and a real server.

    python -m benchmarks.fleet [--replicas 1000] [--json]

from the root of the repository, with the development dependencies. S3 is moto in a process of its own, behind
one proxy for the trainer and one for the replicas, which count whole HTTP messages. Replicas are the real
loops, cursors and heartbeats over a model of 64 Ki elements, in three processes. Steps are driven: each takes
a new version, then asks once in vain, as a loop does 20 ms after a version. How often a loop asks in vain
until the next one is due is computed with the real `Poll` and a clock that is handed in, and so is what
comes after an outage.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock
from urllib.parse import unquote

import torch

from benchmarks import common
from benchmarks.common import say, table
from deltasync import Publisher, Retention, open_store
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.errors import AckTimeoutError, TransientStoreError
from deltasync.following import Follow, MemoryTarget, Poll
from deltasync.serve import heartbeat
from deltasync.serve.heartbeats import HeartbeatWriter
from deltasync.stores import Store
from tests.http_faults import Exchange, FaultProxy, s3_error
from tests.servers.s3 import KEYS, MotoServer

ELEMENTS = 1 << 16
CHANGED = 0.01
VERSIONS = 2  # that are followed in the steady state
PROCESSES = 3
KILLED = 0.3
_AT_ONCE = 12  # steps at once in one process
_BEAT_S = 45.0
_PATIENCE_S = 600.0
_LIVE_S = 240.0  # `heartbeat.LIVE_S` here: one machine that plays all replicas takes more than a minute for a version
_AWAY_S = 20.0
_LOOPS = 100  # which follow in threads of their own while the store is away

KINDS = "record", "nothing new", "head.json", "heartbeat read", "heartbeat written", "listing", "other"


def kind(exchange: Exchange) -> str:
    """Return what a replica asked for, one of `KINDS`."""
    path = unquote(exchange.path)
    if "prefix=" in exchange.query or "list-type" in exchange.query:
        return "listing"
    if f"/{keys.REPLICAS}" in path:
        return "heartbeat written" if exchange.method == "PUT" else "heartbeat read"
    if path.endswith(keys.HEAD):
        return "head.json"
    if f"/{keys.VERSIONS}" in path:
        return "nothing new" if exchange.status == 404 else "record"
    return "other"


def cost(exchanges: Sequence[Exchange], times: int) -> dict[str, float]:
    """Return requests by their kind, and bytes, divided by `times`."""
    counts = Counter(map(kind, exchanges))
    found = {name: counts[name] / times for name in KINDS}
    found["requests"] = len(exchanges) / times
    found["bytes up"] = sum(each.bytes_up for each in exchanges) / times
    found["bytes down"] = sum(each.bytes_down for each in exchanges) / times
    return found


# What runs in other processes


class Replicas:
    """The replicas of one process."""

    def __init__(self, url: str | Store, first: int, count: int) -> None:
        self._members = [_member(url, number) for number in range(first, first + count)]
        self._pool = ThreadPoolExecutor(_AT_ONCE)

    def take(self, version: int, but: int = 0) -> int:
        """Have all but some take a version, and ask once more. Returns how many took it."""

        def step(member: tuple[Follow, HeartbeatWriter]) -> None:
            follow, beats = member
            is_last = False
            while not is_last:
                is_last = follow.version is not None and follow.version >= version
                with contextlib.suppress(
                    TransientStoreError
                ):  # no answer in time, as of a server that is busy
                    follow.step(audits=True)
                beats.update(follow.status(0))

        return len([*self._pool.map(step, self._members[but:])])

    def start(self) -> None:
        """Have each follow in its own thread."""
        for follow, _ in self._members:
            follow.start()

    def versions(self) -> list[int | None]:
        """Return the versions that they serve."""
        return [follow.version for follow, _ in self._members]


def _member(url: str | Store, number: int) -> tuple[Follow, HeartbeatWriter]:
    store = open_store(url)
    reader, beats = ChannelReader(store), HeartbeatWriter(store, _BEAT_S)
    settings = ReplicaSettings(replica_id=f"replica-{number:05d}")
    return Follow(reader, MemoryTarget(reader), settings, heartbeats=beats), beats


class Trainer:
    """Publishes versions that change 1 %, and waits for replicas."""

    def __init__(self, url: str | Store) -> None:
        self._publisher = Publisher(url, retention=Retention(compact_every=0))
        self._random = torch.Generator().manual_seed(0)
        self._weights = {"w": torch.randn(ELEMENTS, generator=self._random).to(torch.bfloat16)}
        self._beats: heartbeat.FleetHeartbeats | None = None

    def publish(self) -> tuple[int, int]:
        """Publish a version; return its number and the bytes of its payload, once head names it."""
        changed = torch.rand(ELEMENTS, generator=self._random) < CHANGED
        self._weights["w"].view(torch.int16)[changed] += 1
        receipt = self._publisher.publish(self._weights).wait(60)
        self._publisher.flush()
        return receipt.version, receipt.payload_bytes

    def ack(self, version: int, timeout_s: float) -> int | str:
        """Wait until all live replicas serve a version; return how many, or the error."""
        publisher = self._publisher
        run_id = str(publisher.run_id)
        if self._beats is None:
            self._beats = heartbeat.FleetHeartbeats(publisher.store, run_id, decides=True)
        try:
            found = heartbeat.wait_for(
                publisher.store, run_id, version, publisher.published, timeout_s, known=self._beats
            )
        except (AckTimeoutError, TransientStoreError) as error:
            return str(error)
        return len(found)

    def usage(self) -> tuple[float, int]:
        """Return this process's CPU seconds, and its resident bytes."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, common.status_bytes("VmRSS")


class Moto:
    """The server."""

    def __init__(self) -> None:
        self._server = MotoServer()
        self.bucket = self._server.new_bucket()

    def where(self) -> tuple[str, str]:
        """Return its endpoint, and a bucket."""
        return self._server.endpoint, self.bucket


def _serve(make: Callable[..., Any], arguments: Sequence[Any], pipe: Connection) -> None:
    os.environ.update(KEYS)
    logging.getLogger("deltasync").setLevel(logging.CRITICAL)  # of an outage, a thousand times
    heartbeat.LIVE_S = _LIVE_S
    made = make(*arguments)
    pipe.send(None)
    for method, given in iter(pipe.recv, None):
        pipe.send(getattr(made, method)(*given))
    os._exit(0)  # without the last heartbeats, as a process that is killed


class Remote:
    """An object in a process of its own."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(make, arguments, other), daemon=True)
        self._process.start()
        self.result()

    def begin(self, method: str, *arguments: Any) -> None:
        """Call a method, whose result `result` waits for."""
        self._pipe.send((method, arguments))

    def result(self) -> Any:
        """Return the result of the last call."""
        if not self._pipe.poll(_PATIENCE_S):
            raise TimeoutError(f"A process of the benchmark did not answer within {_PATIENCE_S:g} s.")
        return self._pipe.recv()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, and return its result."""
        self.begin(method, *arguments)
        return self.result()

    def kill(self) -> None:
        """End the process at once (SIGKILL)."""
        self._process.kill()
        self._process.join()


# The measurement


class Fleet:
    """A trainer and its replicas, and the proxies that count.

    Args:
        endpoint: The server.
        bucket: Where the channel is.
        replicas: How many replicas.
    """

    def __init__(self, stack: contextlib.ExitStack, endpoint: str, bucket: str, replicas: int) -> None:
        self._stack, self._replicas = stack, replicas
        self.trainers, self.fleets = (stack.enter_context(FaultProxy(endpoint)) for _ in range(2))
        self._urls = [
            f"s3://{bucket}/run-{replicas}?endpoint={proxy.url}&region=us-east-1"
            for proxy in (self.trainers, self.fleets)
        ]
        self.trainer = self._remote(Trainer, self._urls[0])
        self.parts: list[Remote] = []

    def _remote(self, make: Callable[..., Any], *arguments: Any) -> Remote:
        remote = Remote(make, *arguments)
        self._stack.callback(remote.kill)
        return remote

    def start(self, first: int, counts: Sequence[int]) -> list[Remote]:
        """Start processes of replicas, whose numbers begin with `first`."""
        started = []
        for count in counts:
            started.append(self._remote(Replicas, self._urls[1], first, count))
            first += count
        self.parts += started
        return started

    def taken(self, version: int, but: int = 0, parts: Sequence[Remote] | None = None) -> list[Exchange]:
        """Have replicas take a version, all but some of the first process; return their requests."""
        self.fleets.exchanges.clear()
        parts = self.parts if parts is None else parts
        for number, part in enumerate(parts):
            part.begin("take", version, 0 if number else but)
        for part in parts:
            part.result()
        return self.fleets.exchanges[:]


def steady(fleet: Fleet, replicas: int) -> dict[str, Any]:
    """Publish versions that all take; the trainer waits for each of them."""
    taken: list[Exchange] = []
    looks = Counter[str]()
    sent, payload, cpu_s, resident = 0, 0, [], []
    for _ in range(VERSIONS):
        fleet.trainers.exchanges.clear()
        before_s, _ = fleet.trainer.call("usage")
        version, payload_bytes = fleet.trainer.call("publish")
        sent += sum(each.bytes_up for each in fleet.trainers.matching("PUT"))
        payload += payload_bytes
        fleet.taken(version)
        fleet.trainers.exchanges.clear()
        # heartbeats follow the steps, and those of earlier than a minute ago count as dead
        while fleet.trainer.call("ack", version, _PATIENCE_S) != replicas:
            time.sleep(0.5)
        taken += fleet.fleets.exchanges
        looks.update(map(kind, fleet.trainers.exchanges))
        after_s, rss_bytes = fleet.trainer.call("usage")
        cpu_s.append(after_s - before_s)
        resident.append(rss_bytes)
    return {
        **cost(taken, VERSIONS * replicas),
        "sent for a byte of delta": sent / payload,
        "reads of each heartbeat": looks["heartbeat read"] / VERSIONS / replicas,
        "trainer_cpu_s": cpu_s,
        "trainer_resident_bytes": resident,
    }


def straggler(fleet: Fleet) -> dict[str, Any]:
    """Have all but one replica take a version, and wait for that one in vain."""
    version, _ = fleet.trainer.call("publish")
    fleet.taken(version, but=1)
    while str(fleet.trainer.call("ack", version, 5.0)).count("replica-") != 1:
        pass  # each heartbeat that has changed is read, as many at a look as the server answers in time
    fleet.trainers.exchanges.clear()
    error = fleet.trainer.call("ack", version, 10.0)
    looks = Counter(map(kind, fleet.trainers.exchanges))
    return {
        "named": error.count("replica-") == 1 and "replica-00000" in error,
        "listings": looks["listing"],
        "reads": looks["heartbeat read"],
    }


def restarted(fleet: Fleet, first: int, count: int) -> dict[str, Any]:
    """Kill the first process, start its replicas again, and wait for all."""
    fleet.parts.pop(0).kill()
    version, _ = fleet.trainer.call("publish")
    fleet.taken(version)
    begun_s = time.monotonic()
    joined = fleet.taken(version, parts=fleet.start(first, [count]))
    joined_s = time.monotonic() - begun_s
    served = fleet.trainer.call("ack", version, _PATIENCE_S)
    acked_s = time.monotonic() - begun_s
    return {**cost(joined, count), "joined_s": joined_s, "acked_s": acked_s, "served": served}


def outage(fleet: Fleet, replicas: int) -> dict[str, Any]:
    """Have loops follow in threads of their own while their store is away, and see when they ask again."""
    for part in fleet.parts:
        part.call("start")
    time.sleep(3.0)
    fleet.fleets.exchanges.clear()
    fault = fleet.fleets.strike(s3_error(503, "SlowDown"), times=1 << 30)
    version, _ = fleet.trainer.call("publish")
    time.sleep(_AWAY_S)
    fleet.fleets.heal()
    back, counts, deadline = fault.hits, [fault.hits], time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        counts.append(len(fleet.fleets.exchanges))
        if all(set(part.call("versions")) == {version} for part in fleet.parts):
            break
    else:
        raise TimeoutError("Not all replicas have taken the version after the outage.")
    return {
        "away_s": _AWAY_S,
        "asked_meanwhile": back / replicas,
        "most_in_a_second": max(after - before for before, after in itertools.pairwise(counts)),
        "until_all_s": len(counts) - 1,
    }


# Computed, with the real `Poll`


def in_vain(interval_s: float, between_s: float, versions: int = 20) -> tuple[float, int]:
    """Return how often a loop asks in vain for each of versions that come at this distance, and the most requests
    of one loop in a second.
    """
    now_s, asked_s = 0.0, list[float]()
    with mock.patch("deltasync.following.poll.time.monotonic", lambda: now_s):
        poll = Poll(interval_s)
        for number in range(1, versions + 1):
            is_there = False
            while not is_there:
                now_s += poll.delay_s(moved=bool(asked_s) and asked_s[-1] < 0)
                is_there = now_s >= number * between_s
                asked_s.append(-now_s if is_there else now_s)
    times = [abs(each) for each in asked_s]
    most = max(sum(begin <= each < begin + 1 for each in times) for begin in times)
    return (len(times) - versions) / versions, most


def herd(replicas: int, away_s: float, window_s: float = 0.1) -> float:
    """Return by how much the most requests in a window exceed their mean in the 5 s after an outage, which began
    at the same moment for all replicas.
    """
    error = TransientStoreError("away")
    windows = Counter[int]()
    for _ in range(replicas):
        poll, now_s = Poll(1.0), 0.0
        while now_s < away_s:
            now_s += poll.delay_s(moved=False, failure=error)
        windows[int((now_s - away_s) / window_s)] += 1
    return max(windows.values()) / (replicas * window_s / 5.0)


def split(replicas: int) -> list[int]:
    """Return how many replicas each process has; the first has those that are killed."""
    killed = max(1, round(KILLED * replicas))
    rest = replicas - killed
    others = [rest // (PROCESSES - 1)] * (PROCESSES - 1)
    others[0] += rest - sum(others)
    return [killed, *others]


def run(replicas: int) -> dict[str, Any]:
    """Measure one replica, a fleet, and what is computed."""
    result: dict[str, Any] = {"replicas": replicas}
    with contextlib.ExitStack() as stack:
        server = Remote(Moto)
        stack.callback(server.kill)
        endpoint, bucket = server.call("where")
        one = Fleet(stack, endpoint, bucket, 1)
        one.start(0, [1])
        one.taken(one.trainer.call("publish")[0])
        result["one"] = steady(one, 1)
        counts = split(replicas)
        fleet = Fleet(stack, endpoint, bucket, replicas)
        version, _ = fleet.trainer.call("publish")
        fleet.start(0, counts)
        say(f"{replicas:,} replicas in {len(counts)} processes")
        result["join"] = cost(fleet.taken(version), replicas)
        say("joined")
        result["steady"] = steady(fleet, replicas)
        say(f"steady {result['steady']}")
        result["straggler"] = straggler(fleet)
        say(f"straggler {result['straggler']}")
        result["restarted"] = restarted(fleet, 0, counts[0])
        say(f"restarted {result['restarted']}")
        some = Fleet(stack, endpoint, bucket, _LOOPS)
        version, _ = some.trainer.call("publish")
        some.start(0, [_LOOPS])
        some.taken(version)
        result["outage"] = outage(some, _LOOPS)
    return result | computed()


def computed() -> dict[str, Any]:
    """Compute how often loops ask in vain, and what comes after an outage."""
    return {
        "in_vain": [
            {"interval_s": interval, "between_s": between, "asked": asked, "most_in_a_second": most}
            for between in (10.0, 60.0)
            for interval in (1.0, 10.0)
            for asked, most in [in_vain(interval, between)]
        ],
        "herd": {f"{away_s:g}": herd(1000, away_s) for away_s in (30.0, 600.0)},
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    for part in (followed, trained, polls):
        yield from part(result)
        yield ""


def followed(result: dict[str, Any]) -> Iterator[str]:
    """Yield the table of what a replica asks for."""
    phases = {"one": "one replica, a version", "steady": f"one of {result['replicas']:,}, a version"}
    phases |= {"join": "it joins", "restarted": "it joins after a kill"}
    names = [*KINDS, "requests"]
    rows = [
        (
            text,
            *(f"{result[phase][name]:.3g}" for name in names),
            *(f"{result[phase][name]:,.0f}" for name in ("bytes up", "bytes down")),
        )
        for phase, text in phases.items()
    ]
    yield from table(("", *names, "bytes up", "bytes down"), rows)


def trained(result: dict[str, Any]) -> Iterator[str]:
    """Yield the table of what replicas cost the trainer, and of what happens to them."""
    one, many, late = result["one"], result["steady"], result["straggler"]
    looks = max(1, late["listings"])
    cpu_s, resident = many["trainer_cpu_s"], many["trainer_resident_bytes"]
    rows = [
        (
            "bytes sent for a byte of delta",
            *(f"{each['sent for a byte of delta']:.3f}" for each in (one, many)),
        ),
        (
            "heartbeats read for a replica and version",
            *(f"{each['reads of each heartbeat']:.2f}" for each in (one, many)),
        ),
        ("one replica lags: listings, and reads, in a look", "", f"1, {late['reads'] / looks:.2g}"),
        ("CPU of a version and its acks", f"{one['trainer_cpu_s'][-1]:.2f} s", f"{cpu_s[-1]:.2f} s"),
        ("memory, first and last version", "", f"{resident[0] / 1e6:.0f}, {resident[-1] / 1e6:.0f} MB"),
        (
            "30 % killed: all have joined, and are acknowledged, after",
            "",
            "{joined_s:.0f} s, {acked_s:.0f} s".format_map(result["restarted"]),
        ),
        (
            f"{_LOOPS} replicas, store away for {_AWAY_S:g} s: requests of each",
            "",
            f"{result['outage']['asked_meanwhile']:.0f}",
        ),
        (
            "then most requests in a second, and all at the newest version after",
            "",
            "{most_in_a_second:,}, {until_all_s} s".format_map(result["outage"]),
        ),
    ]
    yield from table(("", "1 replica", f"{result['replicas']:,} replicas"), rows)


def polls(result: dict[str, Any]) -> Iterator[str]:
    """Yield the table of polls that find nothing."""
    rows = [
        (
            f"{each['between_s']:g} s",
            f"{each['interval_s']:g} s",
            f"{each['asked']:.0f}",
            each["most_in_a_second"],
        )
        for each in result["in_vain"]
    ]
    yield from table(
        ("a version every", "DELTASYNC_POLL_INTERVAL_S", "polls in vain", "most in a second"), rows, words=0
    )


if __name__ == "__main__":
    common.command(
        __doc__, run, lines, common.option("--replicas", type=int, default=1000, help="replicas to start")
    )
