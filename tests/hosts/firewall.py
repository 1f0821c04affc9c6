"""What may pass between the hosts, as rules of nftables; and what did pass, by its counters.

A host takes no packet but of a connection that one of `flows` allows, and sends none. Everything is counted
by peer:

    to_P, from_P                     passed
    refused_to_P, refused_from_P     would have opened a connection that is not allowed
    stray_to_P, stray_from_P         belongs to no connection, such as a reset of one that has ended
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

PORT = 443
"""All services of hosts with an address of their own."""

TABLE = "hosts"

Flow = tuple[str, str]
"""Who opens a connection, and to whom."""


def rules(host: str, addresses: Mapping[str, str], flows: Collection[Flow]) -> str:
    """The table of one host, for `nft -f`.

    Args:
        host: Whose.
        addresses: IPv4 of each host by its name, this one included.
        flows: All that are allowed; anybody's.
    """
    peers = {name: address for name, address in addresses.items() if name != host}
    names = [f"{prefix}{way}_{counter_name(peer)}" for peer in (*peers, "others") for way, prefix in _KINDS]
    lines = [f"table inet {TABLE} {{", *(f" counter {name} {{ }}" for name in names)]
    lines += _chain("input", "iif", "saddr", "from", peers, [peer for peer in peers if (peer, host) in flows])
    lines += _chain("output", "oif", "daddr", "to", peers, [peer for peer in peers if (host, peer) in flows])
    return "\n".join([*lines, "}", ""])


_KINDS = [(way, prefix) for prefix in ("", "refused_", "stray_") for way in ("from", "to")]


def _chain(
    hook: str, interface: str, address: str, way: str, peers: Mapping[str, str], opens: Collection[str]
) -> Iterator[str]:
    yield f" chain {hook} {{"
    yield f"  type filter hook {hook} priority 0; policy drop;"
    yield f"  {interface} lo accept"
    for peer, ip in peers.items():
        name, match = f"{way}_{counter_name(peer)}", f"ip {address} {ip}"
        yield f"  {match} ct state established,related counter name {name} accept"
        if peer in opens:
            yield f"  {match} ct state new tcp dport {PORT} counter name {name} accept"
        yield f"  {match} ct state invalid counter name stray_{name} drop"
        yield f"  {match} counter name refused_{name} drop"
    yield f"  counter name refused_{way}_others"
    yield " }"


def counter_name(host: str) -> str:
    """A host's name as part of a counter's."""
    return host.replace("-", "_")


def parse(listed: str) -> dict[str, dict[str, int]]:
    """Packets and bytes by counter, of what `nft -j list counters` prints."""
    found: Iterable[dict[str, Any]] = json.loads(listed)["nftables"]
    counters = [each["counter"] for each in found if "counter" in each]
    return {each["name"]: {"packets": each["packets"], "bytes": each["bytes"]} for each in counters}
