"""MLX models that follow a channel, by real mlx and mlx-lm: make test-mlx."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from deltasync import Publisher, follow
from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, ConfigError, ModelMismatchError, StageError
from deltasync.opening import adapter_base
from deltasync.opening.adapter_base import AdapterBase
from deltasync.serve import replies
from tests import demands, http_server
from tests.http_server import Server, digests, save, weights_of
from tests.integration.test_module import PATIENCE_S, Trainer, Weights, followed, llama, training, untied
from tests.waiting import wait_until

mx = pytest.importorskip("mlx.core", reason="needs MLX: make test-mlx")
mlx_lm = pytest.importorskip("mlx_lm", reason="needs mlx-lm: make test-mlx")
nn = pytest.importorskip("mlx.nn")
lora = pytest.importorskip("mlx_lm.tuner.utils")

from mlx_plugin.arrays import arrays, bits  # noqa: E402 - it imports MLX
from mlx_plugin.module import MlxTarget  # noqa: E402

PROMPT = [3, 14, 15, 9, 26, 5]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(llama(seed=1), tmp_path / "model")


def load(directory: Path) -> Any:
    return mlx_lm.load(str(directory))[0]


def fresh(directory: Path, weights: Weights, at: Path) -> Any:
    """A model that was loaded from a checkpoint of these weights."""
    at.mkdir()
    for file in directory.iterdir():
        (at / file.name).write_bytes(file.read_bytes())
    save_file(weights, at / "model.safetensors", metadata={"format": "pt"})
    return load(at)


def assert_bits(model: Any, weights: Weights) -> None:
    held = arrays(model)
    assert held.keys() == weights.keys()
    for name, tensor in weights.items():
        np.testing.assert_array_equal(
            bits(held[name]).view(np.int16), tensor.view(torch.int16).numpy(), err_msg=name
        )


def greedy(model: Any, count: int = 8) -> list[int]:
    steps = mlx_lm.generate.__globals__["generate_step"](mx.array(PROMPT), model, max_tokens=count)
    return [int(token) for token, _ in steps]


def test_bits_and_tokens_are_those_of_a_fresh_load_at_each_version(
    checkpoint: Path, memory_url: str, tmp_path: Path
) -> None:
    answers = []
    with followed(memory_url, load(checkpoint), weights_of(checkpoint), poll_interval_s=0.02) as (
        model,
        trainer,
        following,
    ):
        for version in range(1, 6):
            following.wait(version, PATIENCE_S)
            assert_bits(model, trainer.published[version])
            with following.hold() as held:
                answers.append(greedy(model))
            assert held == version
            assert answers[-1] == greedy(
                fresh(checkpoint, trainer.published[version], tmp_path / str(version))
            )
            trainer.publish()
        assert following.status.commits[-1].changed > 0
    assert len({*map(tuple, answers)}) > 1, "no version changed an answer, which proves nothing"
    assert type(model) is type(load(checkpoint))


def test_a_generation_takes_versions_between_its_tokens_and_each_step_is_of_one(
    checkpoint: Path, memory_url: str
) -> None:
    with followed(memory_url, load(checkpoint), weights_of(checkpoint), poll_interval_s=0.02) as (
        model,
        trainer,
        following,
    ):
        seen: list[tuple[int | None, Weights]] = []
        inner = type(model.model).__call__

        def look(self: Any, *arguments: Any, **options: Any) -> Any:
            held = {
                own: torch.from_numpy(bits(each).view(np.int16).copy()) for own, each in arrays(model).items()
            }
            seen.append((following.version, held))
            time.sleep(0.002)
            assert following.version == seen[-1][0]
            return inner(self, *arguments, **options)

        type(model.model).__call__ = look
        try:
            ended = threading.Event()
            publishing = threading.Thread(
                target=lambda: (
                    *(following.wait(trainer.publish(), PATIENCE_S) for _ in range(4)),
                    ended.set(),
                )
            )
            publishing.start()
            while not ended.is_set():
                greedy(model, 40)
            publishing.join()
        finally:
            type(model.model).__call__ = inner
    assert len({version for version, _ in seen}) > 2
    for version, held in seen:
        assert version is not None
        for own, tensor in trainer.published[version].items():
            assert torch.equal(held[own], tensor.view(torch.int16)), (version, own)


def test_a_graph_is_of_the_version_that_it_was_built_at(
    checkpoint: Path, memory_url: str, tmp_path: Path
) -> None:
    with followed(memory_url, load(checkpoint), weights_of(checkpoint), background=False) as (
        model,
        trainer,
        following,
    ):
        built = model(mx.array([PROMPT]))
        for _ in range(3):
            trainer.publish()
            following.sync()
        newer = model(mx.array([PROMPT]))
    for logits, version in ((built, 1), (newer, 4)):
        expected = fresh(checkpoint, trainer.published[version], tmp_path / str(version))(mx.array([PROMPT]))
        assert bool(mx.array_equal(logits, expected)), version


def test_arrays_that_somebody_wrote_are_no_version_until_the_next_sync(
    checkpoint: Path, memory_url: str
) -> None:
    with followed(memory_url, load(checkpoint), weights_of(checkpoint), background=False) as (
        model,
        trainer,
        following,
    ):
        model.lm_head.weight[3, 3] = 2.0  # in the same Python object
        mx.eval(model.parameters())
        assert following.sync() == 1
        assert_bits(model, trainer.published[1])


def updated(model: Any, path: Path) -> None:
    model.update({"lm_head": {"weight": mx.zeros((64, 32), dtype=mx.bfloat16)}})


def loaded(model: Any, path: Path) -> None:
    mx.save_safetensors(str(path), {"lm_head.weight": mx.ones((64, 32), dtype=mx.bfloat16)})
    model.load_weights(str(path), strict=False)


def quantized_otherwise(model: Any, path: Path) -> None:
    model.update_modules({"lm_head": nn.QuantizedLinear(32, 64, False, 32, 4)})  # from float32


def adapted(model: Any, path: Path) -> None:
    lora.linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0})


@pytest.mark.parametrize(
    ("change", "is_brought_back"),
    [(updated, True), (loaded, True), (quantized_otherwise, False), (adapted, False)],
)
def test_nothing_is_computed_with_weights_that_somebody_replaced(
    checkpoint: Path,
    memory_url: str,
    tmp_path: Path,
    change: Callable[[Any, Path], None],
    is_brought_back: bool,
) -> None:
    with followed(memory_url, load(checkpoint), weights_of(checkpoint), background=False) as (
        model,
        trainer,
        following,
    ):
        expected = greedy(model)
        change(model, tmp_path / "other.safetensors")
        for _ in range(2):
            with pytest.raises(ApplyError, match="unknown state"):
                greedy(model)
        if is_brought_back:
            mx.eval(model.parameters())
            assert following.sync() == 1
            assert_bits(model, trainer.published[1])
            assert greedy(model) == expected
        else:
            mx.eval(model.parameters())
            with pytest.raises(ModelMismatchError):
                following.sync()
            with pytest.raises(ApplyError, match="unknown state"):
                greedy(model)


def test_a_call_may_wait_until_the_weights_are_known(checkpoint: Path, memory_url: str) -> None:
    with followed(memory_url, load(checkpoint), weights_of(checkpoint), poll_interval_s=0.02) as (
        model,
        trainer,
        following,
    ):
        model.update({"lm_head": {"weight": mx.zeros((64, 32), dtype=mx.bfloat16)}})
        mx.eval(model.parameters())
        with following.hold(PATIENCE_S) as version:
            assert version == 1
            assert_bits(model, trainer.published[1])


def test_arrays_that_are_not_computed_are_said_by_the_thread_that_cannot_compute_them(
    checkpoint: Path, memory_url: str
) -> None:
    with followed(memory_url, load(checkpoint), weights_of(checkpoint), poll_interval_s=0.02) as (
        model,
        trainer,
        following,
    ):
        model.lm_head.weight = mx.zeros((64, 32), dtype=mx.bfloat16) + 1
        wait_until(lambda: following.error)
        assert StageError.__name__ in (following.error or "") and "mx.eval" in (following.error or "")
        mx.eval(model.parameters())
        version = trainer.publish()
        assert following.wait(version, PATIENCE_S) == version
        assert_bits(model, trainer.published[version])


@pytest.mark.parametrize("names", ["once", "both"])
def test_tied_embeddings(memory_url: str, tmp_path: Path, names: str) -> None:
    source = llama(tied=True, seed=1)
    model = load(save(source, tmp_path / "model"))
    weights = untied(source) if names == "once" else dict(source.state_dict())
    with training(memory_url, weights) as trainer:
        trainer.publish()
        if names == "both":
            trainer.weights["lm_head.weight"] = trainer.weights["model.embed_tokens.weight"]
        with follow(model, memory_url, background=False) as following:
            trainer.weights["model.embed_tokens.weight"].view(torch.int16)[:5] += 1
            following.sync()
            version = trainer.publisher.publish(trainer.weights.items()).wait(PATIENCE_S).version
            assert following.sync() == version
            expected = {own: tensor for own, tensor in trainer.weights.items() if own != "lm_head.weight"}
            assert_bits(model, expected)


MODES = {"affine": (32, 4), "affine 8": (32, 8), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


def quantized(model: Any, mode: str = "affine") -> Any:
    """The model, in which each module that can be is quantized."""
    size, width = MODES[mode]

    def fits(_: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % size == 0

    nn.quantize(model, size, width, mode=mode.split()[0], class_predicate=fits)
    mx.eval(model.parameters())
    return model


def assert_same(model: Any, expected: Any) -> None:
    """Two models have the same bits in all arrays."""
    held, wanted = arrays(model), arrays(expected)
    assert held.keys() == wanted.keys()
    for own, array in wanted.items():
        assert held[own].dtype == array.dtype, own
        np.testing.assert_array_equal(bits(held[own]), bits(array), err_msg=own)


@pytest.mark.parametrize("change", [lambda model: model, quantized], ids=["plain", "quantized"])
def test_experts_that_mlx_lm_stacks(memory_url: str, tmp_path: Path, change: Callable[[Any], Any]) -> None:
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    checkpoint = save(
        Qwen3MoeForCausalLM(config).to(torch.bfloat16), tmp_path / "model", num_experts=4, rope_theta=10000.0
    )
    model, weights = change(load(checkpoint)), weights_of(checkpoint)
    with followed(memory_url, model, weights, background=False) as (_, trainer, following):
        for _ in range(2):
            version = trainer.publish()
            assert following.sync() == version
            assert_same(model, change(fresh(checkpoint, trainer.published[version], tmp_path / str(version))))
        assert any(".switch_mlp." in own for own in arrays(model))


@pytest.mark.parametrize("mode", MODES)
def test_quantized_modules_are_those_of_a_fresh_quantization(
    mode: str, checkpoint: Path, memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expected(version: int) -> Any:
        at = tmp_path / f"{version} {time.monotonic()}"
        return quantized(fresh(checkpoint, trainer.published[version], at), mode)

    model = quantized(load(checkpoint), mode)
    with followed(memory_url, model, weights_of(checkpoint), background=False) as (_, trainer, following):
        assert_same(model, expected(1))
        for version in range(2, 11):
            trainer.publish()
            assert following.sync() == version
        assert_same(model, expected(10))
        assert greedy(model) == greedy(expected(10))
        target = following._follow.target
        _, digest = replies.answer(  # type: ignore[misc]
            following, ReplicaSettings(), "/deltasync/digest", None, target.published, target.made
        )
        assert (digest["version"], digest["sha256"]) == (10, digests(trainer.published[10]))
        words = bits(expected(10).lm_head.weight).tobytes()
        assert digest["made"][0]["lm_head.weight"] == hashlib.sha256(words).hexdigest()
        for damaged in (model.lm_head.weight, model.model.layers[0].self_attn.q_proj.scales):
            bits(damaged)[5, 0] ^= 1
            assert following.sync() == 10
            assert_same(model, expected(10))
        following.pin = 4
        assert following.sync() == 4
        assert_same(model, expected(4))

        def refuse(*_: object) -> None:
            raise ModelMismatchError("planted")

        with monkeypatch.context() as patched, pytest.raises(ModelMismatchError, match="planted"):
            patched.setattr(MlxTarget, "_refuse", refuse)
            following.pin = "newest"
            following.sync()
        assert following.version == 4
        assert_same(model, expected(4))
        assert following.sync() == 10
        assert_same(model, expected(10))


_ANY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "vocab_size": 64, "head_dim": 8, "max_position_embeddings": 512, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_KIMI = {
    "kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _ANY | {"tie_word_embeddings": True},
    "gemma3_text": _ANY | {"sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "kimi_k3": {
        "text_config": _ANY
        | _EXPERTS
        | _LATENT
        | {"linear_attn_config": _KIMI, "attn_res_block_size": 1, "activation_situ_beta": 1.0, "first_k_dense_replace": 1}
    },
    "mamba2": _ANY
    | {
        "num_heads": 4, "state_size": 8, "n_groups": 1, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
        "time_step_limit": (0.0, 100.0), "time_step_rank": "auto", "layer_norm_epsilon": 1e-5,
    },
    "plamo3": _ANY | {"window_size": 64, "sliding_window_pattern": 2},
}  # fmt: skip


def built(family: str, weights: Weights) -> Any:
    """A small model of a family, with these weights; or with random ones if there are none."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": family} | FAMILIES[family]))
    model.set_dtype(mx.float32)  # experts on a CPU take no other
    model.eval()
    for own, array in arrays(model).items():
        if own in weights:
            new = mx.array(weights[own].numpy())
        else:
            new = (
                0.3 * mx.random.normal(array.shape, key=mx.random.key(len(weights) + hash(own) % 1000))
            ).astype(array.dtype)
        model.load_weights([(own, new)], strict=False)
    mx.eval(model.parameters())
    return model


def logits(model: Any) -> Any:
    found = model(mx.array([PROMPT])).astype(mx.float32)
    mx.eval(found)
    return np.array(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_that_is_published_alone_is_computed_with(family: str, memory_url: str) -> None:
    model = built(family, {})
    weights = {
        own: torch.from_numpy(bits(each).copy()).view(torch.float32) for own, each in arrays(model).items()
    }
    logits(model)  # before the first version, as a server warms up
    publisher = Publisher(memory_url, dtype="keep", retention=None)
    with publisher, follow(model, memory_url, background=False) as following:
        different = 0
        before = None
        for own in [None, *weights]:
            if own is not None:
                weights[own] = -weights[own]
            publisher.publish(weights.items()).wait(PATIENCE_S)
            following.sync()
            found = logits(model)
            np.testing.assert_array_equal(found, logits(built(family, weights)), err_msg=str(own))
            different += before is not None and not np.array_equal(found, before)
            before = found
    assert different > len(weights) / 2, "few tensors change an answer, which proves little"


class Keeping(nn.Module):
    """A model that keeps something that it made of its weight."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args
        self.weight = mx.ones((4,), mx.bfloat16)
        self._constant = mx.arange(4).astype(mx.float32)
        self._twice = None
        self.by_size: dict[int, Any] = {}
        self.step = None
        if args == "compiled":
            self.step = mx.compile(self.compute)
        if args == "hidden":
            self.holder = types.SimpleNamespace(arrays=[])

    def compute(self, x: Any) -> Any:
        return x * self.weight

    def __call__(self, x: Any) -> Any:
        if self._twice is None:
            self._twice = self.weight * 2
        if self.args == "by size":
            self.by_size.setdefault(x.size, (self.weight * 3,))
            return x * self.by_size[x.size][0]
        if self.args == "changed":
            self._constant = self._constant + self.weight
        if self.args == "hidden":
            self.holder.arrays.append(self.weight)
        if self.args == "own":
            self.made = (self.weight * 3,)
            self.step = self.step or mx.compile(self.compute)
        return x * self._twice + self._constant


@pytest.mark.parametrize("args", ["plain", "own", "by size", "compiled", "changed", "hidden", None])
def test_arrays_made_of_weights_are_made_anew_or_refused_by_name(args: str | None, memory_url: str) -> None:
    model = Keeping(args)
    mx.random.seed(7)
    expected = mx.random.uniform(shape=(2,)).tolist()
    mx.random.seed(7)
    refused = {"compiled": "step", "changed": "_constant", "hidden": "holder", None: "_constant"}.get(args)
    one = mx.ones((4,), mx.bfloat16)
    publisher = Publisher(memory_url, retention=None)
    with publisher:
        publisher.publish([("weight", torch.ones(4))]).wait(PATIENCE_S)
        if args in ("compiled", None):
            with pytest.raises(ModelMismatchError, match=f"{refused} of the model is .* cannot follow"):
                follow(model, memory_url)
            return
        with follow(model, memory_url, background=False) as following:
            assert mx.random.uniform(shape=(2,)).tolist() == expected
            for value in (1.0, 2.0, 3.0):
                if value > 1:
                    publisher.publish([("weight", torch.full((4,), value))]).wait(PATIENCE_S)
                    if refused is not None:
                        with pytest.raises(ModelMismatchError, match=f"^{refused} of the model is an array"):
                            following.sync()
                        assert following.version == 1
                        continue
                    following.sync()
                    assert model.step is None and "made" not in model
                found = model(one)
                if args != "changed":
                    factor = 3 if args == "by size" else 2
                    constant = 0 if args == "by size" else model._constant
                    assert mx.array_equal(found, one * factor * value + constant), value


def test_what_is_refused(checkpoint: Path, memory_url: str) -> None:
    model = load(checkpoint)
    with training(memory_url, weights_of(checkpoint)) as trainer:
        trainer.publish()
        with follow(model, memory_url), pytest.raises(ConfigError, match="follows a channel already"):
            follow(model, memory_url)
        other = load(checkpoint)
        other.set_dtype(mx.float16)
        before = {own: bits(each).copy() for own, each in arrays(quantized(other)).items()}
        with pytest.raises(ModelMismatchError, match=r"was not quantized from bfloat16, which .*set_dtype"):
            follow(other, memory_url)
        assert all(np.array_equal(bits(each), before[own]) for own, each in arrays(other).items())
        with pytest.raises(ModelMismatchError, match="float32"):
            other = load(checkpoint)
            other.set_dtype(mx.float32)
            follow(other, memory_url)
    with pytest.raises(ConfigError, match=r"takes a torch\.nn\.Module or an mlx\.nn\.Module"):
        follow(object(), memory_url)


LORA = {
    "rank": 4,
    "scale": 2.0,
    "dropout": 0.0,
    "keys": ["self_attn.q_proj", "mlp.down_proj", "embed_tokens", "model.embed_tokens"],
}


def peft_weights(weights: Weights, use_dora: bool) -> Weights:
    """An adapter of both layers as PEFT saves it, in its names and shapes; of the embeddings too where it is LoRA."""
    found, source = {}, torch.Generator().manual_seed(2)

    def made(*shape: int) -> torch.Tensor:
        return (0.1 * torch.randn(shape, generator=source)).to(torch.bfloat16)

    for name in weights:
        path, last = f"base_model.model.{name.removesuffix('.weight')}", name.split(".")[-2]
        rows, *columns = weights[name].shape
        if last in ("q_proj", "down_proj"):
            found |= {f"{path}.lora_A.weight": made(4, *columns), f"{path}.lora_B.weight": made(rows, 4)}
            if use_dora:
                found[f"{path}.lora_magnitude_vector"] = made(rows).abs() + 1
        elif last == "embed_tokens" and not use_dora:
            found |= {
                f"{path}.lora_embedding_A": made(4, rows),
                f"{path}.lora_embedding_B": made(*columns, 4),
            }
    return found


def merged(weights: Weights, adapter: Weights) -> Weights:
    """The weights that a model has with an adapter of scale 2 in them."""
    found = {name: tensor.float() for name, tensor in weights.items()}
    for name, a in adapter.items():
        path, _, last = name.removeprefix("base_model.model.").partition(".lora_")
        if last in ("A.weight", "embedding_A"):
            b = adapter[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")]
            product = b.float() @ a.float()
            weight = found[f"{path}.weight"] + 2 * (product if last == "A.weight" else product.T)
            magnitude = adapter.get(f"base_model.model.{path}.lora_magnitude_vector")
            if magnitude is not None:
                weight *= (magnitude.float() / weight.norm(dim=1))[:, None]
            found[f"{path}.weight"] = weight
    return found


def with_layers(model: Any, use_dora: bool = False, **config: Any) -> Any:
    keys = [each for each in LORA["keys"] if not (use_dora and "embed" in each)]
    lora.linear_to_lora_layers(model, 2, LORA | {"keys": keys} | config, use_dora)
    model.set_dtype(mx.bfloat16)
    model.eval()
    mx.eval(model.parameters())
    return model


@contextlib.contextmanager
def training_adapter(url: str, adapter: Weights, base: Weights) -> Iterator[Trainer]:
    config = {
        "r": 8,
        "lora_alpha": 6,
        "rank_pattern": {"q_proj|down_proj|embed_tokens": 4},
        "alpha_pattern": {"layers.*": 8, "embed_tokens": 8},
    }
    files = {
        "adapter_config.json": json.dumps(config).encode(),
        adapter_base.FILE: AdapterBase.of("base", base.items()).encode(),
    }
    trainer = Trainer(url, adapter, model_files=files)
    with trainer.publisher:
        trainer.publish()
        yield trainer


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_is_followed_in_the_layers_of_mlx_lm(
    checkpoint: Path, memory_url: str, tmp_path: Path, use_dora: bool
) -> None:
    weights, model = weights_of(checkpoint), with_layers(load(checkpoint), use_dora)
    base = {
        own: each for own, each in arrays(model).items() if ".lora_" not in own and not own.endswith(".m")
    }
    before = {own: bits(each).copy() for own, each in base.items()}
    with (
        training_adapter(memory_url, peft_weights(weights, use_dora), weights) as trainer,
        follow(model, memory_url, background=False) as following,
    ):
        for version in range(1, 4):
            assert following.sync() == version
            held = arrays(model)
            assert len(held) == len(base) + len(trainer.published[version])
            for name, tensor in trainer.published[version].items():
                path, _, last = name.removeprefix("base_model.model.").rpartition(".lora_")
                own = {"A": "lora_a", "B": "lora_b", "m": "m"}[last.removeprefix("embedding_")[0]]
                expected = tensor if own == "m" else tensor.T.contiguous()
                np.testing.assert_array_equal(
                    bits(held[f"{path}.{own}"]), expected.view(torch.uint16).numpy(), err_msg=name
                )
            trainer.publish()
        assert all(held[own] is each for own, each in base.items())
        assert all(np.array_equal(bits(held[own]), each) for own, each in before.items())
        whole = fresh(checkpoint, merged(weights, trainer.published[3]), tmp_path / "merged")
        apart, adapted_by = (np.abs(logits(model) - logits(each)).max() for each in (whole, load(checkpoint)))
        assert 5 * apart < adapted_by


def test_an_adapter_of_a_quantized_base_and_what_is_refused(
    checkpoint: Path, memory_url: str, tmp_path: Path
) -> None:
    weights = weights_of(checkpoint)
    base = quantized(load(checkpoint), "affine 8")
    before = {own: bits(each).copy() for own, each in arrays(base).items()}
    model = with_layers(base)
    with training_adapter(memory_url, peft_weights(weights, False), weights) as trainer:
        with follow(model, memory_url, background=False) as following:
            trainer.publish()
            assert following.sync() == 2
            greedy(model)
            held = {
                own.replace(".linear.", ".").replace(".embedding.", "."): each
                for own, each in arrays(model).items()
            }
            assert all(np.array_equal(bits(held[own]), each) for own, each in before.items())
            expected = trainer.published[2]["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
            np.testing.assert_array_equal(
                bits(held["model.layers.1.self_attn.q_proj.lora_a"]).T, expected.view(torch.uint16).numpy()
            )
        for other, said in (
            (with_layers(load(checkpoint), scale=3.0), "multiplies its adapter by 3, and .* says 2: make"),
            (
                with_layers(load(checkpoint), keys=["self_attn.q_proj"]),
                "is in the channel and not in the module",
            ),
            (with_layers(load(checkpoint), True), r"down_proj\.m .*is in the module and not in the channel"),
            (with_layers(load(save(llama(seed=2), tmp_path / "other"))), "trained on base, .* other weights"),
            (load(checkpoint), "is in the channel and not in the module"),
        ):
            with pytest.raises(ModelMismatchError, match=said):
                follow(other, memory_url)


def serving(
    checkpoint: Path, channel: str, log: Path, *options: str, **environ: str
) -> contextlib.AbstractContextManager[Server]:
    command = [sys.executable, "-m", "mlx_plugin.server", str(checkpoint), "--channel", channel, *options]
    return http_server.serving(command, log, **environ)


def complete(server: Server, **options: Any) -> tuple[dict[str, str], Any]:
    prompt = " ".join(f"w{token}" for token in PROMPT)
    return server.complete(prompt, **{"max_tokens": 8, "logprobs": True} | options)


def tokens_of(reply: Any) -> list[int]:
    return [each["id"] for each in reply["choices"][0]["logprobs"]["content"]]


@pytest.fixture
def trainer(checkpoint: Path, tmp_path: Path) -> Iterator[Trainer]:
    with training(f"file://{tmp_path}/channel", weights_of(checkpoint)) as trainer:
        trainer.publish()
        yield trainer


def test_a_server_gives_each_version_s_tokens_and_no_older_prefixes(
    checkpoint: Path, trainer: Trainer, tmp_path: Path
) -> None:
    with serving(checkpoint, f"file://{tmp_path}/channel", tmp_path / "log") as server:
        answers = []
        for version in range(1, 11):
            server.until(version)
            assert server.digest() == digests(trainer.published[version])
            headers, reply = complete(server)
            assert headers["x-deltasync-versions"] == f"{version}..{version}"
            assert headers["x-deltasync-spans"] == f"[[[{version},8]]]"
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, (
                "keys and values of an older version"
            )
            answers.append(tokens_of(reply))
            assert answers[-1] == greedy(
                fresh(checkpoint, trainer.published[version], tmp_path / f"fresh{version}")
            )
            _, again = complete(server)
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the prompt cache is off"
            assert tokens_of(again) == answers[-1]
            # One that cannot be batched goes another way.
            _, single = complete(server, seed=1)
            assert tokens_of(single) == answers[-1]
            trainer.publish()
        assert len({*map(tuple, answers)}) > 1
        server.process.kill()
        server.process.wait()
    with serving(checkpoint, f"file://{tmp_path}/channel", tmp_path / "log2") as server:
        server.until(11)
        assert server.digest() == digests(trainer.published[11])


def test_requests_over_commits_end_and_leave_no_cache(
    checkpoint: Path, trainer: Trainer, tmp_path: Path
) -> None:
    with serving(checkpoint, f"file://{tmp_path}/channel", tmp_path / "log") as server:
        server.until(1)
        for options in ({}, {"seed": 7}):
            # until a version comes before it ends, however fast this machine is
            for count in (1000, 4000, 16000):
                begun = server.log.read_text().count("Prompt processing progress")
                with ThreadPoolExecutor(1) as pool:
                    long = pool.submit(complete, server, max_tokens=count, logit_bias={"63": -100}, **options)
                    while server.log.read_text().count("Prompt processing progress") == begun:
                        time.sleep(0.01)
                    now = trainer.publish()
                    server.until(now)
                    if not options:
                        server.complete("w50 w51", max_tokens=1)  # caches are of the new version from here on
                    is_over_a_commit = not long.done()
                    headers, reply = long.result()
                assert reply["usage"]["completion_tokens"] == count
                if is_over_a_commit:
                    break
            assert is_over_a_commit
            if not options:
                spans = json.loads(headers["x-deltasync-spans"])[0]
                assert [version for version, _ in spans] == [now - 1, now]
                assert sum(made for _, made in spans) == count
                assert headers["x-deltasync-versions"] == f"{now - 1}..{now}"
            # The same beginning: what the long request left was of several versions.
            _, again = complete(server)
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert tokens_of(again) == greedy(
                fresh(checkpoint, trainer.published[now], tmp_path / f"fresh{now}")
            )


def test_a_demand_is_read_or_refused_and_held(checkpoint: Path, trainer: Trainer, tmp_path: Path) -> None:
    trainer.publish()
    found, expected = {}, {}
    with serving(
        checkpoint, f"file://{tmp_path}/channel", tmp_path / "log", DELTASYNC_POLL_INTERVAL_S="0.02"
    ) as server:
        server.until(demands.SERVED)
        for name, demand in demands.READ.items():
            body = demand.data({"prompt": "w1", "max_tokens": 1})
            path = "/v1/completions" + (f"?{demand.query}" if demand.query else "")
            found[name], reply = server.send(path, demand.all_headers(), body)
            expected[name] = demand.code
            if found[name] in (400, 409):
                assert (
                    "deltasync-" in json.loads(reply)["error"]
                    or "serves version 2" in json.loads(reply)["error"]
                )
        assert found == expected

        def ask(version: int, **options: Any) -> tuple[int, bytes]:
            body = {"prompt": "w1", "logit_bias": {"63": -100}, **options}
            return server.send("/v1/completions", [(demands.HEADER, str(version))], json.dumps(body).encode())

        def met_by_a_commit() -> bool:
            live = server.request("/deltasync/status")[2]["version"]
            asked = pool.submit(ask, live, max_tokens=300)
            while not asked.done():
                server.until(trainer.publish())
            code, reply = asked.result()
            return code == 409 and b"The version changed meanwhile." in reply

        with ThreadPoolExecutor(1) as pool:
            wait_until(met_by_a_commit, told=server.log.read_text)
            asked = pool.submit(
                ask, server.request("/deltasync/status")[2]["version"], max_tokens=10**6, stream=True
            )
            while not asked.done():  # it ends by a commit alone
                server.until(trainer.publish())
        code, reply = asked.result()
        assert (code, b"The version changed meanwhile." in reply, b"[DONE]" in reply) == (200, True, False)


def test_a_server_serves_one_model_and_says_what_it_does_not(
    checkpoint: Path, trainer: Trainer, tmp_path: Path
) -> None:
    with serving(checkpoint, f"file://{tmp_path}/channel", tmp_path / "log") as server:
        server.until(1)
        asked = (
            ("model", "another/model", 404),
            ("adapters", "a", 404),
            ("draft_model", "b", 404),
            ("model", str(checkpoint), 200),
        )
        for name, value, code in asked:
            assert (
                server.request("/v1/completions", {"prompt": "w1", "max_tokens": 1, name: value})[0] == code
            )
        assert server.request("/health")[0] == 200
    with serving(
        checkpoint, f"file://{tmp_path}/channel", tmp_path / "log3", "--adapter-path", "adapter"
    ) as server:
        assert server.process.wait(http_server.START_S) == 1
        assert "takes no --adapter-path" in server.log.read_text()
    other = save(llama(tied=True), tmp_path / "other")
    with serving(other, f"file://{tmp_path}/channel", tmp_path / "log4") as server:
        assert server.process.wait(http_server.START_S) == 1
        assert server.log.read_text().splitlines()[-1].startswith("deltasync: ")


def test_a_draft_model_proposes_and_the_version_decides(
    checkpoint: Path, trainer: Trainer, tmp_path: Path
) -> None:
    options = "--draft-model", str(checkpoint), "--num-draft-tokens", "2"
    with serving(checkpoint, f"file://{tmp_path}/channel", tmp_path / "log", *options) as server:
        for version in (1, 2, 3):
            server.until(version)
            for _ in range(2):
                expected = greedy(
                    fresh(checkpoint, trainer.published[version], tmp_path / f"{time.monotonic()}")
                )
                assert tokens_of(complete(server)[1]) == expected
            trainer.publish()
        assert (
            server.request("/v1/completions", {"prompt": "w1", "max_tokens": 1, "draft_model": "b"})[0] == 404
        )


def test_a_server_starts_before_the_first_version(checkpoint: Path, tmp_path: Path) -> None:
    with serving(
        checkpoint, f"file://{tmp_path}/channel", tmp_path / "log", DELTASYNC_HTTP_TOKEN="secret"
    ) as server:
        code, _, reply = server.first_answer("/deltasync/ready")
        assert code == 503 and "no version" in reply["reason"]
        assert server.request("/v1/completions", {"prompt": "w1", "max_tokens": 1})[0] == 503
        for path in ("/deltasync/status", "/deltasync/digest"):
            assert server.request(path)[0] == 401
        with training(f"file://{tmp_path}/channel", weights_of(checkpoint)) as trainer:
            assert trainer.publish() == 1
            wait_until(lambda: server.request("/deltasync/ready")[0] == 200, told=server.log.read_text)
            code, _, found = server.request("/deltasync/digest", authorization="Bearer secret")
            assert (code, found) == (200, {"version": 1, "sha256": digests(trainer.published[1])})
