"""A channel that starts from a model on the Hub: the real client of the Hub against a stand-in that serves one model."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from deltasync import open_store
from deltasync.channel.reading import ChannelReader

COMMIT = "0123456789abcdef0123456789abcdef01234567"
W = {"w": torch.arange(500).to(torch.bfloat16)}
FILES = {
    "model.safetensors": save({"w": W["w"].float()}, {"format": "pt"}),
    "config.json": b"{}",
    "pytorch_model.bin": b"nobody asks for this",
    "onnx/model.safetensors": b"nor for this",
}
PUBLISH = """
import sys, torch
from deltasync import Publisher
w = torch.arange(500).to(torch.bfloat16)
with Publisher(sys.argv[1], initial="some/model") as publisher:
    publisher.publish([("w", w)]).wait(60)
    w[7] = -0.0
    publisher.publish([("w", w)]).wait(60)
"""
FOLLOW = """
import sys, torch
from deltasync import Replica
replica = Replica(sys.argv[1])
print(replica.sync(), replica.state_dict()["w"].view(torch.int16).tolist())
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one model.

    Attributes:
        asked: Requests.
        tokens: The tokens that came with them.
        sizes: Of files, where they are not what is served.
    """

    asked: list[str]
    tokens: set[str | None]
    sizes: dict[str, int]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        self.tokens.add(self.headers["Authorization"])
        if path == "/api/models/some/model/revision/main":
            self._answer(json.dumps({"id": "some/model", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/some/model/tree/{COMMIT}":
            rows = [
                {"type": "file", "path": p, "size": len(b), "oid": hashlib.sha1(b).hexdigest()} for p, b in FILES.items()
            ]
            self._answer(json.dumps(rows).encode())
        elif (name := path.removeprefix(f"/some/model/resolve/{COMMIT}/")) in FILES:
            self._answer(FILES[name], {"ETag": f'"{hashlib.sha1(FILES[name]).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    def _answer(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(self.sizes.get(self.path.rpartition("/")[2], len(body))))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Not to stderr."""


@pytest.fixture
def hub() -> Iterator[http.server.HTTPServer]:
    Hub.asked, Hub.tokens, Hub.sizes = [], set(), {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(
    code: str, channel: str, home: Path, hub: http.server.HTTPServer, **environ: str
) -> subprocess.CompletedProcess[str]:
    settings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home),
    }
    command = [sys.executable, "-c", code, channel]
    return subprocess.run(command, env=os.environ | settings | environ, capture_output=True, text=True, timeout=300)


def test_it_is_downloaded_once_and_then_needs_no_hub(tmp_path: Path, hub: http.server.HTTPServer) -> None:
    channel = f"file://{tmp_path}/channel"
    published = run(PUBLISH, channel, tmp_path / "trainer", hub)
    assert published.returncode == 0, published.stderr
    reference = ChannelReader(open_store(channel)).numbered(1).record.reference
    assert reference is not None and (reference.repo, reference.revision) == ("some/model", COMMIT)
    assert not (tmp_path / "channel/anchors").exists()

    bits = W["w"].view(torch.int16).tolist()
    bits[7] = -0x8000
    expected = f"2 {bits}\n"
    Hub.asked.clear()
    for environ in ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):  # then nobody listens there
        followed = run(FOLLOW, channel, tmp_path / "replica", hub, **environ)
        assert followed.stdout == expected, followed.stderr
    loaded = {line.rpartition("/")[2] for line in Hub.asked if line.startswith("GET /some/model/resolve/")}
    assert loaded == {"model.safetensors"} and not any("onnx" in line for line in Hub.asked)

    refused = run(FOLLOW, channel, tmp_path / "another replica", hub, HF_HUB_OFFLINE="1")
    assert "MissingVersionError" in refused.stderr
    assert f"Version 1 refers to the checkpoint some/model@{COMMIT}" in refused.stderr


def test_a_writer_without_a_trusted_key_gets_neither_the_token_nor_the_disk(
    tmp_path: Path, hub: http.server.HTTPServer
) -> None:
    channel = f"file://{tmp_path}/channel"
    published = run(PUBLISH, channel, tmp_path / "trainer", hub, HF_TOKEN="hf_secret")
    assert published.returncode == 0 and "Bearer hf_secret" in Hub.tokens, published.stderr
    for told, environ in ((False, {}), (True, {"DELTASYNC_REFERENCE_REPOS": "an/other,some/model"})):
        Hub.tokens = set()
        followed = run(FOLLOW, channel, tmp_path / f"replica{told}", hub, HF_TOKEN="hf_secret", **environ)
        assert followed.stdout.startswith("2 "), followed.stderr
        assert ("Bearer hf_secret" in Hub.tokens) is told
    Hub.sizes, Hub.asked = {"model.safetensors": 10**12}, []
    refused = run(FOLLOW, channel, tmp_path / "full", hub)
    assert "has 1,000,000,000,000 bytes, and the channel's model at most" in refused.stderr
    assert not any(line.startswith("GET /some/model/resolve/") for line in Hub.asked)
