"""vLLM's own weight-transfer routes push versions into a real vLLM of two workers, which runs no driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from deltasync.channel.reading import ChannelReader
from deltasync.stores import open_store
from deltasync.tensors.bits import cast
from tests.faults import flipped
from tests.integration.expected_tokens import greedy
from tests.integration.vllm_server import Server, save_model, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BACKEND = ("--weight-transfer-config", '{"backend": "deltasync"}')
EXTENSION = ("--worker-extension-cls", "tests.integration.live_bits.LiveBits")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {
        "vocab_size": 71,
        "intermediate_size": 192,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    return save_model(tmp_path_factory.mktemp("vllm"), Qwen2Config, **fields)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    cores = sorted(os.sched_getaffinity(0))[-2:]
    bind = "|".join(map(str, cores))
    parallel = ("--tensor-parallel-size", "2")
    with serving(
        checkpoint, *BACKEND, *EXTENSION, *parallel, cores=cores, VLLM_CPU_OMP_THREADS_BIND=bind
    ) as server:
        yield server


def refusal(server: Server, path: str, body: object) -> str:
    """What vLLM says to a POST that fails."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.open(path, body)
    with caught.value as error:
        message: str = json.load(error)["error"]["message"]
        return message


def push(server: Server, version: int | None, **names: str) -> None:
    """In the order and with the bodies of TRL's `AsyncGRPOTrainer`."""
    server.json("/pause?mode=keep", {})
    server.json("/start_weight_update", {"is_checkpoint_format": True})
    server.json("/update_weights", {"update_info": {"version": version}})
    server.json("/finish_weight_update", names)
    server.json("/resume", {})


def refused_push(server: Server, update_info: object) -> str:
    server.json("/start_weight_update", {})
    return refusal(server, "/update_weights", {"update_info": update_info})


def rpc(server: Server, method: str, **arguments: str) -> list[Any]:
    results: list[Any] = server.json("/collective_rpc", {"method": method, "kwargs": arguments})["results"]
    return results


def live_bits(server: Server) -> list[Any]:
    found = rpc(server, "live_bits")
    assert len(found) == 2 and all(isinstance(held, dict) for held in found), found
    return found


def assert_live(server: Server, checkpoint: Path, weights: dict[str, Any]) -> None:
    """Live memory and tokens are those that vLLM gets when it loads these weights as a checkpoint itself."""
    bits, tokens = live_bits(server), greedy(server)
    folder = checkpoint.parent / "expected"
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    save_file(
        {name: cast(tensor, "bfloat16") for name, tensor in weights.items()}, folder / "model.safetensors"
    )
    rpc(server, "reload_weights", weights_path=str(folder))
    assert live_bits(server) == bits
    assert greedy(server) == tokens


def test_a_push_to_an_empty_channel_says_so_and_the_loaded_weights_stay(
    server: Server, checkpoint: Path
) -> None:
    server.json("/init_weight_transfer_engine", {"init_info": {}})
    assert "holds no channel yet" in refused_push(server, {})
    bad = {"init_info": {"channel": "nowhere://x"}}
    assert "nowhere" in refusal(server, "/init_weight_transfer_engine", bad)
    assert_live(server, checkpoint, server.weights)


def test_versions_are_pushed_bit_for_bit(server: Server, checkpoint: Path) -> None:
    loaded = live_bits(server)
    push(server, server.publish())
    assert live_bits(server) == loaded  # recognised
    seen = {tuple(greedy(server))}
    for _ in range(2):
        server.step()
        version = server.publish()
        push(server, version, weight_version=str(version))
        assert server.json("/weight_info") == {"weight_version": str(version)}
        assert_live(server, checkpoint, server.weights)
    server.weights["model.norm.weight"] *= 3.0
    server.weights["model.layers.0.mlp.down_proj.weight"] *= -1.5
    push(server, server.publish())
    assert_live(server, checkpoint, server.weights)
    assert tuple(greedy(server)) not in seen


def test_versions_between_are_skipped_and_the_newest_is_the_default(server: Server, checkpoint: Path) -> None:
    past = []
    for _ in range(4):
        server.step()
        past.append((server.publish(), {name: tensor.clone() for name, tensor in server.weights.items()}))
    version, weights = past[1]
    push(server, version)
    assert_live(server, checkpoint, weights)
    push(server, None)
    assert_live(server, checkpoint, server.weights)
    push(server, version)  # back, by the anchor and the deltas after it
    assert_live(server, checkpoint, weights)
    push(server, past[-1][0])
    assert_live(server, checkpoint, server.weights)


def test_a_push_without_a_pause_keeps_running_requests(server: Server, checkpoint: Path) -> None:
    lengths: list[int] = []
    asking = threading.Thread(target=lambda: lengths.append(len(greedy(server, token_count=900))))
    asking.start()
    server.wait_for_requests(1)
    for _ in range(3):
        server.step()
        server.publish()
        server.json("/start_weight_update", {})
        server.json("/update_weights", {"update_info": {}})
        server.json("/finish_weight_update", {})
    asking.join()
    assert lengths == [900]
    assert_live(server, checkpoint, server.weights)


@pytest.mark.parametrize(
    ("update_info", "said"),
    [
        ({"version": 999}, "Version 999 is not published; the newest is version"),
        ({"version": "7"}, "version must be a whole number from 1, or null for the newest, not '7'"),
        ({"version": 0}, "version must be a whole number from 1"),
        (
            {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2]]},
            "unexpected keyword argument 'names'",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_and_changes_nothing(
    server: Server, update_info: object, said: str
) -> None:
    before, tokens = live_bits(server), greedy(server)
    for _ in range(2):  # replies of the two workers would be out of step the second time
        assert said in refused_push(server, update_info)
        assert live_bits(server) == before
    assert greedy(server) == tokens


def test_a_bad_channel_is_refused(server: Server) -> None:
    path = "/init_weight_transfer_engine"
    other = refusal(server, path, {"init_info": {"channel": f"{server.channel}2"}})
    assert "Callers may not name" in other and "DELTASYNC_ALLOWED_CHANNELS" in other
    elsewhere = refusal(
        server, path, {"init_info": {"channel": "s3://bucket/run?endpoint=http://127.0.0.1:1"}}
    )
    assert "Only the server's settings may have options" in elsewhere
    assert "unexpected keyword argument 'port'" in refusal(server, path, {"init_info": {"port": 1}})
    server.json(path, {"init_info": {"channel": server.channel}})


def test_a_damaged_record_leaves_the_old_bits_until_it_is_repaired(server: Server, checkpoint: Path) -> None:
    before, tokens = live_bits(server), greedy(server)
    server.step()
    with server.publishing_as(lambda _, data: flipped(data)) as repair:
        server.publish()
    assert "has another body" in refused_push(server, {})
    assert (live_bits(server), greedy(server)) == (before, tokens)
    repair()
    push(server, None)
    assert_live(server, checkpoint, server.weights)


def test_a_version_with_other_bits_than_it_promises_is_rolled_back_by_both(
    server: Server, checkpoint: Path
) -> None:
    before, tokens = live_bits(server), greedy(server)
    server.step()
    with server.publishing_a_wrong_fingerprint():
        server.publish()
    assert "did not give the published bits" in refused_push(server, {})
    assert (live_bits(server), greedy(server)) == (before, tokens)
    assert server.publisher is not None
    server.publisher._uploader.finisher.maintenance._anchor_every = 1  # type: ignore[union-attr]
    server.publish()
    server.settle()
    push(server, None)
    assert_live(server, checkpoint, server.weights)


TRAIN = """
import vllm.v1.worker.cpu.shm
import sys, torch, vllm_plugin
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm_plugin.trainer_side import TrainerInit

checkpoint, channel, server, saved = sys.argv[1:]
vllm_plugin.register()
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
init = TrainerInit(channel, {"resume": True}, rank=0)
parts = dict(client=HTTPVLLMWeightSyncClient(server), source=ModuleSource(model))
engine = WeightTransferTrainerFactory.trainer_init(init, **parts)
for _ in range(2):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[..., ::7] *= -1.25
    engine.send_weights()
engine.shutdown()
save_file(dict(model.named_parameters()), saved)
"""


def test_vllms_own_trainer_side_pushes_by_its_factory_and_client(
    server: Server, checkpoint: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "sent.safetensors"
    command = [sys.executable, "-c", TRAIN, str(checkpoint), server.channel, server.url, str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    newest = ChannelReader(open_store(server.channel)).newest()
    assert newest is not None
    assert server.json("/weight_info") == {"weight_version": str(newest.record.version)}
    assert_live(server, checkpoint, load_file(saved))
