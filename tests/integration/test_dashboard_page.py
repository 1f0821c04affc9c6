"""The dashboard in a browser: as a file after a run, and served while one goes on. Publisher and keeper are
real.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasync import Publisher, open_store
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.config import Retention
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from demo.processes import Child
from tests.browser import PATIENCE_S, browse, needs_browser

pytestmark = needs_browser
LAYERS = 6
NAMES = [
    "model.embed_tokens",
    *(f"model.layers.{layer}.mlp" for layer in range(LAYERS)),
    "model.norm",
    "lm_head",
]
ERROR = (
    "parts/0000000042.000001-9f8e7d6c.0/000-00001.safetensors does not have the sha256 that it is named by."
)

HEAD_9 = re.compile(r'id="head"[^>]*>9<')

# Runs in the page: what is shown. Whether it is cut or overlaps is the matter of `test_page_layout.py`.
LOOK = """<script>
addEventListener("load", () => setTimeout(() => {
  const all = selector => [...document.querySelectorAll(selector)], count = selector => all(selector).length;
  const box = byId("heat").getBoundingClientRect();
  const at = { bubbles: true, clientX: box.right - 14, clientY: box.top + 8 };  // newest version, first layer
  byId("heat").dispatchEvent(new MouseEvent("mousemove", at));
  const found = {
    tip: byId("tip").textContent,
    deltas: count("#sizes circle"),
    anchors: count("#sizes rect.anchor"),
    compactions: count("#sizes line.compaction"),
    gaps: count("#sizes rect.gap"),
    points: count("#fractions circle"),
    unread: count("#heat rect.unread"),
    cells: all("#heat path.cells").reduce((n, path) => n + path.getAttribute("d").split("M").length - 1, 0),
    layers: all("#heat text").map(node => node.textContent).filter(text => /[a-z]/.test(text)),
    replicas: all("#replicas tbody tr").map(row => [...row.cells].map(cell => cell.textContent)),
    text: Object.fromEntries(all("#channel, dd *, #error, #waiting").map(node => [node.id, node.textContent])),
    shown: !byId("main").hidden,
  };
  document.body.append(Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(found) }));
}, 1000));
</script>"""


def look(document: Path, width: int = 900) -> dict[str, Any]:
    """What a browser of this width shows of an exported page."""
    looking = document.with_name(f"{document.stem}-{width}.html")
    looking.write_text(document.read_text().replace("</html>", f"{LOOK}</html>"))
    dump = browse(
        looking.as_uri(), document.with_name(f"profile-{document.stem}-{width}"), "--dump-dom", width=width
    )
    text = re.search(r'<pre id="found">(.*?)</pre>', dump, re.DOTALL)
    assert text is not None, dump[-2000:]
    return json.loads(text[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


def export(url: str, out: Path, *arguments: str) -> Path:
    command = [sys.executable, "-m", "deltasync", "watch", url, "--out", str(out), *arguments]
    subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True)
    return out


def new_weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(40, 50, generator=random).to(torch.bfloat16) for name in NAMES}


def train(publisher: Publisher, weights: dict[str, torch.Tensor], versions: int) -> None:
    random = torch.Generator().manual_seed(versions)
    for _ in range(versions):
        publisher.publish(weights.items(), step=4 * (publisher.version + 1)).wait(PATIENCE_S)
        for position, tensor in enumerate(weights.values()):
            tensor.view(torch.int16)[torch.rand(tensor.shape, generator=random) < 0.004 * (1 + position)] += 1


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    url = f"file://{tmp_path_factory.mktemp('dashboard')}/channel"
    retention = Retention(compact_every=5, keep_last=40, grace_s=0.0)
    with (
        pytest.MonkeyPatch.context() as patch,
        Publisher(url, anchor_every=15, retention=retention) as publisher,
    ):
        patch.setattr("deltasync.ops.compactor._LEAST_BETWEEN", 6)
        train(publisher, new_weights(), 60)
        run = publisher.run_id
    store = open_store(url)
    for name, version, state, error, age_s, pin in (
        ("gpu-east-0", 60, "serving", None, 0, None),
        ("gpu-east-1", 60, "serving", None, 0, None),
        ("gpu-west-0", 55, "staging", None, 0, None),
        ("gpu-west-1", 41, "failed", ERROR, 0, None),
        ("evaluation", 30, "serving", None, 0, "30"),
        ("gone", 23, "serving", None, 400, None),
    ):
        beat = Heartbeat(replica_id=name, run_id=run, version=version, state=state, error=error, pin=pin)
        heartbeat.write(store, beat)
        stored_s = time.time() - age_s
        os.utime(store.url.removeprefix("file://") + f"/{keys.replica(name)}", (stored_s, stored_s))
    yield url


def test_the_file_shows_the_run(channel: str, tmp_path: Path) -> None:
    reader = ChannelReader(open_store(channel))
    versions = [slot.version for slot, _ in reader.slots()]
    assert versions[0] > 1 and versions[-1] == 60
    document = export(channel, tmp_path / "run.html")
    assert set(re.findall(r"\w+://[^\"'`\s]*", document.read_text())) == {
        "http://www.w3.org/2000/svg",
        channel,
    }
    for width in (900,):
        found = look(document, width)
        assert found["shown"]
        gaps = 1 + sum(
            after > before + 1 for before, after in itertools.pairwise(versions)
        )  # a compaction leaves versions out
        assert (found["deltas"], found["points"], found["gaps"]) == (len(versions), len(versions), gaps)
        assert (found["anchors"], found["compactions"], found["unread"]) == (3, len(reader.compactions()), 0)
        assert found["cells"] == len(versions) * len(NAMES)
        assert found["layers"][1:] == [
            "embed_tokens",
            *(f"layers.{layer}" for layer in range(LAYERS)),
            "norm",
            "lm_head",
        ]
        assert re.match(r"version 60, step 240, [\d:]+\ndelta \S+ kB, \S+ % changed\n", found["tip"])
        assert re.search(r"\nmodel.embed_tokens: 0\.[3-5]\d* %$", found["tip"])
        expected = {
            "channel": channel,
            "head": "60",
            "step": "step 240",
            "fleet": "2 of 4",
            "lagging": "1 failed, 1 silent, 1 pinned",
            "error": "\N{EN DASH}",  # hidden
            "waiting": "",
        }
        assert {name: found["text"][name] for name in expected} == expected
        rows = {row[0]: row[1:] for row in found["replicas"]}
        assert rows["gpu-west-0"][:3] == ["staging", "55", "5"]
        assert rows["gpu-west-1"][:3] == ["failed", "41", "19"] and rows[ERROR] == []
        assert rows["evaluation"][:3] == ["serving, pinned to 30", "30", "30"]
        assert rows["gone"][:3] == ["silent (serving)", "23", "37"]


def test_the_served_page_follows_a_run(tmp_path: Path) -> None:
    url, log = f"file://{tmp_path}/channel", tmp_path / "log"
    command = [sys.executable, "-m", "deltasync", "watch", url, "--page", "--port", "0", "--interval", "0.1"]
    with (
        Child("The dashboard", command, {**os.environ, "PYTHONUNBUFFERED": "1"}, log) as served,
        Publisher(url, retention=Retention(compact_every=3)) as publisher,
    ):
        served.wait_until(lambda: log.read_text().endswith("\n"), PATIENCE_S, "to start")
        address = log.read_text().splitlines()[0]
        weights = new_weights()
        train(publisher, weights, 3)
        stop = threading.Event()

        def follow() -> None:
            version = 0
            while not stop.wait(0.05):
                if publisher.version != version:
                    version = publisher.version
                    beat = Heartbeat(
                        replica_id="follower", run_id=publisher.run_id, version=version, state="serving"
                    )
                    heartbeat.write(open_store(url), beat)

        following = threading.Thread(target=follow)
        following.start()
        for _ in range(6):
            time.sleep(0.5)
            train(publisher, weights, 1)
        time.sleep(1.0)
        stop.set()
        following.join()
        deadline, dump = time.monotonic() + PATIENCE_S, ""
        while not HEAD_9.search(dump) and time.monotonic() < deadline:  # a busy machine is no failure
            dump = browse(address, tmp_path / "profile", "--dump-dom")
        browse(address, tmp_path / "picture", f"--screenshot={tmp_path}/page.png")
        os.kill(served.pids()[0], signal.SIGINT)
        assert served.wait(PATIENCE_S) == 130
    assert HEAD_9.search(dump)
    assert re.search(r'id="when"[^>]*>live, ', dump)
    assert "follower" in dump and dump.count("<circle") >= 8 + 8 + 3  # deltas, fractions, lags that were seen
    assert (tmp_path / "page.png").stat().st_size > 20_000
