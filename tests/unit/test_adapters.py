"""Following an adapter, over a stand-in for vLLM's served models; tests/integration/test_vllm_adapter.py has
a real vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from vllm.lora.request import LoRARequest

from deltasync import Publisher
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.following import Follow, Status
from deltasync.opening.adapter_base import FILE, AdapterBase
from deltasync.serve.constraint import VersionConstraint, constraint, max_lag
from deltasync.serve.engine import open_reader
from tests.conftest import assert_same_bits
from vllm_plugin import adapter_files, adapters, versions
from vllm_plugin.adapters import AdapterTarget

CONFIG = {"adapter_config.json": b'{"r": 2}'}


class VLLM:
    """Engine client and served models at once, as far as the driver goes."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.loads: list[str] = []
        self.refuses: str | None = None
        self.asleep = False
        self.output_processor = SimpleNamespace(request_states={}, external_req_ids={})
        self.while_added: Callable[[], object] = lambda: None
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="the-model", revision=None))

    def use(self, *names: str) -> None:
        """Requests for these run, and no others."""
        states = [SimpleNamespace(lora_name=name) for name in (*names, None)]
        self.output_processor.request_states = dict(enumerate(states))

    async def add_request(self, request_id: str, lora_request: Any) -> None:
        """With two samples."""
        self.while_added()
        names = self.output_processor.external_req_ids[request_id] = [f"{at}_{request_id}" for at in (0, 1)]
        for name in names:
            state = SimpleNamespace(lora_name=lora_request and lora_request.lora_name)
            self.output_processor.request_states[name] = state

    async def abort(self, request_id: list[str], internal: bool) -> None:
        assert internal
        for name in request_id:
            del self.output_processor.request_states[name]

    async def is_sleeping(self) -> bool:
        return self.asleep

    def is_base_model(self, name: str) -> bool:
        return name == "model"

    async def load_lora_adapter(self, request: Any) -> Any:
        self.loads.append(request.lora_name)
        if self.refuses is not None:
            return SimpleNamespace(error=SimpleNamespace(message=self.refuses))
        self.lora_requests[request.lora_name] = SimpleNamespace(
            lora_name=request.lora_name, lora_path=request.lora_path
        )
        return "Success"

    def model_name(self, lora: Any = None) -> str:
        return "model" if lora is None else lora.lora_name

    async def show_available_models(self) -> Any:
        names = ["model", *(each.lora_name for each in self.lora_requests.values())]
        return SimpleNamespace(data=[SimpleNamespace(id=name) for name in names])

    def read(self, name: str) -> tuple[dict[str, torch.Tensor], bytes]:
        """As a worker reads a version, when a request names it."""
        with adapter_files.linked(self.lora_requests[name].lora_path) as folder:
            config = (folder / "adapter_config.json").read_bytes()
            return load_file(folder / "adapter_model.safetensors"), config

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
        for files in self.target._files.values():
            files.close()
        self.loop.close()
        self.publisher.close()

    def publish(self) -> None:
        for tensor in self.tensors.values():
            tensor += torch.randn(tensor.shape)
        self.publisher.publish(self.tensors.items()).wait(60)

    def refresh(self) -> Status:
        with contextlib.suppress(DeltaSyncError):
            for _ in range(2):  # the first look may have been at head, which follows a version
                while not self.follow.step():
                    pass
        return self.follow.status()

    def files(self) -> list[str]:
        return sorted(self.target._files)


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
            assert bench.vllm.lora_requests["policy"] is bench.vllm.lora_requests[f"policy-v{version}"]
            tensors, config = bench.vllm.read("policy")
            assert_same_bits(tensors, bench.tensors)
            assert config == CONFIG["adapter_config.json"]
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
        assert bench.files() == ["policy-v1", "policy-v2", "policy-v3", "policy-v4"]
        monkeypatch.setattr(adapters, "_GRACE_S", 0.0)
        bench.vllm.use("policy-v1")  # which had looked up the name before that went
        bench.refresh()
        assert bench.files() == ["policy-v1", "policy-v3", "policy-v4"]
        bench.vllm.use()
        bench.refresh()
        assert bench.files() == ["policy-v3", "policy-v4"]


def test_nobody_can_write_or_delete_the_files_of_a_version(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bench(memory_url) as bench:
        bench.publish()
        bench.refresh()
        path = bench.vllm.lora_requests["policy"].lora_path
        for file in path.split(":"):
            assert "memfd:" in os.readlink(file)
            with pytest.raises(PermissionError):
                Path(file).write_bytes(b"x")
            with pytest.raises(OSError, match=r"denied|permitted|exist|support"):
                Path(file).unlink()
        tries: list[str] = []

        def load(worker: Any, request: Any) -> SimpleNamespace:
            tries.append(request.lora_path)
            if len(tries) < 3:  # a cleaner deletes all that is old and all that is new
                for each in Path(request.lora_path).iterdir():
                    each.unlink()
            tensors = load_file(Path(request.lora_path, "adapter_model.safetensors"))
            return SimpleNamespace(loras=["q"], tensors=tensors)

        request = LoRARequest("policy-v1", 1, path)
        assert_same_bits(adapter_files._from_memory(load)(worker("q"), request).tensors, bench.tensors)
        assert len(tries) == 3
        assert not any(Path(each).exists() for each in tries)


def worker(*wrapped: str, **packed: list[str]) -> Any:
    """What a worker of vLLM's knows of its layers: those that it wrapped for adapters, and their parts."""
    layer = torch.nn.ModuleDict({"q": torch.nn.Linear(2, 2), "mlp": torch.nn.ModuleDict()})
    model = torch.nn.ModuleDict({"0": layer, "1": torch.nn.Identity()})
    manager = SimpleNamespace(modules=dict.fromkeys(wrapped), packed_modules=packed, model=model)
    return SimpleNamespace(_adapter_manager=manager)


def test_an_adapter_of_layers_that_vllm_leaves_out_is_refused() -> None:
    def check(*loras: str) -> None:
        manager = worker("0.mlp.experts", "0.qk", **{"0.qk": ["0.q", "0.k"]})._adapter_manager
        adapter_files._check_layers(manager, SimpleNamespace(loras=loras))

    check("0.q", "0.k", "0.mlp.experts.base_layer", "1.q", "1", "2.q")  # the last ones are on other workers
    with pytest.raises(
        ValueError, match=r"would leave 0\.v, 0\.mlp\.up of the adapter out: .*--lora-target-modules"
    ):
        check("0.q", "0.v", "0.mlp.up")


def test_versions_in_use_stay_by_last_use_and_other_names_are_refused(memory_url: str) -> None:
    with Bench(memory_url) as bench:

        def look_up(name: str) -> versions._Reply:
            """As vLLM looks a request's model up."""
            reply = versions._Reply()
            token = versions._reply.set(reply)
            assert (name in bench.vllm.lora_requests) is (reply.refused is None)
            versions._reply.reset(token)
            return reply

        def demand(version: int) -> int | None:
            """Look the adapter up for a request that demands one version alone."""
            token = constraint.set(VersionConstraint(version, exact=True))
            adapter = look_up("policy").adapter
            assert bench.vllm.lora_requests["policy"].lora_name == f"policy-v{adapter}"
            constraint.reset(token)
            return adapter

        def listed() -> list[str]:
            shown = bench.loop.run_until_complete(bench.vllm.show_available_models())
            return [card.id for card in shown.data]

        assert listed() == ["model"]
        assert look_up("policy").refused == (503, "No version of policy is served yet.")
        for version in range(1, 12):
            bench.publish()
            bench.refresh()
            assert look_up("policy").adapter == version
            assert look_up("policy-v1").adapter == 1  # a conversation of many turns
        bench.refresh()
        kept = [1, *range(5, 12)]
        assert [demand(version) for version in (1, 5, 11)] == [1, 5, 11]
        assert demand(4) == 11  # which the reply's own check refuses
        assert sorted(listed()) == sorted(["model", "policy", *(f"policy-v{version}" for version in kept)])
        assert bench.target.names.served == [f"policy-v{version}" for version in kept]
        for version in (2, 3, 4, 99):
            refused = look_up(f"policy-v{version}").refused
            assert refused is not None
            names = ", ".join(f"policy-v{each}" for each in kept)
            assert refused == (
                409,
                f"policy-v{version} is not served here. Name policy, the newest version, or one that is "
                f"kept: {names}.",
            )
        assert {bench.vllm.model_name(each) for each in bench.vllm.lora_requests.values()} == {"policy"}
        assert bench.vllm.model_name() == "model"


def test_a_request_ends_at_the_version_that_makes_its_own_too_old(memory_url: str) -> None:
    with Bench(memory_url) as bench:

        def publish() -> None:
            bench.publish()
            bench.refresh()

        def add(request_id: str, name: str, lag: int | None) -> None:
            token = max_lag.set(lag)
            adapters = bench.vllm.lora_requests
            assert (name in adapters) is (name != "model")
            lora = None if name == "model" else adapters[name]
            bench.loop.run_until_complete(bench.vllm.add_request(request_id, lora_request=lora))
            max_lag.reset(token)

        def running() -> set[str]:
            return {name.split("_")[1] for name in bench.vllm.output_processor.request_states}

        publish()
        for request_id, name, lag in (
            *(("none", "policy", None), ("base", "model", 0), ("zero", "policy", 0)),
            *(("one", "policy", 1), ("named", "policy-v1", 1)),
        ):
            add(request_id, name, lag)
        assert running() == {"none", "base", "zero", "one", "named"}
        publish()
        assert running() == {"none", "base", "one", "named"}
        publish()
        assert running() == {"none", "base"}
        names = bench.target.names
        bench.vllm.while_added = lambda: names.serve("policy-v3")
        names.serve("policy-v2")
        add("late", "policy", 0)  # version 3 comes while it is added
        assert running() == {"none", "base"}


def test_a_version_that_is_too_old_already_is_refused(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Any] = []
    monkeypatch.setattr(adapters, "resolved", lambda *found: refused.append(found))
    with Bench(memory_url) as bench:
        for _ in range(3):
            bench.publish()
            bench.refresh()
            assert "policy-v1" in bench.vllm.lora_requests  # so that it is kept
        refused.clear()
        token = max_lag.set(1)
        assert "policy-v2" in bench.vllm.lora_requests and "policy" in bench.vllm.lora_requests
        assert "policy-v1" not in bench.vllm.lora_requests
        max_lag.reset(token)
        assert "policy-v1" in bench.vllm.lora_requests
    sentence = "policy-v1 is older than version 3 by more than x-deltasync-max-lag: 1 allows."
    assert refused == [(2, None), (3, None), (None, (409, sentence)), (1, None)]


def test_a_version_that_vllm_does_not_load_is_tried_again(memory_url: str) -> None:
    with Bench(memory_url) as bench:
        bench.publish()
        bench.vllm.refuses = "LoRA rank 64 is greater than max_lora_rank 16."
        for _ in range(2):
            status = bench.refresh()
            assert (status.state, status.version) == ("failed", None)
            assert status.error == f"ApplyError: vLLM did not load policy-v1: {bench.vllm.refuses}"
            assert bench.vllm.lora_requests == {}
            assert bench.files() == []
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
                found, config_read = bench.vllm.read("policy")
                assert_same_bits(found, tensors)
                assert config_read == files["adapter_config.json"]


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


def test_files_that_are_not_what_was_published_are_not_loaded(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bench(memory_url) as bench:
        bench.publish()

        def save_other(tensors: dict[str, torch.Tensor], *rest: Any) -> bytes:
            return save({name: tensor * 2 for name, tensor in tensors.items()}, *rest)

        monkeypatch.setattr(adapter_files, "save", save_other)
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
