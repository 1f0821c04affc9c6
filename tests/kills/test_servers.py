"""Real vLLM servers of which a process dies, and a supervisor that starts them again."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from deltasync.errors import DeltaSyncError
from deltasync.ops.cli.serve import vllm_command
from demo.processes import Child, get_json
from demo.run import free_port
from tests.integration.expected_tokens import greedy
from tests.integration.vllm_server import PATIENCE_S, Server, one_thread, save_model
from tests.kills.killing import DRIVER_STEPS

_REPOSITORY = Path(__file__).parents[2]


@dataclasses.dataclass
class Supervised:
    """A server that is started again when it has ended.

    Attributes:
        folder: Holds its channel, checkpoint and log.
        workers: Tensor-parallel ones.
        starts: How often it was started.
    """

    folder: Path
    workers: int = 1
    starts: int = 0

    def __post_init__(self) -> None:
        checkpoint = save_model(self.folder)
        channel, port = f"file://{self.folder}/channel", free_port()
        weights = {
            name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()
        }
        self.server = Server(f"http://127.0.0.1:{port}", channel, weights)
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "1024"]
        arguments += ["--max-num-seqs", "8", "--tensor-parallel-size", str(self.workers)]
        arguments += ["--worker-extension-cls", "tests.kills.killing_worker.KillingExtension"]
        line, variables = vllm_command(str(checkpoint), channel, arguments)
        self._line = [
            word.replace("vllm.entrypoints.openai.api_server", "tests.kills.killing") for word in line
        ]
        self._cores = sorted(os.sched_getaffinity(0))[-self.workers :]
        self._environ = {
            **os.environ,
            **variables,
            "DELTASYNC_POLL_INTERVAL_S": "0.05",
            "FAULT_AT": str(self.at),
            "PYTHONPATH": f"{_REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if self.workers == 1 else "|".join(map(str, self._cores)),
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
        }

    @property
    def at(self) -> Path:
        """Where the step is told."""
        return self.folder / "at"

    @property
    def log(self) -> Path:
        """Of the last start."""
        return self.folder / f"server-{self.starts}.log"

    @contextlib.contextmanager
    def running(self) -> Iterator[Child]:
        """Start it; what is left of it is ended with the block."""
        self.starts += 1
        with Child("The vLLM server", self._line, self._environ, self.log, self._cores) as child:
            try:
                child.wait_until(
                    lambda: get_json(self.server.url + "/deltasync/status"), 2 * PATIENCE_S, "to start"
                )
            except DeltaSyncError:
                print(self.log.read_text(errors="replace"))
                raise
            yield child

    def publish(self) -> int:
        """The next version."""
        self.server.step()
        return self.server.publish()

    def serve(self, version: int) -> None:
        """Start it, until it serves the version, bit for bit, and answers."""
        self._running = self.running()
        self._child = self._running.__enter__()
        self.server.assert_serves(version)
        assert len(greedy(self.server, token_count=5)) == 5

    def pids(self, title: str) -> list[int]:
        """Processes of this server with this in their title."""
        found = []
        for pid in self._child.pids():
            with contextlib.suppress(OSError):
                if title in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found

    def ends(self, published: int) -> None:
        """Wait for its end; while it lasts, it serves no wrong bits, and the request that runs does not
        hang.
        """
        before, serves = time.monotonic(), self.server.status
        while self._child.running():
            assert time.monotonic() - before < PATIENCE_S, "the server neither serves nor ends"
            with contextlib.suppress(OSError, http.client.HTTPException):
                version = serves()["version"]
                assert version is None or version <= published
            time.sleep(0.05)
        self._running.__exit__(None, None, None)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(AttributeError):
            self._running.__exit__(None, None, None)
        if self.server.publisher is not None:
            self.server.publisher.close()


class Request(threading.Thread):
    """One long completion after the other, until one fails; `outcome` says how."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server, self.outcome = server, ""
        self.start()

    def run(self) -> None:
        while not self.outcome:
            try:
                greedy(self._server, token_count=900)
            except Exception as error:  # noqa: BLE001 - how it ends is what is asked
                self.outcome = f"{type(error).__name__}: {error}"


class OneAtATime:
    """The server that the rows share, as long as they want as many workers."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._now: Supervised | None = None

    def of(self, workers: int) -> Supervised:
        """With so many workers, serving."""
        if self._now is None or self._now.workers != workers:
            self.close()
            self._now = Supervised(self._factory.mktemp("supervised"), workers)
            self._now.serve(self._now.server.publish())
        return self._now

    def close(self) -> None:
        """End it."""
        if self._now is not None:
            self._now.close()


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneAtATime]:
    """Servers for all rows."""
    with one_thread(), contextlib.closing(OneAtATime(tmp_path_factory)) as servers:
        yield servers


ANY_TIME = "tokens are generated"
IN_WORKER = (
    "a tensor is decoded",
    "all is staged",
    "half of the values are exchanged",
    "all is written, nothing confirmed",
    "the version is confirmed",
)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "step"),
    [
        *((2, step) for step in (ANY_TIME, *IN_WORKER[2:4])),
        *((1, step) for step in (*IN_WORKER, *DRIVER_STEPS)),
    ],
)
def test_a_server_of_which_a_process_is_killed_serves_the_newest_version_again(
    supervised: OneAtATime, workers: int, step: str
) -> None:
    """At a step of the next version, or the last worker while none is taken; then all is started again."""
    server = supervised.of(workers)
    request = Request(server.server)
    server.server.wait_for_requests(1)
    if step == ANY_TIME:
        os.kill(server.pids("Worker")[-1], signal.SIGKILL)
    else:
        server.at.write_text(step)
    version = server.publish()
    server.ends(version)
    assert not server.at.exists()
    request.join(PATIENCE_S)
    assert request.outcome
    server.serve(version)
