"""A long line: frames between pairs of TAP devices arrive later. For kernels without netem, such as those of
many micro-VMs.

    python -m tests.hosts.line SECONDS SWITCH HOST...    # network namespaces; prints `ready` once the devices exist

The device `eth0` of each host is joined to `to-HOST` of the switch. The rate of a line is the business of
`tc`. Runs with real-time priority, because distance does not depend on how busy a machine is.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

from tests.hosts import namespaces

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_LARGEST_FRAME = 1 << 16


def tap(namespace: str, name: str) -> int:
    """A new TAP device; it lives as long as the file descriptor."""
    with namespaces.inside(namespace):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return device


def carry(ends: dict[int, int], delay_s: float) -> None:
    """Pass frames on for ever, each `delay_s` after it came.

    Args:
        ends: Other end by file descriptor, in both directions.
        delay_s: The same everywhere, so that frames leave in the order in which they came.
    """
    under_way: deque[tuple[float, int, bytes]] = deque()
    poll = select.epoll()
    for end in ends:
        poll.register(end, select.EPOLLIN)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end, _ in poll.poll(wait_s):
            under_way.append((time.monotonic() + delay_s, ends[end], os.read(end, _LARGEST_FRAME)))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, end, frame = under_way.popleft()
            try:
                os.write(end, frame)
            except OSError:  # a device that is down, or full, loses frames as any line does
                continue


def main(delay_s: float, switch: str, hosts: list[str]) -> None:
    """See the module."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    ends = {}
    for host in hosts:
        near, far = tap(host, "eth0"), tap(switch, namespaces.port_name(host))
        ends |= {near: far, far: near}
    print("ready", flush=True)
    carry(ends, delay_s)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
