"""A throwaway Ceph cluster with a RADOS gateway on loopback: one monitor, one OSD on a sparse file, the
gateway, one user.

    python -m tests.servers.radosgw DIRECTORY -- COMMAND...    # COMMAND runs with RADOSGW_ENDPOINT set, then all is stopped

With --https ADDRESS:PORT FILE the gateway serves HTTPS there, with the key and the certificate in FILE, which
this process must trust (SSL_CERT_FILE). Needs the programs of the Debian packages ceph-mon, ceph-osd and
radosgw. Everything is kept in DIRECTORY, which is removed in the end. Takes some 15 seconds to start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from demo.processes import Child, interrupt_on_sigterm

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
ACCESS_KEY, SECRET_KEY = "testkey", "testsecret"

# cephx stays on: without it the gateway does not start. Bluestore on a file: memstore grows without end.
# tcp_nodelay: otherwise each reply waits 40 ms. Deleted objects are collected after seconds instead of hours.
_CONFIG = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port},v1:127.0.0.1:{mon_port_v1}]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
run dir = {root}/run
admin socket = {root}/run/$name.asok
log file = {root}/log/$name.log
pid file = {root}/run/$name.pid
keyring = {root}/keyring
mon data = {root}/mon
osd data = {root}/osd
osd objectstore = bluestore
bluestore block size = 17179869184
bluestore cache autotune = false
bluestore cache size = 134217728
osd memory target = 1073741824
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 2000
[client.rgw]
rgw frontends = beast {listen} tcp_nodelay=1
rgw gc obj min wait = 2
rgw gc processor period = 5
rgw gc processor max time = 5
rgw thread pool size = 64
rgw enable usage log = false
"""


class Cluster:
    """The cluster's processes.

    Args:
        root: Directory for everything.
        https: Address and port of the gateway, and the file of its certificate; None for HTTP on a free port
            of loopback.

    Attributes:
        endpoint: URL of the gateway.
    """

    def __init__(self, root: Path, https: Sequence[str] | None = None) -> None:
        self.root = root.resolve()
        self._processes: dict[str, Child] = {}
        self._ending = contextlib.ExitStack()
        port, mon_port, mon_port_v1 = _free_ports(3)
        if https is None:
            self.endpoint, listen = f"http://127.0.0.1:{port}", f"endpoint=127.0.0.1:{port}"
        else:
            place, certificate = https
            self.endpoint, listen = f"https://{place}", f"ssl_endpoint={place} ssl_certificate={certificate}"
        self._fsid = str(uuid.uuid4())
        self._config = _CONFIG.format(
            root=self.root, fsid=self._fsid, listen=listen, mon_port=mon_port, mon_port_v1=mon_port_v1
        )
        self._mon_address = f"[v2:127.0.0.1:{mon_port},v1:127.0.0.1:{mon_port_v1}]"

    def start(self) -> None:
        """Set everything up and wait until the gateway answers."""
        for folder in ("mon", "osd", "run", "log"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "ceph.conf").write_text(self._config)
        keyring, monmap = self.root / "keyring", self.root / "monmap"
        self._run(
            "ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"
        )
        for name in ("client.admin", "client.rgw"):
            caps = [word for part in ("mon", "osd") for word in ("--cap", part, "allow *")]
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *caps)
        self._run("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", self._mon_address, monmap)
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
        self._start("ceph-mon", "-i", "a", "-f")
        osd, secret = str(uuid.uuid4()), self._run("ceph-authtool", "--gen-print-key").strip()
        self._run("ceph", "osd", "new", osd, "-i", "-", given=json.dumps({"cephx_secret": secret}))
        self._run("ceph-authtool", keyring, "-n", "osd.0", "--add-key", secret)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--key", secret, "--osd-uuid", osd)
        self._start("ceph-osd", "-i", "0", "-f")
        self._wait("the OSD", lambda: "1 up" in self._run("ceph", "osd", "stat"))
        self._start("radosgw", "-n", "client.rgw", "-f")
        self._wait("the gateway", self._answers)
        keys = ("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)
        self._run("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)

    def stop(self) -> None:
        """End the processes and remove the directory."""
        self._ending.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _command(self, program: str, *arguments: str | Path) -> list[str]:
        config = (
            ["-c", str(self.root / "ceph.conf")] if program not in ("ceph-authtool", "monmaptool") else []
        )
        return [program, *config, *map(str, arguments)]

    def _run(self, program: str, *arguments: str | Path, given: str | None = None) -> str:
        done = subprocess.run(
            self._command(program, *arguments), input=given, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _start(self, program: str, *arguments: str) -> None:
        log = self.root / "log" / f"{program}.out"
        child = Child(program, self._command(program, *arguments), os.environ, log, stop_s=20.0)
        self._processes[program] = self._ending.enter_context(child)

    def _wait(self, what: str, ready: Callable[[], bool], timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            ended = [program for program, process in self._processes.items() if not process.running()]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come up{f'; ended: {ended}' if ended else ''}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


@contextlib.contextmanager
def running(root: Path, https: Sequence[str] | None = None) -> Iterator[Cluster]:
    """A cluster for the length of the block; see `Cluster`."""
    cluster = Cluster(root, https)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.servers.radosgw", description="A throwaway RADOS gateway."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--https", nargs=2, metavar=("ADDRESS:PORT", "FILE"))
    parser.add_argument("command", nargs="+", help="after --")
    arguments = parser.parse_args()
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        print(f"not installed: {', '.join(missing)} (packages ceph-mon, ceph-osd, radosgw)", file=sys.stderr)
        return 2
    interrupt_on_sigterm()
    began_s = time.monotonic()
    with running(arguments.directory, arguments.https) as cluster:
        print(
            f"RADOS gateway at {cluster.endpoint} after {time.monotonic() - began_s:.0f} s", file=sys.stderr
        )
        environ = os.environ | {"RADOSGW_ENDPOINT": cluster.endpoint}
        with Child("The command", arguments.command, environ, None) as child:
            return child.wait()


if __name__ == "__main__":
    sys.exit(main())
