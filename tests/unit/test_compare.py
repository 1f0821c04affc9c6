"""`deltasync check --against`: a version's bits, and those of a file, a directory or a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from deltasync import Publisher, open_store, ops
from deltasync.channel.documents import sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError
from deltasync.ops.cli import main
from deltasync.tensors.bits import bits_of
from tests.answers import Answers

Weights = dict[str, torch.Tensor]


def states() -> tuple[Weights, Weights]:
    torch.manual_seed(0)
    first = {
        "a.weight": torch.randn(3, 4).bfloat16(),
        "b.weight": torch.randn(5).bfloat16(),
        "ids": torch.arange(4),
    }
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["a.weight"][1, 2] = 7.0
    return first, second


@pytest.fixture
def url(memory_url: str) -> str:
    with Publisher(memory_url) as publisher:
        for state in states():
            publisher.publish(state).wait(60)
    return memory_url


def against(url: str, place: object, *options: str) -> Result:
    return CliRunner().invoke(main, ["check", url, "--against", str(place), *options])


def test_equal_bits_exit_with_0(url: str, tmp_path: Path) -> None:
    save_file(states()[1], tmp_path / "m.safetensors")
    done = against(url, tmp_path / "m.safetensors")
    assert (done.exit_code, "0 of 3 tensors differ" in done.stdout) == (0, True), done.output
    older = against(url, tmp_path / "m.safetensors", "--version", "1", "--json")
    assert older.exit_code == 8
    (difference,) = json.loads(older.stdout)["differences"]
    assert (difference["tensor"], difference["index"], difference["count"]) == ("a.weight", [1, 2], 1)
    assert difference["found"] == "0x40e0" != difference["expected"]


def test_zeros_and_nans_are_compared_as_bits(memory_url: str, tmp_path: Path) -> None:
    with Publisher(memory_url) as publisher:
        publisher.publish({"w": torch.tensor([0.0, float("nan"), 1.0]).bfloat16()}).wait(60)
    save_file({"w": torch.tensor([-0.0, float("nan"), 1.0]).bfloat16()}, tmp_path / "m.safetensors")
    shown = against(memory_url, tmp_path / "m.safetensors").stdout
    assert "w[0]: 0x0000 in the channel, 0x8000 there; 1 of 3 elements differ." in shown


def test_a_directory_another_shape_and_what_is_not_there(url: str, tmp_path: Path) -> None:
    ops.export(ChannelReader(open_store(url)), 2, tmp_path / "same", shard_bytes=16)
    assert (tmp_path / "same/model.safetensors.index.json").exists()
    assert against(url, tmp_path / "same").exit_code == 0
    (tmp_path / "other").mkdir()
    weights = {**states()[1], "a.weight": torch.zeros(4, 3).bfloat16(), "more": torch.zeros(1)}
    del weights["ids"]
    save_file(weights, tmp_path / "other/model.safetensors")
    done = against(url, tmp_path / "other")
    assert done.exit_code == 8
    assert "1 of 2 tensors differ" in done.stdout and "a.weight as bfloat16[4, 3]" in done.stdout
    assert "1 tensor not there: ids" in done.stdout and "1 tensor only there: more" in done.stdout


def test_masters_are_rounded_as_they_are_served(memory_url: str, tmp_path: Path) -> None:
    masters = {"w": torch.randn(100)}
    with Publisher(memory_url) as publisher:
        publisher.publish(masters).wait(60)
    save_file(masters, tmp_path / "m.safetensors")
    assert against(memory_url, tmp_path / "m.safetensors").exit_code == 0


def test_nothing_in_common_is_no_agreement(url: str, tmp_path: Path) -> None:
    save_file({"else": torch.zeros(2)}, tmp_path / "m.safetensors")
    assert against(url, tmp_path / "m.safetensors").exit_code == 8


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    """A server, and what it answers."""
    answer: dict[str, Any] = {}

    with Answers(lambda asked: (200 if asked.path == "/deltasync/digest" else 404, answer)) as server:
        yield server.url, answer


def test_a_server_is_compared_at_the_version_that_it_serves(
    url: str, server: tuple[str, dict[str, Any]]
) -> None:
    place, answer = server
    digests = {name: sha256_hex(bits_of(tensor).data) for name, tensor in states()[0].items()}
    answer.update(version=1, sha256=digests)
    assert against(url, place).exit_code == 0
    answer["sha256"] = digests | {"b.weight": "0" * 64}
    done = against(url, place)
    assert done.exit_code == 8 and "b.weight: The sha256 of its bits differs." in done.stdout
    with pytest.raises(ConfigError, match="serves version 1, not 2"):
        ops.compare(ChannelReader(open_store(url)), place, 2)


def test_a_server_without_a_version(url: str, server: tuple[str, dict[str, Any]]) -> None:
    place, answer = server
    answer["error"] = "No version is served yet."
    done = against(url, place)
    assert done.exit_code == 1 and "No version is served yet." in done.stderr


def test_places_that_are_none(url: str, tmp_path: Path) -> None:
    assert against(url, tmp_path / "no").exit_code == 3
    assert CliRunner().invoke(main, ["check", url, "--version", "1"]).exit_code == 2
