"""The soak with real vLLM servers, on S3 through a proxy that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deltasync import open_store
from deltasync.channel.reading import ChannelReader
from deltasync.demo.processes import Child, get_json
from deltasync.demo.run import free_port
from deltasync.errors import DeltaSyncError
from tests import http_faults as faults
from tests.http_faults import FaultProxy
from tests.integration.vllm_server import complete, save_model, start
from tests.processes import PROCESSES
from tests.servers.reverse_proxy import Action, Exchange, Handler, Reply
from tests.servers.s3 import KEYS, MotoServer
from tests.soak import ends
from tests.soak.run import Say, attend, problems
from tests.soak.settings import CACHE_BYTES, FAULT_RATE, Soak, told
from tests.soak.watch import Watch

_PATIENCE_S = 600.0
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

    def __call__(self) -> Iterator[ends.Weights]:
        return ends.noise(self.checkpoint, self.seed)


class _Checked:
    """What a server serves, held to the ledger."""

    def __init__(self, url: str, child: Child, reader: ChannelReader, ledger: Path) -> None:
        self._url, self._reader, self._ledger = url, reader, ends.Ledger(ledger)
        self.pids = child.pids
        self.numbers = {"version": 0, "checked": 0, "wrong": 0, "refused": 0}

    def check(self) -> int:
        """Compare the bits that are live now; returns their version, 0 if there is none."""
        found = None
        with contextlib.suppress(DeltaSyncError):  # nothing is published yet
            found = get_json(f"{self._url}/deltasync/digest")
        status = get_json(f"{self._url}/deltasync/status?commits=0")
        self.numbers["refused"] += status is not None and status["state"] == "failed"
        assert len(complete(self._url, 3)) == 3
        if found is None or found["version"] is None:
            return 0
        version = int(found["version"])
        with contextlib.suppress(DeltaSyncError):  # forgotten meanwhile
            step = self._reader.numbered(version).record.step
            self.numbers["wrong"] += step is None or found["sha256"] != self._ledger.of(step)
            self.numbers["checked"] += 1
        self.numbers["version"] = version
        return version


def run(soak: Soak, say: Say) -> dict[str, Any]:
    """As `tests.soak.run.run`."""
    os.environ.update(KEYS)
    checkpoint, watch = save_model(soak.folder), Watch()
    mine, theirs = PROCESSES.Pipe()
    store = PROCESSES.Process(target=_store, args=(soak, theirs))
    store.start()
    with contextlib.ExitStack() as stack:
        stack.callback(store.join, 30)
        stack.callback(mine.close)
        theirs.close()
        url, direct = mine.recv()
        reader, servers = ChannelReader(open_store(direct)), []
        for number in range(1, soak.replicas + 1):
            port = free_port()
            environ = {"DELTASYNC_REPLICA_ID": f"soak-{number}", "DELTASYNC_CACHE_DIR": str(soak.folder / "cache")}
            environ |= {"DELTASYNC_CACHE_BYTES": str(CACHE_BYTES), "VLLM_LOGGING_LEVEL": "ERROR"}
            child = start(checkpoint, url, port, soak.folder / f"server-{number}.log", **environ)
            stack.enter_context(child)
            address = f"http://127.0.0.1:{port}"
            child.wait_until(lambda at=address: get_json(f"{at}/deltasync/status"), _PATIENCE_S, "to start")
            servers.append(_Checked(address, child, reader, soak.folder / "ledger"))
            say(f"server {number} is up")
        trainer = PROCESSES.Process(target=ends.publish, args=(soak, url, _Noise(checkpoint, soak.seed), False))
        trainer.start()
        stack.callback(trainer.kill)

        def look() -> None:
            assert trainer.is_alive(), "the publisher has ended"
            watch.process("publisher", [trainer.pid or 0])
            for number, server in enumerate(servers, 1):
                server.check()
                watch.process(f"server {number}", server.pids())
            watch.folder("cache", soak.folder / "cache")
            sizes = [info.bytes for info in open_store(direct).list("")]
            watch.note("bucket objects", len(sizes))
            watch.note("bucket bytes", sum(sizes))

        pids = [trainer.pid or 0, *(server.pids()[0] for server in servers)]
        result = attend(soak, watch, lambda: pids, look, say)
        (soak.folder / "end").touch()
        trainer.join(_PATIENCE_S)
        last = told(soak.folder / "publisher")
        stopwatch = Watch()
        while any(server.check() != last["version"] for server in servers):
            assert stopwatch.seconds() < _PATIENCE_S, "a server does not get to the last version"
        replicas = [server.numbers for server in servers]
        return result | {"publisher": last, "replicas": replicas, "problems": problems(direct)}
