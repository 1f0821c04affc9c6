"""A channel on a disk without a free byte: a tmpfs of a few pages, in a mount namespace of its own (needs
root).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import errno, os, sys, time
from pathlib import Path
import torch
from deltasync import Publisher, Replica, errors, ops
from deltasync.channel.reading import ChannelReader
from deltasync.config import Retention
from deltasync.stores import open_store

root = Path(sys.argv[1])
weights = {"weight": torch.zeros(1 << 14, dtype=torch.bfloat16)}

def publish(publisher, step):
    weights["weight"] += 1
    return publisher.publish(list(weights.items()), step=step).wait(60).version

def filled():
    with open(root / "others", "ab", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
    free = os.statvfs(root).f_bfree
    assert free == 0, free

def newest():
    replica = Replica(str(root / "run"))
    replica.sync()
    assert torch.equal(replica.state_dict()["weight"], weights["weight"])
    return replica.version
"""

_GC = """
with Publisher(str(root / "run"), retries=0, anchor_every=4) as publisher:
    for step in range(12):
        publish(publisher, step)
reader = ChannelReader(open_store(str(root / "run")))
filled()
found = ops.gc(reader, ops.KeepPolicy(last=1), grace_s=0)
assert found.objects and found.plan.forgotten, found
assert newest() == 12
with Publisher(str(root / "run"), retries=0, resume=True) as publisher:
    assert publish(publisher, 12) == 13
"""

_KEEP_LAST = """
retention = Retention(keep_last=2, grace_s=0.0)
with Publisher(str(root / "run"), retries=0, anchor_every=4, retention=retention) as publisher:
    for step in range(12):
        publish(publisher, step)
    filled()
    published = None
    for step in range(12, 1000):  # its own collection frees what a later attempt needs
        try:
            published = publish(publisher, step)
            break
        except errors.PublishError:
            time.sleep(0.01)
    assert published is not None
    assert newest() == published
"""


@pytest.fixture
def run(tmp_path: Path) -> object:
    namespace = ["unshare", "--mount", "--propagation", "private"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no right to make a mount namespace")

    def run(program: str) -> None:
        (tmp_path / "program.py").write_text(_PROGRAM + program)
        command = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$1" "$2" "$0"'
        disk = tmp_path / "disk"
        disk.mkdir()
        done = subprocess.run(
            [*namespace, "sh", "-c", command, str(disk), sys.executable, str(tmp_path / "program.py")],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr[-3000:]

    return run


@pytest.mark.parametrize("program", [_GC, _KEEP_LAST], ids=["gc", "keep_last"])
def test_garbage_is_collected_where_not_a_byte_can_be_written(run: object, program: str) -> None:
    assert callable(run)
    run(program)
