"""What `deltasync doctor` says of stores, channels and installations that are not as they should be."""

from __future__ import annotations

import json
import re
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from deltasync import Publisher, open_store
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import StoreError
from deltasync.ops import doctor
from deltasync.ops.cli import main
from deltasync.ops.doctor import Finding
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from tests.faults import FOREVER, FaultyStore

STORE_CHECKS = ["list", "write", "read", "clock", "create", "speed", "delete"]
HERE = ["vllm", "trl", "kernels", "gpu"]


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(open_store(f"file://{tmp_path}/channel"))


def examined(store: FaultyStore) -> dict[str, Finding]:
    return {finding.check: finding for finding in doctor.examine(ChannelReader(store), parameters=8e9)}


def test_all_is_well_and_nothing_is_left_behind(store: FaultyStore) -> None:
    findings = examined(store)
    assert list(findings) == [*STORE_CHECKS, "channel", *HERE]
    states = {check: finding.state for check, finding in findings.items() if finding.state != "ok"}
    assert states == {"channel": "warning"}
    assert findings["channel"].found == f"{store.url} holds no channel yet."
    assert "99.3 MB" in findings["speed"].found  # 8e9 x 1 % x 9.93 bits
    assert list(store.inner.list("")) == []


@pytest.mark.parametrize(
    ("operation", "check", "state", "left"),
    [
        ("list", "list", "failure", 0),
        ("put", "write", "failure", 0),
        ("read", "read", "failure", 0),
        ("delete", "delete", "warning", 2),
    ],
)
def test_what_is_not_allowed_is_named_and_what_needs_it_is_not_tried(
    store: FaultyStore, operation: str, check: str, state: str, left: int
) -> None:
    store.fail_at(operation, times=FOREVER, error=StoreError)
    findings = examined(store)
    assert findings[check].state == state
    assert findings[check].advice
    assert [name for name in findings if name in STORE_CHECKS] == STORE_CHECKS[
        : STORE_CHECKS.index(check) + 1
    ]
    assert len(list(store.inner.list(""))) == left


def test_a_store_that_gives_other_bytes_fails(store: FaultyStore) -> None:
    store.tamper("probe/", lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    assert examined(store)["read"] == Finding(
        "read",
        "failure",
        "The store returned other bytes than were stored.",
        "Give the credentials the right to read objects.",
    )


@pytest.mark.parametrize(("off_s", "side"), [(60, "ahead of"), (-60, "behind")])
def test_a_clock_that_is_off_is_told(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, off_s: float, side: str
) -> None:
    now = time.time
    monkeypatch.setattr("deltasync.ops.doctor.time.time", lambda: now() + off_s)
    clock = examined(store)["clock"]
    assert clock.state == "warning"
    assert re.search(rf"clock is (59|60|61) s {side} the store's", clock.found)


def test_a_store_that_does_not_decide_gets_a_lease() -> None:
    store = FaultyStore(open_store("memory://doctor-undecided"))
    inner = store.inner
    store.inner = type(
        "Undecided",
        (),
        {"__getattr__": lambda _, name: getattr(inner, name), "create": lambda _, *a: inner.put(*a)},
    )()
    create = examined(store)["create"]
    assert create.state == "warning"
    assert "lease" in create.found


def test_the_channel_and_its_replicas_are_looked_at(store: FaultyStore) -> None:
    with Publisher(store) as publisher:
        publisher.publish({"w": torch.zeros(8)}.items()).wait(timeout_s=60)
        run_id = publisher.run_id
    for name, state, error in (
        ("good", "serving", None),
        ("bad", "failed", "it broke"),
        ("gone", "stopped", None),
    ):
        heartbeat.write(
            store, Heartbeat(replica_id=name, run_id=run_id, version=None, state=state, error=error)
        )
    findings = [
        finding
        for finding in doctor.examine(ChannelReader(store), parameters=8e9)
        if finding.check not in STORE_CHECKS
    ]
    assert findings[0].found.startswith("The newest version is 1 (")
    assert findings[1].found == "2 of 3 known replicas have a fresh heartbeat."
    assert findings[2] == Finding("replicas", "warning", "bad: it broke")
    assert [finding.check for finding in findings[3:]] == HERE


def test_a_damaged_channel_is_a_failure(store: FaultyStore) -> None:
    store.put(keys.CHANNEL, b"{")
    assert examined(store)["channel"].state == "failure"


def test_versions_are_held_to_what_deltasync_requires(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = metadata.version
    monkeypatch.setattr(
        doctor.metadata, "version", lambda name: "0.99.0" if name.startswith("vllm") else version(name)
    )
    vllm = examined(store)["vllm"]
    assert vllm.state == "failure"
    assert vllm.found.startswith("0.99.0 is installed; deltasync needs ")


def test_the_command_exits_by_what_it_found(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["doctor", f"file://{tmp_path}/new", "--model", "600M", "--json"])
    assert done.exit_code == 0, done.output
    assert [row["state"] for row in json.loads(done.stdout)] == ["ok"] * 7 + ["warning"] + ["ok"] * 4
    (tmp_path / "file").write_text("in the way")
    done = CliRunner().invoke(main, ["doctor", f"file://{tmp_path}/file"])
    assert done.exit_code == 1
    assert "failure" in done.stdout
