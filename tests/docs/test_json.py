"""What commands print with `--json` is what the table of docs/reference/cli.md says."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from deltasync import Publisher, open_store, ops
from deltasync.channel.reading import ChannelReader
from deltasync.ops.cli import main
from deltasync.ops.dashboard.observe import CompactionRow, ReplicaRow, VersionRow
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat

PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"
CALLS = {
    "log": ["CHANNEL"],
    "log of a version": ["CHANNEL", "latest"],
    "watch": ["CHANNEL", "--once"],
    "check": ["CHANNEL", "--read-data"],
    "check --against": ["CHANNEL", "--version", "2", "--against", "FOLDER/checkpoint"],
    "repair": ["CHANNEL"],
    "gc": ["CHANNEL", "--keep-last", "1", "--grace", "0", "--dry-run"],
    "export": ["CHANNEL", "latest", "FOLDER/exported"],
    "relay": ["CHANNEL", "file://FOLDER/relayed", "--once"],
    "follow": ["CHANNEL", "--once"],
    "doctor": ["CHANNEL"],
    "bisect": ["CHANNEL", "--run", "test $VERSION -lt 2 # {}", "--bad", "3"],
    "blame": ["CHANNEL", "w"],
    "diff": ["CHANNEL", "1", "3"],
    "follow --once of a server": ["http://server", "--once"],
    "follow --pin of a server": ["http://server", "--pin", "1"],
}


@pytest.fixture
def channel(tmp_path: Path) -> str:
    """Three versions, an announced anchor, a compaction, a replica, and one damaged record."""
    url, weights = f"file://{tmp_path}/run", {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    with Publisher(url, anchor_every=2) as publisher:
        for version in range(1, 5):
            weights["w"][version] = 1.0
            publisher.publish(weights, step=version).wait(60)
    heartbeat.write(
        open_store(url), Heartbeat(replica_id="r", run_id=publisher.run_id, version=3, state="serving")
    )
    ops.write_compaction(ChannelReader(open_store(url)), 2, 4)
    (slot,) = [slot for slot, _ in ChannelReader(open_store(url)).slots() if slot.version == 4]
    path = tmp_path / "run" / slot.key
    path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)
    return url


def rows() -> dict[str, tuple[str, str]]:
    """What each command prints, and its fields, as the table says."""
    table = (
        PAGE.read_text(encoding="utf-8").partition("| command | prints | fields |")[2].partition("\n\n")[0]
    )
    found = {}
    for line in table.strip().splitlines()[1:]:
        commands, prints, fields = (cell.strip() for cell in line.strip("|").split("|"))
        found |= dict.fromkeys(re.findall(r"`(.*?)`", commands), (prints, fields))
    return found


def documented(command: str) -> list[set[str]]:
    """The fields of the objects that a command may print."""
    if command == "watch":
        kinds = [VersionRow, CompactionRow, ReplicaRow]
        more = [
            {"sha256", "version", "payload_bytes"},
            {"count", "left"},
            {"channel"},
            {"problem"},
            {"error"},
        ]
        found = [{field.name for field in dataclasses.fields(kind)} for kind in kinds] + more
        found[0].add("changed_fraction")
        return [each | {"event"} for each in found]
    fields = re.sub(r"\(.*?\)", "", rows()[command][1])
    return [set(re.findall(r"`(\w+)`", each)) for each in fields.split("; or ")]


def test_every_command_with_json_is_there() -> None:
    commands: dict[str, Any] = {name: main.get_command(None, name) for name in main.list_commands(None)}  # type: ignore[arg-type]
    with_json = {
        name
        for name, command in commands.items()
        if any("--json" in option.opts for option in command.params)
    }
    assert {name.split()[0] for name in CALLS} == rows().keys() == with_json


@pytest.mark.parametrize("command", CALLS)
def test_a_command_prints_what_the_page_says(
    command: str, channel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: Callable[..., dict[str, Any]] = lambda *_: {"version": 1, "waited_s": time.monotonic()}  # noqa: E731
    monkeypatch.setattr(heartbeat, "post", served)  # as tests/unit/test_driver.py sees a server answer
    ops.export(ChannelReader(open_store(channel)), 3, tmp_path / "checkpoint")
    arguments = [word.replace("CHANNEL", channel).replace("FOLDER", str(tmp_path)) for word in CALLS[command]]
    name = command.split()[0]
    done = CliRunner().invoke(main, [name, *arguments, "--json"])
    assert done.stdout, done.output
    prints = rows()[name][0]
    in_lines = "a line" in prints and not done.stdout.startswith("{\n")
    documents = (
        [json.loads(line) for line in done.stdout.splitlines()] if in_lines else json.loads(done.stdout)
    )
    for document in documents if isinstance(documents, list) else [documents]:
        assert document.keys() in documented(name)
    assert isinstance(documents, list) or "an object" in prints or "a line" in prints
