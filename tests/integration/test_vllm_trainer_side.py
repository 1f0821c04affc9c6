"""A trainer on vLLM's own trainer side, by its factory and its client; what goes over the wire is recorded.

In a process of its own: vLLM for the CPU wants to be imported first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TRAIN = """
import vllm.v1.worker.cpu.shm
import json, sys, torch, vllm_plugin
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from deltasync import Replica
from vllm_plugin.trainer_side import TrainerInit

class Client(HTTPVLLMWeightSyncClient):
    def _post(self, path, json=None):
        sent.append([path, json, None if "init" in path else replica.sync()])

url, sent = sys.argv[1], []
vllm_plugin.register()
vllm_plugin.register()
model = torch.nn.Linear(40, 30).to(torch.bfloat16)
replica = Replica(url)
parts = dict(client=Client("http://127.0.0.1:1"), source=ModuleSource(model))
engine = WeightTransferTrainerFactory.trainer_init(TrainerInit(url, {"codec": "packed"}, rank=0), **parts)
other = WeightTransferTrainerFactory.trainer_init(TrainerInit(url, rank=1), **parts)
for _ in range(2):
    engine.send_weights()
    other.send_weights()
    assert all(torch.equal(replica.state_dict()[k], v) for k, v in model.state_dict().items())
    with torch.no_grad():
        model.weight[3, :5] += 1
engine.shutdown()

from vllm.distributed.weight_transfer import base
if hasattr(base, "ParamMeta") and hasattr(base.WeightSource, "owned_names"):
    from functools import cached_property
    from deltasync.errors import ConfigError

    class Stages(base.WeightSource):  # rank 0 owns a, rank 1 owns b
        @cached_property
        def metadata(self):
            return [base.ParamMeta(name, torch.bfloat16, (4,), owners=(at,)) for at, name in enumerate("ab")]
        def iter_full(self):
            yield "a", torch.ones(4)

    class Shards(ModuleSource):
        iter_full = base.WeightSource.iter_full

    for source, said in ((Stages(), "1 tensors not there, such as b"), (Shards(model), "2 tensors not there")):
        try:
            WeightTransferTrainerFactory.trainer_init(TrainerInit(url, rank=1), **parts | {"source": source})
        except ConfigError as error:
            assert said in str(error), error
        else:
            raise AssertionError(source)
print("SENT " + json.dumps(sent))
"""


def test_each_send_is_published_before_the_servers_are_told_its_version(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, url], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SENT ")]
    begun, *rounds = json.loads(line.removeprefix("SENT "))
    assert begun[:2] == ["init_weight_transfer_engine", {"init_info": {"channel": url}}]
    assert rounds == [
        told
        for version in (1, 2)
        for told in (
            ["start_weight_update", None, version],
            ["update_weights", {"update_info": {"version": version}}, version],
            ["finish_weight_update", {"weight_version": str(version)}, version],
        )
    ]
