"""Each TRL that is said to be supported, fetched from the package index and imported in a process of its own.

Some minutes, and downloads: `make test-long`, or LONG_TESTS=1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trl_callback import DeltaSyncConfig, DeltaWeightTransfer
from trl_callback.callback import client_class

pytestmark = [
    pytest.mark.trl,
    pytest.mark.slow,
]

CHECK = """
import sys

sys.modules["vllm"] = None  # older TRLs do not import with the vLLM that is installed here

from deltasync.errors import ConfigError
from transformers import Trainer
from trl_callback import compat
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

class Made(AsyncGRPOTrainer):
    def __init__(self):
        compat.replace_transfer("ours")
        module = sys.modules[AsyncGRPOTrainer.__module__]
        assert module.WeightTransferClient(weight_update_info={}) == "ours"
        assert isinstance(module.WeightTransferClient, type)

assert compat.streams_weights(AsyncGRPOConfig.__new__(AsyncGRPOConfig))
for check in (Made, lambda: compat.replace_client(lambda base: base)):
    try:
        check()
    except ConfigError as error:
        print(f"refused: {error}")
    else:
        print("taken")
"""


def fetch(version: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        f"trl=={version}",
        "--dest",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"pip cannot fetch trl {version}: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "trl")
    return folder / "trl"


@pytest.mark.parametrize(
    ("version", "weight_transfer", "client"),
    [("1.8.0", False, False), ("1.9.0", True, False), ("1.10.0", True, False)]
    + [(f"1.{minor}.0", True, True) for minor in range(11, 17)],
)
def test_what_this_trl_offers(version: str, weight_transfer: bool, client: bool, tmp_path: Path) -> None:
    site = fetch(version, tmp_path)
    environ = {
        **os.environ,
        "PYTHONPATH": f"{site}:{Path(__file__).parents[2]}",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "CI": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = done.stdout.splitlines()
    assert [answer == "taken" for answer in answers] == [weight_transfer, client], answers
    if not weight_transfer:
        assert "Install TRL 1.9 to 1.16" in answers[0]
    if not client:
        assert "Install TRL 1.11 to 1.16" in answers[1]

    # What TRL calls is what we have.
    if weight_transfer:
        source = (site / "trl/experimental/async_grpo/async_grpo_trainer.py").read_text()
        called = set(re.findall(r"\.weight_transfer\.(\w+)\(", source))
        assert called == {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
        # The callback hears of on_init_end before the transfer is built, and it is built by this name.
        assert (
            0
            < source.index("        super().__init__(")
            < source.index("self.weight_transfer = WeightTransferClient(")
        )
        assert source.count("_init_lora_sync(") in (0, 2)
        assert all(callable(getattr(DeltaWeightTransfer, name)) for name in called)
        # The stream of the main process, and of the others.
        assert source.count("self._streaming_iter()") == 2
        assert "for _ in self._streaming_iter():" in source
    # The way of a sample's versions: reply, log probabilities, metrics, queue, collator.
    worker = (site / "trl/experimental/async_grpo/async_rollout_worker.py").read_text()
    trainer = (site / "trl/experimental/async_grpo/async_grpo_trainer.py").read_text()
    steps = [
        "self._loop_cls,",
        "async with self.session.post(",
        "            for seq in sequences:\n                samples.append(",
    ]
    carries = all(step in worker for step in steps) and "_rollout_dataset = dataset" in trainer
    assert carries is client  # WITH_TOKEN_VERSIONS
    if carries:
        assert '"metrics": sample.metrics,' in trainer and "collate_fn=DataCollatorForRollout(" in trainer
        assert 'return choice["token_ids"], choice["logprobs"]["token_logprobs"]' in worker
    if client:
        source = (site / "trl/generation/vllm_generation.py").read_text()
        called = set(re.findall(r"self\.vllm_client\.(\w+)\(", source))
        ours = vars(client_class(DeltaWeightTransfer(DeltaSyncConfig("memory://x")), None, object)).keys()
        assert called - {"generate", "image_features", "chat"} <= ours
        assert "if self._weight_metadata is None:" in source
        assert "update_named_params(self._weight_metadata, self._iter_named_params())" in source
        assert "for _ in self._iter_named_params():" in source
        # The callback hears of on_init_end before the client is made.
        for trainer in ("grpo", "rloo"):
            source = (site / f"trl/trainer/{trainer}_trainer.py").read_text()
            assert 0 < source.index("        super().__init__(") < source.index("= VLLMGeneration(")
