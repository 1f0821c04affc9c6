"""The time from the beginning of a publish to live bits elsewhere, over long lines, and the requests that
this takes.

    python -m benchmarks.lag [small] [large] [idle] [--versions 20] [--json]

from the root of the repository, with the development dependencies. The store is S3 (moto). A publisher and a
host replica each reach it over a simulated line (`tests.servers.line`). All run in processes of their own,
and requests are counted at the server. Bits are compared at the last version.

small   a delta of 130 kB at 200 ms per round trip: round trips from the beginning of the publish, without the encode
large   1 % of Qwen3-0.6B's shape, 7 MB, over 50 ms and 100 Mbit/s: times one transfer and two round trips
idle    requests of a replica while nothing is published
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks import common, models
from deltasync import Publisher, Replica
from deltasync.config import ReplicaSettings
from deltasync.errors import NotPublishedError
from deltasync.following import Poll
from deltasync.stores import open_store
from tests.http_faults import Exchange, FaultProxy
from tests.servers.line import Line, Shape
from tests.servers.s3 import KEYS, REGION, MotoServer

ENDS = ("trainer", "replica")
CHANGED_FRACTION = 0.01
IDLE_S = 20.0
WARM_UP = 3
BARS = {"small": 2.5, "large": 1.4}

_SPAWN = multiprocessing.get_context("spawn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A case to measure."""

    shapes: dict[str, tuple[int, ...]]  # shapes of the tensors
    line: Shape  # shape of both lines, once the first version is published
    versions: int  # number of versions, after a few to warm up
    between_s: float  # time from one publish to the next


def cases(versions: int) -> dict[str, Case]:
    """Return the shapes by name."""
    return {
        "small": Case(shapes={"w": (10_500, 1000)}, line=Shape(0.2), versions=versions, between_s=3.0),
        "large": Case(
            shapes=models.shapes(), line=Shape(0.05, 100e6), versions=max(5, versions // 2), between_s=5.0
        ),
    }


# --- the processes of the server and of the lines
# ------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Run the server. Sends its URL for each of `ENDS`, then answers each message but None with the requests
    since.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(MotoServer()))
        bucket = server.new_bucket()
        proxies = {end: stack.enter_context(FaultProxy(server.endpoint)) for end in ENDS}
        pipe.send({end: server.url(bucket, endpoint=proxy.url) for end, proxy in proxies.items()})
        while pipe.recv() is not None:
            pipe.send({end: proxy.exchanges[:] for end, proxy in proxies.items()})
            for proxy in proxies.values():
                proxy.exchanges.clear()


def carry(ports: dict[str, int], pipe: Connection) -> None:
    """Run the lines to these ports. Sends their own ports, then gives the lines each shape that it
    receives.
    """
    with contextlib.ExitStack() as stack:
        lines = {end: stack.enter_context(Line(("127.0.0.1", port), Shape())) for end, port in ports.items()}
        pipe.send({end: line.port for end, line in lines.items()})
        while (shape := pipe.recv()) is not None:
            for line in lines.values():
                line.shape = shape
            pipe.send(None)


class Server:
    """The server behind its lines, each in a process of its own. `urls` are the channel's through the line of
    each of `ENDS`.
    """

    def __enter__(self) -> Server:
        with contextlib.ExitStack() as stack:
            self._server = stack.enter_context(running(serve))
            urls: dict[str, str] = self._server.recv()
            ports = {
                end: int(url.partition("endpoint=http://127.0.0.1:")[2].partition("&")[0])
                for end, url in urls.items()
            }
            self._lines = stack.enter_context(running(carry, ports))
            near: dict[str, int] = self._lines.recv()
            self.urls = {end: url.replace(f":{ports[end]}", f":{near[end]}") for end, url in urls.items()}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shape(self, shape: Shape) -> None:
        """Give both lines this shape."""
        self._lines.send(shape)
        self._lines.recv()

    def taken(self) -> dict[str, list[Exchange]]:
        """Return the exchanges since the last call, by end."""
        self._server.send("taken")
        found: dict[str, list[Exchange]] = self._server.recv()
        return found


# --- the process of the replica
# -----------------------------------------------------------------------------------------


def follow(url: str, pipe: Connection) -> None:
    """Follow a channel as `deltasync follow` does. Sends each version and when its bits were live; any
    message ends it.
    """
    store = open_store(url)
    replica = Replica(store)
    before: int | None = None
    with Poll(ReplicaSettings.from_env().poll_interval_s).watching(store, lambda _: None) as poll:
        while not pipe.poll():
            with contextlib.suppress(NotPublishedError):
                replica.poll()
            if moved := replica.version != before:
                before = replica.version
                pipe.send((before, time.monotonic()))
            pipe.poll(poll.delay_s(moved))
    pipe.send(models.digest(replica.state_dict()))


@contextlib.contextmanager
def running(target: Any, *args: Any) -> Iterator[Connection]:
    """Start a process; return it and the pipe to it."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(30)
        process.terminate()


# --- the trainer
# --------------------------------------------------------------------------------------------------------


def measure(case: Case) -> dict[str, Any]:
    """Publish versions, and measure when they are live.

    Returns `payload_bytes`, and for each version: `lag_s` from the beginning of the publish, `encode_s`,
    `held_s`; `requests` of one version by kind; `cold_puts`, records that were put on a new connection.
    """
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in case.shapes.items():
        weights[name] = torch.from_numpy(random.standard_normal(shape, np.float32)).to(torch.bfloat16)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server())
        replica = stack.enter_context(running(follow, server.urls["replica"]))
        publisher = stack.enter_context(Publisher(server.urls["trainer"], anchor_every=1 << 30))
        rows, warm = [], set[int]()
        for number in range(-WARM_UP, case.versions):
            if number > -WARM_UP:
                server.shape(case.line)
                models.change(weights, CHANGED_FRACTION, number + WARM_UP)
            if number == 0:
                warm = {each.connection for each in server.taken()["trainer"]}
            began_s = time.monotonic()
            receipt = publisher.publish(weights.items())
            while (live := replica.recv())[0] < receipt.version:
                pass
            if number >= 0:
                rows.append(
                    {"lag_s": live[1] - began_s, "encode_s": receipt.encode_s, "held_s": receipt.held_s}
                )
            time.sleep(max(0.0, began_s + case.between_s - time.monotonic()))
        exchanges = server.taken()
        replica.send(None)
        while not isinstance(answer := replica.recv(), str):
            pass
    assert answer == models.digest(weights), "the replica has other bits"
    return {
        "payload_bytes": receipt.payload_bytes,
        "versions": rows,
        "requests": requests(exchanges, case.versions),
        "cold_puts": cold_puts(exchanges["trainer"], warm),
    }


def kind(exchange: Exchange) -> str:
    """Return the kind of a request, as text."""
    folder = exchange.path.split("/")[3] if exchange.path.count("/") > 2 else "list"
    there = "" if exchange.status < 400 else " (not there yet)"
    return f"{exchange.method} {folder}{there}"


def requests(exchanges: dict[str, list[Exchange]], versions: int) -> dict[str, dict[str, float]]:
    """Return the requests for one version, by end and kind."""
    return {
        end: {name: round(count / versions, 2) for name, count in sorted(Counter(map(kind, found)).items())}
        for end, found in exchanges.items()
    }


def cold_puts(exchanges: Sequence[Exchange], warm: set[int]) -> int:
    """Count the puts of records on a new connection."""
    cold, known = 0, set(warm)
    for exchange in exchanges:
        cold += (
            exchange.method == "PUT" and "/versions/" in exchange.path and exchange.connection not in known
        )
        known.add(exchange.connection)
    return cold


def idle() -> dict[str, Any]:
    """Count requests and bytes of a replica that follows a channel to which nothing is published."""
    with Server() as server:
        with Publisher(server.urls["trainer"]) as publisher:
            publisher.publish([("w", torch.zeros(1000))]).wait(60)
        with running(follow, server.urls["replica"]) as replica:
            replica.recv()
            time.sleep(5.0)  # until the waits between polls have grown to the interval
            server.taken()
            time.sleep(IDLE_S)
            found = server.taken()["replica"]
    sizes = [each.bytes_up + each.bytes_down for each in found]
    return {
        "requests": {name: count for name, count in sorted(Counter(map(kind, found)).items())},
        "seconds": IDLE_S,
        "bytes_max": max(sizes),
        "bytes_mean": round(statistics.fmean(sizes)),
    }


# --- the result
# ---------------------------------------------------------------------------------------------------------


def summary(name: str, case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Return the measurement with p50 and p95 of `lag_s`, and as `units` in the unit of the bar."""
    rows, line = found["versions"], case.line
    lags = [row["lag_s"] for row in rows]
    if name == "small":
        units = [(row["lag_s"] - row["encode_s"]) / line.round_trip_s for row in rows]
        unit = "round trips and the encode"
    else:
        one_s = 8 * found["payload_bytes"] / line.bits_per_s + 2 * line.round_trip_s
        units = [lag_s / one_s for lag_s in lags]
        unit = f"times {one_s:.2f} s, one transfer and two round trips"
    spans = {"lag_s": _span(lags), "units": _span(units)}
    return {"unit": unit, "bar": BARS[name], "met": spans["units"]["p50"] <= BARS[name], **spans, **found}


def _span(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(values), 4), "p95": round(float(np.percentile(values, 95)), 4)}


def lines(result: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the result as lines of text."""
    texts = {"small": "200 ms per round trip", "large": "50 ms, 100 Mbit/s"}
    rows = [
        (
            text,
            f"{result[name]['payload_bytes'] / 1e6:.2f} MB",
            *(f"{result[name]['lag_s'][share]:.2f} s" for share in ("p50", "p95")),
            f"{result[name]['units']['p50']:.2f} {result[name]['unit']}",
        )
        for name, text in texts.items()
        if name in result
    ]
    yield from common.table(("line", "a version", "lag, p50", "p95", "that is"), rows, words=5)


def main() -> None:
    """Measure the cases that are named."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "what", nargs="*", choices=["small", "large", "idle", []], help="default: small and idle"
    )
    parser.add_argument("--versions", type=int, default=20)
    given = parser.parse_args()
    os.environ.update(KEYS)
    os.environ["AWS_REGION"] = REGION
    result: dict[str, dict[str, Any]] = {}
    known = cases(given.versions)
    for name in given.what or ["small", "idle"]:
        common.say(f"Measuring {name}")
        result[name] = idle() if name == "idle" else summary(name, known[name], measure(known[name]))
    idle_lines = [f"idle: {result['idle']}"] if "idle" in result else []
    common.emit(given.json, result, [*lines(result), *idle_lines])


if __name__ == "__main__":
    common.run(main)
