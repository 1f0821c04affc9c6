"""What commands print with `--json` is what docs/reference/json.md says."""

from __future__ import annotations

import json
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

from deltasync import Publisher, maintenance, open_store
from deltasync.channel import heartbeat
from deltasync.channel.heartbeat import Heartbeat
from deltasync.channel.reading import ChannelReader
from deltasync.cli import main
from tests import json_schemas
from tests.json_schemas import LINES, LIST, SCHEMAS, fields, page

CALLS = {
    "log": ["CHANNEL"],
    "show": ["CHANNEL"],
    "watch": ["CHANNEL", "--once"],
    "check": ["CHANNEL", "--read-data"],
    "repair": ["CHANNEL"],
    "forget": ["CHANNEL", "--keep-last", "1", "--grace", "0", "--dry-run"],
    "prune": ["CHANNEL", "--grace", "0", "--dry-run"],
    "export": ["CHANNEL", "latest", "FOLDER/exported"],
    "cp": ["CHANNEL", "file://FOLDER/copy"],
    "relay": ["CHANNEL", "file://FOLDER/relayed", "--once"],
    "follow": ["CHANNEL", "--once"],
    "doctor": ["CHANNEL"],
    "sync": ["http://server"],
    "pin": ["http://server", "1"],
}


@pytest.fixture
def channel(tmp_path: Path) -> str:
    """Three versions, an announced anchor, a compaction, a replica, and one damaged record."""
    url, weights = f"file://{tmp_path}/run", {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    with Publisher(url, anchor_every=2) as publisher:
        for version in range(1, 5):
            weights["w"][version] = 1.0
            publisher.publish(weights, step=version).wait(60)
    heartbeat.write(open_store(url), Heartbeat(replica_id="r", run_id=publisher.run_id, version=3, state="serving"))
    maintenance.write_compaction(ChannelReader(open_store(url)), 2, 4)
    (slot,) = [slot for slot, _ in ChannelReader(open_store(url)).slots() if slot.version == 4]
    path = tmp_path / "run" / slot.key
    path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)
    return url


def assert_is(document: Any, kind: type) -> None:
    """It has the type's fields, each of its type, and no other."""
    assert document.keys() == fields(kind).keys(), kind
    for name, hint in typing.get_type_hints(kind).items():
        msgspec.convert(document[name], hint, strict=True)
        for part in json_schemas.parts(hint):
            for each in document[name] if isinstance(document[name], list) else [document[name]]:
                if each is not None:
                    assert_is(each, part)


def test_the_page_is_what_the_types_say() -> None:
    assert json_schemas.PAGE.read_text(encoding="utf-8") == page(), "python -m tests.json_schemas writes it again"


def test_every_command_with_json_is_there() -> None:
    commands: dict[str, Any] = {name: main.get_command(None, name) for name in main.list_commands(None)}  # type: ignore[arg-type]
    with_json = {name for name, command in commands.items() if any("--json" in option.opts for option in command.params)}
    assert set(CALLS) == set(SCHEMAS) == with_json


@pytest.mark.parametrize("command", SCHEMAS)
def test_a_command_prints_what_the_page_says(
    command: str, channel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: Callable[..., dict[str, Any]] = lambda *_: {"version": 1, "waited_s": time.monotonic()}  # noqa: E731
    monkeypatch.setattr(heartbeat, "post", served)  # as tests/unit/test_driver.py sees a server answer
    arguments = [word.replace("CHANNEL", channel).replace("FOLDER", str(tmp_path)) for word in CALLS[command]]
    done = CliRunner().invoke(main, [command, *arguments, "--json"])
    assert done.stdout, done.output
    count, kinds = SCHEMAS[command]
    documents = [json.loads(line) for line in done.stdout.splitlines()] if count == LINES else json.loads(done.stdout)
    for document in documents if count in (LINES, LIST) else [documents]:
        event = {typing.get_args(typing.get_type_hints(kind)["event"])[0]: kind for kind in kinds if len(kinds) > 1}
        assert_is(document, event[document["event"]] if event else kinds[0])


def test_what_is_not_of_the_type_is_seen() -> None:
    good = {"version": 1, "waited_s": 0.5}
    assert_is(good, json_schemas.Served)
    for bad in (good | {"more": 1}, {"version": 1}, good | {"version": "1"}):
        with pytest.raises((AssertionError, msgspec.ValidationError)):
            assert_is(bad, json_schemas.Served)
