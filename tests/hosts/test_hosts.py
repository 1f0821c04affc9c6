from __future__ import annotations

import socket
import threading
import time

import pytest

from tests.hosts import firewall, summary
from tests.hosts.network import FLOWS, HOSTS, Namespaces, Shape, is_refused, round_trip_s, why_not_permitted


def test_rules_name_every_peer_and_let_nobody_else_open_a_connection() -> None:
    addresses = {"trainer": "10.0.0.1", "vllm-a": "10.0.0.2", "bucket": "10.0.0.3"}
    text = firewall.rules("vllm-a", addresses, {("trainer", "vllm-a"), ("vllm-a", "bucket")})
    received, sent = text.split(" chain output {")
    opens = [line for line in text.splitlines() if "ct state new" in line]
    assert text.count("policy drop;") == 2
    assert [line.split()[:3] for line in opens] == [["ip", "saddr", "10.0.0.1"], ["ip", "daddr", "10.0.0.3"]]
    assert "ip saddr 10.0.0.3 counter name refused_from_bucket drop" in received
    assert "ip daddr 10.0.0.1 counter name refused_to_trainer drop" in sent


def test_bits_are_equal_only_if_memory_channel_and_trainer_agree_to_the_last_version() -> None:
    weights = {1: {"w": "a"}, 2: {"w": "b"}}
    proofs = [{"version": version, "sha256": sha256} for version, sha256 in weights.items()]
    other = {**weights, 2: {"w": "c"}}
    assert summary.bit_exact({"vllm-a": proofs, "vllm-b": proofs}, weights, weights)
    assert not summary.bit_exact({"vllm-a": proofs, "vllm-b": proofs[:1]}, weights, weights)
    assert not summary.bit_exact({"vllm-a": proofs, "vllm-b": proofs}, other, weights)
    assert not summary.bit_exact({"vllm-a": proofs, "vllm-b": proofs}, weights, other)


@pytest.fixture(scope="module")
def permitted() -> None:
    refusal = why_not_permitted()
    if refusal is not None:
        pytest.skip(refusal)


def _listen(network: Namespaces, host: str) -> socket.socket:
    with network.inside(host):
        return socket.create_server(network.place(host))


@pytest.mark.usefixtures("permitted")
def test_only_the_allowed_connections_can_be_opened_and_all_bytes_are_counted() -> None:
    with Namespaces() as network:
        servers = [_listen(network, host) for host in HOSTS]
        opened = {
            (source, target)
            for source in HOSTS
            for target in HOSTS
            if source != target and not is_refused(network, source, target, 0.1)
        }
        counters = network.counters()
        for server in servers:
            server.close()
    assert opened == FLOWS
    for source in HOSTS:
        for target in HOSTS:
            if source == target:
                continue
            here, there = firewall.counter_name(source), firewall.counter_name(target)
            linked = {(source, target), (target, source)} & FLOWS
            assert (counters[source][f"to_{there}"]["bytes"] > 0) == bool(linked)
            assert counters[target][f"from_{here}"] == counters[source][f"to_{there}"]
            # What is refused does not even leave.
            assert (counters[source][f"refused_to_{there}"]["packets"] > 0) == ((source, target) not in FLOWS)
            assert counters[target][f"refused_from_{here}"]["packets"] == 0


@pytest.mark.usefixtures("permitted")
def test_shaped_lines_are_as_long_and_as_wide_as_asked_for() -> None:
    sent_bytes = 1 << 20
    with Namespaces(["trainer", "bucket"], Shape(round_trip_s=0.05, bits_per_s=100e6)) as network:
        with _listen(network, "bucket") as server:
            assert round_trip_s(network, "trainer", "bucket") >= 0.05
            for _ in range(3):
                server.accept()[0].close()
            with network.inside("trainer"):
                client = socket.create_connection(network.place("bucket"))
            began = time.monotonic()
            threading.Thread(target=_send, args=(client, sent_bytes)).start()
            connection, _ = server.accept()
            with connection:
                received = 0
                while received < sent_bytes:
                    received += len(connection.recv(1 << 16))
        assert time.monotonic() - began > 8 * sent_bytes / 100e6


def _send(client: socket.socket, count: int) -> None:
    with client:
        client.sendall(bytes(count))
