"""Every command says on a terminal that it goes on, and nothing about that elsewhere or with --json."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch

from deltasync import Publisher
from deltasync.ops.cli import main
from tests.answers import Answers

AT_ONCE = {"bisect", "keygen"}
STREAM = {"serve"}  # becomes vLLM, which logs
SHOW = {
    "follow": "{channel} --once",
    "follow of a server": "{server} --once",
    "watch": "{channel} --once",
    "watch as a page": "{channel} --out {folder}/page.html",
    "log": "{channel}",
    "log of a version": "{channel} latest",
    "doctor": "{channel}",
    "check": "{channel}",
    "repair": "{channel}",
    "gc": "{channel} --keep-last 2",
    "blame": "{channel} w",
    "diff": "{channel} 1 latest",
    "export": "{channel} latest {folder}/export",
    "relay": "{channel} file://{folder}/copy --once",
}


class Terminal(io.StringIO):
    """A stderr that says it is one."""

    def isatty(self) -> bool:
        return True


def commands(
    group: click.Group, context: click.Context, before: str = ""
) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, context, f"{before}{name} ")
        elif command is not None:
            yield before + name, command


COMMANDS = dict(commands(main, click.Context(main)))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with Answers(lambda _: (200, {"version": 2, "waited_s": 0.0})) as server:
        yield server.url


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"file://{tmp_path_factory.mktemp('progress')}/run"
    weights = {"w": torch.zeros(1000)}
    with Publisher(url) as publisher:
        for number in range(4):
            weights["w"][number] = 1
            publisher.publish(weights).wait(timeout_s=60)
    return url


def test_each_command_shows_progress_or_has_a_reason_not_to() -> None:
    assert COMMANDS.keys() == {*(name.split()[0] for name in SHOW), *AT_ONCE, *STREAM}


@pytest.mark.parametrize("name", SHOW)
def test_progress(
    name: str, channel: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    said = []
    words_of, name = SHOW[name], name.split()[0]
    json_too = "page" not in words_of and any(option.name == "as_json" for option in COMMANDS[name].params)
    for way, stderr in enumerate([Terminal(), io.StringIO(), *([Terminal()] if json_too else [])]):
        monkeypatch.setattr(sys, "stderr", stderr)
        words = words_of.format(channel=channel, server=server, folder=tmp_path / str(way)).split()
        (tmp_path / str(way)).mkdir()
        with pytest.raises(SystemExit) as ended:
            main([name, *words, *(["--json"] if way == 2 else [])])
        assert ended.value.code == 0, stderr.getvalue()
        said.append(stderr.getvalue())
    assert "━" in said[0]
    assert not [text for text in said[1:] if "━" in text or "\x1b" in text]
