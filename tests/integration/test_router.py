"""The router: the real HAProxy with the shipped files; its replicas are small servers of the test."""

from __future__ import annotations

import collections
import contextlib
import http.client
import http.server
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltasync.errors import ConfigError
from demo.processes import Child, get_json
from demo.run import free_port
from deploy.router import servers, write
from tests.hosts.authority import Authority
from tests.servers.haproxy import PATIENCE_S, Router, require_haproxy, routing
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


class Replica(http.server.ThreadingHTTPServer):
    """What a router sees of a vLLM with deltasync.

    Attributes:
        version: What status and the header of a completion tell.
        seen: Headers and body of each completion asked for.
        asked: Headers of each request for the status.
        hosts: What the requests were addressed to.
        hold: A completion waits for it, a stream after its first event.
        left: Set once a client was found to have gone away.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, version: int | None = 1, port: int = 0, address: str = "127.0.0.1") -> None:
        super().__init__((address, port), Handler)
        self.version = version
        self.state = "serving"
        self.seen: list[tuple[dict[str, str], bytes]] = []
        self.asked: list[dict[str, str]] = []
        self.hosts: set[str] = set()
        self.hold = threading.Event()
        self.hold.set()
        self.left = threading.Event()
        self.connections: list[socket.socket] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in self.connections:  # kept alive, they would still answer
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the tests."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Replica

    def setup(self) -> None:
        self.server.connections.append(self.request)
        super().setup()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        replica = self.server
        replica.hosts.add(self.headers["Host"])
        if path == "/deltasync/status":
            replica.asked.append({name.lower(): value for name, value in self.headers.items()})
        if path in ("/deltasync/status", "/deltasync/ready"):
            self._answer({"state": replica.state, "version": replica.version, "newest_version": 99})
        else:
            self._answer({"path": path})

    def do_POST(self) -> None:
        replica = self.server
        replica.hosts.add(self.headers["Host"])
        body = self.rfile.read(int(self.headers["Content-Length"]))
        replica.seen.append((dict(self.headers.items()), body))
        version = replica.version
        headers = {} if version is None else {"x-deltasync-versions": f"{version}..{version}"}
        if json.loads(body).get("stream"):
            self._stream(headers, json.loads(body)["max_tokens"])
            return
        replica.hold.wait(PATIENCE_S)
        self._answer({"bytes": len(body)}, headers)

    def _answer(self, told: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(told).encode()
        self.send_response(200)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, headers: dict[str, str], event_count: int) -> None:
        self.close_connection = True
        self.send_response(200)
        for name, value in {"Content-Type": "text/event-stream", "Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"data: first\n\n")
        self.server.hold.wait(PATIENCE_S)
        try:
            for _ in range(event_count):
                self.wfile.write(b"data: " + b"x" * 1000 + b"\n\n")
                time.sleep(0.001)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.left.set()


@pytest.fixture
def replicas() -> Iterator[dict[str, Replica]]:
    require_haproxy()
    with contextlib.ExitStack() as stack:
        found = {name: Replica(version) for name, version in (("one", 3), ("two", 5), ("three", 4))}
        for replica in found.values():
            stack.callback(replica.stop)
            stack.callback(replica.hold.set)
        yield found


@contextlib.contextmanager
def routing_to(replicas: dict[str, Replica], folder: Path, **environ: str) -> Iterator[Router]:
    ports = {name: replica.server_port for name, replica in replicas.items()}
    with routing(folder, ports, "router's", REPLICA_TOKEN="replica's", **environ) as router:
        router.wait_for_versions(**{name: replica.version for name, replica in replicas.items()})
        yield router


@pytest.fixture
def router(replicas: dict[str, Replica], tmp_path: Path) -> Iterator[Router]:
    with routing_to(replicas, tmp_path, ROUTER_WAIT_S="60") as router:
        yield router


def complete(router: Router, prompt: object = "once upon a time", **headers: str) -> tuple[int, str]:
    """Status of a completion, and the replica that made it."""
    with router.open("/v1/completions", {"model": "m", "prompt": prompt}, **headers) as reply:
        reply.read()
        return reply.status, reply.headers.get("x-deltasync-replica", "")


def test_token_and_routes(router: Router, replicas: dict[str, Replica]) -> None:
    for wrong in ("Bearer replica's", "Bearer router'", "Bearer router'sx", "Basic router's", ""):
        assert complete(router, authorization=wrong)[0] == 401
        assert router.open("/deltasync/replicas", authorization=wrong).status == 401
    assert not any(replica.seen for replica in replicas.values())
    assert complete(router)[0] == 200
    (headers, _), *none = [seen for replica in replicas.values() for seen in replica.seen]
    assert headers["authorization"] == "Bearer replica's" and none == []
    for path in ("/v1/models", "/tokenize", "/inference/v1/generate"):
        assert router.json(path) == {"path": path}
    for authorization in ("Bearer router's", "Bearer mine", ""):
        with router.open("/deltasync/status", authorization=authorization) as reply:
            assert json.load(reply)["state"] == "serving"
    assert not any("authorization" in asked for replica in replicas.values() for asked in replica.asked)
    assert router.open("/deltasync/status", {}).status == 404
    for path in ("/pause", "/deltasync/sync", "/collective_rpc", "/", "/v1/../pause"):
        assert router.open(path).status == 404
    assert router.open("/health", authorization="").status == 200


def test_without_a_token_the_clients_own_passes(replicas: dict[str, Replica], tmp_path: Path) -> None:
    with routing(tmp_path, {"one": replicas["one"].server_port}) as router:
        assert complete(router, authorization="Bearer mine") == (200, "one")
        assert replicas["one"].seen[0][0]["authorization"] == "Bearer mine"


def test_requests_that_begin_alike_go_to_one_replica(router: Router, replicas: dict[str, Replica]) -> None:
    prompts = [f"question {number}: " + "and more " * 200 for number in range(60)]
    first = {prompt: complete(router, prompt)[1] for prompt in prompts}
    assert min(collections.Counter(first.values()).values()) > 6
    assert len(collections.Counter(first.values())) == 3
    assert {prompt: complete(router, prompt + "to the end")[1] for prompt in prompts} == first
    tokens = complete(router, list(range(1000)))
    assert all(complete(router, [*range(1000), number]) == tokens for number in range(5))
    chats = [{"messages": [{"role": "user", "content": prompt}], "model": "m"} for prompt in prompts[:9]]
    for chat in chats:
        found = {router.open("/v1/chat/completions", chat).headers["x-deltasync-replica"] for _ in range(3)}
        assert len(found) == 1
    sessions = [
        {complete(router, prompt, x_session_id=f"{number}") for prompt in prompts[:5]} for number in range(9)
    ]
    assert all(len(session) == 1 for session in sessions)
    assert len(set().union(*sessions)) > 1

    # One goes: the others' stay where they are.
    replicas["two"].stop()
    router.wait_for_versions(two=None)
    moved = {prompt: complete(router, prompt) for prompt in prompts}
    assert all(status == 200 for status, _ in moved.values())
    assert all(moved[prompt][1] == name for prompt, name in first.items() if name != "two")
    assert {moved[prompt][1] for prompt, name in first.items() if name == "two"} == {"one", "three"}


def test_no_replica_gets_much_more_than_its_share(router: Router, replicas: dict[str, Replica]) -> None:
    for replica in replicas.values():
        replica.hold.clear()
    with ThreadPoolExecutor(60) as pool:
        replies = []
        for number in range(60):
            replies.append(pool.submit(complete, router))
            wait_until(
                lambda wanted=number + 1: sum(len(replica.seen) for replica in replicas.values()) == wanted
            )
        counts = [len(replica.seen) for replica in replicas.values()]
        for replica in replicas.values():
            replica.hold.set()
        assert all(reply.result()[0] == 200 for reply in replies)
    assert max(counts) <= 1.25 * 60 / 3 + 3, counts
    assert min(counts) > 0, counts


def test_at_least_a_version(router: Router, replicas: dict[str, Replica]) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    assert {complete(router, prompt, x_deltasync_version=">=4")[1] for prompt in prompts} == {"two", "three"}
    assert {complete(router, prompt, x_deltasync_version=">=5") for prompt in prompts} == {(200, "two")}
    # One that nobody has yet: when somebody has it.
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(complete, router, x_deltasync_version=">=6")
        time.sleep(0.2)
        assert not reply.done()
        replicas["one"].version = 6
        assert reply.result() == (200, "one")
    for wrong in ("-1", "six", "6.0", "9" * 19, "latest", ">6", "0", ">=six", "", "7, six", "6, 7"):
        assert complete(router, x_deltasync_version=wrong)[0] == 400
    assert complete(router, x_deltasync_version=">= 4, >=4")[0] == 200


@pytest.mark.parametrize(("values", "status"), [(("6", "six"), 400), (("six", "6"), 400), (("6", "6"), 200)])
def test_repeated_demands_are_read_as_replicas_read_them(
    router: Router, replicas: dict[str, Replica], values: tuple[str, str], status: int
) -> None:
    replicas["one"].version = 6
    router.wait_for_versions(one=6)
    line = http.client.HTTPConnection(router.url.removeprefix("http://"), timeout=PATIENCE_S)
    line.putrequest("POST", "/v1/completions")
    for name, value in (("authorization", "Bearer router's"), ("content-length", "2")):
        line.putheader(name, value)
    for value in values:
        line.putheader("x-deltasync-version", value)
    line.endheaders(b"{}")
    assert line.getresponse().status == status
    line.close()


def test_one_version_and_the_latest(router: Router, replicas: dict[str, Replica]) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    for version, name in (("4", "three"), ("5", "two"), (">=latest", "two")):
        assert {complete(router, prompt, x_deltasync_version=version) for prompt in prompts} == {(200, name)}
    assert replicas["two"].seen[-1][0]["x-deltasync-version"] == ">=latest", (
        "the replica holds its reply to it"
    )


def test_a_version_that_nobody_has_in_time(replicas: dict[str, Replica], tmp_path: Path) -> None:
    with routing_to(replicas, tmp_path, ROUTER_WAIT_S="0.3") as router:
        started = time.monotonic()
        refused = router.open("/v1/completions", {"prompt": "x"}, x_deltasync_version=">=6")
        assert time.monotonic() - started > 0.25
        assert refused.status == 409
        assert "No replica serves this version" in json.load(refused)["error"]
        # One that sleeps is not asked for a version.
        replicas["two"].state = "sleeping"
        wait_until(lambda: router.replicas()["two"]["version"] is None)
        assert complete(router, x_deltasync_version=">=5")[0] == 409
        assert complete(router, x_deltasync_version=">=4") == (200, "three")
        assert complete(router)[0] == 200


def test_a_replica_that_dies_costs_no_request(router: Router, replicas: dict[str, Replica]) -> None:
    prompts = [f"prompt {number}" for number in range(30)]
    replicas["one"].stop()
    # Not noticed by a check yet: the request itself goes to another.
    assert {complete(router, prompt)[0] for prompt in prompts} == {200}
    for name in ("two", "three"):
        replicas[name].stop()
    router.wait_for_versions(one=None, two=None, three=None)
    assert router.open("/health").status == 503
    assert complete(router)[0] == 503
    back = Replica(8, replicas["two"].server_port)
    router.wait_for_versions(two=8)
    assert complete(router, x_deltasync_version=">=8") == (200, "two")
    back.stop()


def test_streams_pass_as_they_come(router: Router, replicas: dict[str, Replica]) -> None:
    for replica in replicas.values():
        replica.hold.clear()
    with router.open("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 100}) as reply:
        assert reply.headers["content-type"] == "text/event-stream"
        assert reply.readline() == b"data: first\n"  # the replica has not written the rest yet
        assert not any(replica.hold.is_set() for replica in replicas.values())
        for replica in replicas.values():
            replica.hold.set()
        rest = reply.read()
    assert rest.endswith(b"data: [DONE]\n\n") and rest.count(b"data: ") == 101


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_gives_up_the_request(router: Router, replicas: dict[str, Replica], stream: bool) -> None:
    for replica in replicas.values():
        replica.hold.clear()
    connection = http.client.HTTPConnection(router.url.removeprefix("http://"), timeout=PATIENCE_S)
    body = json.dumps({"prompt": "x", "stream": stream, "max_tokens": 100_000})
    connection.request("POST", "/v1/completions", body, {"authorization": "Bearer router's"})
    wait_until(lambda: any(replica.seen for replica in replicas.values()))
    (asked,) = [replica for replica in replicas.values() if replica.seen]
    if stream:
        assert connection.getresponse().readline() == b"data: first\n"
        connection.close()
        asked.hold.set()  # the next tokens find nobody
        assert asked.left.wait(PATIENCE_S)
    else:
        connection.close()
    wait_until(lambda: all(replica["requests"] == 0 for replica in router.replicas().values()))


def test_long_prompts_pass_whole(router: Router, replicas: dict[str, Replica]) -> None:
    prompt = "long " * 400_000
    assert complete(router, prompt, x_deltasync_version=">=5") == (200, "two")
    (_, body) = replicas["two"].seen[-1]
    assert json.loads(body)["prompt"] == prompt


def test_spaces_are_asked_by_their_names_over_tls(tmp_path: Path) -> None:
    require_haproxy()
    name = "user-one.hf.space"
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.issue(name, "127.0.0.1"))
    indicated = set()
    context.sni_callback = lambda _, server_name, __: indicated.add(server_name)
    space = Replica(version=4)
    space.socket = context.wrap_socket(space.socket, server_side=True)
    options = f"{space.server_port} ssl verify required ca-file {authority.certificate} sni str({name}) check-sni {name}"
    with contextlib.closing(space.socket), routing(tmp_path, {name: options}) as router:
        router.wait_for_versions(**{name: 4})
        assert complete(router, x_deltasync_version=">=4") == (200, name)
        assert space.hosts == indicated == {name}
        space.stop()


def test_the_command(replicas: dict[str, Replica], tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:{replica.server_port}" for replica in replicas.values()]
    port = free_port()
    command = [sys.executable, ROOT / "deploy" / "router.py", *urls, "--port", str(port)]
    env = os.environ | {
        "REPLICA_TOKEN": "replica's",
        "ROUTER_WAIT_S": "60",
        "ROUTER_REPLICAS": "of another router:1",
    }
    router = Router(port, None)
    with Child("The router", command, env, tmp_path / "log") as child:
        child.wait_until(lambda: get_json(f"{router.url}/v1/models"), PATIENCE_S, "to start")
        router.wait_for_versions(
            **{url.removeprefix("http://"): r.version for url, r in zip(urls, replicas.values(), strict=True)}
        )
        assert complete(router, x_deltasync_version=">=5") == (200, urls[1].removeprefix("http://"))
        assert replicas["two"].seen[0][0]["authorization"] == "Bearer replica's"
        again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert again.returncode == 3 and f"Port {port} on 127.0.0.1 cannot be used" in again.stderr


def test_the_files_of_the_command(tmp_path: Path) -> None:
    urls = ["https://user-one.hf.space", "https://host:8443/", "http://10.0.0.5"]
    file = write(tmp_path, servers(urls, "/ca.pem"))
    assert [line for line in file.read_text().splitlines() if line.startswith("    server ")] == [
        "    server user-one.hf.space user-one.hf.space:443 ssl verify required ca-file /ca.pem "
        "sni str(user-one.hf.space) check-sni user-one.hf.space",
        "    server host:8443 host:8443 ssl verify required ca-file /ca.pem sni str(host) check-sni host",
        "    server 10.0.0.5 10.0.0.5:80",
    ]
    assert (tmp_path / "replicas.lua").is_file()
    for wrong in (
        ["10.0.0.5:80"],
        ["https://"],
        ["http://host:x"],
        ["http://a/v1"],
        ["http://a", "http://a"],
    ):
        with pytest.raises(ConfigError):
            servers(wrong)


class Names:
    """A name server that knows one name, whatever it is asked."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(4096)
            question = query[12 : query.index(b"\0", 12) + 5]
            addresses = self.addresses if question[-4:-2] == b"\0\1" else []  # of IPv6 there are none
            header = query[:2] + struct.pack(">5H", 0x8180, 1, len(addresses), 0, 0)
            answers = [
                struct.pack(">HHHIH", 0xC00C, 1, 1, 1, 4) + socket.inet_aton(address) for address in addresses
            ]
            self._socket.sendto(header + question + b"".join(answers), client)


def test_replicas_come_and_go_by_name(tmp_path: Path) -> None:
    require_haproxy()
    one, names = Replica(version=4), Names()
    two = Replica(5, one.server_port, "127.0.0.2")
    names.addresses = ["127.0.0.1", "127.0.0.2"]
    service = f"replicas.default.svc.cluster.local:{one.server_port}"
    with routing(tmp_path, {}, nameserver=names.url, ROUTER_REPLICAS=service, ROUTER_WAIT_S="60") as router:

        def versions() -> list[int]:
            return sorted(replica["version"] or 0 for replica in router.replicas().values())

        wait_until(lambda: versions() == [4, 5])
        assert len({complete(router, f"prompt {number}")[1] for number in range(20)}) == 2
        names.addresses = ["127.0.0.2"]
        wait_until(lambda: versions() == [5])
        assert {complete(router, f"prompt {number}")[0] for number in range(20)} == {200}
        assert len(two.seen) >= 20
    one.stop()
    two.stop()


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_vllm(tmp_path: Path) -> None:
    require_haproxy()
    from tests.integration.vllm_server import save_model, serving

    (tmp_path / "vllm").mkdir()
    checkpoint = save_model(tmp_path / "vllm")
    environ = {"DELTASYNC_HTTP_TOKEN": "status", "VLLM_API_KEY": "replica's"}
    with serving(checkpoint, token="status", **environ) as server:
        version = server.publish()
        server.assert_serves(version)
        port = int(server.url.rpartition(":")[2])
        with routing(
            tmp_path, {"one": port}, "router's", REPLICA_TOKEN="replica's", ROUTER_WAIT_S="60"
        ) as router:
            router.wait_for_versions(one=version)
            assert router.json("/v1/models")["data"][0]["id"] == str(checkpoint)
            body = {"model": str(checkpoint), "prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True}

            def versions(least: int) -> str:
                with router.open("/v1/completions", body, x_deltasync_version=f">={least}") as reply:
                    assert reply.status == 200, reply.read()
                    assert len(json.load(reply)["choices"]) == 1
                    return str(reply.headers["x-deltasync-versions"])

            assert versions(version) == f"{version}..{version}"
            with ThreadPoolExecutor() as pool:
                later = pool.submit(versions, version + 1)
                server.step()
                assert server.publish() == version + 1
                assert later.result() == f"{version + 1}..{version + 1}"
            with router.open("/v1/completions", body | {"stream": True, "max_tokens": 1000}) as reply:
                assert reply.readline().startswith(b"data:")
                server.wait_for_requests(1)  # vLLM is still at it
                rest = reply.read()
            assert rest.endswith(b"data: [DONE]\n\n") and b": x-deltasync-spans " in rest
