"""Rates and latencies of the store at URL, compared with the provider's own client, and what a version costs.

    python -m benchmarks.store URL [--bytes 33554432] [--json]

Writes about twelve large objects below URL, into a folder of its own, and removes them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import common
from benchmarks.common import say, table, timed
from deltasync import Publisher
from deltasync.channel import payloads
from deltasync.channel.reading import ChannelReader
from deltasync.following import Replica
from deltasync.stores import Store, open_store
from deltasync.stores.base import WrappedStore, check_key

_ROUNDS = 9
_SMALL_BYTES = 1024
_SMALL_ROUNDS = 50

_Result = TypeVar("_Result")
Client = tuple[Callable[[str, bytes], object], Callable[[str], object]]
"""The put and get functions of the provider's own client, by key."""


class CountingStore(WrappedStore):
    """A store that counts the calls of each verb."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        """See `WrappedStore.ask`."""
        self.calls[verb] += 1
        return action()


def run(url: str, payload_bytes: int) -> dict[str, Any]:
    """Measure the store, in a folder made below `url`, with large objects and a delta of `payload_bytes`.

    Returns `large`: MB/s of the client and of the store in turn, medians (None for a client that has no plain
    put and get), and the store's share of the client's put and get, the median of neighbours; `small`: ms of
    each verb, p50 and p95; `version`: bytes of a delta and seconds of its stages; `calls` of store verbs: of
    publishing and following it, and of a poll that finds nothing new.
    """
    folder = _below(url, f"bench-{uuid.uuid4().hex[:12]}")
    store = open_store(folder)
    try:
        say(f"{payload_bytes / 1e6:.1f} MB objects")
        large = _large(folder, store, payload_bytes)
        say(f"{_SMALL_BYTES} B objects")
        small = _small(store)
        say(f"a delta of {payload_bytes / 1e6:.1f} MB")
        version, calls = _version(open_store(_below(folder, "channel")), payload_bytes)
    finally:
        say("removing what was written")
        store.delete(*[info.key for info in store.list("")])
        if folder.startswith("file:"):
            shutil.rmtree(folder.removeprefix("file://"), ignore_errors=True)
    return {
        "url": url,
        "payload_bytes": payload_bytes,
        "large": large,
        "small": small,
        "version": version,
        "calls": calls,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as tables."""
    large, version = result["large"], result["version"]
    yield f"{result['url']}, {result['payload_bytes'] / 1e6:.1f} MB, medians of {_ROUNDS}"
    yield ""
    rates = {name: large[name] for name in ("client", "store") if large[name] is not None}
    columns = ("put", "get", "put_get")
    yield from table(
        ("MB/s", "put", "get", "put+get"),
        [(name, *(f"{found[column]:.0f}" for column in columns)) for name, found in rates.items()],
    )
    if large["share"] is not None:
        yield f"the store has {large['share']:.0%} of its client's rate"
    yield ""
    yield from table(
        (f"ms, {_SMALL_BYTES} B", "p50", "p95"),
        [
            (name, f"{times['p50_ms']:.2f}", f"{times['p95_ms']:.2f}")
            for name, times in result["small"].items()
        ],
    )
    yield ""
    yield from table(
        (f"a delta of {version['delta_bytes'] / 1e6:.1f} MB, nothing in it compresses", "s"),
        [(name, f"{version[f'{name}_s']:.3f}") for name in ("encode", "upload", "fetch", "sync")],
    )
    for name, calls in result["calls"].items():
        yield f"{name.replace('_', ' ')}: " + ", ".join(f"{count} {verb}" for verb, count in calls.items())


def _large(folder: str, store: Store, payload_bytes: int) -> dict[str, Any]:
    """Put and get large objects by the client and by the store in turn, with new random bytes each time."""
    ours: Client = (
        store.create if store.can_create else store.put,
        lambda key: store.read(key, payload_bytes),
    )
    with _client(folder, store) as client:
        seconds: dict[str, list[tuple[float, float]]] = {"client": [], "store": []}
        for number in range(_ROUNDS + 1):  # the first round warms up
            for name, (put, get) in {"client": client or (None, None), "store": ours}.items():
                if put is None or get is None:
                    continue
                key, data = f"large/{name}-{number}", os.urandom(payload_bytes)
                put_s, _ = timed(lambda put=put, key=key, data=data: put(key, data))  # type: ignore[misc]
                get_s, found = timed(lambda get=get, key=key: get(key))  # type: ignore[misc]
                assert found is None or found == data
                seconds[name] += [(put_s, get_s)] if number else []
    rates: dict[str, Any] = {name: _rates(times, payload_bytes) for name, times in seconds.items()}
    # Ratios of neighbours, so that a machine that gets slower meanwhile affects both.
    shares = [
        sum(client) / sum(ours) for client, ours in zip(seconds["client"], seconds["store"], strict=False)
    ]
    rates["share"] = statistics.median(shares) if shares else None
    return rates


def _rates(seconds: list[tuple[float, float]], payload_bytes: int) -> dict[str, float] | None:
    if not seconds:
        return None
    put_s, get_s = (statistics.median(column) for column in zip(*seconds, strict=True))
    both_s = statistics.median(sum(pair) for pair in seconds)
    megabytes = payload_bytes / 1e6
    return {"put": megabytes / put_s, "get": megabytes / get_s, "put_get": 2 * megabytes / both_s}


@contextlib.contextmanager
def _client(folder: str, store: Store) -> Iterator[Client | None]:
    """Return put and get by the provider's own client, in its fastest way."""
    if folder.startswith("file:"):
        root = Path(folder.removeprefix("file://"))
        (root / "large").mkdir(parents=True, exist_ok=True)

        def put(key: str, data: bytes) -> None:
            with (root / key).open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        yield put, lambda key: (root / key).read_bytes()
    elif folder.startswith("hf:"):
        from huggingface_hub import HfApi

        from deltasync.clouds.hub import bucket_of

        api, (bucket, prefix) = HfApi(), bucket_of(folder)
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory, "object")

            def get(key: str) -> bytes:
                target.unlink(missing_ok=True)
                api.download_bucket_files(bucket, [(f"{prefix}/{key}", target)], raise_on_missing_files=True)
                return target.read_bytes()

            yield lambda key, data: api.batch_bucket_files(bucket, add=[(data, f"{prefix}/{key}")]), get
    else:
        import obstore

        from deltasync.stores.object import ObstoreStore

        if isinstance(store, ObstoreStore):
            client = store.client()
            yield (
                lambda key, data: obstore.put(client, key, data),
                lambda key: obstore.get(client, key).bytes(),
            )
        else:
            yield None


def _small(store: Store) -> dict[str, dict[str, float]]:
    """Return the times of each verb on small objects, in ms."""
    data = os.urandom(_SMALL_BYTES)
    verbs: dict[str, Callable[[int], object]] = {
        "create": lambda number: (store.create if store.can_create else store.put)(
            f"small/{number:04d}", data
        ),
        "read": lambda number: store.read(f"small/{number:04d}", _SMALL_BYTES),
        "put": lambda number: store.put("head.json", data),
        "list": lambda number: list(store.list("small/")),
        "delete": lambda number: store.delete(f"small/{number:04d}"),
    }
    return {name: _quantiles(verb) for name, verb in verbs.items()}


def _quantiles(verb: Callable[[int], object]) -> dict[str, float]:
    ordered = sorted(timed(lambda number=number: verb(number))[0] for number in range(_SMALL_ROUNDS))  # type: ignore[misc]
    return {
        "p50_ms": 1e3 * statistics.median(ordered),
        "p95_ms": 1e3 * ordered[int(0.95 * (len(ordered) - 1))],
    }


def _version(store: Store, payload_bytes: int) -> tuple[dict[str, float], dict[str, dict[str, int]]]:
    """Publish a delta and follow it; return seconds of its stages and calls of verbs.

    One tensor changes everywhere at random, which nothing compresses; another one does not change, so that no
    anchor is due.
    """
    counting = CountingStore(store)
    random = torch.Generator().manual_seed(0)
    elements = max(1, payload_bytes // 2)
    states = [
        torch.randint(-(1 << 15), 1 << 15, (elements,), generator=random, dtype=torch.int16) for _ in range(2)
    ]
    still = ("still", torch.zeros(elements, dtype=torch.int16))
    with Publisher(counting, dtype="keep") as publisher:
        publisher.publish([("w", states[0]), still]).wait()
        replica = Replica(counting)
        replica.sync()
        counting.calls.clear()
        receipt = publisher.publish([("w", states[1]), still])
        upload_s, _ = timed(receipt.wait)
        publish_calls = dict(counting.calls)
    counting.calls.clear()
    sync_s, _ = timed(replica.poll)
    follow_calls = dict(counting.calls)
    assert torch.equal(replica.state_dict()["w"], states[1])
    counting.calls.clear()
    replica.poll()
    poll_calls = dict(counting.calls)
    reader = ChannelReader(store)
    fetch_s, _ = timed(lambda: payloads.fetch(reader, reader.numbered(2)))
    version = {
        "delta_bytes": receipt.payload_bytes,
        "encode_s": receipt.encode_s,
        "upload_s": upload_s,
        "fetch_s": fetch_s,
        "sync_s": sync_s,
    }
    return version, {"publish": publish_calls, "follow": follow_calls, "idle_poll": poll_calls}


def _below(url: str, name: str) -> str:
    """Return the URL of a folder below another URL."""
    path, mark, options = url.partition("?")
    return f"{path.rstrip('/')}/{check_key(name)}{mark}{options}"


if __name__ == "__main__":
    common.command(
        __doc__,
        run,
        lines,
        common.option("url", metavar="URL"),
        common.option(
            "--bytes",
            dest="payload_bytes",
            type=int,
            default=32 << 20,
            help="size of the large objects and of the delta",
        ),
    )
