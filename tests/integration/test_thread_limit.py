"""A process that may start no more threads, as in a container at its pids.max: a limit for another user, in a
child.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os, resource, sys
from deltasync import errors, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.following import Follow, MemoryTarget
from deltasync.stores import local, object

store = open_store(sys.argv[1])
reader = ChannelReader(open_store("file:///nowhere/at/all"))
follow = Follow(reader, MemoryTarget(reader), ReplicaSettings())
os.setresuid(65533, 65533, 65533)  # root has no such limit
resource.setrlimit(resource.RLIMIT_NPROC, (1, 4096))
for call, kind in ((lambda: store.put("a", b"1"), errors.TransientStoreError), (follow.start, errors.StageError)):
    try:
        call()
    except kind as error:
        assert "ulimit -u" in str(error), error
    else:
        raise AssertionError(kind)
resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))
store.put("a", b"1")
assert store.read("a", 9) == b"1"
follow.start()
follow.stop()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="other processes of this user count")
def test_a_limit_of_threads_is_named_and_passes(memory_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, memory_url],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0 and "panicked" not in done.stderr, done.stderr[-3000:]
