"""The operator's minute: what a first start can get wrong, and that the last line of the command that somebody
types, or a line of `deltasync doctor`, names the cause. Each row runs the real command.
"""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deltasync import Publisher, open_store
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat

FAST = "import time; now = time.time; time.time = lambda: now() + 600; "
MAIN = "from deltasync.ops.cli import main; main()"
FOLLOW = """
import sys, torch, deltasync
try:
    deltasync.follow(torch.nn.Linear(3, 5, dtype=torch.bfloat16), sys.argv[1]).sync()
except deltasync.errors.DeltaSyncError as error:
    sys.exit(f"deltasync: {error}")
"""


@dataclasses.dataclass(frozen=True)
class Start:
    """What is typed (`{channel}` is a channel of four versions, `{refuses}` the address of a store), what else
    is wrong, and the text that names the cause.
    """

    command: str
    cause: str
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    lost: str = ""  # a pattern of the keys that are deleted first
    beat: str = ""  # the error of a replica's heartbeat
    program: str = MAIN


STARTS = {
    "an empty channel": Start(
        "serve MODEL", "'--channel' (env var: 'DELTASYNC_CHANNEL')", {"DELTASYNC_CHANNEL": ""}
    ),
    "a misspelt variable": Start(
        "serve MODEL --channel {channel}",
        "DELTASYNC_CHANEL is not a setting of deltasync; the nearest is DELTASYNC_CHANNEL.",
        {"DELTASYNC_CHANEL": "file:///run"},
    ),
    "a misspelt value": Start(
        "serve MODEL --channel {channel}", "DELTASYNC_PIN must be newest", {"DELTASYNC_PIN": "last"}
    ),
    "an empty token": Start(
        "serve MODEL --channel {channel}", "DELTASYNC_HTTP_TOKEN is empty", {"DELTASYNC_HTTP_TOKEN": ""}
    ),
    "half a URL": Start("serve MODEL --channel s3:/bucket/run", "A bucket is written s3://bucket/prefix"),
    "an http URL": Start("doctor http://host:9000/b/run", "s3://bucket/prefix?endpoint=http://host"),
    "a channel in memory": Start("serve MODEL --channel memory://run", "exists in one process only"),
    "nothing there": Start("watch {channel}-2 --once", "holds no channel yet. Check the URL"),
    "a mistyped prefix": Start("doctor {channel}s --json", "runs holds no channel yet"),
    "a missing record": Start("watch {channel} --once", "versions/", lost="versions/.*0000003"),
    "a deleted channel": Start("doctor {channel} --json", "lacks its channel.json", lost="(?!head)"),
    "a lost anchor": Start("doctor {channel} --json", "anchors/", lost="anchors/"),
    "a replica that failed": Start("watch {channel} --once", "vllm-0: failed", beat="out of memory"),
    "another model's channel": Start("{channel}", "weight is bfloat16 of shape [5, 3] where", program=FOLLOW),
    "a wrong token": Start("watch {refuses}/InvalidAccessKeyId --once", "InvalidAccessKeyId"),
    "no permission": Start("doctor {refuses}/AccessDenied --json", "may list objects"),
    "a clock that is off": Start("doctor {channel} --json", "clock is", program=FAST + MAIN),
}


@pytest.fixture(scope="module")
def refuses() -> Iterator[str]:
    """A store that refuses each request by the code that the bucket is named by, as S3 does."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code = "InvalidAccessKeyId" if "InvalidAccessKeyId" in self.path else "AccessDenied"
            body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            self.send_response(403)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("name", STARTS)
def test_a_wrong_start_is_named(name: str, tmp_path: Path, refuses: str) -> None:
    start = STARTS[name]
    store, weights = open_store(f"file://{tmp_path}/run"), torch.zeros(4, 4)
    with Publisher(store) as publisher:
        for number in range(4):
            weights[number] = 1
            publisher.publish({"weight": weights}.items()).wait(timeout_s=60)
        if start.beat:
            beat = Heartbeat(
                replica_id="vllm-0", run_id=publisher.run_id, version=3, state="failed", error=start.beat
            )
            heartbeat.write(store, beat)
    lost = [info.key for info in store.list("") if start.lost and re.match(start.lost, info.key)]
    for key in lost:
        store.delete(key)
    assert bool(lost) == bool(start.lost)
    place = re.sub(r"\{refuses\}/(\w+)", rf"s3://bucket/\1?endpoint={refuses}", start.command)
    words = place.replace("{channel}", store.url).split()
    plain = {key: value for key, value in os.environ.items() if not key.startswith("DELTASYNC_")}
    access = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "x"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start.program, *words],
        env={**plain, **access, **start.variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if words[0] == "doctor" and "--json" in words:
        told = [row for row in json.loads(done.stdout) if row["state"] != "ok"]
        assert any(start.cause in f"{row['found']} {row['advice']}" for row in told), told
    else:
        assert done.returncode != 0
        assert start.cause in done.stderr.splitlines()[-1], done.stderr
    if words[0] == "watch":
        assert re.search(r"Next, run `deltasync (doctor|check) ", done.stderr.splitlines()[-1])


def test_a_whole_channel_ends_without_an_error(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/run")
    with Publisher(store) as publisher:
        publisher.publish({"weight": torch.zeros(4)}.items()).wait(timeout_s=60)
    done = subprocess.run(
        [sys.executable, "-m", "deltasync", "watch", store.url, "--once"], capture_output=True, check=False
    )
    assert done.returncode == 0 and b"version 1" in done.stdout and done.stderr == b""
