"""Hosts of our own, each a network namespace on one switch behind a firewall; or this machine, where that is
not permitted.

                         switch
    trainer   environment   bucket   vllm-a   vllm-b   fleet

Everything is gone after the `with` block: processes by their id, namespaces by their name, and devices and
rules with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from demo.processes import Child
from demo.run import free_port
from tests.hosts import firewall, namespaces

ROOT = Path(__file__).parents[2]
HOSTS = ("trainer", "environment", "bucket", "vllm-a", "vllm-b", "fleet")
REPLICAS = ("vllm-a", "vllm-b")
FLOWS: frozenset[firewall.Flow] = frozenset(
    {("trainer", "vllm-a"), ("trainer", "vllm-b"), ("trainer", "bucket"), ("trainer", "environment"),
     ("vllm-a", "bucket"), ("vllm-b", "bucket"), ("fleet", "bucket")}
)  # fmt: skip
_SETTINGS = (
    "net.ipv6.conf.all.disable_ipv6=1",
    "net.netfilter.nf_conntrack_tcp_loose=0",  # a packet out of the blue opens no connection
    "net.ipv4.tcp_slow_start_after_idle=0",  # otherwise each version begins with a small window again
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How far apart two hosts are, and how wide the line of each one is."""

    round_trip_s: float = 0.05
    bits_per_s: float = 100e6


class Network(Protocol):
    """What a run needs to know of it."""

    shaped_by: str | None
    """What slows it down, None for nothing."""

    isolated: bool
    """Whether the hosts are apart, and counted."""

    def place(self, host: str) -> tuple[str, int]:
        """Address and port of a host's service."""
        ...

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host."""
        ...

    def inside(self, host: str) -> contextlib.AbstractContextManager[None]:
        """The calling thread is on a host."""
        ...

    def counters(self, hosts: Sequence[str] = HOSTS) -> dict[str, dict[str, dict[str, int]]]:
        """Packets and bytes by host and counter."""
        ...


class Loopback:
    """All hosts are this machine, told apart by ports. No firewall, no counters, no distance."""

    shaped_by = None
    isolated = False

    def __init__(self) -> None:
        self._ports = {host: free_port() for host in HOSTS}

    def place(self, host: str) -> tuple[str, int]:
        """See `Network.place`."""
        return "127.0.0.1", self._ports[host]

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """See `Network.on`."""
        return list(command)

    def inside(self, host: str) -> contextlib.AbstractContextManager[None]:
        """See `Network.inside`."""
        return contextlib.nullcontext()

    def counters(self, hosts: Sequence[str] = HOSTS) -> dict[str, dict[str, dict[str, int]]]:
        """See `Network.counters`."""
        return {}


class Namespaces:
    """A namespace for each host, and one for the switch. Use as a `with` block."""

    isolated = True

    def __init__(self, hosts: Sequence[str] = HOSTS, shape: Shape | None = None) -> None:
        self.shaped_by: str | None = None
        self._hosts = hosts
        self._shape = shape
        self._run = f"dsh{os.getpid()}"
        self._addresses = {host: f"10.77.0.{number}" for number, host in enumerate(hosts, start=10)}
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> Namespaces:
        with contextlib.ExitStack() as ending:
            for name in ("switch", *self._hosts):
                namespaces.run("ip", "netns", "add", self._space(name))
                ending.callback(namespaces.run, "ip", "netns", "delete", self._space(name))
            self._ip("switch", "link", "add", "bridge0", "type", "bridge")
            self._ip("switch", "link", "set", "bridge0", "up")
            if self._shape is not None and not self._has_netem():
                ending.enter_context(self._long_lines(self._shape.round_trip_s / 4))
            for host in self._hosts:
                self._join(host)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def place(self, host: str) -> tuple[str, int]:
        """See `Network.place`."""
        return self._addresses[host], firewall.PORT

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """See `Network.on`."""
        return ["ip", "netns", "exec", self._space(host), *command]

    def inside(self, host: str) -> contextlib.AbstractContextManager[None]:
        """See `Network.inside`."""
        return namespaces.inside(self._space(host))

    def counters(self, hosts: Sequence[str] = HOSTS) -> dict[str, dict[str, dict[str, int]]]:
        """See `Network.counters`."""
        return {
            host: firewall.parse(namespaces.run(*self.on(host, ["nft", "-j", "list", "counters"])))
            for host in hosts
        }

    def reset_counters(self) -> None:
        """Count anew."""
        for host in self._hosts:
            namespaces.run(*self.on(host, ["nft", "reset", "counters"]))

    def _space(self, name: str) -> str:
        return f"{self._run}-{name}"

    def _ip(self, name: str, *command: str) -> None:
        namespaces.run("ip", "-n", self._space(name), *command)

    def _join(self, host: str) -> None:
        """Connect a host to the switch, behind its firewall."""
        space, port = self._space(host), namespaces.port_name(self._space(host))
        if self.shaped_by != "line":
            self._ip("switch", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        namespaces.run(*self.on(host, ["sysctl", "-q", "-w", *_SETTINGS]))
        rules = firewall.rules(host, self._addresses, FLOWS)
        namespaces.run(*self.on(host, ["nft", "-f", "-"]), given=rules)
        self._ip(host, "address", "add", f"{self._addresses[host]}/24", "dev", "eth0")
        if self._shape is not None:
            for name, device in (("switch", port), (host, "eth0")):
                namespaces.run(
                    "tc",
                    "-n",
                    self._space(name),
                    "qdisc",
                    "replace",
                    "dev",
                    device,
                    "root",
                    *self._discipline(),
                )
        self._ip("switch", "link", "set", port, "master", "bridge0", "up")
        self._ip(host, "link", "set", "lo", "up")
        self._ip(host, "link", "set", "eth0", "up")

    def _discipline(self) -> list[str]:
        """What `tc` does at each end of a line. Four of them make a round trip."""
        assert self._shape is not None
        rate = f"{self._shape.bits_per_s:.0f}bit"
        if self.shaped_by == "line":
            return ["tbf", "rate", rate, "burst", "32kb", "latency", "200ms"]
        return ["netem", "delay", f"{1e6 * self._shape.round_trip_s / 4:.0f}us", "rate", rate]

    def _has_netem(self) -> bool:
        try:
            namespaces.run(
                "tc",
                "-n",
                self._space("switch"),
                "qdisc",
                "add",
                "dev",
                "bridge0",
                "root",
                "netem",
                "delay",
                "1ms",
            )
        except RuntimeError:
            return False
        self.shaped_by = "netem"
        namespaces.run("tc", "-n", self._space("switch"), "qdisc", "delete", "dev", "bridge0", "root")
        return True

    @contextlib.contextmanager
    def _long_lines(self, delay_s: float) -> Iterator[None]:
        spaces = [self._space(name) for name in ("switch", *self._hosts)]
        command = [sys.executable, "-m", "tests.hosts.line", str(delay_s), *spaces]
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        }
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            with Child("What makes the long lines", command, environ, log) as child:
                child.wait_until(lambda: "ready" in log.read_text(), 60, "to start")
                self.shaped_by = "line"
                yield


def why_not_permitted() -> str | None:
    """Why there can be no namespaces here, None if there can."""
    missing = [program for program in ("ip", "tc", "nft", "sysctl") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2, nftables, procps)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Namespaces(["trainer"]):
            return None
    except RuntimeError as error:
        return str(error)


def round_trip_s(network: Network, source: str, target: str) -> float:
    """Seconds that it takes to open a connection, the best of three.

    Raises:
        OSError: it cannot be opened.
    """
    found = []
    with network.inside(source):
        for _ in range(3):
            began = time.perf_counter()
            socket.create_connection(network.place(target), timeout=5).close()
            found.append(time.perf_counter() - began)
    return min(found)


def is_refused(network: Network, source: str, target: str, within_s: float = 0.5) -> bool:
    """Whether a connection cannot be opened."""
    try:
        with network.inside(source):
            socket.create_connection(network.place(target), timeout=within_s).close()
    except OSError:
        return True
    return False
