"""The table of mistakes: each raises an error of a class, with one sentence that names the thing and the
cure.

None of them publishes, follows or changes anything.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError, ModelMismatchError, TransientStoreError
from deltasync.ops.cli import main, output
from deltasync.serve import heartbeat
from deltasync.stores.base import WrappedStore
from tests.channels import EPOCH
from tests.unit.test_trainers_server import DEFAULTS, MODEL, Status
from trl_callback import DeltaSyncCallback, server

WEIGHTS = {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}

CHANNELS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "A channel is a URL, a path or a store, not None."),
    "a number": (7, "A channel is a URL, a path or a store, not 7."),
    "a name": ("run", "Not a channel URL: 'run'. Use a path, file:///path"),
    "a relative path without a dot": ("runs/a", "Not a channel URL: 'runs/a'. Use a path, file:///path"),
    "a path that needs one": ("my run", "A path in this directory is written './my run'."),
    "an empty URL": ("", "Not a channel URL: ''. Use a path"),
    "another scheme": ("https://bucket/run", "Not a channel URL: 'https://bucket/run'. Use a path"),
    "a relative file URL": ("file://run", "A directory is written file:///absolute/path, not 'file://run'."),
    "the root": (Path("/"), "A directory is written file:///absolute/path, not 'file:///'."),
    "options of a directory": ("file:///data/run?x=1", "A file:// URL has no '?' and no '#'"),
    "no bucket": ("s3:///run", "A bucket is written s3://bucket/prefix"),
    "memory without a name": ("memory://", "An in-memory store is written memory://name"),
    "credentials": ("s3://key:secret@bucket/run", "credentials"),
    "half a bucket of the Hub": ("hf://buckets/me", "hf://buckets/namespace/name"),
    "an unknown option": ("s3://bucket/run?regoin=x", "regoin"),
}


@pytest.mark.parametrize("who", [open_store, Publisher, Replica, DeltaSyncCallback])
@pytest.mark.parametrize("name", CHANNELS)
def test_a_channel(who: Callable[[Any], object], name: str) -> None:
    given, said = CHANNELS[name]
    with pytest.raises(ConfigError) as caught:
        who(given)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_paths_are_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (tmp_path / "a b", f"{tmp_path}/a b", "./a b", Path("a b")):
        assert open_store(given).url == f"file://{tmp_path}/a b"
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(WEIGHTS).wait(timeout_s=60)
    assert Replica("./run").sync() == 1


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown codec": ({"codec": "zip"}, "codec must be one of packed, context, raw, not 'zip'."),
    "an unknown dtype": (
        {"dtype": "bf16"},
        "dtype must be one of auto, bfloat16, float16, float32, fp8, keep, or with patterns",
    ),
    "a dtype of torch": ({"dtype": torch.bfloat16}, "dtype must be one of"),
    "no anchors": ({"anchor_every": 0}, "anchor_every must be at least 1"),
    "anchors by text": ({"anchor_every": "5"}, "anchor_every must be a whole number, not '5'."),
    "anchors by a fraction": ({"anchor_every": 2.5}, "anchor_every must be a whole number, not 2.5."),
    "anchors by truth": ({"anchor_every": True}, "anchor_every must be a whole number, not True."),
    "fewer than no retries": ({"retries": -1}, "retries must be at least 0"),
    "a time as text": ({"retry_delay_s": "1s"}, "retry_delay_s must be a number, not '1s'."),
    "a time that is none": ({"peer_timeout_s": float("nan")}, "peer_timeout_s must be"),
    "retention as a number": ({"retention": 5}, "retention must be a Retention, not 5."),
    "a checkpoint that is not there": ({"initial": "/no/such/checkpoint"}, "/no/such/checkpoint"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_publishers_setting(memory_url: str, name: str) -> None:
    given, said = SETTINGS[name]
    with pytest.raises(ConfigError) as caught:
        Publisher(memory_url, **given)
    assert said in str(caught.value)


STREAMS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "takes a module, a mapping of names to tensors, or pairs of name and tensor, not None"),
    "a tensor": (
        torch.zeros(3),
        "takes a module, a mapping of names to tensors, or pairs of name and tensor, not a Tensor",
    ),
    "text": (
        "weights",
        "takes a module, a mapping of names to tensors, or pairs of name and tensor, not 'weights'",
    ),
    "names alone": (["weight"], "reads pairs of name and tensor, not 'weight'"),
    "tensors alone": ([torch.zeros(3)], "reads pairs of name and tensor, not a Tensor"),
    "triples": ([("weight", torch.zeros(3), 1)], "reads pairs of name and tensor"),
    "arrays of numpy": (
        {"weight": np.zeros(3)},
        "weight is a ndarray, not a torch.Tensor; torch.from_numpy makes one",
    ),
    "a list": ({"weight": [1.0, 2.0]}, "weight is a list, not a torch.Tensor"),
    "a name that is none": ([(1, torch.zeros(3))], "Names of tensors are strings, not 1."),
    "a name twice": ([("w", torch.zeros(3)), ("w", torch.zeros(3))], "held w twice"),
    "no tensor at all": ({}, "There is no tensor to publish."),
}


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_published(memory_url: str, name: str) -> None:
    given, said = STREAMS[name]
    with Publisher(memory_url) as publisher:
        with pytest.raises((ConfigError, ModelMismatchError)) as caught:
            publisher.publish(given)
        assert said in str(caught.value)
        assert publisher.publish(WEIGHTS).version == 1  # the publisher goes on


@pytest.mark.parametrize("given", [WEIGHTS, WEIGHTS.items(), list(WEIGHTS.items()), iter(WEIGHTS.items())])
def test_what_can_be_published(memory_url: str, given: Any) -> None:
    with Publisher(memory_url) as publisher:
        publisher.publish(given).wait(timeout_s=60)
    replica = Replica(memory_url)
    replica.sync()
    assert replica.state_dict().keys() == WEIGHTS.keys()


def test_a_module_can_be_published(memory_url: str) -> None:
    """By its parameters and the buffers that are saved, tied ones once by each name, as `state_dict()` has
    them.
    """
    module = torch.nn.BatchNorm1d(3)
    with Publisher(memory_url, dtype="keep") as publisher:
        publisher.publish(module).wait(timeout_s=60)
    replica = Replica(memory_url)
    replica.sync()
    assert replica.state_dict().keys() == module.state_dict().keys()


STEPS: dict[str, Any] = {
    "text": "3",
    "a fraction": 2.5,
    "truth": True,
    "too large": 1 << 70,
    "a tensor": torch.tensor(1.5),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step(memory_url: str, name: str) -> None:
    with Publisher(memory_url) as publisher:
        with pytest.raises(ConfigError, match="step must be a whole number"):
            publisher.publish(WEIGHTS, step=STEPS[name])
        receipt = publisher.publish(WEIGHTS, step=np.int64(7))
        receipt.wait(timeout_s=60)
        assert type(receipt.step) is int


LAGS: dict[str, Any] = {
    "two": (0.0, 1.0),
    "below zero": (-1.0, 0.0, 0.0),
    "no number": (float("nan"), 0.0, 0.0),
    "infinite": (0.0, 0.0, float("inf")),
    "text": "123",
    "one": 5,
}


@pytest.mark.parametrize("name", LAGS)
def test_ages_of_tokens(memory_url: str, name: str) -> None:
    with Publisher(memory_url) as publisher:
        with pytest.raises(ConfigError, match="token_lag must be three numbers from 0 on"):
            publisher.publish(WEIGHTS, token_lag=LAGS[name])
        publisher.publish(WEIGHTS, token_lag=(np.float32(0.5), np.int64(1), 2)).wait(timeout_s=60)
    assert ChannelReader(open_store(memory_url)).numbered(1).record.token_lag == (0.5, 1.0, 2.0)


VERSIONS: dict[str, Any] = {"latest": "latest", "a fraction": 1.5, "truth": True, "zero": 0, "less": -1}


@pytest.mark.parametrize("name", VERSIONS)
def test_a_version(memory_url: str, name: str) -> None:
    with Publisher(memory_url) as publisher:
        publisher.publish(WEIGHTS).wait(timeout_s=60)
    with pytest.raises(ConfigError, match="version must be a whole number from 1 on, not"):
        Replica(memory_url).sync(version=VERSIONS[name])


COMMANDS: dict[str, tuple[list[str], int, str]] = {
    "log of a name": (["log", "run"], 3, "Not a channel URL: 'run'"),
    "log of another scheme": (["log", "ftp://x"], 3, "Not a channel URL"),
    "log of a directory that is not there": (["log", "{tmp}/no"], 5, "/no holds no channel yet."),
    "log of another directory": (["log", "{tmp}"], 5, "holds no channel"),
    "watch of a directory that is not there": (
        ["watch", "{tmp}/no", "--once"],
        5,
        "/no holds no channel yet.",
    ),
    "dashboard of a directory that is not there": (
        ["watch", "{tmp}/no", "--out", "{tmp}/page.html"],
        5,
        "/no holds no channel yet.",
    ),
    "watch of nothing for a while": (["watch", "{tmp}/no", "--timeout", "0"], 5, "Check the URL"),
    "follow of nothing for a while": (["follow", "{tmp}/no", "--timeout", "0"], 5, "Check the URL"),
    "log of a version in a directory that is not there": (["log", "{tmp}/no", "latest"], 5, "Check the URL"),
    "log of a version by a word": (["log", "{channel}", "first"], 3, "'first' is neither a version"),
    "log of a record that is not there": (
        ["log", "{channel}", keys.slot(77, EPOCH)],
        5,
        "has no versions/0000000/0000000077",
    ),
    "log of another object": (["log", "{channel}", "head.json"], 3, "neither a version"),
    "export of version zero": (["export", "{channel}", "0", "{tmp}/x"], 2, "neither a version nor"),
    "export of a version that is not there": (
        ["export", "{channel}", "60", "{tmp}/x"],
        5,
        "Version 60 is not published",
    ),
    "check of nothing": (["check", "{tmp}/no"], 5, "holds no channel yet"),
    "repair of nothing": (["repair", "{tmp}/no"], 5, "from a copy of the channel"),
    "repair from nowhere": (["repair", "{channel}", "--from", "/nowhere"], 3, "neither the URL"),
    "log of a version that is not there": (["log", "{channel}", "7"], 5, "Version 7 is not in"),
    "export to a file": (["export", "{channel}", "latest", "{tmp}/file"], 3, "file"),
    "gc of all": (["gc", "{channel}", "--keep-last", "0"], 2, "x>=1"),
    "gc with a time that is none": (["gc", "{channel}", "--grace", "soon"], 2, "not a duration"),
    "copy onto itself": (["relay", "{channel}", "{channel}", "--once"], 3, "is both source and target"),
    "keygen over a key": (["keygen", "{tmp}/file"], 3, "file"),
    "serve from memory": (
        ["serve", "model", "--channel", "memory://run", "--dry-run"],
        3,
        "one process only",
    ),
    "doctor of a size that is none": (["doctor", "{channel}", "--model", "big"], 2, "600M, 8B or 1T"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command(tmp_path: Path, name: str) -> None:
    words, exit_code, said = COMMANDS[name]
    channel = tmp_path / "channel"
    with Publisher(channel) as publisher:
        publisher.publish(WEIGHTS).wait(timeout_s=60)
    (tmp_path / "file").write_text("in the way")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = CliRunner().invoke(main, [word.format(tmp=tmp_path, channel=channel) for word in words])
    assert done.exit_code == exit_code, done.output
    assert said in done.stderr
    assert "Traceback" not in done.output
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


RUN = "0123456789abcdef"
SERVERS: dict[str, tuple[dict[str, Any] | int, list[str], str]] = {
    "no deltasync in it": (
        404,
        ["policy"],
        "Start the server with DELTASYNC_CHANNEL and --worker-extension-cls",
    ),
    "a model by its path": ({}, ["../b/tiny"], "serves the model ../b/tiny, and the trainer asks for policy"),
    "a model by another name": ({}, ["tiny", "other"], "Start the server with --served-model-name policy"),
    "raw log probabilities": (
        {"logprobs_mode": "raw_logits"},
        ["policy"],
        "--logprobs-mode processed_logprobs",
    ),
    "another run": (
        {"run_id": "other", "channel": "s3://b/old"},
        ["policy"],
        "Restart the server with DELTASYNC_CHANNEL",
    ),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_training_generates_on(
    memory_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the first batch, or, where only its heartbeat shows it, with the first version."""
    answer, models, said = SERVERS[name]
    monkeypatch.setattr(heartbeat, "_CONFIRM_S", 0.2)
    status = Status()
    status.answer, status.models = answer, models
    try:
        with pytest.raises(ConfigError) as caught:
            server.check(
                SimpleNamespace(**DEFAULTS), MODEL, status.url, compares=True, name="policy", wait_s=0.1
            )
            heartbeat.wait_for(
                open_store(memory_url), RUN, 1, {1: "0" * 64}, 30.0, [status.url], required=True
            )
    finally:
        status.close()
    assert said in str(caught.value) and status.url in str(caught.value)


HANGING: dict[str, list[str]] = {
    "watch": ["--once"],
    "log": [],
    "check": [],
    "repair": [],
    "gc": ["--keep-last", "1"],
    "export": ["latest", "{tmp}/exported"],
    "relay": ["memory://copy", "--once"],
    "follow": ["--once"],
    "doctor": [],
}
_Result = TypeVar("_Result")


@pytest.mark.parametrize("name", HANGING)
def test_a_store_that_hangs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command says so while it waits."""
    said = threading.Event()

    class Hanging(WrappedStore):
        def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
            assert said.wait(30), f"{verb} of {key} is not reported"
            raise TransientStoreError("away")

    lines: list[str] = []

    def echo(line: str, err: bool = False) -> None:
        lines.append(line)
        said.set()

    monkeypatch.setattr(output, "PATIENCE_S", 0.05)
    monkeypatch.setattr(output, "echo", echo)
    monkeypatch.setattr("deltasync.stores.open_store", lambda url: Hanging(open_store(url)))
    words = [word.format(tmp=tmp_path) for word in HANGING[name]]
    CliRunner().invoke(main, [name, "memory://hangs", *words])
    assert (
        "at memory://hangs has not finished after 0.05 s; the command waits. Ctrl-C ends it; `deltasync"
        in lines[0]
    )


def test_a_store_that_hangs_is_reported_within_five_seconds() -> None:
    """A real command, and a server that takes connections and never answers."""
    assert output.PATIENCE_S < 5
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"s3://bucket/run?anonymous=1&endpoint=http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "deltasync", "watch", url, "--once"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            silent.settimeout(60)
            connection, _ = silent.accept()
            assert child.stderr is not None
            assert "has not finished after 4 s" in child.stderr.readline()
            child.kill()
            connection.close()
