"""A channel that starts from a model on the Hub: the real client of the Hub against a stand-in that serves
one model.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from deltasync import open_store
from deltasync.channel.reading import ChannelReader
from tests.answers import Answers, Asked

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


class Hub(Answers):
    """Serves one model.

    Attributes:
        asked: Requests.
        tokens: The tokens that came with them.
        sizes: Of files, where they are not what is served.
    """

    def __init__(self) -> None:
        self.asked, self.tokens, self.sizes = list[str](), set[str | None](), dict[str, int]()
        super().__init__(self._answer)

    def _answer(self, asked: Asked) -> tuple[int, Any, dict[str, str]]:
        path = asked.path.partition("?")[0]
        self.asked.append(f"{asked.method} {path}")
        self.tokens.add(asked.headers.get("authorization"))
        if path == "/api/models/some/model/revision/main":
            return 200, {"id": "some/model", "sha": COMMIT, "siblings": []}, {}
        digests = {name: hashlib.sha1(data).hexdigest() for name, data in FILES.items()}
        if path == f"/api/models/some/model/tree/{COMMIT}":
            return (
                200,
                [{"type": "file", "path": p, "size": len(b), "oid": digests[p]} for p, b in FILES.items()],
                {},
            )
        if (name := path.removeprefix(f"/some/model/resolve/{COMMIT}/")) not in FILES:
            return 404, b"", {"x-error-code": "RepoNotFound"}
        told = {"etag": f'"{digests[name]}"', "x-repo-commit": COMMIT}
        return 200, FILES[name], told | {"content-length": str(self.sizes.get(name, len(FILES[name])))}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


def run(code: str, channel: str, home: Path, hub: Hub, **environ: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home),
    }
    command = [sys.executable, "-c", code, channel]
    return subprocess.run(
        command, env=os.environ | settings | environ, capture_output=True, text=True, timeout=300
    )


def test_it_is_downloaded_once_and_then_needs_no_hub(tmp_path: Path, hub: Hub) -> None:
    channel = f"file://{tmp_path}/channel"
    published = run(PUBLISH, channel, tmp_path / "trainer", hub)
    assert published.returncode == 0, published.stderr
    reference = ChannelReader(open_store(channel)).numbered(1).record.reference
    assert reference is not None and (reference.repo, reference.revision) == ("some/model", COMMIT)
    assert not (tmp_path / "channel/anchors").exists()

    bits = W["w"].view(torch.int16).tolist()
    bits[7] = -0x8000
    expected = f"2 {bits}\n"
    hub.asked.clear()
    # then nobody listens there
    for environ in ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        followed = run(FOLLOW, channel, tmp_path / "replica", hub, **environ)
        assert followed.stdout == expected, followed.stderr
    loaded = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET /some/model/resolve/")}
    assert loaded == {"model.safetensors"} and not any("onnx" in line for line in hub.asked)

    refused = run(FOLLOW, channel, tmp_path / "another replica", hub, HF_HUB_OFFLINE="1")
    assert "MissingVersionError" in refused.stderr
    assert f"Version 1 refers to the checkpoint some/model@{COMMIT}" in refused.stderr


def test_a_writer_without_a_trusted_key_gets_neither_the_token_nor_the_disk(tmp_path: Path, hub: Hub) -> None:
    channel = f"file://{tmp_path}/channel"
    published = run(PUBLISH, channel, tmp_path / "trainer", hub, HF_TOKEN="hf_secret")
    assert published.returncode == 0 and "Bearer hf_secret" in hub.tokens, published.stderr
    for told, environ in ((False, {}), (True, {"DELTASYNC_REFERENCE_REPOS": "an/other,some/model"})):
        hub.tokens = set()
        followed = run(FOLLOW, channel, tmp_path / f"replica{told}", hub, HF_TOKEN="hf_secret", **environ)
        assert followed.stdout.startswith("2 "), followed.stderr
        assert ("Bearer hf_secret" in hub.tokens) is told
    hub.sizes, hub.asked = {"model.safetensors": 10**12}, []
    refused = run(FOLLOW, channel, tmp_path / "full", hub)
    assert "has 1,000,000,000,000 bytes, and the channel's model at most" in refused.stderr
    assert not any(line.startswith("GET /some/model/resolve/") for line in hub.asked)
