"""Publishing and replicas where Python has none of what only POSIX systems have: a stand-in for Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import os, sys

import numba, obstore, torch  # others' code, which has wheels for Windows and knows where it is

for name in ("fcntl", "resource", "grp", "pwd", "termios"):
    sys.modules[name] = None  # an import raises ImportError
for name in dir(os):
    if name in {"O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "fwalk", "getuid", "geteuid", "fork",
                "killpg", "sysconf", "statvfs", "uname", "sched_getaffinity", "sched_setaffinity"}:
        delattr(os, name)
os.supports_dir_fd, os.supports_fd = set(), set()
open_file = os.open
def no_folders(path, *args, dir_fd=None, **kwargs):
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return open_file(path, *args, **kwargs)
os.open = no_folders
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


SYNC = """
import torch
from deltasync import Publisher, Replica, follow

url = sys.argv[1]
model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
with Publisher(url, anchor_every=2) as publisher:
    for step in range(4):
        with torch.no_grad():
            model.weight[step] += 1
        publisher.publish(model, step=step).wait(timeout_s=60)
replica = Replica(url)
assert replica.sync() == 4
with Publisher(url, resume=True) as publisher:
    assert publisher.publish(model, step=4).wait(timeout_s=60).version == 5
assert replica.sync() == 5
assert all(torch.equal(held.view(torch.int16), model.state_dict()[name].view(torch.int16))
           for name, held in replica.state_dict().items())
other = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
with follow(other, url):
    assert torch.equal(other.weight, model.weight)
"""


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_channel_is_published_and_followed(kind: str, tmp_path: Path) -> None:
    url = (tmp_path / "a run").as_uri() if kind == "file" else "memory://run"
    done = run(SYNC, url)
    assert done.returncode == 0, done.stderr
    if kind == "file":  # what it wrote is a channel as others write it
        from deltasync import Replica

        assert Replica(url).sync() == 5


EVERYTHING = """
import importlib, pkgutil

import deltasync

# GPU kernels are for Linux; open_store takes object.PortableStore where there is no stores.local.
LEFT_OUT = ("deltasync.kernels.gpu", "deltasync.stores.local", "deltasync.__main__")
for found in pkgutil.walk_packages(deltasync.__path__, "deltasync."):
    if not found.name.startswith(LEFT_OUT):
        importlib.import_module(found.name)
"""


def test_everything_else_can_be_imported() -> None:
    done = run(EVERYTHING)
    assert done.returncode == 0, done.stderr


def test_what_is_for_linux_says_so(tmp_path: Path) -> None:
    done = run("from demo.__main__ import main\nmain(['--out', sys.argv[1]])", str(tmp_path / "out"))
    assert done.returncode != 0
    assert done.stderr == "deltasync: The demo needs Linux, as vLLM does.\n"

    cached = """
from deltasync import open_store
from deltasync.errors import ConfigError
from deltasync.stores.cache import CachedStore
try:
    CachedStore(open_store("memory://run"), sys.argv[1], 1 << 20)
except ConfigError as error:
    print(error)
"""
    done = run(cached, str(tmp_path / "cache"))
    assert done.stdout.startswith("The cache of a node needs Linux or macOS"), done.stderr
    assert not os.path.exists(tmp_path / "cache")
