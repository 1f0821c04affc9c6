"""Requests and bytes of a version and of an idle replica, counted between the real clients and servers on
this machine.

    python -m benchmarks.cost_sheet [--json]

from the root of the repository, with the development dependencies. S3 is moto in this process, the Hub is the
stand-in of the tests; both are behind a proxy that counts. Bytes are whole HTTP messages, headers included,
without TLS.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import huggingface_hub
import torch

from benchmarks import common
from deltasync import Publisher, Receipt, Replica, open_store
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from tests.http_faults import Exchange, FaultProxy
from tests.hub import fixtures as hub
from tests.servers.s3 import KEYS, MotoServer

VERSIONS, POLLS = 10, 20
HEAD_S = 0.5  # wait after each version for head.json, which is written behind it
ELEMENTS = 4_000_000
PART = os.urandom(100_000)


@contextlib.contextmanager
def s3() -> Iterator[tuple[str, FaultProxy]]:
    """Run an S3 server; yield a channel's URL and the proxy that its requests pass."""
    os.environ.update(KEYS)
    with contextlib.closing(MotoServer()) as server, FaultProxy(server.endpoint) as proxy:
        yield server.url(server.new_bucket(), endpoint=proxy.url), proxy


@contextlib.contextmanager
def hugging_face() -> Iterator[tuple[str, FaultProxy]]:
    """Run the stand-in of the Hub; yield as `s3` does."""
    with hub.running_server() as server, FaultProxy(server.endpoint) as proxy:
        os.environ.update(server.env)
        os.environ["HF_HUB_OFFLINE"] = "0"
        huggingface_hub.constants.ENDPOINT = proxy.url
        huggingface_hub.constants.HF_HUB_OFFLINE = False
        yield "hf://buckets/user/cost/run", proxy
        huggingface_hub.close_session()


def row(exchanges: list[Exchange], times: int, up_bytes: float = 0, down_bytes: float = 0) -> dict[str, Any]:
    """Return the mean requests and bytes of one action, without so many bytes of payload."""
    return {
        "requests": len(exchanges) / times,
        "to_hub": sum(exchange.path.startswith(("/api/", "/buckets/")) for exchange in exchanges) / times,
        "up_bytes": sum(exchange.bytes_up for exchange in exchanges) / times - up_bytes,
        "down_bytes": sum(exchange.bytes_down for exchange in exchanges) / times - down_bytes,
    }


def measure(url: str, proxy: FaultProxy) -> dict[str, Any]:
    """Measure one store: mean payload bytes of a version, and requests and bytes of each action."""

    def taken(action: Callable[[], object], behind_s: float = 0.0) -> list[Exchange]:
        proxy.exchanges.clear()
        action()
        time.sleep(behind_s)
        return proxy.exchanges[:]

    random = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(ELEMENTS, generator=random).to(torch.bfloat16)}
    published, followed, payload_bytes = list[Exchange](), list[Exchange](), 0
    store = open_store(url)
    with Publisher(url) as publisher:
        publisher.publish(weights.items()).wait(600)
        replica = Replica(store)
        replica.sync()
        for _ in range(VERSIONS):
            weights["w"].view(torch.int16)[torch.rand(ELEMENTS, generator=random) < 0.01] += 1
            receipts: list[Receipt] = []
            published += taken(lambda: receipts.append(publisher.publish(weights.items()).wait(600)), HEAD_S)  # noqa: B023
            followed += taken(replica.poll)
            replica.poll()  # as between two versions; otherwise it would take itself to lag, and read ahead
            payload_bytes += receipts[0].payload_bytes
        identity = replica.identity
        assert identity is not None
        beat = Heartbeat(
            replica_id="r",
            run_id=publisher.run_id,
            version=identity.version,
            epoch=identity.epoch,
            sha256=identity.sha256,
            state="serving",
        )
        polled = taken(lambda: [replica.poll() for _ in range(POLLS)])
        beaten = taken(lambda: [heartbeat.write(store, beat) for _ in range(POLLS)])
        put = taken(lambda: [store.put(f"parts/{number}", PART) for number in range(POLLS)])
        got = taken(lambda: [store.read(f"parts/{number}", 1 << 30) for number in range(POLLS)])
    mean_bytes = payload_bytes / VERSIONS
    rows = {
        "publish": row(published, VERSIONS, up_bytes=mean_bytes),
        "put": row(put, POLLS, up_bytes=len(PART)),
        "follow": row(followed, VERSIONS, down_bytes=mean_bytes),
        "get": row(got, POLLS, down_bytes=len(PART)),
        "poll": row(polled, POLLS),
        "heartbeat": row(beaten, POLLS),
    }
    return {"payload_bytes": mean_bytes, "rows": rows}


TEXTS = {
    "publish": "publish a version, payload in its record",
    "put": "one more object: part, anchor's file, compaction",
    "follow": "follow a version",
    "get": "its parts, each",
    "poll": "poll an idle channel",
    "heartbeat": "heartbeat",
}


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    columns = [f"{name}: {what}" for name in result for what in ("requests", "bytes up", "bytes down")]
    rows = []
    for key, text in TEXTS.items():
        cells = [text]
        for found in result.values():
            each = found["rows"][key]
            note = f", {each['to_hub']:g} of them to the Hub" if each["to_hub"] else ""
            cells += [f"{each['requests']:g}{note}", f"{each['up_bytes']:,.0f}", f"{each['down_bytes']:,.0f}"]
        rows.append(cells)
    yield from common.table(("without the payload", *columns), rows)
    payloads = " and ".join(f"{found['payload_bytes']:,.0f}" for found in result.values())
    yield f"Payloads of {payloads} bytes: 1 % of {ELEMENTS:,} elements changed"


def run() -> dict[str, Any]:
    """Measure both stores."""
    result = {}
    for name, server in (("S3", s3), ("Hugging Face", hugging_face)):
        with server() as (url, proxy):
            result[name] = measure(url, proxy)
    return result


if __name__ == "__main__":
    common.command(__doc__, run, lines)
