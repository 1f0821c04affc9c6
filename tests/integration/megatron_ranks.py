"""What each of two ranks of Megatron does in `test_verl`, by torchrun: megatron_ranks.py FOLDER.

A real GPTModel of megatron-core: its dense layers are cut by tensor parallelism, and each rank has experts of
its own. `streamed` gathers it under the checkpoint's names as a bridge does, one tensor at a time, and our
engine for verl publishes what it yields.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from deltasync import Publisher, Replica
from deltasync.errors import ConfigError
from trl_callback.verl import DeltaSyncCheckpointEngine

FOLDER = Path(sys.argv[1])
HEADS, GROUPS, SIZE, HIDDEN, FFN, EXPERTS, VOCAB = 4, 2, 8, 32, 48, 4, 64
Weights = dict[str, torch.Tensor]
LAYER = "model.layers.0"
DIRECT = {
    "decoder.layers.0.input_layernorm.weight": f"{LAYER}.input_layernorm.weight",
    "decoder.layers.0.pre_mlp_layernorm.weight": f"{LAYER}.post_attention_layernorm.weight",
    "decoder.layers.0.mlp.router.weight": f"{LAYER}.mlp.gate.weight",
    "decoder.layers.0.self_attention.linear_proj.weight": f"{LAYER}.self_attn.o_proj.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the checkpoint."""
    found: dict[str, tuple[int, ...]] = {name: (HIDDEN,) for name in DIRECT.values() if "norm" in name}
    found |= {name: (VOCAB, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    rows = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}
    found |= {f"{LAYER}.self_attn.{each}_proj.weight": (rows[each], HIDDEN) for each in "qkv"}
    found |= {f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE)}
    found |= {f"{LAYER}.mlp.gate.weight": (EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        found |= {
            f"{LAYER}.mlp.experts.{expert}.{each}_proj.weight": (FFN, HIDDEN) for each in ("gate", "up")
        }
        found[f"{LAYER}.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, FFN)
    return found


def make() -> GPTModel:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=SIZE,
        ffn_hidden_size=FFN,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(EXPERTS, False, normalization="RMSNorm")
    return GPTModel(
        config, spec, VOCAB, 16, share_embeddings_and_output_weights=False, position_embedding_type="rope"
    )


def cut(model: GPTModel, whole: Weights) -> None:
    """Give the ranks of Megatron the weights of a checkpoint, each its parts."""
    rank, experts = dist.get_rank(), EXPERTS // 2
    for name, param in model.named_parameters():
        if name in DIRECT:
            tensor = whole[DIRECT[name]]
        elif ".linear_qkv." in name:  # of each group of heads: queries, keys, values
            q, k, v = (
                whole[f"{LAYER}.self_attn.{each}_proj.weight"].view(GROUPS, -1, HIDDEN) for each in "qkv"
            )
            tensor = torch.cat([q, k, v], 1).view(-1, HIDDEN)
        else:
            expert, layer = name.split("local_experts.")[1].split(".")[:2]
            prefix = f"{LAYER}.mlp.experts.{rank * experts + int(expert)}"
            parts = ["gate", "up"] if layer == "linear_fc1" else ["down"]
            param.data.copy_(torch.cat([whole[f"{prefix}.{each}_proj.weight"] for each in parts]))
            continue
        if is_cut(param):
            tensor = tensor.chunk(2, param.partition_dim)[rank]
        param.data.copy_(tensor)


def is_cut(param: torch.Tensor) -> bool:
    """Whether tensor parallelism cuts a dense parameter; norms are whole, and not marked."""
    return bool(getattr(param, "tensor_model_parallel", False))


def streamed(model: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the checkpoint. Each step of it is a collective of all ranks."""
    for name, param in model.named_parameters():
        is_expert = ".experts." in name
        parts = [param.data]
        if is_expert or is_cut(param):
            group = (
                mpu.get_expert_model_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group()
            )
            parts = [torch.empty_like(param.data) for _ in range(2)]
            dist.all_gather(parts, param.data.contiguous(), group=group)
        if is_expert:
            expert, layer = name.split("local_experts.")[1].split(".")[:2]
            for rank, part in enumerate(parts):
                prefix = f"{LAYER}.mlp.experts.{rank * EXPERTS // 2 + int(expert)}"
                names = ["gate", "up"] if layer == "linear_fc1" else ["down"]
                for each, tensor in zip(names, part.chunk(len(names)), strict=True):
                    yield f"{prefix}.{each}_proj.weight", tensor
            continue
        tensor = torch.cat(parts, param.partition_dim) if len(parts) > 1 else parts[0]
        if name in DIRECT:
            yield DIRECT[name], tensor
            continue
        rows = [HEADS // GROUPS * SIZE, SIZE, SIZE]
        for each, part in zip("qkv", tensor.view(GROUPS, -1, HIDDEN).split(rows, 1), strict=True):
            yield f"{LAYER}.self_attn.{each}_proj.weight", part.reshape(-1, HIDDEN)


def refused(given: object) -> str:
    with Publisher(f"file://{FOLDER}/alone-{dist.get_rank()}") as publisher:
        try:
            publisher.publish(given)
        except ConfigError as error:
            return str(error)
    raise AssertionError("A rank published alone.")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mpu.initialize_model_parallel(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    model, rank = make(), dist.get_rank()
    experts = {name: param for name, param in model.named_parameters() if ".experts." in name}
    for given, words in (
        (model, "a part of a tensor that tensor parallelism cuts"),
        (experts, "to an expert"),
    ):
        message = refused(given)
        assert words in message and "Publisher(..., group=group)" in message, message

    rng = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=rng).bfloat16() for name, shape in shapes().items()}
    channel = f"file://{FOLDER}/channel"
    engine, replica = DeltaSyncCheckpointEngine(1 << 20, rank == 0, channel=channel), Replica(channel)
    for step in (1, 2, 3):
        for tensor in whole.values():
            tensor += 0.01 * (torch.rand(tensor.shape, generator=rng) < 0.05)
        cut(model, whole)
        engine.prepare()
        told = asyncio.run(engine.send_weights(streamed(model), global_steps=step))
        assert told.get("deltasync/version") == (step if rank == 0 else None)
        dist.barrier()
        replica.sync(step, timeout_s=60)
        found = replica.state_dict()
        assert found.keys() == whole.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor.view(torch.int16), whole[name].view(torch.int16)), name
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
