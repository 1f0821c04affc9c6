"""A real vLLM server while versions arrive: how long each pauses generation, and how much throughput they
cost.

The versions are published beforehand; to let one arrive, its record is put where readers look for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commit.versions import Versions
from deltasync.errors import DeltaSyncError
from deltasync.serve import heartbeat
from deltasync.stores import open_store
from demo import gpu
from demo.processes import Child, get_json
from demo.run import HOST, free_port

_START_S = 600.0
_PATIENCE_S = 120.0
_REST_S = 0.3  # wait between two versions, for tokens that no version touches
_PERIOD_S = 1.0  # time from one version to the next while throughput is measured
_REQUESTS = 4
_TOKENS = 900
_MAX_MODEL_LEN = 1024
_SETTLE_S = 2.0

_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}


def environ(**settings: str) -> dict[str, str]:
    """Return the environment for vLLM, without the user's settings of deltasync."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DELTASYNC_")}
    return {**inherited, **_SETTINGS, **gpu.variables(), **settings}


class Server:
    """A running server, its URL and process, and the versions of its channel."""

    def __init__(self, url: str, versions: Versions, child: Child) -> None:
        self._url = url
        self._versions = versions
        self._child = child
        self._store = open_store(versions.channel)
        self.shown = 1

    def show_next(self) -> int:
        """Let the next version arrive."""
        self.shown += 1
        self._versions.show(self.shown)
        return self.shown

    def wait_for_shown(self) -> None:
        """Wait until the newest version that has arrived is served. This reads only files, to disturb
        nothing.
        """
        self._child.check()
        versions = self._versions
        heartbeat.wait_for(self._store, versions.run_id, self.shown, versions.published, _PATIENCE_S)

    def status(self) -> dict[str, Any]:
        """Return `/deltasync/status`."""
        return json.loads(self._get("/deltasync/status"))

    def check(self) -> None:
        """Compare every bit that is served with the newest version, if the channel knows its digests."""
        digest = json.loads(self._get("/deltasync/digest"))
        wanted = self._versions.sha256.get(self.shown)
        if digest["version"] != self.shown or (wanted is not None and digest["sha256"] != wanted):
            raise AssertionError(f"the server does not serve version {self.shown} bit for bit")

    def generated_tokens(self) -> float:
        """Return vLLM's own counter of generated tokens."""
        text = self._get("/metrics").decode()
        return sum(
            map(float, re.findall(r"^vllm:generation_tokens_total(?:{.*})? (\S+)$", text, re.MULTILINE))
        )

    def stream(self, token_count: int) -> Iterator[float]:
        """Stream one completion; yield the time at which each piece arrives, in seconds since the epoch."""
        with self._complete(token_count, stream=True) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    yield time.time()

    def complete(self, token_count: int) -> None:
        """Request one completion."""
        with self._complete(token_count, stream=False) as reply:
            reply.read()

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self._url}{path}", timeout=_PATIENCE_S) as reply:
            return reply.read()

    def _complete(self, token_count: int, stream: bool) -> Any:
        body = {"prompt": [5, 6, 7], "max_tokens": token_count, "ignore_eos": True, "stream": stream}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=_PATIENCE_S)


@contextlib.contextmanager
def launch(
    checkpoint: Path, channel: str, log: Path, device: str, options: Sequence[str], sequences: int
) -> Iterator[tuple[str, Child]]:
    """Run vLLM as a replica of a channel for the length of a `with` block; on a GPU with CUDA graphs.

    Args:
        checkpoint: The model.
        channel: The channel; the server waits for its first version.
        log: File for the server's log.
        device: `cpu` or `cuda`.
        options: Further ones for vLLM.
        sequences: Most requests at a time.

    Yields:
        The server's URL and its process. `wait_to_serve` waits until it is there.
    """
    port = free_port()
    command = [sys.executable, "-m", "deltasync", "serve", str(checkpoint), "--channel", channel]
    command += ["--host", HOST, "--port", str(port), "--disable-uvicorn-access-log"]
    command += ["--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", str(sequences)]
    command += [*gpu.options(device == "cuda"), *options]
    env = environ(DELTASYNC_POLL_INTERVAL_S="0.05", DELTASYNC_REPLICA_ID="bench")
    with Child("The vLLM server", command, env, log) as child:
        yield f"http://{HOST}:{port}", child


def wait_to_serve(url: str, child: Child, version: int, patience_s: float = _START_S) -> None:
    """Wait until a server serves a version.

    Raises:
        DeltaSyncError: it has failed or ended, or takes longer.
    """

    def serves() -> bool:
        status = get_json(f"{url}/deltasync/status")
        if status is not None and status["state"] == "failed":
            raise DeltaSyncError(f"The replica failed: {status['error']}")
        return status is not None and status["version"] == version

    child.wait_until(serves, patience_s, f"to serve version {version}")


@contextlib.contextmanager
def serve(
    versions: Versions, log: Path, device: str = "cpu", options: Sequence[str] = ()
) -> Iterator[Server]:
    """As `launch`, a replica of prepared versions, once it serves version 1."""
    versions.show(1)
    with launch(versions.checkpoint, versions.channel, log, device, options, 8) as (url, child):
        wait_to_serve(url, child, 1)
        server = Server(url, versions, child)
        server.complete(8)  # the first step takes seconds
        yield server


def pauses(server: Server, commits: int) -> dict[str, Any]:
    """Let versions arrive while completions are streamed, in turn one that changes weights and one that
    changes nothing.

    The latter shows what a pause costs without a commit. The server's next `2 * commits` versions are of
    these two kinds in turn. Returns `token_gap_s`, the usual time between two tokens; for `changed` and
    `unchanged`, medians: `silence_s`, from the last token before to the first after, `extra_s`, how much
    longer than usual that is, and the server's own numbers.
    """
    streams: list[list[float]] = []

    def record(done: threading.Event) -> None:
        times_s: list[float] = []
        streams.append(times_s)
        for time_s in server.stream(_TOKENS):
            times_s.append(time_s)
            if done.is_set():
                break

    arriving: list[tuple[float, float]] = []
    with _clients(1, record):
        time.sleep(_SETTLE_S)
        for _ in range(2 * commits):
            before = time.time()
            server.show_next()
            server.wait_for_shown()
            arriving.append((before, time.time()))
            time.sleep(_REST_S)
    server.check()
    found = server.status()["commits"]
    gaps = [gap for stream in streams for gap in itertools.pairwise(stream)]
    usual_s = statistics.median(end - start for start, end in outside(gaps, arriving))
    result: dict[str, Any] = {"token_gap_s": usual_s, "first_pause_s": found[0]["pause_s"]}
    kinds = {
        "changed": [row for row in found if row["changed"]],
        "unchanged": [row for row in found if not row["changed"]],
    }
    for name, rows in kinds.items():
        windows = [(row["served_at"] - row["pause_s"], row["served_at"]) for row in rows]
        silences = [silence for window in windows if (silence := longest(gaps, window)) is not None]
        result[name] = {
            "commits": len(rows),
            "seen": len(silences),
            "silence_s": statistics.median(silences),
            "extra_s": statistics.median(silences) - usual_s,
            "pause_s": statistics.median(row["pause_s"] for row in rows),
            "scatter_s": statistics.median(row["scatter_s"] for row in rows),
            "stage_s": statistics.median(row["stage_s"] for row in rows),
        }
    return result


def longest(gaps: Sequence[tuple[float, float]], window: tuple[float, float]) -> float | None:
    """Return the longest gap that overlaps the window; None if no token came before or none after it."""
    start, end = window
    found = [gap for gap in gaps if gap[0] < end and gap[1] > start]
    return max((high - low for low, high in found), default=None)


def outside(
    gaps: Sequence[tuple[float, float]], windows: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the gaps that overlap no window."""
    return [gap for gap in gaps if not any(gap[0] < end and gap[1] > start for start, end in windows)]


def throughput(server: Server, window_s: float, pairs: int) -> dict[str, Any]:
    """Measure tokens per second under load, in windows without versions and with one a second, in turn.

    Returns `without` and `with_versions`, tokens per second of each of the `pairs` of windows; `share`, of
    all together.
    """
    rates: dict[bool, list[float]] = {False: [], True: []}
    with _clients(_REQUESTS, lambda _: server.complete(_TOKENS)):
        time.sleep(_SETTLE_S)
        for pair in range(pairs):
            for arriving in (False, True) if pair % 2 == 0 else (True, False):
                rates[arriving].append(_rate(server, window_s, arriving))
    server.check()
    share = sum(rates[True]) / sum(rates[False])
    return {"requests": _REQUESTS, "without": rates[False], "with_versions": rates[True], "share": share}


def _rate(server: Server, window_s: float, arriving: bool) -> float:
    started_s, before = time.perf_counter(), server.generated_tokens()
    if arriving:
        for number in range(int(window_s / _PERIOD_S)):
            time.sleep(max(0.0, started_s + number * _PERIOD_S - time.perf_counter()))
            server.show_next()
    time.sleep(max(0.0, started_s + window_s - time.perf_counter()))
    tokens, elapsed_s = server.generated_tokens() - before, time.perf_counter() - started_s
    if arriving:
        server.wait_for_shown()
    return tokens / elapsed_s


@contextlib.contextmanager
def _clients(count: int, ask: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run threads that send one request after the other until the `with` block ends; the event says that it
    has.
    """
    done = threading.Event()
    failures: list[Exception] = []

    def run() -> None:
        try:
            while not done.is_set():
                ask(done)
        except (OSError, ValueError) as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    if failures:
        raise DeltaSyncError(f"A request failed: {failures[0]}.")
