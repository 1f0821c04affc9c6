"""A real vLLM and a real trainer on one GPU, while completions stream: what a version costs trainer, server
and clients.

    python -m benchmarks.gpu_serve [--versions 20] [--streams 32] [--json]
    python -m benchmarks.gpu_serve --device cpu --size tiny --versions 3 --streams 4        # tries the benchmark itself

The trainer (float32 master, AdamW, random tokens) publishes a version a second to a folder, in memory if
there is room; the server follows it by the literal command. Every bit of the first versions and of the last
is compared by sha256, and one version changes most of the model. Options for vLLM follow `--`, such as `--
--compilation-config '{"mode": 0}'`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.commit.server import environ, launch, wait_to_serve
from benchmarks.commit.versions import SIZES, build_checkpoint
from deltasync.errors import DeltaSyncError
from demo.processes import Child, get_json, interrupt_on_sigterm

_PATIENCE_S, _WINDOW_S, _PERIOD_S = 120.0, 8.0, 1.0
_PROVEN = 3  # versions whose bits are compared under load, before the ones that are measured
_ROOM_BYTES = 24 << 30  # of memory, for checkpoint and channel
_TOKENS = 200, 400


# --- the trainer, in a process of its own
# ------------------------------------------------------------------------------


class _Trainer:
    """Trains on random tokens and publishes; its methods answer the lines of `_Client`."""

    def __init__(self, checkpoint: str, channel: str, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from deltasync import Publisher

        torch.manual_seed(1)
        self._torch, self._device = torch, device
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, weight_decay=0.0)
        self._publisher = Publisher(channel)
        self.train(0.0)

    def train(self, lr: float) -> dict[str, Any]:
        """Take a step at a learning rate."""
        torch = self._torch
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        tokens = torch.randint(
            0, self._model.config.vocab_size, (4, 128 if self._device == "cpu" else 256), device=self._device
        )
        with torch.autocast(self._device, torch.bfloat16):
            self._model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return {}

    def publish(self) -> dict[str, Any]:
        """Publish the weights and wait until the version is visible."""
        cuda = self._torch.cuda if self._device == "cuda" else None
        before = 0
        if cuda is not None:
            cuda.reset_peak_memory_stats()
            before = cuda.memory_allocated()
        began_s = time.time()
        receipt = self._publisher.publish(dict(self._model.named_parameters())).wait(_PATIENCE_S)
        return {
            "version": receipt.version,
            "changed": receipt.changed,
            "total": receipt.total,
            "payload_bytes": receipt.payload_bytes,
            "held_s": receipt.held_s,
            "encode_s": receipt.encode_s,
            "visible_s": time.time() - began_s,
            "peak_bytes": None if cuda is None else cuda.max_memory_allocated() - before,
        }

    def sha256(self) -> dict[str, str]:
        """Return the digest of each tensor's bits, as they were published."""
        bf16, int16 = self._torch.bfloat16, self._torch.int16
        bits = {
            name: tensor.detach().to(bf16).contiguous().view(int16)
            for name, tensor in self._model.named_parameters()
        }
        return {name: hashlib.sha256(held.cpu().numpy().tobytes()).hexdigest() for name, held in bits.items()}


def _train(checkpoint: str, channel: str, device: str) -> None:
    trainer = _Trainer(checkpoint, channel, device)
    print("{}", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(trainer, name)(*arguments)), flush=True)


class _Client:
    """Asks the trainer's process."""

    def __init__(self, folder: Path, device: str) -> None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu_serve",
            common.PART,
            f"{folder}/model",
            f"file://{folder}/channel",
            device,
        ]
        with (folder / "trainer.log").open("w") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            self._process = subprocess.Popen(command, cwd=common.ROOT, env=environ(), text=True, **pipes)  # type: ignore[call-overload]
        self._log = folder / "trainer.log"

    def answer(self) -> Any:
        """Return the next answer."""
        line = self._process.stdout.readline()
        if not line:
            raise DeltaSyncError(f"The trainer has ended. Its log ends with: {self._log.read_text()[-500:]}")
        return json.loads(line)

    def ask(self, name: str, *arguments: object) -> Any:
        """Call a method of `_Trainer`."""
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


# --- load
# --------------------------------------------------------------------------------------------------------------


class _Load:
    """Streams completions all the time, from a thread.

    Attributes:
        tokens, done: Tokens that have come, and completions that have ended.
        gaps: When a token came, and how long after the one before it in its stream, in seconds.
        failures: What went wrong.
    """

    def __init__(self, url: str, streams: int) -> None:
        self.tokens = self.done = 0
        self.gaps: list[tuple[float, float]] = []
        self.failures: list[str] = []
        self._url, self._streams, self._ended = url, streams, False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def end(self) -> None:
        """Let the completions that run end."""
        self._ended = True
        self._thread.join()

    async def _run(self) -> None:
        import aiohttp

        timeout, connector = aiohttp.ClientTimeout(total=_PATIENCE_S), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(
                *(self._stream(session, random.Random(number)) for number in range(self._streams))
            )

    async def _stream(self, session: Any, chance: random.Random) -> None:
        while not self._ended:
            count = chance.randint(*_TOKENS)
            body = {
                "prompt": [chance.randrange(5, 30) for _ in range(chance.randrange(8, 48))],
                "max_tokens": count,
            }
            body |= {"ignore_eos": True, "stream": True, "temperature": 1.0}
            try:
                async with session.post(f"{self._url}/v1/completions", json=body) as reply:
                    reply.raise_for_status()
                    came, last_s = 0, 0.0
                    async for line in reply.content:
                        if line.startswith(b"data: {"):
                            now_s = time.time()
                            if came:
                                self.gaps.append((now_s, now_s - last_s))
                            came, last_s = came + 1, now_s
                            self.tokens += 1
                self.done += 1
            except Exception as error:  # noqa: BLE001 - a request must not fail, whatever happens
                self.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)


# --- the run
# -----------------------------------------------------------------------------------------------------------


def measure(
    device: str, size: str, versions: int, streams: int, lr: float, options: Sequence[str]
) -> dict[str, Any]:
    """Run server and trainer; see `main` for the arguments. Returns rows of versions, rates and proofs."""
    with _folder() as folder:
        common.say(f"building a Qwen3 of random weights ({size})")
        build_checkpoint(size, folder / "model")
        common.say("starting trainer and server")
        trainer = _Client(folder, device)
        try:
            given = folder / "model", f"file://{folder}/channel", folder / "server.log", device, options, 64
            with launch(*given) as (url, server):
                trainer.answer()
                trainer.ask("publish")
                wait_to_serve(url, server, 1)
                return _measure(url, server, trainer, versions, streams, lr)
        except BaseException:
            for log in ("server.log", "trainer.log"):
                if (folder / log).exists():
                    common.say(f"{log} ends with:\n{(folder / log).read_text(errors='replace')[-3000:]}")
            raise
        finally:
            trainer.close()


def _measure(
    url: str, server: Child, trainer: _Client, versions: int, streams: int, lr: float
) -> dict[str, Any]:
    proven = [_prove(url, trainer)]
    load = _Load(url, streams)
    rates: dict[str, float] = {}
    try:
        time.sleep(_WINDOW_S / 2)  # until all streams are at work
        with _rate(rates, "alone", load):
            time.sleep(_WINDOW_S)
        with _rate(rates, "beside training", load):
            until_s = time.time() + _WINDOW_S
            while time.time() < until_s:
                trainer.ask("train", 0.0)
        for _ in range(_PROVEN):
            _version(url, server, trainer, lr)
            proven.append(_prove(url, trainer))
        with _rate(rates, "with a version a second", load):
            rows = [_version(url, server, trainer, lr) for _ in range(versions)]
        common.say("a version that changes most of the model")
        most = _version(url, server, trainer, 3e-4)
    finally:
        load.end()
    proven.append(_prove(url, trainer))
    commits = {row["version"]: row for row in get_json(f"{url}/deltasync/status?commits=1000")["commits"]}
    for row in (*rows, most):
        row |= {
            name: commits[row["version"]][name]
            for name in ("stage_s", "pause_s", "scatter_s", "lag_s", "served_at")
        }
        begin_s = row["served_at"] - row["pause_s"]
        over = [gap_s for at_s, gap_s in load.gaps if at_s > begin_s and at_s - gap_s < row["served_at"]]
        row["silence_s"] = max(over, default=None)
    return {
        "rows": rows,
        "most": most,
        "rates": rates,
        "proven": proven,
        "requests": load.done,
        "failures": load.failures[:10],
        "token_gap_s": statistics.median(gap_s for _, gap_s in load.gaps),
    }


def _version(url: str, server: Child, trainer: _Client, lr: float) -> dict[str, Any]:
    """Train, publish, and wait until the version is served and its second is over."""
    began_s = time.time()
    trainer.ask("train", lr)
    row: dict[str, Any] = trainer.ask("publish")
    wait_to_serve(url, server, row["version"], _PATIENCE_S)
    time.sleep(max(0.0, began_s + _PERIOD_S - time.time()))
    return row


def _prove(url: str, trainer: _Client) -> int:
    """Compare every bit that is served with the trainer's; return the version."""
    wanted, found = trainer.ask("sha256"), get_json(f"{url}/deltasync/digest")
    different = [name for name, digest in wanted.items() if found["sha256"].get(name) != digest]
    if different:
        raise DeltaSyncError(
            f"Version {found['version']} is not served bit for bit: {', '.join(different[:3])} differ."
        )
    return int(found["version"])


@contextlib.contextmanager
def _rate(rates: dict[str, float], name: str, load: _Load) -> Iterator[None]:
    began_s, tokens = time.perf_counter(), load.tokens
    yield
    rates[name] = (load.tokens - tokens) / (time.perf_counter() - began_s)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a temporary folder, in memory if there is room."""
    memory = Path("/dev/shm")
    in_memory = memory.is_dir() and shutil.disk_usage(memory).free > _ROOM_BYTES
    with tempfile.TemporaryDirectory(prefix="deltasync-bench-", dir=memory if in_memory else None) as name:
        yield Path(name)


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result as a table."""

    def cells(name: str, scale: float = 1e3) -> tuple[str, str, str]:
        found = sorted(scale * row[name] for row in result["rows"] if row[name] is not None)
        late = found[min(len(found) - 1, int(0.95 * len(found)))] if found else float("nan")
        middle = statistics.median(found) if found else float("nan")
        return (
            f"{middle:.1f}",
            f"{late:.1f}",
            "-" if result["most"][name] is None else f"{scale * result['most'][name]:.1f}",
        )

    named = {
        "the trainer is held, ms": "held_s",
        "encoded after, ms": "encode_s",
        "visible after, ms": "visible_s",
        "stage, ms": "stage_s",
        "pause, ms": "pause_s",
        "exchange of values, ms": "scatter_s",
        "longest silence of a stream, ms": "silence_s",
        "lag, encoded to served, ms": "lag_s",
    }
    rows = [("changed, M", *cells("changed", 1e-6)), ("payload, MB", *cells("payload_bytes", 1e-6))]
    rows += [(label, *cells(name)) for label, name in named.items()]
    rows += [("device memory beside the model, MB", *cells("peak_bytes", 1e-6))]
    yield from common.table((f"{len(result['rows'])} versions", "median", "p95", "most of the model"), rows)
    yield ""
    yield from common.table(
        ("tokens a second", ""), [(name, f"{rate:,.0f}") for name, rate in result["rates"].items()]
    )
    yield f"{result['requests']} requests, {len(result['failures'])} failed; bits equal at versions {result['proven']}"


def main() -> None:
    """Run the benchmark by the command line."""
    if sys.argv[1:2] == [common.PART]:
        _train(*sys.argv[2:5])
        return
    parser = common.parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--size", choices=SIZES, default="0.6b", help="model of the shape of Qwen3-0.6B, or the demo's"
    )
    parser.add_argument("--versions", type=int, default=20, help="versions to measure, one a second")
    parser.add_argument("--streams", type=int, default=32, help="completions at the same time")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of AdamW")
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="options for vLLM")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    if min(given["versions"], given["streams"]) < 1:
        parser.error("--versions and --streams must be at least 1")
    interrupt_on_sigterm()
    result = measure(**given)
    common.emit(as_json, result, lines(result))


if __name__ == "__main__":
    common.run(main)
