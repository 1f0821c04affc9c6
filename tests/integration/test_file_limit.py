"""A process that may open no more files: each use of a store says so, and passes once some are free. In a
child.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.servers.s3 import S3Server

_PROGRAM = """
import os, resource, sys
from deltasync import Replica, errors, open_store
import deltasync.following, deltasync.stores.local, deltasync.clouds.cloud

url = sys.argv[1]
store = open_store(url)
calls = [
    lambda: store.put("b", b"1"), lambda: store.create("c", b"1"), lambda: store.read("a", 9), lambda: list(store.list("")),
    lambda: store.read_range("a", 0, 1), lambda: store.delete("a"), lambda: open_store(url).put("a", b"1"),
    lambda: Replica(url).sync(),
]
for is_used in (False, True):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for number, call in enumerate(calls):
        try:
            call()
        except errors.TransientStoreError as error:
            assert "ulimit -n" in str(error), error
        else:  # a connection that this store has open already needs no file
            assert is_used and number < 6 and not url.startswith("file"), number
    for file in held:
        os.close(file)
    for key in "ab":
        store.put(key, b"1")
    assert store.read("b", 9) == b"1"
    assert [info.key for info in store.list("b")] == ["b"]
"""


def run(url: str) -> None:
    """With a store that was not used before, and again with one that was."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, url],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]


class TestAFullTable:
    def test_of_a_directory(self, tmp_path: Path) -> None:
        run(f"file://{tmp_path}")

    def test_of_a_bucket(self, s3_server: S3Server, s3_bucket: str) -> None:
        run(s3_server.url(s3_bucket))
