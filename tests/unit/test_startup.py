"""Variables that a server cannot follow by end its command at once, by name and with what was typed, in each
engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import vllm_plugin
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError
from deltasync.serve import startup

WRONG = {
    "an empty channel": (
        {"DELTASYNC_CHANNEL": ""},
        "DELTASYNC_CHANNEL='' names no channel, as where a secret is missing",
    ),
    "a blank channel": ({"DELTASYNC_CHANNEL": " \n"}, r"DELTASYNC_CHANNEL=' \n' names no channel"),
    "one slash": (
        {"DELTASYNC_CHANNEL": "s3:/b/run"},
        "DELTASYNC_CHANNEL='s3:/b/run': A bucket is written s3://bucket/prefix",
    ),
    "a short bucket": (
        {"DELTASYNC_CHANNEL": "s3://b/r"},
        "not 's3://b/r'. A bucket's name has two characters or more.",
    ),
    "an http URL": (
        {"DELTASYNC_CHANNEL": "http://host:9000/b/run"},
        "written s3://bucket/prefix?endpoint=http://host",
    ),
    "a bare word": ({"DELTASYNC_CHANNEL": "run"}, "A path in this directory is written './run'"),
    "a second one": (
        {"DELTASYNC_CHANNEL": "s3://bucket/run s3:/copy/run"},
        "Not a valid object key: 'run s3:/copy/run'",
    ),
    "memory": (
        {"DELTASYNC_CHANNEL": "memory://run"},
        "DELTASYNC_CHANNEL='memory://run': a memory:// channel exists in one",
    ),
    "a misspelt name": ({"DELTASYNC_CHANEL": "s3://bucket/run"}, "the nearest is DELTASYNC_CHANNEL"),
    "a misspelt prefix": ({"DELTASYN_CHANNEL": "s3://bucket/run"}, "the nearest is DELTASYNC_CHANNEL"),
    "a dash in the prefix": ({"DELTA_SYNC_CHANNEL": "s3://bucket/run"}, "the nearest is DELTASYNC_CHANNEL"),
    "another's name": (
        {"DELTASYNC_CHANNEL": "file:///run", "DELTASYNC_POL_INTERVAL_S": "1"},
        "DELTASYNC_POLL_INTERVAL_S",
    ),
    "a wrong value": (
        {"DELTASYNC_CHANNEL": "file:///run", "DELTASYNC_PIN": "last"},
        "DELTASYNC_PIN must be newest or a",
    ),
    "an empty token": (
        {"DELTASYNC_CHANNEL": "file:///run", "DELTASYNC_HTTP_TOKEN": ""},
        "DELTASYNC_HTTP_TOKEN is empty",
    ),
    "empty keys": (
        {"DELTASYNC_CHANNEL": "file:///run", "DELTASYNC_TRUSTED_KEYS": ""},
        "DELTASYNC_TRUSTED_KEYS is empty",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_variable_is_named_with_what_was_typed(wrong: str) -> None:
    variables, sentence = WRONG[wrong]
    with pytest.raises(ConfigError) as error:
        startup.is_to_follow(variables)
    assert sentence in str(error.value)
    assert all(
        name in str(error.value) for name, value in variables.items() if value not in ("file:///run", "")
    )


def test_what_a_server_follows() -> None:
    assert not startup.is_to_follow({"DELTA_LAKE_SYNC": "1", "ASYNC_CHANNEL": "x", "PATH": "/bin"})
    assert startup.is_to_follow(
        {"DELTASYNC_CHANNEL": "s3://bucket/run?region=eu&endpoint=http://host:9000\n"}
    )
    assert startup.is_to_follow({"DELTASYNC_CHANNEL": "memory://run"}, alone=False)


def test_a_name_of_a_setting_is_told_by_its_nearest() -> None:
    for make in (ReplicaSettings, ReplicaSettings.from_env):
        with pytest.raises(ConfigError, match=r"Unknown setting: pinn\. Did you mean pin\?"):
            make(pinn="3")  # type: ignore[call-arg, unused-ignore]
        with pytest.raises(ConfigError, match=r"Unknown setting: zz\. Known: adapter, "):
            make(zz="3")  # type: ignore[call-arg, unused-ignore]


# As engines do: vLLM calls its plugins while it builds its options, SGLang before; it goes on after any
# Exception.
_VLLM = """
import sys, vllm_plugin
sys.argv[:] = ["/bin/vllm", "serve", "MODEL", *sys.argv[1:]]
vllm_plugin.register()
print("loads the model")
"""
_SGLANG = """
import sglang_plugin
try:
    sglang_plugin.register()
except Exception:
    pass
print("loads the model")
"""
_TRANSFORMERS = """
import sys
sys.argv[1:] = ["MODEL"]
from examples import serve_transformers
serve_transformers.main()
print("loads the model")
"""
_ENGINES = {"vllm": _VLLM, "sglang": _SGLANG, "transformers": _TRANSFORMERS}


def ended(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DELTASYNC_")}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(
        command, cwd=root, env=environ | variables, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("engine", "wrong"),
    [("vllm", "an empty channel"), ("sglang", "one slash"), ("transformers", "an empty channel")],
)
def test_an_engine_ends_before_it_loads_anything(engine: str, wrong: str) -> None:
    if engine == "transformers":
        pytest.importorskip("transformers.cli.serving.server")
    variables, sentence = WRONG[wrong]
    done = ended(_ENGINES[engine], **variables)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "loads the model" not in done.stdout, done.stderr
    assert last.startswith("deltasync: ") and sentence in last


def test_a_command_that_names_the_extension_needs_a_channel() -> None:
    extension = ("--worker-extension-cls", vllm_plugin.EXTENSION)
    done = ended(_VLLM, *extension)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "deltasync: DELTASYNC_CHANNEL is not set, but this command names "
    )
    assert not startup.runs_extension(
        ["serve", *extension, "--weight-transfer-config", "{}"], vllm_plugin.EXTENSION
    )
    assert not startup.runs_extension(["serve"], vllm_plugin.EXTENSION)
