"""The HTTP side of a replica: a real vLLM server that wants a token, and a real browser for its page."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deltasync.channel import documents, record
from deltasync.channel.signing import Signer
from deltasync.ops.cli import main
from tests.browser import browse, needs_browser
from tests.integration.vllm_server import PATIENCE_S, Server, digests

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]


def post(server: Server, path: str, **body: object) -> tuple[int, dict[str, Any]]:
    try:
        with server.open(path, body) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def samples(server: Server) -> dict[str, float]:
    """What /metrics says of deltasync, by sample name and labels."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE_S) as reply:
        lines = reply.read().decode().splitlines()
    assert any(line.startswith("vllm:generation_tokens_total") for line in lines)
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("deltasync_")
    }


def test_sync_waits_for_a_version_that_is_published_later(server: Server) -> None:
    wanted = server.status()["version"] + 2
    replies: list[tuple[int, dict[str, Any]]] = []
    waiting = threading.Thread(
        target=lambda: replies.append(post(server, "/deltasync/sync", version=wanted, timeout_s=PATIENCE_S))
    )
    waiting.start()
    server.step()
    server.publish()
    server.step()
    assert server.publish() == wanted
    waiting.join()
    assert [(status, reply["version"]) for status, reply in replies] == [(200, wanted)]
    server.assert_serves(wanted)


def test_a_server_goes_back_to_a_version_and_on_again_by_the_command(server: Server) -> None:
    older, then = server.status()["version"], server.json("/deltasync/digest")
    for _ in range(2):
        server.step()
        newest = server.publish()
    server.assert_serves(newest)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(
            main, ["follow", server.url, *arguments], env={"DELTASYNC_HTTP_TOKEN": server.token}
        )
        assert result.exit_code == 0, result.output
        return result.output

    assert run("--pin", str(older)) == f"{server.url} serves version {older}\n"
    assert server.json("/deltasync/digest") == then
    with server.open("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4}) as reply:
        assert reply.headers["x-deltasync-versions"] == f"{older}..{older}"
    assert (server.status()["pin"], server.status()["newest_version"]) == (str(older), newest)
    assert run("--pin", str(newest - 1)) == f"{server.url} serves version {newest - 1}\n"
    assert json.loads(run("--pin", "newest", "--json"))["version"] == newest
    assert run("--once") == f"{server.url} serves version {newest}\n"
    server.assert_serves(newest)


def test_versions_are_evaluated_in_turn_by_the_example(server: Server) -> None:
    first = server.status()["version"]
    for _ in range(2):
        server.step(size=1e-2)
        newest = server.publish()
    server.assert_serves(newest)
    versions = [str(version) for version in (newest, first, newest - 1, first)]
    command = [sys.executable, ROOT / "examples" / "evaluate.py", server.url, *versions]
    environ = os.environ | {"DELTASYNC_HTTP_TOKEN": server.token}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True)
    scores = dict.fromkeys(versions, "")
    for line in done.stdout.splitlines():
        version, said = line.removeprefix("version ").split(": ")
        assert scores[version] in ("", said), "the same version, another score"
        scores[version] = said
    assert len(set(scores.values())) == 3
    server.assert_serves(newest)


def test_a_trainer_of_pipeline_rl_updates_a_server_that_chats(server: Server) -> None:
    """By its trainer's own order: it asks, counting samples, and only then sends the weights."""
    chat = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 400, "ignore_eos": True}
    parameters = [
        {"name": name, "shape": list(t.shape), "dtype": "torch.bfloat16"}
        for name, t in server.weights.items()
    ]
    before = server.status()["version"]
    with ThreadPoolExecutor() as pool:
        chatting = pool.submit(
            lambda: server.open("/v1/chat/completions", chat).headers["x-deltasync-versions"]
        )
        for samples in (2048, 4096):
            body = {
                "kind": "weight_update_request",
                "version": samples,
                "parameters_info": parameters,
                "timestamp": 0.0,
            }
            asked = pool.submit(post, server, "/receive_weight_update", **body)
            server.step()
            version = server.publish(step=samples)
            status, reply = asked.result()
            assert (status, reply["version"]) == (200, version)
        first, last = chatting.result().split("..")
        assert before <= int(first) <= int(last) <= version
    server.assert_serves(version)


def test_what_is_not_signed_is_refused_and_the_version_stays(server: Server, folder: Path) -> None:
    status = server.status()
    assert status["trusted_keys"] == [Signer(folder / "key").public]
    served = {name: tensor.clone() for name, tensor in server.weights.items()}
    server.step()
    with server.publishing_as(lambda _, data: data.replace(b'"coalesced":1', b'"coalesced":2')) as repair:
        server.publish()
    found = server.wait(lambda status: status["error"] is not None)
    assert "was altered" in found["error"] and found["version"] == status["version"]
    assert server.json("/deltasync/digest")["sha256"] == digests(served)
    repair()
    server.assert_serves(status["version"] + 1)
    private = (folder / "key").read_text().splitlines()[1]
    assert private not in (folder / "server.log").read_text(errors="replace")


def test_metrics_stand_beside_vllms_own(server: Server) -> None:
    server.step()
    version = server.publish()
    post(server, "/deltasync/sync", version=version)
    server.wait(lambda status: status["state"] == "serving" and status["commits"][-1]["version"] == version)
    status, found = server.status(), samples(server)
    commits = status["commits"]
    assert found["deltasync_served_version"] == found["deltasync_newest_version"] == version
    anchors = sum(commit["anchor"] for commit in commits)  # after going back
    assert found['deltasync_commits_total{kind="anchor"}'] == anchors
    assert found['deltasync_commits_total{kind="delta"}'] == len(commits) - anchors
    assert found['deltasync_commits_total{kind="compaction"}'] == 0
    assert found["deltasync_payload_bytes_total"] == sum(commit["payload_bytes"] for commit in commits)
    for name in ("lag", "stage", "pause"):
        seconds = [commit[f"{name}_s"] for commit in commits if commit[f"{name}_s"] is not None]
        assert found[f"deltasync_{name}_seconds_count"] == len(seconds)
        assert found[f"deltasync_{name}_seconds_sum"] == pytest.approx(sum(seconds))
    assert found["deltasync_rollbacks_total"] == 0


def test_completions_say_which_versions_were_live_while_they_ran(server: Server) -> None:
    model = server.json("/v1/models")["data"][0]["id"]
    chat = {"messages": [{"role": "user", "content": "1+1="}]}
    prompts: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [5, 6, 7]},
        "/v1/chat/completions": chat,
    }

    def versions(path: str, token_count: int, **more: object) -> str:
        body = {"model": model, "max_tokens": token_count, "ignore_eos": True, **prompts[path], **more}
        with server.open(path, body) as reply:
            reply.read()
            return str(reply.headers["x-deltasync-versions"])

    version = server.status()["version"]
    for path in prompts:
        assert versions(path, 5) == f"{version}..{version}"
        assert versions(path, 5, stream=True) == f"{version}.."
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(versions("/v1/completions", 900)))
    asking.start()
    server.wait_for_requests(1)
    for _ in range(3):
        server.step()
        server.assert_serves(server.publish())
    asking.join()
    first, last = map(int, found[0].split(".."))
    assert first == version
    assert version < last <= version + 3
    assert versions("/v1/completions", 5) == f"{version + 3}..{version + 3}"


def test_the_page_loads_nothing_from_elsewhere(server: Server) -> None:
    with server.open("/deltasync/") as reply:
        page, headers = reply.read().decode(), reply.headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert set(re.findall(r"\w+://[^\"'`\s]*", page)) == {"http://www.w3.org/2000/svg"}


@needs_browser
def test_the_page_shows_the_replica_in_a_browser(server: Server, folder: Path, tmp_path: Path) -> None:
    address = server.url.replace("://", f"://anyone:{server.token}@")

    def look(what: str, *arguments: str) -> str:
        return browse(f"{address}/deltasync/", tmp_path / what, *arguments, width=1000, height=900)

    def shown(page: str) -> dict[str, str]:
        return dict(re.findall(r'id="(state|version|head|count|replica|error)"[^>]*>([^<]*)<', page))

    status = server.status()
    page, commits = look("serving", "--dump-dom"), status["commits"]
    assert shown(page) == {
        "state": "serving",
        "version": str(status["version"]),
        "head": str(status["version"]),
        "count": str(len(commits)),
        "replica": "test-server",
        "error": "\N{EN DASH}",
    }
    assert (
        page.count("<circle") == 2 * len(commits) + sum(commit["lag_s"] is not None for commit in commits) > 0
    )
    assert re.search(r'<section id="error"[^>]* hidden', page)

    def of_another_format(key: str, data: bytes) -> bytes:
        honest = record.decode(data, key, None).record
        document = documents.encode(dataclasses.replace(honest, format="<b>another</b>"))
        document = Signer(folder / "key").seal(key, document)
        return data[: honest.body_bytes] + document + struct.pack("<Q", len(document))

    server.step()
    with server.publishing_as(of_another_format) as repair:
        version = server.publish()
    server.wait(lambda status: status["error"] is not None)
    page = look("damaged", "--dump-dom")
    assert shown(page)["state"] == "failed"
    assert "has format '&lt;b&gt;another&lt;/b&gt;'" in shown(page)["error"]
    look("picture", f"--screenshot={tmp_path}/page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    repair()
    server.assert_serves(version)
