"""A module that follows a channel in place: transformers' generate, wrapped and renamed modules, what is
refused.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from deltasync import ModuleReplica, Publisher, Replica, follow, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.errors import AckTimeoutError, ApplyError, ConfigError, ModelMismatchError
from deltasync.opening import adapter_base
from deltasync.opening.adapter_base import AdapterBase
from deltasync.serve import heartbeat
from deltasync.serve.in_place import adapter_name
from deltasync.tensors.bits import int_view
from tests.conftest import assert_same_bits
from tests.waiting import wait_until

PATIENCE_S = 60.0

Weights = dict[str, torch.Tensor]


def llama(tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


class Trainer:
    """Publishes a model, and random steps of it; remembers the bits of each version."""

    def __init__(self, url: str, weights: Weights, **options: Any) -> None:
        self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self.published: dict[int, Weights] = {}
        self.publisher = Publisher(url, retention=None, **options)
        self._source = torch.Generator().manual_seed(1)

    def publish(self) -> int:
        if self.published:
            for tensor in self.weights.values():
                chosen = torch.rand(tensor.shape, generator=self._source) < 0.2
                tensor[chosen] *= 1.05
        version = self.publisher.publish(self.weights.items()).wait(PATIENCE_S).version
        self.published[version] = {name: tensor.clone() for name, tensor in self.weights.items()}
        return version


@contextlib.contextmanager
def training(url: str, weights: Weights) -> Iterator[Trainer]:
    trainer = Trainer(url, weights)
    with trainer.publisher:
        yield trainer


@contextlib.contextmanager
def followed(
    url: str, model: Any = None, weights: Weights | None = None, **options: Any
) -> Iterator[tuple[Any, Trainer, ModuleReplica]]:
    """A model that follows a channel, whose version 1 it is already."""
    model = llama() if model is None else model
    with training(url, model.state_dict() if weights is None else weights) as trainer:
        trainer.publish()
        with follow(model, url, **options) as following:
            yield model, trainer, following


def untied(model: torch.nn.Module) -> Weights:
    """As checkpoints have it: shared memory once."""
    found: Weights = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            found[name] = tensor
        seen.add(tensor.data_ptr())
    return found


def generate(model: Any, ended: threading.Event) -> None:
    """Generate one completion after the other."""
    while not ended.is_set():
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=20, do_sample=False)


def batch(model: Any, ended: threading.Event) -> None:
    """The same by transformers' continuous batching, in a thread of its own, two requests at a time."""
    settings = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32, use_async_batching=False)
    with model.continuous_batching_context_manager(
        GenerationConfig(max_new_tokens=20, do_sample=False),
        continuous_batching_config=settings,
        warmup=False,
    ) as manager:
        for _ in range(2):
            manager.add_request([1, 2, 3])
        while not ended.is_set():
            if manager.get_result(timeout=PATIENCE_S) is not None:
                manager.add_request([1, 2, 3])


@pytest.mark.parametrize(("use", "tied"), [(generate, True), (batch, False)])
def test_every_forward_call_sees_one_version_while_weights_change_under_generation(
    memory_url: str, tied: bool, use: Callable[[Any, threading.Event], None]
) -> None:
    model = llama(tied)
    names = list(untied(model))
    seen: list[tuple[int | None, Weights]] = []
    with training(memory_url, untied(llama(tied, seed=1))) as trainer:
        trainer.publish()
        with follow(model, memory_url, poll_interval_s=0.02) as following:
            assert following.version == 1

            def look(*_: object) -> None:
                held = model.state_dict()
                seen.append((following.version, {name: held[name].clone() for name in names}))

            ended = threading.Event()
            hooks = [model.model.register_forward_pre_hook(look), model.lm_head.register_forward_hook(look)]
            thread = threading.Thread(target=use, args=(model, ended))
            thread.start()
            for _ in range(5):
                following.wait(trainer.publish(), PATIENCE_S)
            ended.set()
            thread.join()
            for hook in hooks:
                hook.remove()
            assert following.error is None
            newest = following.version
    assert newest == 6 and len({version for version, _ in seen}) > 2
    for version, bits in seen:
        assert version is not None
        wanted = trainer.published[version]
        assert all(torch.equal(int_view(bits[name]), int_view(wanted[name])) for name in names)
    fresh = llama(tied, seed=2)
    fresh.load_state_dict(trainer.published[6], strict=not tied)
    prompt = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(
        model.generate(torch.tensor([[5, 6]]), **prompt), fresh.generate(torch.tensor([[5, 6]]), **prompt)
    )


def batched(manager: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of a running manager of continuous batching."""
    asked, found = [manager.add_request([*prompt], max_new_tokens=8) for prompt in prompts], {}
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < len(asked):
        assert time.monotonic() < deadline
        reply = manager.get_result(timeout=1)
        if reply is not None and reply.is_finished():
            found[reply.request_id] = reply
    return [found[each].generated_tokens for each in asked]


def test_continuous_batching_shares_no_prefix_of_another_version(memory_url: str) -> None:
    prompts = [[*range(1, 60)] * 5, [*range(1, 60)] * 5, [*range(1, 60)] * 5 + [3]]
    options = {
        "generation_config": GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=256),
    }
    model, before = llama(), llama()
    early = before.init_continuous_batching(**options)
    with training(memory_url, llama(seed=1).state_dict()) as trainer:
        trainer.publish()
        with follow(model, memory_url, poll_interval_s=0.02) as following:
            manager = model.init_continuous_batching(**options)
            manager.start()
            try:
                answers = []
                for version in (1, 2, 3):
                    following.wait(version, PATIENCE_S)
                    fresh = llama(seed=2)
                    fresh.load_state_dict(trainer.published[version])
                    with fresh.continuous_batching_context_manager(**options, warmup=False) as other:
                        expected = batched(other, prompts)
                    answers.append(batched(manager, prompts))
                    assert answers[-1] == expected, version
                    assert batched(manager, prompts) == expected, version
                    trainer.weights = {name: -tensor.flip(0) for name, tensor in trainer.weights.items()}
                    trainer.publish()
                assert answers[0] != answers[1] != answers[2], (
                    "no version changed an answer, which proves nothing"
                )
            finally:
                manager.stop(block=True)
        with follow(before, memory_url, background=False):
            early.start()
            try:
                early.add_request([1, 2, 3], max_new_tokens=2, request_id="one")
                reply = early.get_result(timeout=PATIENCE_S)
                assert reply is None or "also of an older version's" in str(reply.error)
                assert reply is None or not reply.generated_tokens
            finally:
                early.stop(block=True)


def test_a_hold_keeps_one_version_and_the_next_one_comes_behind_it(memory_url: str) -> None:
    with followed(memory_url, poll_interval_s=0.02) as (model, trainer, following):
        with following.hold() as version:
            assert version == 1
            assert trainer.publish() == 2
            for _ in range(3):
                model.generate(torch.tensor([[1, 2]]), max_new_tokens=3)
                time.sleep(0.05)
                assert following.version == 1
                assert_same_bits(model.state_dict(), trainer.published[1])
            with pytest.raises(ConfigError, match="while this thread holds them"):
                following.sync()
            with pytest.raises(ConfigError, match="while this thread holds them"):
                following.close()
        assert following.wait(2, PATIENCE_S) == 2
        assert_same_bits(model.state_dict(), trainer.published[2])


def test_without_a_thread_it_moves_when_it_is_told_and_where_it_is_pinned(memory_url: str) -> None:
    model = llama()
    with training(memory_url, llama(seed=1).state_dict()) as trainer:  # noqa: SIM117 - read more easily
        with follow(model, memory_url, background=False) as following:
            assert following.version is None
            with pytest.raises(AckTimeoutError, match="the weights are version None, not 1"):
                following.wait(timeout_s=0)
            for version in (1, 2, 3):
                assert trainer.publish() == version == following.sync()
                assert_same_bits(model.state_dict(), trainer.published[version])
            for pin, version in (("1", 1), ("2", 2), (3, 3), ("newest", 3)):
                following.pin = pin
                # Head, which tells the newest, moves behind the last record.
                wait_until(lambda wanted=version: following.sync() == wanted)  # type: ignore[misc]
                assert_same_bits(model.state_dict(), trainer.published[version])
            with pytest.raises(ConfigError, match="newest or a version"):
                following.pin = "yesterday"
    assert not any(thread.name == "deltasync-follow" for thread in threading.enumerate())


def test_a_module_that_is_a_version_already_is_known_without_loading_anything(memory_url: str) -> None:
    model = llama()
    with training(memory_url, model.state_dict()) as trainer:
        trainer.publish()
        trainer.publish()
        with torch.no_grad():
            model.load_state_dict(trainer.published[2])
        before = [tensor.data_ptr() for tensor in model.state_dict().values()]
        with follow(model, memory_url, background=False) as following:
            assert following.version == 2
            assert trainer.publish() == following.sync()
        assert before == [tensor.data_ptr() for tensor in model.state_dict().values()]


def test_others_see_it_by_its_heartbeat(memory_url: str) -> None:
    model = llama()
    with training(memory_url, model.state_dict()) as trainer:
        version = trainer.publish()
        store, run_id = open_store(memory_url), str(trainer.publisher.run_id)
        with follow(model, memory_url, replica_id="notebook"):
            published = trainer.publisher.published
            (found,) = heartbeat.wait_for(store, run_id, version, published, PATIENCE_S)
            assert (found.replica_id, found.version) == ("notebook", version)
        assert [beat.state for beat in heartbeat.read_all(store, run_id)] == [heartbeat.STOPPED]


class Fused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 12, bias=False)
        self.out = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("scratch", torch.zeros(3))
        self.transposed = torch.nn.Parameter(torch.zeros(8, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * self.scale


def test_renamed_fused_transposed_and_private_tensors(memory_url: str) -> None:
    source = torch.Generator().manual_seed(3)
    shapes = {
        "q": (4, 8),
        "k": (4, 8),
        "v": (4, 8),
        "o.weight": (8, 8),
        "o.bias": (8,),
        "scale": (),
        "t": (5, 8),
    }
    weights = {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}
    module = Fused()
    names = {
        "qkv.weight": ["q", "k", "v"],
        "out.weight": "o.weight",
        "out.bias": "o.bias",
        "scratch": None,
        "transposed": "t",
    }
    publisher = Publisher(memory_url, dtype="keep")
    with publisher, follow(module, memory_url, names=names, background=False) as following:
        for _ in range(3):
            publisher.publish(weights.items()).wait(PATIENCE_S)
            following.sync()
            held = module.state_dict()
            found = dict(zip("qkv", held["qkv.weight"].split(4), strict=True))
            found |= {
                "o.weight": held["out.weight"],
                "o.bias": held["out.bias"],
                "scale": held["scale"],
                "t": held["transposed"],
            }
            assert_same_bits(found, weights)
            assert not held["scratch"].any() and not module.transposed.is_contiguous()
            weights = {
                name: tensor + 1e-3 * torch.randn(tensor.shape, generator=source)
                for name, tensor in weights.items()
            }


def test_the_base_of_an_adapter_and_what_torch_compile_wraps(memory_url: str) -> None:
    peft = pytest.importorskip("peft")
    base = llama()
    with training(memory_url, llama(seed=1).state_dict()) as trainer:
        trainer.publish()
        adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
        before = {name: tensor.clone() for name, tensor in adapted.state_dict().items() if "lora_" in name}
        with follow(adapted, memory_url, poll_interval_s=0.02) as following:
            with following.hold():
                trainer.publish()
                adapted.generate(input_ids=torch.tensor([[1, 2]]), max_new_tokens=3)
                assert following.version == 1
            following.wait(2, PATIENCE_S)
            adapted.generate(input_ids=torch.tensor([[1, 2]]), max_new_tokens=3)
            held = adapted.state_dict()
            assert all(torch.equal(held[name], tensor) for name, tensor in before.items()) and before
            merged = adapted.unload().state_dict()
            assert_same_bits(merged, trainer.published[2])
        compiled = torch.compile(llama(seed=4), backend="eager")
        with follow(compiled, memory_url, background=False):
            assert_same_bits(compiled._orig_mod.state_dict(), trainer.published[2])
            with torch.no_grad():
                compiled(torch.tensor([[1, 2]]))


def adapted(
    name: str = "default", seed: int = 0, targets: Sequence[str] = ("q_proj", "v_proj"), **options: Any
) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=[*targets], **{"r": 2, "lora_alpha": 6} | options)
    return peft.get_peft_model(llama(seed=seed), config, adapter_name=name).to(torch.bfloat16)


@contextlib.contextmanager
def training_adapter(url: str, tmp_path: Path, **options: Any) -> Iterator[Trainer]:
    """Trains the adapter of a model, and publishes what PEFT saves."""
    model = adapted(**options)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    files = {
        "adapter_config.json": (tmp_path / "adapter_config.json").read_bytes(),
        adapter_base.FILE: AdapterBase.of("base", llama().state_dict().items()).encode(),
    }
    trainer = Trainer(url, {name: tensor + 0.5 for name, tensor in saved.items()}, model_files=files)
    with trainer.publisher:
        trainer.publish()
        yield trainer


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_module_follows_an_adapter_alone(memory_url: str, tmp_path: Path, use_dora: bool) -> None:
    module = adapted("policy", use_dora=use_dora)
    base = {name: each.clone() for name, each in module.state_dict().items() if ".lora_" not in name}
    with (
        training_adapter(memory_url, tmp_path / "first", use_dora=use_dora) as trainer,
        follow(module, memory_url, background=False) as following,
    ):
        for version in range(1, 4):
            assert following.sync() == version
            module.save_pretrained(tmp_path)
            assert_same_bits(
                load_file(tmp_path / "policy" / "adapter_model.safetensors"), trainer.published[version]
            )
            trainer.publish()
        held = module.state_dict()
        assert_same_bits({name: held[name] for name in base}, base)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"lora_alpha": 4}, "has lora_alpha=6, and the module's 4: make"),
        (
            {"seed": 1},
            "trained on base, and the module has other weights, such as model.embed_tokens.weight: follow",
        ),
        ({"targets": ["q_proj"]}, r"v_proj\.lora_A\.weight .*is in the channel and not in the module"),
        ({"targets": ["q_proj", "v_proj", "o_proj"]}, "o_proj.* is in the module and not in the channel"),
    ],
)
def test_an_adapter_of_another_module_is_refused(
    memory_url: str, tmp_path: Path, other: dict[str, Any], said: str
) -> None:
    module = adapted(**other)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    with training_adapter(memory_url, tmp_path), pytest.raises(ModelMismatchError, match=said):
        follow(module, memory_url)
    assert_same_bits(module.state_dict(), before)


@pytest.mark.parametrize("config", [None, b"", b"[]", b'{"r": 0, "lora_alpha": 1}', b'{"r": 2}'])
def test_an_adapter_without_its_scaling_is_refused(memory_url: str, config: bytes | None) -> None:
    module = adapted()
    weights = {adapter_name(own): each for own, each in module.state_dict().items() if ".lora_" in own}
    files = {} if config is None else {"adapter_config.json": config}
    with Publisher(memory_url, retention=None, model_files=files) as publisher:
        publisher.publish(weights.items()).wait(PATIENCE_S)
        with pytest.raises(ModelMismatchError, match=r"adapter_config\.json.* scaling"):
            follow(module, memory_url)


def _meta() -> torch.nn.Module:
    return llama().to("meta")


def _larger() -> torch.nn.Module:
    model = llama()
    model.model.norm.weight = torch.nn.Parameter(torch.ones(33, dtype=torch.bfloat16))
    return model


def _with_more() -> torch.nn.Module:
    model = llama()
    model.register_buffer("mine", torch.zeros(1))
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (_meta, "is on the meta device"),
        (
            _larger,
            r"model.norm.weight is bfloat16 of shape \[33\] where model.norm.weight should lie, which is bfloat16 of shape",
        ),
        (lambda: llama().float(), r"is float32 of shape .* which is bfloat16"),
        (_with_more, r"mine is in the module and not in the channel\. Map the names"),
        (
            lambda: llama().model,
            r"\(and \d+ more\) is in the channel and not in the module; .* is in the module and not in the",
        ),
    ],
    ids=["meta", "shape", "dtype", "more", "names"],
)
def test_another_model_is_refused_in_one_sentence_and_not_touched(
    memory_url: str, make: Callable[[], torch.nn.Module], sentence: str
) -> None:
    module = make()
    before = {} if module.state_dict()[next(iter(module.state_dict()))].is_meta else _copied(module)
    with training(memory_url, llama(seed=1).state_dict()) as trainer:
        trainer.publish()
        with pytest.raises(ModelMismatchError, match=sentence):
            follow(module, memory_url)
    assert_same_bits({name: tensor for name, tensor in module.state_dict().items() if before}, before)
    assert "forward" not in vars(module)


def _copied(module: torch.nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_gradients_want_a_hold(memory_url: str) -> None:
    with followed(memory_url, poll_interval_s=0.02) as (model, trainer, following):
        with pytest.raises(ConfigError, match="needs the same weights until its backward"):
            model(torch.tensor([[1, 2]]))
        with following.hold():
            trainer.publish()
            model(torch.tensor([[1, 2]])).logits.sum().backward()
        following.wait(2, PATIENCE_S)
        assert_same_bits(model.state_dict(), trainer.published[2])


def test_an_interrupt_leaves_the_gate_open(memory_url: str) -> None:
    with followed(memory_url, poll_interval_s=0.02) as (model, trainer, following):

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        hook = model.model.layers[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.generate(torch.tensor([[1, 2]]), max_new_tokens=3)
        hook.remove()
        following.wait(trainer.publish(), PATIENCE_S)
        assert_same_bits(model.state_dict(), trainer.published[2])


def test_an_interrupt_of_a_commit_that_waits_leaves_the_gate_open(memory_url: str) -> None:
    with followed(memory_url, background=False) as (model, trainer, following):
        trainer.publish()
        changed = following._gate._changed
        with (
            mock.patch.object(changed, "wait_for", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            following.sync()
        assert _computes(following, model)
        assert following.sync() == 2
        assert_same_bits(model.state_dict(), trainer.published[2])


@pytest.mark.parametrize("how", ["forward", "hold"])
def test_threads_that_call_without_a_pause_keep_no_version_away(memory_url: str, how: str) -> None:
    model, stop = llama(), threading.Event()

    def call(following: ModuleReplica) -> None:
        while not stop.is_set():
            with following.hold() if how == "hold" else contextlib.nullcontext(), torch.no_grad():
                model(torch.tensor([[1, 2, 3]]))

    with training(memory_url, model.state_dict()) as trainer:
        trainer.publish()
        with follow(model, memory_url, poll_interval_s=0.02) as following:
            threads = [threading.Thread(target=call, args=(following,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            try:
                for version in (2, 3):
                    trainer.publish()
                    assert following.wait(version, timeout_s=PATIENCE_S) == version
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            assert_same_bits(model.state_dict(), trainer.published[3])


def test_a_long_hold_is_said_and_threads_inside_it_go_on(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.serve.module._WAIT_S", 0.1)
    with followed(memory_url, poll_interval_s=0.02) as (model, trainer, following):
        with following.hold() as version:
            trainer.publish()
            wait_until(lambda: following.error)
            assert "has waited for forward calls" in (following.error or "")
            inside = threading.Thread(target=_computes, args=(following, model))
            inside.start()
            inside.join(PATIENCE_S)
            assert not inside.is_alive() and following.version == version
        assert following.wait(2, timeout_s=PATIENCE_S) == 2


def test_a_copy_of_a_followed_module_has_weights_of_its_own(memory_url: str) -> None:
    model = llama()
    with training(memory_url, model.state_dict()) as trainer:
        trainer.publish()
        with follow(model, memory_url, background=False) as following:
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), AveragedModel(model)]
            trainer.publish()
            assert following.sync() == 2
            for made in copies:
                inner = made.module if isinstance(made, AveragedModel) else made
                assert type(inner) is LlamaForCausalLM
                assert_same_bits(inner.state_dict(), trainer.published[1])
                with torch.no_grad():
                    inner.lm_head.weight.zero_()
                    assert not made(torch.tensor([[1, 2]])).logits.any(), "it computes with its own weights"
                assert inner(torch.tensor([[1]])).logits.requires_grad, "and nothing keeps gradients from it"
            assert_same_bits(model.state_dict(), trainer.published[2])
        assert type(model) is LlamaForCausalLM


def test_a_module_follows_once(memory_url: str) -> None:
    model = llama()
    with training(memory_url, model.state_dict()) as trainer:
        trainer.publish()
        with follow(model, memory_url, background=False):
            for part in (model, model.model):
                with pytest.raises(ConfigError, match="follows a channel already"):
                    follow(part, memory_url, background=False)
        follow(model, memory_url, background=False).close()


def _resized(model: Any) -> None:
    model.resize_token_embeddings(70, mean_resizing=False)


def _pruned(model: Any) -> None:  # of the same memory
    model.lm_head.weight.data = model.lm_head.weight.data[:32]


def _seen_as_fp16(model: Any) -> None:  # likewise
    model.lm_head.weight.data = model.lm_head.weight.data.view(torch.float16)


def _with_a_bias(model: Any) -> None:
    model.lm_head = torch.nn.Linear(32, 64, bias=True, dtype=torch.bfloat16).requires_grad_(False)


def _renamed(model: Any) -> None:
    model.other, model.lm_head = model.lm_head, None


def _normalized(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)


def _masked(model: Any) -> None:
    prune.l1_unstructured(model.lm_head, "weight", 0.5)


def _shared(model: Any) -> None:
    model.share_memory()


def _on_meta(model: Any) -> None:
    model.lm_head.to("meta")


@pytest.mark.parametrize(
    "change",
    [
        torch.nn.Module.float,
        torch.nn.Module.half,
        torch.nn.Module.double,
        _resized,
        _pruned,
        _seen_as_fp16,
        _with_a_bias,
        _renamed,
        _normalized,
        _masked,
        _shared,
        _on_meta,
    ],
    ids=lambda change: change.__name__.strip("_"),
)
@pytest.mark.parametrize("background", [False, True], ids=["sync", "thread"])
def test_a_module_that_was_changed_is_refused_at_each_sync_and_computes_nothing(
    memory_url: str, change: Callable[[Any], Any], background: bool
) -> None:
    model = llama().requires_grad_(False)
    with followed(memory_url, model, background=background, poll_interval_s=0.02) as (_, trainer, following):
        change(model)
        with pytest.raises(ApplyError, match="unknown state"):
            model(torch.tensor([[1, 2]]))
        for _ in range(2):
            trainer.publish()
            for _ in range(2):
                with pytest.raises(ModelMismatchError):
                    following.sync()
                assert (
                    following.version == 1
                    and following.status.state == "failed"
                    and following.error is not None
                )
                assert "unknown state" in (following.not_ready or "")
                with pytest.raises(ApplyError, match="unknown state"):
                    model(torch.tensor([[1, 2]]))


def _transposed(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


def _written(model: Any) -> None:
    model.load_state_dict(llama(seed=5).state_dict())


def _assigned(model: Any) -> None:
    model.load_state_dict(llama(seed=5).state_dict(), assign=True)


def _replaced(model: Any) -> None:
    model.lm_head = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("change", [_transposed, _written, _assigned, _replaced])
def test_nothing_is_computed_with_weights_that_something_else_wrote_or_moved(
    memory_url: str, change: Callable[[Any], Any]
) -> None:
    tokens = torch.tensor([[1, 2]])
    with followed(memory_url, background=False) as (model, trainer, following), torch.no_grad():
        change(model)
        assert following.not_ready is not None and following.status.state == "failed"
        with pytest.raises(ApplyError, match="something else wrote, converted or replaced"):
            model(tokens)
        for version in (1, 2):
            assert following.sync() == version
            assert following.error is None and following.not_ready is None
            fresh = llama(seed=6)
            fresh.load_state_dict(trainer.published[version])
            assert torch.equal(model(tokens).logits, fresh(tokens).logits)
            trainer.publish()


def test_a_version_with_two_values_for_one_tensor_is_refused_in_each_version_anew(memory_url: str) -> None:
    model = llama(tied=True).requires_grad_(False)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    publisher = Publisher(memory_url, retention=None)
    with publisher, follow(model, memory_url, background=False) as following:
        publisher.publish(weights.items()).wait(PATIENCE_S)
        assert following.sync() == 1
        weights["lm_head.weight"][0, 0] += 1
        for version in (2, 3):
            weights["model.norm.weight"] += 1
            publisher.publish(weights.items()).wait(PATIENCE_S)
            for _ in range(2):
                with pytest.raises(
                    ModelMismatchError, match=f"are one tensor in the module, and differ in version {version}"
                ):
                    following.sync()
                assert following.version == 1 and following.status.state == "failed"
                with pytest.raises(ApplyError, match=f"differ in version {version}"):
                    model(torch.tensor([[1]]))
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        publisher.publish(weights.items()).wait(PATIENCE_S)
        assert following.sync() == 4
        assert_same_bits(model.state_dict(), weights)
        model(torch.tensor([[1]]))


def test_casts_that_autocast_keeps_are_of_no_older_version(memory_url: str) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    publisher = Publisher(memory_url, dtype="keep", retention=None)
    with (
        publisher,
        follow(model, memory_url, background=False) as following,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        for value in (1.0, 2.0, 3.0):
            publisher.publish([("weight", torch.full((4, 4), value))]).wait(PATIENCE_S)
            following.sync()
            with following.hold():
                assert model(torch.ones(1, 4))[0, 0].item() == 4 * value


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_each_tensor_that_is_published_alone_is_computed_with(memory_url: str, tied: bool) -> None:
    model, tokens = llama(tied).requires_grad_(False), torch.tensor([[1, 2, 3, 5, 8]])
    weights = {name: tensor.clone() for name, tensor in untied(llama(tied, seed=1)).items()}
    publisher = Publisher(memory_url, retention=None)
    with publisher, follow(model, memory_url, background=False) as following:
        before = None
        for name in [None, *weights]:
            if name is not None:
                weights[name] = -weights[name]
            version = publisher.publish(weights.items()).wait(PATIENCE_S).version
            assert following.sync() == version
            fresh = llama(tied, seed=2)
            fresh.load_state_dict(weights, strict=not tied)
            logits = model(tokens).logits
            assert torch.equal(logits, fresh(tokens).logits), name
            assert before is None or not torch.equal(logits, before), (
                f"{name} changes nothing, which proves nothing"
            )
            before = logits


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize("order", ["before", "after", "in place", "followed"])
def test_a_compiled_module_stays_compiled(memory_url: str, order: str) -> None:
    runs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *given: runs.append(1) or graph.forward(*given)

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    torch._dynamo.reset()
    model = Small().requires_grad_(False)
    compiled = (
        model if order == "in place" else torch.compile(model, backend=backend) if order != "after" else None
    )
    if order == "in place":
        model.compile(backend=backend)
    with training(memory_url, model.state_dict()) as trainer:
        trainer.publish()
        with follow(compiled if order == "followed" else model, memory_url, background=False) as following:
            compiled = torch.compile(model, backend=backend) if compiled is None else compiled
            for version in (1, 2):
                assert following.sync() == version
                runs.clear()
                found = compiled(torch.ones(8, dtype=torch.bfloat16))
                assert runs
                expected = torch.nn.functional.linear(
                    torch.ones(8, dtype=torch.bfloat16), model.inner.weight
                ).relu()
                torch.testing.assert_close(found, expected)
                trainer.publish()


def test_closing_twice_is_closing_once(memory_url: str) -> None:
    model = llama()
    with training(memory_url, model.state_dict()) as trainer:
        trainer.publish()
        with follow(model, memory_url) as following:
            following.close()
        assert "forward" not in vars(model)


def _computes(following: ModuleReplica, model: Any) -> bool:
    with torch.no_grad():
        model(torch.tensor([[1]]))
    return following.error is None


def test_the_channel_that_comes_later_is_followed_then(memory_url: str) -> None:
    model = llama()
    with follow(model, memory_url, poll_interval_s=0.02) as following:
        assert following.version is None
        assert _computes(following, model) or following.error is not None  # with its own weights
        with training(memory_url, llama(seed=1).state_dict()) as trainer:
            trainer.publish()
            following.wait(timeout_s=PATIENCE_S)
            assert_same_bits(model.state_dict(), trainer.published[1])
            assert Replica(ChannelReader(open_store(memory_url))).sync() == following.version
