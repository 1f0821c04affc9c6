"""A real vLLM that embeds follows like one that generates, and one version makes each reply, as transformers
makes it.
"""

from __future__ import annotations

import itertools
import json
import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, Qwen3Config

from tests.integration.vllm_server import Server, Weights, save_model, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

INPUTS = [[5 + at, 7, 9, 11, 20 - at] * (1 + at % 3) for at in range(16)]
NEAR, FAR = 0.995, 0.9  # cosines: of bfloat16 with float32, of one version with another


def embed(server: Server) -> tuple[torch.Tensor, str]:
    body = {"model": server.json("/v1/models")["data"][0]["id"], "input": INPUTS, "encoding_format": "float"}
    with server.open("/v1/embeddings", body) as reply:
        rows = [row["embedding"] for row in json.load(reply)["data"]]
        return torch.tensor(rows), reply.headers["x-deltasync-versions"]


def expected(checkpoint: Path, weights: Weights) -> torch.Tensor:
    """The last token's state of each input, of length one."""
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict(
        {name.removeprefix("model."): tensor.bfloat16().float() for name, tensor in weights.items()}
    )
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([tokens])).last_hidden_state[0, -1] for tokens in INPUTS]
    return torch.nn.functional.normalize(torch.stack(rows))


def test_embeddings_are_those_of_one_version_in_each_reply(tmp_path: Path) -> None:
    checkpoint = save_model(
        tmp_path, Qwen3Config, intermediate_size=192, head_dim=32, tie_word_embeddings=True
    )
    of: dict[int, torch.Tensor] = {}
    with (
        serving(checkpoint, "--runner", "pooling", "--convert", "embed") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        with pytest.raises(urllib.error.HTTPError, match="503") as caught:
            server.json("/v1/embeddings", {"input": "a"})
        caught.value.close()
        stop = threading.Event()
        replies: list[tuple[torch.Tensor, str]] = []

        def publish() -> None:
            version = server.publish()
            of[version] = expected(checkpoint, server.weights)
            server.assert_serves(version)

        def keep_asking() -> None:
            while not stop.is_set():
                replies.append(embed(server))

        publish()
        asking = [pool.submit(keep_asking) for _ in range(4)]
        try:
            for _ in range(8):
                for tensor in server.weights.values():
                    tensor += (
                        0.3 * tensor.std() * torch.randn(tensor.shape, generator=server.rng)
                        if tensor.ndim > 1
                        else 0
                    )
                publish()
        finally:
            stop.set()
        for each in asking:
            each.result()
        replies.append(embed(server))
        assert server.status()["error"] is None
    assert all((one * other).sum(1).max() < FAR for one, other in itertools.pairwise(of.values()))
    for found, versions in replies:
        first, _, last = versions.partition("..")
        assert first == last
        assert (found * of[int(first)]).sum(1).min() > NEAR, versions
    assert len({versions for _, versions in replies}) > 4
