"""`deploy/space.py`: the real huggingface_hub against the local Hub."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deltasync.ops.cli import main
from deploy import space
from tests.hub.fixtures import HubServer

PACKAGE = "deltasync @ https://example.com/deltasync-9-cp311-abi3-manylinux_2_34_x86_64.whl"
TOKEN = "token-of-these-spaces"
FILES = Path(space.__file__).with_name("spaces")
WORDLE = Path(__file__).parents[2] / "examples" / "wordle"
numbers = itertools.count()


@pytest.fixture
def names(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, str]:
    """A bucket and two Spaces that do not exist yet; the tokens are in the environment."""
    monkeypatch.setenv("DELTASYNC_HTTP_TOKEN", TOKEN)
    number = next(numbers)
    return f"user/run-{number}", f"user/one-{number}", f"user/two-{number}"


def deploy(kind: str, *arguments: str) -> Result:
    return CliRunner().invoke(space.main, [kind, *arguments])


def replica_arguments(names: tuple[str, str, str]) -> list[str]:
    bucket, *spaces = names
    arguments = [
        *spaces,
        "--channel",
        f"hf://buckets/{bucket}/a",
        "--model",
        "Qwen/Qwen3-0.6B",
        "--hardware",
        "l4x1",
    ]
    arguments += ["--package", PACKAGE]
    return [
        *arguments,
        "--secret",
        "HF_TOKEN",
        "--secret",
        "DELTASYNC_HTTP_TOKEN",
        "--variable",
        "DELTASYNC_KV_CACHE=keep",
    ]


def known(hub: HubServer, name: str) -> dict[str, Any]:
    return dict(hub.ask("GET", "/_spaces")[name])


def git_digests(folder: Path) -> dict[str, str]:
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return {
        name: hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() for name, data in contents.items()
    }


def test_replicas(hub: HubServer, names: tuple[str, str, str]) -> None:
    bucket, *spaces = names
    arguments = replica_arguments(names)
    planned = deploy("vllm", *arguments, "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert hub.requests() == {}
    assert TOKEN not in planned.output and hub.env["HF_TOKEN"] not in planned.output
    assert f"add_space_secret(repo_id='{spaces[1]}', key='HF_TOKEN', value='***')" in planned.output

    done = deploy("vllm", *arguments)
    assert done.exit_code == 0, done.output
    assert TOKEN not in done.output and hub.env["HF_TOKEN"] not in done.output
    hosts = [
        f"{name} is being built, and will answer at https://{name.replace('/', '-')}.hf.space"
        for name in spaces
    ]
    assert done.output.splitlines() == [*planned.output.splitlines(), *hosts]
    requests = hub.requests()
    del requests["validate_yaml"], requests["preupload"]
    made = [line.split("(")[0] for line in planned.output.splitlines()]
    assert requests == {
        "create_bucket": made.count("create_bucket"),
        "create_repo": made.count("create_repo"),
        "variable": made.count("add_space_variable"),
        "secret": made.count("add_space_secret"),
        "hardware": made.count("request_space_hardware"),
        "commit": made.count("upload_folder"),
        "space_info": made.count("space_info"),
    }
    assert hub.ask("GET", "/_spaces").keys() >= set(spaces)
    for name in spaces:
        assert known(hub, name) == {
            "private": False,
            "variables": {
                "PACKAGE": PACKAGE,
                "DELTASYNC_CHANNEL": f"hf://buckets/{bucket}/a",
                "MODEL": "Qwen/Qwen3-0.6B",
                "DELTASYNC_KV_CACHE": "keep",
            },
            "secrets": {"HF_TOKEN": hub.env["HF_TOKEN"], "DELTASYNC_HTTP_TOKEN": TOKEN},
            "hardware": "l4x1",
            "sleep_s": None,
            "files": git_digests(FILES / "vllm"),
            "texts": {path.name: path.read_text() for path in (FILES / "vllm").iterdir()},
            "commits": 1,
        }


def test_a_second_run_changes_what_changed(
    hub: HubServer, names: tuple[str, str, str], tmp_path: Path
) -> None:
    _, name, _ = names
    arguments = replica_arguments(names)
    assert deploy("vllm", *arguments).exit_code == 0
    before = known(hub, name)
    assert deploy("vllm", *arguments).exit_code == 0
    assert known(hub, name) == before

    wheel = tmp_path / "deltasync-9-cp311-abi3-manylinux_2_34_x86_64.whl"
    wheel.write_bytes(b"PK\x03\x04\0\0 bytes of a wheel" * 100)
    others = ["--package", str(wheel), "--variable", "DELTASYNC_KV_CACHE=recompute", "--sleep-after", "900"]
    done = deploy("vllm", *arguments, *others, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["hosts"][name].startswith("https://")
    assert TOKEN not in done.output
    after = known(hub, name)
    changed = {"PACKAGE": f"./{wheel.name}", "DELTASYNC_KV_CACHE": "recompute"}
    assert after == before | {
        "variables": before["variables"] | changed,
        "sleep_s": 900,
        "files": before["files"] | {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest()},
        "commits": 2,
    }


def test_replicas_that_require_signatures(
    hub: HubServer, names: tuple[str, str, str], tmp_path: Path
) -> None:
    key = tmp_path / "trainer"
    assert CliRunner().invoke(main, ["keygen", str(key)]).exit_code == 0
    public = tmp_path / "trainer.pub"
    wheel = tmp_path / "deltasync-9-cp311-abi3-manylinux_2_34_x86_64.whl"
    wheel.write_bytes(b"PK\x03\x04")
    others = ["--trusted-keys", str(public), "--package", str(wheel)]
    assert deploy("vllm", *replica_arguments(names), *others).exit_code == 0
    found = known(hub, names[1])
    assert found["variables"]["DELTASYNC_TRUSTED_KEYS"] == "/app/trusted-keys"
    assert found["variables"]["PACKAGE"] == f"./{wheel.name}[signing]"
    assert found["texts"]["trusted-keys"] == public.read_text()

    refused = deploy("vllm", *replica_arguments(names), "--trusted-keys", str(key))
    assert refused.exit_code == 3 and str(key) in refused.stderr
    assert key.read_text() not in refused.output


def test_a_refusal_names_the_call_and_can_be_made_good(hub: HubServer, names: tuple[str, str, str]) -> None:
    arguments = replica_arguments(names)
    hub.arm("hardware", status=402, message="Payment is required for l4x1")
    refused = deploy("vllm", *arguments)
    assert refused.exit_code == 6
    assert "request_space_hardware(" in refused.stderr and "run this again to continue" in refused.stderr
    assert TOKEN not in refused.output
    assert known(hub, names[1])["files"] == {}
    assert deploy("vllm", *arguments).exit_code == 0
    assert known(hub, names[2])["commits"] == 1


def test_the_environment(
    hub: HubServer, names: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = names[1]
    assert (
        "needs the secret DELTASYNC_ENVIRONMENT_TOKEN" in deploy("wordle", name, "--package", PACKAGE).stderr
    )
    monkeypatch.setenv("DELTASYNC_ENVIRONMENT_TOKEN", TOKEN)
    given = [
        "--secret",
        "DELTASYNC_ENVIRONMENT_TOKEN",
        "--variable",
        "WORDS=full",
        "--private",
        "--package",
        PACKAGE,
    ]
    assert "There is no nowhere/Dockerfile" in deploy("wordle", name, *given, "--files", "nowhere").stderr
    done = deploy("wordle", name, *given)
    assert done.exit_code == 0, done.output
    found = known(hub, name)
    assert found["private"] is True and found["hardware"] == "cpu-basic"
    assert found["variables"] == {"PACKAGE": PACKAGE, "WORDS": "full"}
    assert found["secrets"] == {"DELTASYNC_ENVIRONMENT_TOKEN": TOKEN}
    assert found["files"] == git_digests(WORDLE)
    assert "create_bucket" not in hub.requests()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--channel", "file:///data/run", "--secret", "DELTASYNC_HTTP_TOKEN"],
            "cannot reach file:///data/run",
        ),
        (["--channel", "s3://bucket/run"], "needs the secret DELTASYNC_HTTP_TOKEN"),
        (["--channel", "hf://buckets/a/b", "--secret", "DELTASYNC_HTTP_TOKEN"], "needs the secret HF_TOKEN"),
        (["--channel", "s3://bucket/run", "--secret", "NOT_SET"], "where NOT_SET is not set"),
        (["--channel", "s3://bucket/run", "--variable", "NAME"], "NAME=VALUE, not 'NAME'"),
        (
            ["--channel", "s3://bucket/run", "--secret", "DELTASYNC_HTTP_TOKEN", "--package", "no.whl"],
            "There is no wheel no.whl",
        ),
        (
            ["--channel", "s3://bucket/run", "--secret", "DELTASYNC_HTTP_TOKEN", "--sleep-after", "9"],
            "together with its hardware",
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_done(
    hub: HubServer, names: tuple[str, str, str], arguments: list[str], sentence: str
) -> None:
    arguments = [
        "--model",
        "some/model",
        *([] if "--package" in arguments else ["--package", PACKAGE]),
        *arguments,
    ]
    refused = deploy("vllm", names[1], *arguments)
    assert refused.exit_code == 3
    assert sentence in refused.stderr
    assert hub.requests() == {}


@pytest.mark.parametrize("kind", ["vllm", "wordle"])
def test_a_package_has_to_be_named(hub: HubServer, names: tuple[str, str, str], kind: str) -> None:
    """No name on an index stands for it: whoever takes the name would run beside the secrets."""
    arguments = ["--channel", "s3://bucket/run", "--model", "some/model"] if kind == "vllm" else []
    refused = deploy(kind, names[1], *arguments)
    assert refused.exit_code == 2 and "--package" in refused.stderr
    assert hub.requests() == {}
