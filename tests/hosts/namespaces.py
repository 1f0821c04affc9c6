"""Linux network namespaces by name, as `ip netns` keeps them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/run/netns")
_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def run(*command: str, given: str | None = None) -> str:
    """What a program prints.

    Raises:
        RuntimeError: it failed; with what it says.
    """
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """The calling thread is in a namespace: sockets that it opens stay there, and so do threads that it
    starts.
    """
    with open("/proc/thread-self/ns/net", "rb") as home, (_FOLDER / name).open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def port_name(namespace: str) -> str:
    """The switch's device that leads to a host, whose namespace is called `<run>-<host>`."""
    return f"to-{namespace.partition('-')[2]}"[:15]
