"""vLLM's offline `LLM` follows a channel. In a process of its own: vLLM wants to be imported first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltasync import Publisher
from tests.integration.vllm_server import PATIENCE_S, digests, save_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
path, channel = sys.argv[1:]
llm = LLM(path, enforce_eager=True, max_model_len=256, worker_extension_cls="vllm_plugin.DeltaSyncWorkerExtension")
import vllm_plugin
from deltasync.errors import ApplyError, ConfigError

def answer():
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    return list(llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params, use_tqdm=False)[0].outputs[0].token_ids)

def told(what):
    print("TOLD " + json.dumps(what), flush=True)

try:
    answer()
except ConfigError as error:
    told(str(error))
replica = vllm_plugin.follow(llm, channel)
told(replica.sync())
told([len(answer()), llm.llm_engine.get_weight_version(), replica.version])
told(replica._follow.target.digest())
try:
    replica.sync(version=99, timeout_s=0.2)
except ApplyError as error:
    told(str(error))
told(replica.sync(version=2))
replica.close()
"""


def test_an_offline_llm_follows_when_asked(tmp_path: Path) -> None:
    path, channel = save_model(tmp_path), f"file://{tmp_path}/channel"
    weights = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    with Publisher(channel) as publisher:
        for _ in range(3):
            publisher.publish(weights.items()).wait(PATIENCE_S)
            served = digests(weights)
            weights = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in weights.items()}
    environ = {
        "DELTASYNC_CHANNEL": channel,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-c", _SCRIPT, str(path), channel]
    done = subprocess.run(
        command,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    told = [
        json.loads(line.removeprefix("TOLD "))
        for line in done.stdout.splitlines()
        if line.startswith("TOLD ")
    ]
    assert len(told) == 6, done.stdout[-2000:] + done.stderr[-2000:]
    assert told[0].startswith(
        f"This engine would never follow {channel}: nothing has called vllm_plugin.follow("
    )
    assert told[1] == 3
    assert told[2] == [30, "3", 3]
    assert told[3] == served
    assert "Version 99 is not live, but version 3" in told[4]
    assert told[5] == 3
