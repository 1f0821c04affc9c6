"""Child processes that end with the `with` block or with this process, and report in one sentence why they
ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from deltasync.errors import DeltaSyncError
from demo import supervisor


def get_json(url: str) -> Any:
    """Return the JSON that a GET answers, None while nothing answers there. Raise DeltaSyncError for an error
    answer.
    """
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise DeltaSyncError(
            f"{url} answered {error.code}: {error.read().decode(errors='replace')[:300]}"
        ) from None
    except OSError:  # URLError and timeouts too
        return None


def interrupt_on_sigterm() -> None:
    """Have SIGTERM end this process as Ctrl-C does: `with` blocks end, and temporary folders are removed.

    Ctrl-C does so too if a shell started this process with SIGINT ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


class Child:
    """One child process in a session of its own. It and all that it started end with the `with` block and
    with this process.

    `demo.supervisor`, a process between the two, does this, even on SIGKILL. Processes that a child leaves
    behind are ended too. Linux only.

    Args:
        name: Subject of the sentences in messages, such as "The trainer".
        command: Program and arguments.
        env: Its whole environment.
        log: File for stdout and stderr; None for those of this process.
        cores: The CPU cores that it and its children may use; None for all.
        stop_s: Seconds that it has to end after SIGTERM, and then its children, before they get SIGKILL.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        env: Mapping[str, str],
        log: Path | None,
        cores: Collection[int] | None = None,
        *,
        stop_s: float = 15.0,
    ) -> None:
        self._name = name
        self._log = log
        self._request = {
            "command": [os.fspath(word) for word in command],
            "env": dict(env),
            "cores": None if cores is None else list(cores),
            "stop_s": stop_s,
        }

    def __enter__(self) -> Self:
        with open(os.devnull if self._log is None else self._log, "wb") as log:
            output = None if self._log is None else log
            self._process = subprocess.Popen(
                [sys.executable, "-IS", supervisor.__file__],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with self._process.stdin as file:
            file.write(json.dumps({"parent": os.getpid(), **self._request}).encode())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; return its exit code, or the negative number of the signal."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as late:
            raise self._error(f"took more than {late.timeout:.0f} s to end.") from None

    def check(self) -> None:
        """Raise DeltaSyncError if it has ended with an error."""
        code = self._process.poll()
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise self._error(f"{how}.")

    def wait_until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> None:
        """Wait for `condition` while the process runs; raise DeltaSyncError if it ends, or takes longer to do
        `what`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            running = self.running()
            if condition():
                return
            if not running:
                self.check()
                raise self._error("ended.")
            if time.monotonic() > deadline:
                raise self._error(f"took more than {timeout_s:.0f} s {what}.")
            time.sleep(0.1)

    def pids(self) -> list[int]:
        """Return the command's process and all its descendants, the oldest first."""
        return supervisor.descendants(self._process.pid)

    def _error(self, what: str) -> DeltaSyncError:
        """The error that says what happened, and the last line of the log."""
        if self._log is None:
            return DeltaSyncError(f"{self._name} {what}")
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip()[:300] if lines else "(none)"
        return DeltaSyncError(f"{self._name} {what} Its last line: {last} (all of it: {self._log})")
