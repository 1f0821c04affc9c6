"""Every command that the repository prints is one that its program takes (`tests/docs/printed.py`)."""

from __future__ import annotations

import click
import pytest

from deltasync.ops.cli import main
from tests.docs.printed import CHECKS, Printed, found

FOUND = found()


@pytest.mark.parametrize("printed", FOUND, ids=lambda printed: f"{printed.where}: {printed}"[:150])
def test_its_program_takes_it(printed: Printed) -> None:
    printed.check()


def test_commands_are_found() -> None:
    """In each kind of place, and each command of deltasync."""
    assert {each.words[1] for each in FOUND if each.words[0] == "deltasync"} >= set(
        main.list_commands(click.Context(main))
    )
    places = {each.where for each in FOUND}
    assert places >= {
        "README.md",
        "deploy/compose/compose.yaml",
        "deploy/space.py",
        "deploy/spaces/vllm/entrypoint.sh",
    }
    assert places >= {
        "deltasync/channel/signing.py",
        "examples/async_grpo.py",
        "deploy/production-stack/values.yaml",
    }


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("deltasync repare s3://b/r", "no command repare"),
        ("deltasync check --read s3://b/r", "No such option"),
        ("deltasync gc s3://b/r --keep-last many", "not a valid integer"),
        ("vllm serve MODEL --no-such-option", "does not know"),
        ("vllm serve MODEL --max-model-len soon", "refuses"),
        ("make no-such-target", "no no-such-target"),
        ("make demo-hosts HOTS=x", "no HOTS"),
        ("pip install deltasync[vllm]", "on no index"),
        ("pip install .[vlm]", "no extra"),
        ("python examples/no_such.py", "there is no"),
        ("python -m benchmarks.codec --no-such-option", "does not know"),
        (
            "python deploy/space.py wordle me/w --package dist/d-cp311-abi3-linux_x86_64.whl",
            "make dist makes no",
        ),
        ("kubectl apply -f deploy/k8s/no-such.yaml", "there is no"),
    ],
)
def test_what_its_program_refuses_is_found(words: str, reason: str) -> None:
    start = next(start for start in sorted(CHECKS, key=len, reverse=True) if words.startswith(start))
    with pytest.raises(AssertionError, match=reason):
        CHECKS[start](tuple(words.split()))
