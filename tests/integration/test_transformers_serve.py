"""`transformers serve` and continuous batching with a model that follows: versions change between and under
requests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import http_server
from tests.http_server import ROOT, Server, digests, save, weights_of
from tests.integration.test_module import Weights, llama, training

# Longer than a block of the paged cache, so that its prefix could be shared.
PROMPT = [(7 * index) % 61 + 1 for index in range(300)]
TEXT = " ".join(f"w{token}" for token in PROMPT)


def fresh(checkpoint: Path, weights: Weights) -> str:
    """The greedy answer of a model that was loaded with these weights."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.load_state_dict(weights)
    with torch.no_grad():
        tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, len(PROMPT) :]
    return " ".join(f"w{token}" for token in tokens.tolist())


def answer(server: Server, count: int = 8) -> tuple[str, str]:
    headers, reply = server.complete(TEXT, max_tokens=count)
    return headers["x-deltasync-versions"], reply["choices"][0]["text"].strip()


@pytest.mark.parametrize(
    "options", [(), ("--continuous-batching", "--cb-num-blocks", "64")], ids=["one by one", "batched"]
)
def test_tokens_are_those_of_a_fresh_load_at_each_version(tmp_path: Path, options: Sequence[str]) -> None:
    checkpoint, url = save(llama(seed=1), tmp_path / "model"), f"file://{tmp_path}/channel"
    with training(url, weights_of(checkpoint)) as trainer:
        trainer.publish()
        script = str(ROOT / "examples" / "serve_transformers.py")
        command = [sys.executable, script, str(checkpoint), "--channel", url, "--device", "cpu", *options]
        with http_server.serving(command, tmp_path / "log") as server, ThreadPoolExecutor(3) as pool:
            answers = []
            for version in range(1, 6):
                server.until(version)
                assert server.digest() == digests(trainer.published[version])
                expected = fresh(checkpoint, trainer.published[version])
                assert answer(server) == (f"{version}..{version}", expected)
                assert [each.result()[1] for each in [pool.submit(answer, server) for _ in range(3)]] == [
                    expected
                ] * 3
                answers.append(expected)
                # Under requests: they end, and the next prompt does not see what they leave.
                running = [pool.submit(answer, server, 60) for _ in range(3)]
                server.until(trainer.publish())
                for each in running:
                    each.result()
            assert len({*answers}) > 1, "no version changed an answer, which proves nothing"
