"""The process's default device, which torch.set_default_device sets for all code, decides nothing here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import deltasync
from deltasync import Publisher, Replica, follow
from tests.conftest import assert_same_bits

ROOT = Path(deltasync.__file__).parents[1]
PACKAGES = ("deltasync", "vllm_plugin", "sglang_plugin", "mlx_plugin", "trl_callback")
FACTORIES = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
    ),
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def test_whatever_makes_a_tensor_says_where() -> None:
    without = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                f"torch.{name}" for name in FACTORIES
            }:
                given = {keyword.arg for keyword in node.keywords}
                without += [] if given & {"device", None} else [f"{path.relative_to(ROOT)}:{node.lineno}"]
    assert not without, "these follow the default device"


@pytest.fixture(params=["meta", "cuda:99"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_default_device(request.param)
    yield
    torch.set_default_device(None)


def module() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(40, 30, device="cpu"), torch.nn.Linear(30, 20, device="cpu"))
    return made.to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("codec", ["packed", "context", "raw"])
@pytest.mark.usefixtures("elsewhere")
def test_publishing_and_following_use_no_default_device(codec: str, memory_url: str) -> None:
    given, followed = module(), module()
    with Publisher(memory_url, codec=codec, anchor_every=2) as publisher:
        publisher.publish(given).wait(60)
        replica = Replica(memory_url)
        replica.sync()
        with follow(followed, memory_url, replica_id="r", poll_interval_s=0.05) as following:
            for step in range(3):
                for param in given.parameters():
                    param.view(-1)[step::7] += 1
                version = publisher.publish(given, step=step).wait(60).version
                assert replica.sync() == version and replica.audit()
                following.wait(version, timeout_s=60)
                assert_same_bits(replica.state_dict(), given.state_dict())
                assert_same_bits(followed.state_dict(), given.state_dict())
        wider = {name: tensor.float() + 1 for name, tensor in given.state_dict().items()}
        publisher.publish(
            (name, tensor.mT.contiguous().mT if tensor.ndim == 2 else tensor)
            for name, tensor in wider.items()
        ).wait(60)
    late = Replica(memory_url)
    late.sync()
    assert_same_bits(late.state_dict(), {name: tensor.bfloat16() for name, tensor in wider.items()})
    with Publisher(memory_url, resume=True) as publisher:
        assert publisher.publish(given).wait(60).kind == "delta"
