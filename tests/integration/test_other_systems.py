"""Publishing and replicas where Python has none of what only POSIX systems have: a stand-in for Windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deltasync import Replica

WITHOUT = """
import os, sys

import obstore, torch  # others' code, which has wheels for Windows and knows where it is

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


EVERYTHING = """
import importlib, pkgutil, pathlib
import torch
import deltasync
from deltasync import Publisher, Replica, follow, open_store
from deltasync.errors import ConfigError
from deltasync.stores.cache import CachedStore

def works(url):
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

folder = pathlib.Path(sys.argv[1])
works((folder / "a run").as_uri())
works("memory://run")
# GPU kernels and what calls them are for Linux; open_store takes object.PortableStore where there is no stores.local.
KERNELS = ("classes", "codec", "coder", "common", "detect", "encode", "segments")
LEFT_OUT = (*(f"deltasync.gpu.{name}" for name in KERNELS), "deltasync.stores.local", "deltasync.__main__")
for found in pkgutil.walk_packages(deltasync.__path__, "deltasync."):
    if not found.name.startswith(LEFT_OUT):
        importlib.import_module(found.name)
try:
    CachedStore(open_store("memory://run"), str(folder / "cache"), 1 << 20)
except ConfigError as error:
    print(error)
"""


def test_a_channel_is_published_and_followed_and_all_but_what_is_for_linux_is_imported(
    tmp_path: Path,
) -> None:
    done = run(EVERYTHING, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The node-local cache needs Linux or macOS")
    assert not (tmp_path / "cache").exists()
    assert Replica((tmp_path / "a run").as_uri()).sync() == 5  # a channel as others write it


def test_the_demo_says_that_it_is_for_linux(tmp_path: Path) -> None:
    done = run("from demo.__main__ import main\nmain(['--out', sys.argv[1]])", str(tmp_path / "out"))
    assert done.returncode != 0
    assert done.stderr == "deltasync: The demo needs Linux, as vLLM does.\n"
