"""The demo: a trainer and a vLLM server that share nothing but a directory, watched and checked from outside.

There are three processes. This one builds the model, starts the other two and watches. The server (`deltasync
serve`) knows the channel's URL and nothing else. The trainer (`demo.train`) publishes to the channel and asks
the server for completions. A task may have a fourth process, an environment, which the trainer asks for
rewards.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.ops.cli.serve import check_port
from demo import gpu, report
from demo.processes import Child, get_json
from demo.task import Task

EXAMPLES = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
DIGEST_EVERY = 8  # versions between two proofs of bits while the run goes on
SERVER_START_S = 240.0
ENVIRONMENT_START_S = 60.0
CATCH_UP_S = 30.0

_OFFLINE = {"HF_HUB_OFFLINE": "1", "CI": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_NO_USAGE_STATS": "1"}

Say = Callable[[str], None]


def run(
    out: Path,
    say: Say,
    *,
    steps: int,
    seed: int,
    port: int,
    codec: str,
    task: str,
    vllm_options: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the demo, write `summary.json` and `run.png`, and return the summary.

    The options are those of `python examples/demo`; `say` is called with one line at a time. Trainer and
    server use the GPU if there is one. If the server or the trainer ends, the error quotes the last line of
    its log.
    """
    began_s = time.monotonic()
    paths = (str(EXAMPLES), os.environ.get("PYTHONPATH"))
    environ = {**os.environ, **_OFFLINE, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    _require_packages()
    port = port or free_port()
    check_port(HOST, port)
    out = fresh(out)
    url, channel = f"http://{HOST}:{port}", f"file://{out / 'channel'}"
    with contextlib.ExitStack() as stack:
        say = stack.enter_context(Talker(say))
        say("building a tiny Qwen3")
        from demo.model import begin, save_checkpoint  # takes seconds

        lesson, tokenizer, model = begin(seed, task)
        save_checkpoint(out / "untrained", model, tokenizer)
        server = stack.enter_context(_server(environ, out, channel, port, vllm_options))
        place = "GPU" if gpu.has_gpu() else "CPU"
        say(
            f"starting vLLM ({place}, port {port}), untrained; it knows only {channel} (log: "
            f"{out / 'server.log'})"
        )
        _warm_up(out, url, seed, say, lesson, tokenizer, model)
        train = [sys.executable, "-m", "demo.train", "--model", f"{out}/model", "--channel", channel]
        train += ["--server-url", url, "--steps", str(steps), "--seed", str(seed), "--task", task]
        train += ["--metrics", f"{out}/metrics.jsonl", "--published", f"{out}/published.jsonl"]
        if lesson.environment is not None:
            assert lesson.token_variable is not None
            environ |= {lesson.token_variable: secrets.token_urlsafe(16)}
            train += ["--environment-url", _start_environment(stack, lesson.environment, environ, out)]
            say(f"the environment is up at {train[-1]} (log: {out / 'environment.log'})")
        env = {**environ, "OMP_NUM_THREADS": "1", "DELTASYNC_CODEC": codec}
        trainer = stack.enter_context(Child("The trainer", train, env, out / "trainer.log", cores()[1]))
        say(f"starting AsyncGRPOTrainer (log: {out / 'trainer.log'})")
        server.wait_until(lambda: get_json(f"{url}/deltasync/status"), SERVER_START_S, "to start")
        say("waiting for the first steps; vLLM is up")
        proofs = _watch(steps, out, url, server, trainer, say)
        status = _caught_up(out, url, server)
        (out / "status.json").write_text(json.dumps(status, indent=2) + "\n")
        proofs.append(get_json(f"{url}/deltasync/digest"))
        say("training done; the server serves the last version")
    summary = report.summarize(out, status, proofs, wall_s=time.monotonic() - began_s)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report.plot(out, status, out / "run.png", task)
    return summary


class Talker:
    """Says each line, and after every five seconds of silence what still goes on."""

    def __init__(self, say: Say, every_s: float = 5.0) -> None:
        self._say, self._every_s, self._what = say, every_s, ""
        self._spoken, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._tick, name="deltasync-demo", daemon=True)

    def __call__(self, line: str) -> None:
        """Say a line; the part before a semicolon is what goes on from here."""
        self._what = line.partition(";")[0]
        self._spoken.set()
        self._say(line)

    def _tick(self) -> None:
        silent_s = 0.0
        while not self._ended:
            if self._spoken.wait(self._every_s):
                self._spoken.clear()
                silent_s = 0.0
            else:
                silent_s += self._every_s
                self._say(f"{silent_s:.0f} s later, still: {self._what}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._spoken.set()
        self._thread.join()


def _require_packages() -> None:
    for module in ("vllm", "trl", "aiohttp", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"The demo needs {module}. `make setup` installs it into .venv; run .venv/bin/python "
                "examples/demo."
            )


def free_port() -> int:
    """Return a TCP port on `HOST` that nothing uses at the moment, from below those that systems give to
    outgoing connections: one of them may not take it before a server does.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def fresh(out: Path) -> Path:
    """Make an empty directory in place of an earlier demo's; ConfigError if it has anything else in it."""
    out = out.resolve()
    if out.exists() and any(out.iterdir()) and not (out / ".deltasync-demo").exists():
        raise ConfigError(f"{out} exists and was not made by a demo; choose another directory with --out.")
    try:
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be emptied: {error.strerror}. Is another demo running there?"
        ) from None
    (out / ".deltasync-demo").touch()
    return out


def _warm_up(out: Path, url: str, seed: int, say: Say, lesson: Task, tokenizer: Any, model: Any) -> None:
    """Warm the model up while the server starts; write the checkpoint `model`, from which the trainer
    starts.
    """
    import torch

    from demo.model import save_checkpoint, warm_up

    threads = torch.get_num_threads()
    torch.set_num_threads(len(cores()[1]))  # the server has the other cores until it is up

    def say_more(line: str) -> None:
        if get_json(f"{url}/deltasync/status") is not None:
            torch.set_num_threads(threads)
        say(line)

    say("meanwhile, warming the model up by supervised learning")
    loss = warm_up(model, tokenizer, seed, say_more, lesson)
    save_checkpoint(out / "model", model, tokenizer)
    say(f"model ready: {model.num_parameters():,} parameters, warm-up loss {loss:.3f}")


def _server(
    environ: dict[str, str], out: Path, channel: str, port: int, vllm_options: Sequence[str]
) -> Child:
    command = [
        sys.executable,
        "-m",
        "deltasync",
        "serve",
        f"{out}/untrained",
        "--channel",
        channel,
        "--host",
        HOST,
    ]
    command += [
        "--port",
        str(port),
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "16",
        "--disable-uvicorn-access-log",
    ]
    command += ["--served-model-name", f"{out}/model"]  # as the trainer will call it
    command += [*gpu.options(gpu.has_gpu()), *vllm_options]
    env = {
        **environ,
        **gpu.variables(),
        "DELTASYNC_POLL_INTERVAL_S": "0.05",
        "DELTASYNC_REPLICA_ID": "demo",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it is given its cores
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # the rollout worker keeps its connections between steps
    }
    return Child("The vLLM server", command, env, out / "server.log", cores()[0])


def _start_environment(stack: contextlib.ExitStack, module: str, environ: dict[str, str], out: Path) -> str:
    """Start the task's server; return its URL once it answers."""
    port = free_port()
    command = [sys.executable, "-m", module, "--host", HOST, "--port", str(port)]
    child = stack.enter_context(
        Child("The environment", command, environ, out / "environment.log", cores()[1])
    )
    url = f"http://{HOST}:{port}"
    child.wait_until(lambda: get_json(f"{url}/health"), ENVIRONMENT_START_S, "to start")
    return url


def cores() -> tuple[list[int], list[int]]:
    """The cores of the server and of the trainer: vLLM's processes spin while they wait, and would take the
    trainer's.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    return cores[:half], cores[-half:]


def _watch(steps: int, out: Path, url: str, server: Child, trainer: Child, say: Say) -> list[dict[str, Any]]:
    """Watch the run until the trainer ends; return digests of the server's live memory taken meanwhile."""
    proofs: list[dict[str, Any]] = []
    steps_said = 0
    while trainer.running():
        time.sleep(0.1)
        server.check()
        status = get_json(f"{url}/deltasync/status")
        if status is None:
            continue  # it is too busy, or has just ended, and `check` will raise
        if status["error"] is not None and status["state"] in ("failed", "refused"):
            raise DeltaSyncError(f"The replica {status['state']}: {status['error']}")
        version = status["version"]
        if version is not None and (not proofs or version >= proofs[-1]["version"] + DIGEST_EVERY):
            proofs.append(get_json(f"{url}/deltasync/digest"))
        lines = list(report.read_lines(out / "metrics.jsonl"))
        if len(lines) >= steps_said + 5 and status["commits"]:
            steps_said, last, commit = len(lines), lines[-1], status["commits"][-1]
            lag = "-" if commit["lag_s"] is None else f"{commit['lag_s']:.2f} s"
            say(
                f"step {last['step']} of {steps}  reward {last['reward']:.3f}  served version {version}  "
                f"payload {commit['payload_bytes'] / 1e3:.0f} kB  lag {lag}  "
                f"pause {1e3 * commit['pause_s']:.0f} ms"
            )
    trainer.check()
    return proofs


def _caught_up(out: Path, url: str, server: Child) -> dict[str, Any]:
    """Wait until the server serves the last published version; return its status."""
    last = max(line["version"] for line in report.read_lines(out / "published.jsonl"))
    status: dict[str, Any] = {}

    def reached() -> bool:
        status.update(get_json(f"{url}/deltasync/status") or {})
        version = status.get("version") or 0
        # the final weights are a version after the last step
        return version >= last and version == status["newest_version"]

    server.wait_until(reached, CATCH_UP_S, f"to serve version {last}")
    return status
