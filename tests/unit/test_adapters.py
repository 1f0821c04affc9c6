"""Following an adapter, over a stand-in for vLLM's served models; tests/integration/test_vllm_adapter.py has
a real vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltasync import Publisher
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.following import Follow, Status
from deltasync.opening.adapter_base import FILE, AdapterBase
from deltasync.serve.engine import open_reader
from tests.conftest import assert_same_bits
from vllm_plugin import adapters
from vllm_plugin.adapters import AdapterTarget

CONFIG = {"adapter_config.json": b'{"r": 2}'}


class VLLM:
    """Engine client and served models at once, as far as the driver goes."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Path] = {}
        self.loads: list[str] = []
        self.refuses: str | None = None
        self.asleep = False
        self.output_processor = SimpleNamespace(request_states={})
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="the-model", revision=None))

    def use(self, *names: str) -> None:
        """Requests for these run, and no others."""
        states = [SimpleNamespace(lora_name=name) for name in (*names, None)]
        self.output_processor.request_states = dict(enumerate(states))

    async def is_sleeping(self) -> bool:
        return self.asleep

    def is_base_model(self, name: str) -> bool:
        return name == "model"

    async def load_lora_adapter(self, request: Any) -> Any:
        self.loads.append(request.lora_name)
        if self.refuses is not None:
            return SimpleNamespace(error=SimpleNamespace(message=self.refuses))
        self.lora_requests[request.lora_name] = Path(request.lora_path)
        return "Success"

    async def unload_lora_adapter(self, request: Any) -> Any:
        del self.lora_requests[request.lora_name]
        return "Success"


class Bench:
    def __init__(self, url: str, **publisher: Any) -> None:
        self.tensors = {"q.lora_A.weight": torch.randn(2, 8), "q.lora_B.weight": torch.zeros(8, 2)}
        self.publisher = Publisher(url, dtype="keep", **({"model_files": CONFIG} | publisher))
        self.vllm = VLLM()
        settings = ReplicaSettings(channel=url, adapter="policy")
        reader, self.loop = open_reader(settings), asyncio.new_event_loop()
        self.target = AdapterTarget(self.vllm, reader, settings, self.vllm, self.loop.run_until_complete)
        self.follow = Follow(reader, self.target, settings)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.target._root.cleanup()
        self.loop.close()
        self.publisher.close()

    def publish(self) -> None:
        for tensor in self.tensors.values():
            tensor += torch.randn(tensor.shape)
        self.publisher.publish(self.tensors.items()).wait(60)

    def refresh(self) -> Status:
        with contextlib.suppress(DeltaSyncError):
            while not self.follow.step():
                pass
        return self.follow.status()

    def folders(self) -> list[str]:
        (folder,) = {path.parent for path in self.vllm.lora_requests.values()}
        return sorted(path.name for path in folder.iterdir())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of what follows; the publisher's, that it deletes nothing, is not among them."""
    return [
        record.message
        for record in caplog.records
        if record.levelname == "WARNING" and record.name != "deltasync.opening.start"
    ]


def test_versions_are_loaded_by_name_and_the_newest_by_the_adapters(memory_url: str) -> None:
    with Bench(memory_url) as bench:
        for version in (1, 2):
            bench.publish()
            status = bench.refresh()
            assert (status.state, status.version, status.error) == ("serving", version, None)
            folder = bench.vllm.lora_requests["policy"]
            assert folder == bench.vllm.lora_requests[f"policy-v{version}"]
            assert_same_bits(load_file(folder / "adapter_model.safetensors"), bench.tensors)
            assert (folder / "adapter_config.json").read_bytes() == CONFIG["adapter_config.json"]
        assert bench.vllm.loads == ["policy-v1", "policy-v2"]
        assert bench.target.models == ["policy", "policy-v2", "policy-v1"]


def test_a_version_in_use_is_kept_and_its_files_outlast_its_name(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bench(memory_url) as bench:
        for _ in range(4):
            bench.publish()
            bench.vllm.use("policy-v1")
            bench.refresh()
        bench.refresh()
        assert sorted(bench.vllm.lora_requests) == ["policy", "policy-v1", "policy-v3", "policy-v4"]
        bench.vllm.use()
        bench.refresh()
        assert sorted(bench.vllm.lora_requests) == ["policy", "policy-v3", "policy-v4"]
        assert bench.folders() == ["policy-v1", "policy-v2", "policy-v3", "policy-v4"]
        monkeypatch.setattr(adapters, "_GRACE_S", 0.0)
        bench.vllm.use("policy-v1")  # which had looked up the name before that went
        bench.refresh()
        assert bench.folders() == ["policy-v1", "policy-v3", "policy-v4"]
        bench.vllm.use()
        bench.refresh()
        assert bench.folders() == ["policy-v3", "policy-v4"]


def test_a_version_that_vllm_does_not_load_is_tried_again(memory_url: str) -> None:
    with Bench(memory_url) as bench:
        bench.publish()
        bench.vllm.refuses = "LoRA rank 64 is greater than max_lora_rank 16."
        for _ in range(2):
            status = bench.refresh()
            assert (status.state, status.version) == ("failed", None)
            assert status.error == f"ApplyError: vLLM did not load policy-v1: {bench.vllm.refuses}"
            assert bench.vllm.lora_requests == {}
        bench.vllm.refuses = None
        assert bench.refresh().version == 1


def test_a_trainer_that_resumes_with_another_config_or_base_publishes_full_weights_with_it(
    memory_url: str,
) -> None:
    config = {"adapter_config.json": b'{"r": 2, "lora_alpha": 64}'}
    other = config | {FILE: AdapterBase(name="another", tensors={}).encode()}
    with Bench(memory_url) as bench:
        bench.publish()
        bench.refresh()
        anew = ["anchor", "delta"]
        for files, kinds in (
            (CONFIG, ["delta"]),
            (config, anew),
            (config, ["delta"]),
            (other, anew),
            (other, ["delta"]),
        ):
            bench.publisher.close()
            bench.publisher = Publisher(memory_url, dtype="keep", model_files=files, resume=True)
            for kind in kinds:
                tensors = {name: tensor + torch.randn(()) for name, tensor in bench.tensors.items()}
                assert bench.publisher.publish(tensors.items()).wait(60).kind == kind
                assert bench.refresh().version == bench.publisher.version
                folder = bench.vllm.lora_requests["policy"]
                assert_same_bits(load_file(folder / "adapter_model.safetensors"), tensors)
                assert (folder / "adapter_config.json").read_bytes() == files["adapter_config.json"]


BASE = {
    "embed.weight": torch.randn(6, 8),
    "norm.weight": torch.ones(8),
    "q.weight": torch.randn(8, 8),
    "steps": torch.arange(3),
}


def based_on(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return CONFIG | {FILE: AdapterBase.of("the-base", tensors.items()).encode()}


def serve(bench: Bench, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """vLLM has loaded this base."""
    bench.vllm.vllm_config.model_config.model = str(folder)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_served_over_its_base(
    dtype: torch.dtype, memory_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in BASE.items()
    }
    with Bench(memory_url, model_files=based_on(trained)) as bench:
        serve(
            bench,
            tmp_path,
            {name: tensor.bfloat16() for name, tensor in BASE.items()} | {"extra": torch.ones(1)},
        )
        for version in (1, 2):
            bench.publish()
            assert bench.refresh().version == version
    assert not warnings_of(caplog)


@pytest.mark.parametrize("name", ["embed.weight", "norm.weight", "q.weight"])
def test_an_adapter_of_another_base_is_refused(name: str, memory_url: str, tmp_path: Path) -> None:
    with Bench(memory_url, model_files=based_on(BASE)) as bench:
        serve(
            bench,
            tmp_path,
            BASE | {name: BASE[name].clone().index_put_((torch.tensor(3),), torch.tensor(0.5))},
        )
        bench.publish()
        for _ in range(2):
            status = bench.refresh()
            assert (status.state, status.version) == ("failed", None)
            assert status.error == (
                f"ModelMismatchError: The adapter of {memory_url} was trained on the-base, and {tmp_path}, "
                "which is served "
                f"here, has other weights: {name}. Serve the model that it was trained on."
            )
        assert bench.vllm.loads == []


def test_what_a_base_cannot_be_compared_with_is_named_once(
    memory_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Bench(memory_url, model_files=based_on(BASE)) as bench:
        quantized = BASE | {"q.weight": BASE["q.weight"].to(torch.float8_e4m3fn)}
        serve(bench, tmp_path, {name: tensor for name, tensor in quantized.items() if name != "norm.weight"})
        for version in (1, 2):
            bench.publish()
            assert bench.refresh().version == version
        (warning,) = warnings_of(caplog)
        assert warning.startswith("2 of 3 tensors of the adapter's base model were not compared")
        assert warning.endswith(f"in {tmp_path}: norm.weight, q.weight.")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (CONFIG, "does not say which base model"),
        (based_on(BASE), "cannot be compared: the-model is neither a directory"),
    ],
)
def test_a_base_that_nobody_knows_is_warned_of(
    files: dict[str, bytes],
    said: str,
    memory_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Bench(memory_url, model_files=files) as bench:
        bench.vllm.vllm_config.model_config.model = "the-model/of/nobody"
        bench.publish()
        assert bench.refresh().version == 1
        (warning,) = warnings_of(caplog)
        assert said.replace("the-model", "the-model/of/nobody") in warning


def test_nothing_is_loaded_while_vllm_sleeps(memory_url: str) -> None:
    with Bench(memory_url) as bench:
        bench.publish()
        bench.vllm.asleep = True
        assert bench.refresh().state == "sleeping"
        assert bench.vllm.loads == []
        bench.vllm.asleep = False
        assert bench.refresh().version == 1


def test_a_channel_of_a_model_is_refused(memory_url: str) -> None:
    with Bench(memory_url, model_files=None) as bench:
        bench.publish()
        status = bench.refresh()
        assert status.state == "failed"
        assert "it is not the channel of an adapter" in status.error


def test_damage_on_the_disk_is_not_loaded(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Bench(memory_url) as bench:
        bench.publish()
        save_file = adapters.save_file

        def save_other(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
            save_file({name: tensor * 2 for name, tensor in tensors.items()}, *rest)

        monkeypatch.setattr(adapters, "save_file", save_other)
        assert "does not hold the bits of version 1" in bench.refresh().error
        assert bench.vllm.loads == []
        monkeypatch.undo()
        assert bench.refresh().version == 1


def test_the_name_of_a_served_model_is_refused(memory_url: str) -> None:
    settings = ReplicaSettings(channel=memory_url, adapter="model")
    with pytest.raises(ConfigError, match="cannot be named model"):
        AdapterTarget(VLLM(), open_reader(settings), settings, VLLM(), run=lambda work: work)
    with pytest.raises(ConfigError, match="adapter must be"):
        ReplicaSettings(channel=memory_url, adapter="a b")
