"""The soak with real vLLM servers, on S3 through a proxy that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deltasync import open_store
from deltasync.channel.reading import ChannelReader
from deltasync.errors import DeltaSyncError
from deltasync.stores import Store
from demo.processes import Child, get_json
from demo.run import free_port
from tests import http_faults as faults
from tests.http_faults import FaultProxy
from tests.integration.vllm_server import complete, save_model, start
from tests.processes import PROCESSES
from tests.servers.reverse_proxy import Action, Exchange, Handler, Reply
from tests.servers.s3 import KEYS, MotoServer
from tests.soak import ends
from tests.soak.chaos import Troubles, small_disk
from tests.soak.run import Cast, Say, acks, attend, problems
from tests.soak.settings import CACHE_BYTES, FAULT_RATE, Soak, digest_of, noted, told
from tests.soak.watch import Watch

_REPOSITORY = Path(__file__).parents[2]
_DISK_BYTES = 16 << 20
_PATIENCE_S = 600.0
_SERVES_S = 30.0  # all servers, before one of them is killed
_ACTIONS = [
    faults.status(503),
    faults.status(500),
    faults.reset(),
    faults.killed_upload(),
    faults.truncated(),
    faults.shortened(),
    faults.flipped(),
    faults.empty(),
    faults.late(0.5),
]


class _Proxy(FaultProxy):
    """Remembers nothing, and answers 503 while the store is away."""

    away: Path | None = None

    def choose(self, request: Handler) -> tuple[Action, bool] | None:
        if self.away is not None and self.away.exists():
            return faults.status(503), False
        return super().choose(request)

    def record(self, exchange: Exchange) -> None:
        pass

    def remember(self, request: Handler, reply: Reply) -> None:
        pass


def _store(soak: Soak, told_url: Connection) -> None:
    """A process with the bucket and the proxy, until it is ended."""
    with contextlib.closing(MotoServer()) as server:
        bucket = server.new_bucket()
        with _Proxy(server.endpoint) as proxy:
            proxy.away = soak.away
            proxy.strike_at_random(FAULT_RATE, _ACTIONS, soak.seed)
            told_url.send((server.url(bucket, endpoint=proxy.url), server.url(bucket)))
            told_url.poll(None)  # until the other end is closed


@dataclasses.dataclass(frozen=True)
class _Noise:
    checkpoint: Path
    seed: int
    start: int

    def __call__(self) -> Iterator[ends.Weights]:
        return ends.noise(self.checkpoint, self.seed, self.start)


class _Steps:
    """The steps that versions are of, by digest: of all that the channel had when it was looked at."""

    def __init__(self, store: Store) -> None:
        self._reader = ChannelReader(store)
        self._known: dict[str, tuple[str, int | None]] = {}  # by key: digest and step

    def refresh(self) -> None:
        """At what is new."""
        with contextlib.suppress(DeltaSyncError):  # nothing is published yet, or it is just being restored
            for slot, _ in self._reader.slots():
                if slot.key not in self._known:
                    stored = self._reader.slot(slot)
                    if stored is not None and stored.record.is_version:
                        self._known[slot.key] = stored.sha256, stored.record.step

    def found(self) -> dict[str, int | None]:
        """By digest."""
        return dict(self._known.values())


class _Served:
    """One server: its process, which may be killed and started again, and what it says that it served."""

    def __init__(self, soak: Soak, number: int, start: Callable[[Path], Child], url: str) -> None:
        self.name, self.noted = f"server-{number}", soak.folder / f"served-{number}"
        self.numbers = {"version": 0, "checked": 0, "wrong": 0, "unknown": 0, "failed": 0, "unanswered": 0, "starts": 0}
        self.sha256: str | None = None
        self._folder, self._start, self._url = soak.folder, start, url
        self._child: Child | None = None
        self._ledger = ends.Ledger(soak.folder / "ledger", remembered=1 << 16)
        self._at = 0
        self._unknown: list[tuple[str, str]] = []  # noted, of versions of which no record was seen yet
        self.up_s = 0.0  # since when it serves, by `time.monotonic`; 0 if it does not

    def revive(self) -> None:
        """Start it if it does not run."""
        if self._child is not None and self._child.running():
            return
        self.end()
        self.numbers["starts"] += 1
        self._child = self._start(self._folder / f"{self.name}-{self.numbers['starts']}.log").__enter__()

    def wait(self) -> None:
        """Until it answers."""
        assert self._child is not None
        self._child.wait_until(lambda: get_json(f"{self._url}/deltasync/status"), _PATIENCE_S, "to start")

    def pids(self) -> list[int]:
        """Its processes."""
        return [] if self._child is None else self._child.pids()

    def end(self) -> None:
        """End it."""
        self.up_s = 0.0
        if self._child is not None:
            self._child.__exit__(None)

    def refresh(self, steps: _Steps) -> None:
        """Whether it answers, what it serves, and whether all that it ever served had the right bits."""
        try:
            assert len(complete(self._url, 3)) == 3
            status, live = get_json(f"{self._url}/deltasync/status?commits=0"), get_json(f"{self._url}/deltasync/digest")
        except (OSError, http.client.HTTPException, TypeError, DeltaSyncError):  # it is being started, or dies
            self.numbers["unanswered"] += 1
            status, live = None, None
        self.check(steps)
        if status is None or live is None or status["sha256"] is None:
            self.up_s = 0.0
            return
        self.up_s = self.up_s or time.monotonic()
        self.sha256 = status["sha256"]
        self.numbers["version"] = status["version"]
        self.numbers["failed"] += status["state"] == "failed"
        self.numbers["wrong"] += digest_of(live["sha256"]) not in (bits for _, bits in self.lines())

    def check(self, steps: _Steps) -> None:
        """Hold to the ledger what it has noted, once it is known of which step that is."""
        known, lines = steps.found(), self.lines()
        unknown = [*self._unknown, *lines[self._at :]]
        self._at, self._unknown = len(lines), []
        for sha256, bits in unknown:
            step = known.get(sha256)
            if step is None:
                self._unknown.append((sha256, bits))
                continue
            self.numbers["checked"] += 1
            self.numbers["wrong"] += digest_of(self._ledger.of(step)) != bits
        self.numbers["unknown"] = len(self._unknown)

    def lines(self) -> list[tuple[str, str]]:
        """Digests of versions, each with that of the bits that were live."""
        return [(sha256, bits) for sha256, bits in noted(self.noted)]


class _Fleet(Cast):
    """A publisher, and servers in the place of the replicas.

    Args:
        soak: What to run.
        checkpoint: That the servers load.
        url: URL of the channel, through the proxy.
        direct: The channel itself.
    """

    def __init__(self, soak: Soak, checkpoint: Path, url: str, direct: Store) -> None:
        super().__init__(soak)
        self._checkpoint, self._url, self._direct = checkpoint, url, direct
        self._saved: dict[str, bytes] = {}
        self._chance = random.Random(soak.seed + 2)
        self.servers = [self._server(number) for number in range(1, soak.replicas + 1)]

    def _server(self, number: int) -> _Served:
        folder, port = self._soak.folder, free_port()
        environ = {
            "DELTASYNC_REPLICA_ID": f"server-{number}",
            "DELTASYNC_CACHE_DIR": str(self.disk / "cache"),
            "DELTASYNC_CACHE_BYTES": str(CACHE_BYTES),
            "PYTHONPATH": f"{_REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
            "SOAK_CLOCK": str(self._soak.clock(f"server-{number}")),
            "SOAK_SERVED": str(folder / f"served-{number}"),
            "VLLM_LOGGING_LEVEL": "INFO" if self._soak.chaos else "ERROR",
        }

        def begin(log: Path) -> Child:
            return start(self._checkpoint, self._url, port, log, module="tests.soak.serving", **environ)

        return _Served(self._soak, number, begin, f"http://127.0.0.1:{port}")

    def _named(self, name: str) -> _Served:
        return next(server for server in self.servers if server.name == name)

    def _arguments(self, name: str) -> tuple[object, ...]:
        return self._soak, self._url, _Noise(self._checkpoint, self._soak.seed, self._starts), False, self._starts

    def may_kill(self, name: str) -> bool:
        """A server only while all serve, and have for a while: a start takes most of a minute."""
        if name == "publisher":
            return super().may_kill(name)
        now = time.monotonic()
        return all(server.up_s and now - server.up_s > _SERVES_S for server in self.servers)

    def kill(self, name: str) -> None:
        """SIGKILL, to one of its processes."""
        if name == "publisher":
            super().kill(name)
            return
        server = self._named(name)
        server.up_s = 0.0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._chance.choice(server.pids()), signal.SIGKILL)

    def revive(self) -> None:
        if "publisher" not in self.alive:
            self.start("publisher")
        self.revive_servers()

    def revive_servers(self) -> None:
        """Start again those that have ended."""
        for server in self.servers:
            server.revive()

    @property
    def names(self) -> list[str]:
        return ["publisher", *(server.name for server in self.servers)]

    @property
    def pids(self) -> list[int]:
        return [*super().pids, *(pid for server in self.servers for pid in server.pids())]

    def save(self) -> None:
        self._saved = {info.key: self._direct.read(info.key, 1 << 30) for info in self._direct.list("")}

    def restore(self) -> None:
        self._direct.delete(*(info.key for info in self._direct.list("")))
        for key, data in self._saved.items():
            self._direct.put(key, data)

    def end(self) -> None:
        super().end()
        for server in self.servers:
            server.end()


def run(soak: Soak, say: Say) -> dict[str, Any]:
    """As `tests.soak.run.run`."""
    os.environ.update(KEYS)
    checkpoint = save_model(soak.folder)
    mine, theirs = PROCESSES.Pipe()
    store = PROCESSES.Process(target=_store, args=(soak, theirs))
    store.start()
    with contextlib.ExitStack() as stack:
        stack.callback(store.join, 30)
        stack.callback(mine.close)
        theirs.close()
        url, direct = mine.recv()
        bucket = open_store(direct)
        steps, fleet = _Steps(bucket), _Fleet(soak, checkpoint, url, bucket)
        stack.enter_context(small_disk(fleet.disk, _DISK_BYTES))
        stack.callback(fleet.end)
        for server in fleet.servers:
            server.revive()
            server.wait()
            say(f"{server.name} is up")
        fleet.start("publisher")
        watch = Watch()

        def look() -> None:
            assert soak.chaos or "publisher" in fleet.alive, "the publisher has ended"
            fleet.revive()
            steps.refresh()
            watch.process("publisher", [fleet.alive.get("publisher", 0)])
            for server in fleet.servers:
                server.refresh(steps)
                watch.process(server.name, server.pids())
            watch.folder("cache", fleet.disk / "cache")
            sizes = [info.bytes for info in bucket.list("")]
            watch.note("bucket objects", len(sizes))
            watch.note("bucket bytes", sum(sizes))

        result = attend(soak, watch, lambda: fleet.pids, look, say, Troubles(soak, fleet).all if soak.chaos else {})
        if soak.chaos:
            result["summary"] = {}  # who is started anew begins small
            fleet.revive()
        (soak.folder / "end").touch()
        codes = fleet.join()
        assert set(codes.values()) == {0}, codes
        last = told(soak.folder / "publisher")
        stopwatch = Watch()
        while any(server.sha256 != last["digest"] for server in fleet.servers):
            assert stopwatch.seconds() < _PATIENCE_S, "a server does not get to the last version"
            fleet.revive_servers()
            time.sleep(1.0)
            steps.refresh()
            for server in fleet.servers:
                server.refresh(steps)
        served = {server.name: {sha256 for sha256, _ in server.lines()} for server in fleet.servers}
        found = {"publisher": last, "replicas": [server.numbers for server in fleet.servers], "acks": acks(soak, served)}
        return result | found | {"problems": problems(direct)}
