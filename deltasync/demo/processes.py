"""Child processes that never outlive the demo, and tell in one sentence why they ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from deltasync.errors import DeltaSyncError

_STOP_S = 15.0


def get_json(url: str) -> Any:
    """The JSON that a GET returns, None while nothing answers there.

    Raises:
        DeltaSyncError: the server answered with an error.
    """
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise DeltaSyncError(f"{url} answered {error.code}: {error.read().decode(errors='replace')[:300]}") from None
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


class Child:
    """One child process in a session of its own, its output in a file; ended with the `with` block, however that ends.

    Args:
        name: For messages, as the start of a sentence.
        command: Program and arguments.
        env: Its whole environment.
        log: File for stdout and stderr.
        cores: The CPU cores that it and its children may use; None leaves them all.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, cores: Collection[int] | None = None
    ) -> None:
        self._name = name
        self._command = command
        self._env = env
        self._log = log
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if self._cores is not None:
            os.sched_setaffinity(self._process.pid, self._cores)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        # The whole group: vLLM and TRL have children of their own.
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, signal_number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + _STOP_S
            while _group_alive(self._process) and time.monotonic() < deadline:
                time.sleep(0.05)
        self._process.wait()

    def running(self) -> bool:
        """Whether it has not ended."""
        assert self._process is not None
        return self._process.poll() is None

    def check(self) -> None:
        """Raise DeltaSyncError if it has ended badly."""
        assert self._process is not None
        if self._process.poll() not in (None, 0):
            raise DeltaSyncError(f"{self._name} ended with exit code {self._process.returncode}. {self._tail()}")

    def wait_until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> None:
        """Wait for `condition` while the process runs.

        Raises:
            DeltaSyncError: it ended, or took longer.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not self.running():
                self.check()
                raise DeltaSyncError(f"{self._name} ended. {self._tail()}")
            if time.monotonic() > deadline:
                raise DeltaSyncError(f"{self._name} took more than {timeout_s:.0f} s {what}. {self._tail()}")
            time.sleep(0.1)

    def _tail(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"Its last line: {lines[-1].strip()[:300] if lines else '(none)'} (all of it: {self._log})"


def _group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reap the leader, which would count as alive otherwise
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
