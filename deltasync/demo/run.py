"""The demo: a trainer and a vLLM server that share nothing but a directory, watched and checked from outside.

Three processes: this one builds the model, starts the other two and watches; the server (`deltasync serve`) is told the
channel's URL and nothing else; the trainer (`deltasync.demo.train`) publishes to it and asks the server for completions.
For Wordle there is a fourth, the environment (`deltasync.demo.wordle`), which the trainer asks for marks and rewards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deltasync.cli.serve import check_port, require_vllm
from deltasync.demo import report
from deltasync.demo.processes import Child, get_json
from deltasync.demo.wordle.protocol import TOKEN_VARIABLE
from deltasync.errors import ConfigError, DeltaSyncError

HOST = "127.0.0.1"
DIGEST_EVERY = 8  # versions between two proofs of bits while the run goes on
SERVER_START_S = 240.0
ENVIRONMENT_START_S = 60.0
CATCH_UP_S = 30.0

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What `deltasync demo` can be told.

    Attributes:
        out: Directory for everything the demo writes; an earlier demo's is replaced.
        steps: Optimizer steps.
        seed: Of model, warm-up, prompts and trainer.
        port: Of the server; 0 takes a free one.
        codec: Of the deltas.
        task: What the model learns, one of `deltasync.demo.TASKS`.
    """

    out: Path
    steps: int = 40
    seed: int = 0
    port: int = 0
    codec: str = "packed"
    task: str = "counting"


def run(settings: DemoSettings, say: Say) -> dict[str, Any]:
    """Run the demo and write `summary.json` and `run.png`.

    Args:
        settings: See `DemoSettings`.
        say: Called with one line at a time as things happen.

    Returns:
        The summary.

    Raises:
        ConfigError: a package is missing, the port is in use, or the directory is not a demo's.
        DeltaSyncError: the server or the trainer ended, with the last lines that it said.
    """
    began_s = time.monotonic()
    environ = {**os.environ, **_OFFLINE}  # as it is now: importing TRL quietens vLLM through the environment
    _require_packages()
    port = free_port() if settings.port == 0 else settings.port
    check_port(HOST, port)
    out = _fresh(settings.out)
    model, channel = out / "model", f"file://{out / 'channel'}"
    say("building a tiny Qwen3 and warming it up by supervised learning")
    info = _build_model(model, settings, say)
    say(f"model ready: {info['parameter_count']:,} parameters, warm-up loss {info['warmup_loss']:.3f}")
    url = f"http://{HOST}:{port}"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_server(environ, out, model, channel, port))
        say(f"starting vLLM on port {port}; it knows only the channel {channel} (log: {out / 'server.log'})")
        server.wait_until(lambda: get_json(f"{url}/deltasync/status"), SERVER_START_S, "to start")
        say("vLLM is up and waits for the first version; starting AsyncGRPOTrainer")
        place: list[str] = []
        if settings.task == "wordle":
            environ |= {TOKEN_VARIABLE: secrets.token_urlsafe(16)}
            place = ["--environment-url", stack.enter_context(_environment(environ, out))]
            say(f"the Wordle environment is up at {place[1]} (log: {out / 'environment.log'})")
        trainer = stack.enter_context(_trainer(environ, settings, out, model, channel, url, place))
        proofs = _watch(settings, out, url, server, trainer, say)
        status = _caught_up(out, url, server)
        (out / "status.json").write_text(json.dumps(status, indent=2) + "\n")
        proofs.append(get_json(f"{url}/deltasync/digest"))
        say("training done; the server serves the last version")
    summary = report.summarize(out, status, proofs, wall_s=time.monotonic() - began_s)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report.plot(out, status, out / "run.png")
    return summary


def _require_packages() -> None:
    require_vllm()
    for module, extra in (("trl", "trl"), ("aiohttp", "trl"), ("httpx", "wordle"), ("matplotlib", "demo")):
        try:
            importlib.import_module(module)
        except ImportError:
            raise ConfigError(f"The demo needs {module}. Run: pip install 'deltasync[{extra}]'.") from None


def free_port() -> int:
    """A TCP port on `HOST` that nothing uses at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _fresh(out: Path) -> Path:
    """An empty directory in place of an earlier demo's; anything else in the way is left alone."""
    out = out.resolve()
    if out.exists() and any(out.iterdir()) and not (out / ".deltasync-demo").exists():
        raise ConfigError(f"{out} exists and was not made by a demo; choose another directory with --out.")
    try:
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be emptied: {error.strerror}. Is another demo running there?") from None
    (out / ".deltasync-demo").touch()
    return out


def _build_model(model: Path, settings: DemoSettings, say: Say) -> dict[str, Any]:
    from deltasync.demo.model import build_checkpoint

    def on_progress(step: int, total: int, loss: float) -> None:
        if step % 50 == 0:
            say(f"warm-up step {step} of {total}, loss {loss:.3f}")

    return dict(build_checkpoint(model, settings.seed, on_progress, settings.task))


_OFFLINE = {"HF_HUB_OFFLINE": "1", "CI": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_NO_USAGE_STATS": "1"}


def _server(environ: dict[str, str], out: Path, model: Path, channel: str, port: int) -> Child:
    command = [sys.executable, "-m", "deltasync.cli", "serve", str(model), "--channel", channel, "--host", HOST]
    command += ["--port", str(port), "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"]
    command += ["--disable-uvicorn-access-log"]
    env = {
        **environ,
        "DELTASYNC_DIGEST_ROUTE": "1",
        "DELTASYNC_POLL_INTERVAL_S": "0.05",
        "DELTASYNC_REPLICA_ID": "demo",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores it is given are enough of a bound
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # the rollout worker keeps its connections between steps
    }
    return Child("The vLLM server", command, env, out / "server.log", _cores()[0])


@contextlib.contextmanager
def _environment(environ: dict[str, str], out: Path) -> Iterator[str]:
    """The Wordle server, once it answers; gives its URL."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    command = [sys.executable, "-m", "deltasync.demo.wordle", "--host", HOST, "--port", str(port)]
    with Child("The Wordle environment", command, environ, out / "environment.log", _cores()[1]) as child:
        child.wait_until(lambda: get_json(f"{url}/health"), ENVIRONMENT_START_S, "to start")
        yield url


def _trainer(
    environ: dict[str, str], settings: DemoSettings, out: Path, model: Path, channel: str, url: str, place: list[str]
) -> Child:
    command = [sys.executable, "-m", "deltasync.demo.train", "--model", str(model), "--channel", channel]
    command += ["--server-url", url, "--steps", str(settings.steps), "--seed", str(settings.seed)]
    command += ["--task", settings.task, *place]
    command += ["--metrics", str(out / "metrics.jsonl"), "--published", str(out / "published.jsonl")]
    env = {**environ, "OMP_NUM_THREADS": "1", "DELTASYNC_CODEC": settings.codec}
    return Child("The trainer", command, env, out / "trainer.log", _cores()[1])


def _cores() -> tuple[list[int], list[int]]:
    """Cores of the server and of the trainer. vLLM's processes spin while they wait, and would take the trainer's too."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    return cores[:half], cores[-half:]


def _watch(settings: DemoSettings, out: Path, url: str, server: Child, trainer: Child, say: Say) -> list[dict[str, Any]]:
    """Follow the run until the trainer ends; returns digests of the server's live memory taken on the way."""
    proofs: list[dict[str, Any]] = []
    said = 0
    while trainer.running():
        time.sleep(0.1)
        server.check()
        status = get_json(f"{url}/deltasync/status")
        if status is None:
            continue  # it has just ended, which `check` tells, or is too busy
        if status["error"] is not None and status["state"] in ("failed", "refused"):
            raise DeltaSyncError(f"The replica {status['state']}: {status['error']}")
        version = status["version"]
        if version is not None and (not proofs or version >= proofs[-1]["version"] + DIGEST_EVERY):
            proofs.append(get_json(f"{url}/deltasync/digest"))
        lines = list(report.read_lines(out / "metrics.jsonl"))
        if len(lines) >= said + 5 and status["commits"]:
            said, last, commit = len(lines), lines[-1], status["commits"][-1]
            say(
                f"step {last['step']} of {settings.steps}  reward {last['reward']:.3f}  served version {version}  "
                f"payload {commit['payload_bytes'] / 1e3:.0f} kB  lag {commit['lag_s']:.2f} s  "
                f"pause {1e3 * commit['pause_s']:.0f} ms"
            )
    trainer.check()
    return proofs


def _caught_up(out: Path, url: str, server: Child) -> dict[str, Any]:
    """Status of the server once it serves the last published version."""
    last = max(line["version"] for line in report.read_lines(out / "published.jsonl"))
    status: dict[str, Any] = {}

    def reached() -> bool:
        status.update(get_json(f"{url}/deltasync/status") or {})
        return status.get("version") == last

    server.wait_until(reached, CATCH_UP_S, f"to serve version {last}")
    return status
