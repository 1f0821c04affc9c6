"""Requests and bytes of a version and of an idle replica, counted between the real clients and servers on this machine.

    python -m benchmarks.cost_sheet [--json]

from the root of the repository, with the development dependencies. S3 is moto in this process, the Hub is the stand-in of
the tests; both are behind a proxy that counts. Bytes are whole HTTP messages, headers included, without TLS.
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
from deltasync.channel import heartbeat
from deltasync.channel.heartbeat import Heartbeat
from tests import http_faults
from tests.http_faults import FaultProxy
from tests.hub import fixtures as hub
from tests.servers.s3 import KEYS, MotoServer

VERSIONS, POLLS = 10, 20
HEAD_S = 0.5  # wait after each version for head.json, which is written behind it
ELEMENTS = 4_000_000
PART = os.urandom(100_000)

Exchange = tuple[int, int, int]
"""Requests, bytes up and bytes down of one action: whole HTTP messages, without the payload."""

STATED: dict[str, dict[str, Exchange]] = {
    "s3": {
        "publish": (3, 2_300, 1_430),  # a version whose payload is in its record; then head is read and replaced
        "put": (1, 470, 345),  # storing one more object: a part, a file of an anchor, a compaction
        "follow": (1, 500, 1_050),  # reading a version whose payload is in its record
        "get": (1, 450, 455),  # reading one more object
        "poll": (1, 497, 643),  # requesting a record that does not exist yet
        "heartbeat": (1, 660, 345),  # replacing a replica's heartbeat
    },
    "hf": {
        "publish": (10, 4_800, 3_400),
        "put": (3, 1_500, 640),
        "follow": (3, 920, 1_900),
        "get": (3, 840, 1_330),
        "poll": (1, 358, 229),
        "heartbeat": (3, 1_680, 660),
    },
}
"""What docs/operations/cost.md says of each action at a store, by the scheme of its URL."""


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


def row(exchanges: list[http_faults.Exchange], times: int, stated: Exchange) -> dict[str, Any]:
    """Return the mean requests and bytes of one action, and what docs/operations/cost.md says of it."""
    return {
        "requests": len(exchanges) / times,
        "to_hub": sum(exchange.path.startswith(("/api/", "/buckets/")) for exchange in exchanges) / times,
        "up_bytes": sum(exchange.bytes_up for exchange in exchanges) / times,
        "down_bytes": sum(exchange.bytes_down for exchange in exchanges) / times,
        "stated": dict(zip(("requests", "up_bytes", "down_bytes"), stated, strict=True)),
    }


def measure(url: str, proxy: FaultProxy) -> dict[str, Any]:
    """Measure one store: mean payload bytes of a version, and requests and bytes of each action."""

    def taken(action: Callable[[], object], behind_s: float = 0.0) -> list[http_faults.Exchange]:
        proxy.exchanges.clear()
        action()
        time.sleep(behind_s)
        return proxy.exchanges[:]

    random = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(ELEMENTS, generator=random).to(torch.bfloat16)}
    published, followed, payload_bytes = list[http_faults.Exchange](), list[http_faults.Exchange](), 0
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
    rates = STATED[url.partition(":")[0]]
    rows = {
        "publish": row(published, VERSIONS, rates["publish"]),
        "follow": row(followed, VERSIONS, rates["follow"]),
        "put": row(put, POLLS, rates["put"]),
        "get": row(got, POLLS, rates["get"]),
        "poll": row(polled, POLLS, rates["poll"]),
        "heartbeat": row(beaten, POLLS, rates["heartbeat"]),
    }
    return {"payload_bytes": payload_bytes / VERSIONS, "object_bytes": len(PART), "rows": rows}


TEXTS = {
    "publish": "publish a version",
    "follow": "follow a version",
    "put": "one more object, put",
    "get": "the same, read",
    "poll": "poll an idle channel",
    "heartbeat": "heartbeat",
}


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    columns = ("requests", "bytes up", "bytes down", "in docs/operations/cost.md, without the payload")
    for name, found in result.items():
        rows = []
        for key, text in TEXTS.items():
            each = found["rows"][key]
            note = f" ({each['to_hub']:g} to the Hub)" if each["to_hub"] else ""
            stated = ", ".join(f"{count:,}" for count in each["stated"].values())
            counts = (f"{each['requests']:g}{note}", f"{each['up_bytes']:,.0f}", f"{each['down_bytes']:,.0f}")
            rows.append((text, *counts, stated))
        title = f"{name}, payload of {found['payload_bytes']:,.0f} bytes, objects of {found['object_bytes']:,}"
        yield from common.table((title, *columns), rows)
        yield ""


def run() -> dict[str, Any]:
    """Measure both stores."""
    result = {}
    for name, server in (("S3", s3), ("Hugging Face", hugging_face)):
        with server() as (url, proxy):
            result[name] = measure(url, proxy)
    return result


if __name__ == "__main__":
    common.command(__doc__, run, lines)
