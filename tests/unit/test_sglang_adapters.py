"""An adapter in SGLang's terms, and the version that a request names, without SGLang;
tests/integration/test_sglang_adapter.py has a real one.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltasync.errors import ModelMismatchError
from deltasync.serve.adapters import VersionNames
from deltasync.serve.constraint import VersionConstraint, constraint
from sglang_plugin import adapters

PREFIX = "base_model.model.model.layers.0."
TENSORS = {
    f"{PREFIX}self_attn.q_proj.lora_A.weight": torch.zeros(4, 8),
    f"{PREFIX}self_attn.q_proj.lora_B.weight": torch.zeros(8, 4),
    f"{PREFIX}mlp.down_proj.lora_A.weight": torch.zeros(4, 16),
    f"{PREFIX}mlp.down_proj.lora_B.weight": torch.zeros(8, 4),
}


def config(**fields: Any) -> bytes:
    return json.dumps({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | fields).encode()


def test_sglang_scales_as_peft_does() -> None:
    found = adapters.sglang_config(config(), TENSORS)
    assert found["target_modules"] == ["down_proj", "q_proj"]
    assert found["lora_alpha"] / found["r"] == 2
    found = adapters.sglang_config(config(use_rslora=True), TENSORS)
    assert found["lora_alpha"] / found["r"] == 4  # 8 / sqrt(4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base_model.model.lm_head.weight", (8, 8)),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 8)),
        (f"{PREFIX}self_attn.q_proj.lora_magnitude_vector", (8,)),
        (f"{PREFIX}self_attn.q_proj.lora_B.bias", (8,)),
        (f"{PREFIX}mlp.experts.0.up_proj.lora_A.weight", (4, 8)),
        ("base_model.model.model.visual.layers.0.attn.qkv_proj.lora_A.weight", (4, 8)),
        (f"{PREFIX}mlp.up_proj.lora_A.weight", (4, 8)),  # without gate_proj
        (f"{PREFIX}mlp.gate_proj.lora_A.weight", (2, 8)),
        (f"{PREFIX}mlp.gate_proj.lora_B.weight", (8, 2)),
    ],
)
def test_what_sglang_passes_over_or_scales_otherwise_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelMismatchError, match="has others: ") as caught:
        adapters.sglang_config(config(), TENSORS | {name: torch.zeros(shape)})
    assert name in str(caught.value)


def test_a_scale_of_its_own_is_refused() -> None:
    with pytest.raises(ModelMismatchError, match="has others: q_proj"):
        adapters.sglang_config(config(alpha_pattern={"q_proj": 1}), TENSORS)


def ask(names: VersionNames, **document: Any) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of a reply: what the application finds, or an error."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        found = json.loads((await receive())["body"])
        chosen = adapters._choice.get()
        body = json.dumps({"found": found, "made_by": chosen and chosen.name}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(document).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    routes: Any = SimpleNamespace(target=SimpleNamespace(names=names))
    asyncio.run(adapters.choose_versions(application, routes)({"type": "http"}, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, json.loads(sent[1]["body"])


def test_a_request_names_a_version_by_its_model_or_its_adapter() -> None:
    names = VersionNames("policy")
    assert ask(names, model="policy")[0] == 503
    for version in (1, 2, 3):
        names.serve(f"policy-v{version}")
    for document, made_by in (
        ({"model": "policy"}, "policy-v3"),
        ({"model": "policy-v2"}, "policy-v2"),
        ({"model": "base:policy-v1"}, "policy-v1"),
        ({"model": "base", "lora_path": "policy"}, "policy-v3"),
    ):
        status, headers, body = ask(names, **document)
        assert (status, headers["x-deltasync-versions"]) == (200, "{0}..{0}".format(made_by[-1]))
        assert body["made_by"] == made_by
        assert body["found"]["model"] == "policy"
    status, _, body = ask(names, lora_path=["policy-v1"] * 2)
    assert (status, body["made_by"], "model" in body["found"]) == (200, "policy-v1", False)
    for document in ({"model": "base"}, {"model": "policy-2"}, {"lora_path": "another"}, {"lora_path": None}):
        assert ask(names, **document) == (200, {}, {"found": document, "made_by": None})


def test_a_version_that_is_not_served_is_refused() -> None:
    names = VersionNames("policy")
    for version in (1, 2, 3):
        names.serve(f"policy-v{version}")
    for document in ({"model": "policy-v9"}, {"model": "base:policy-v9"}, {"lora_path": "policy-v9"}):
        status, _, body = ask(names, **document)
        assert status == 409
        assert body["error"]["message"].startswith(
            "policy-v9 is not served here. Name policy, the newest version"
        )
    assert ask(names, lora_path=["policy", None])[0] == 400
    token = constraint.set(VersionConstraint(2, exact=True))
    assert ask(names, model="policy")[2]["made_by"] == "policy-v2"
    assert ask(names, model="policy-v1")[0] == 409
    constraint.reset(token)
