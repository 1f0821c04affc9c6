"""vLLM's kernels for GPUs, made to lay out tensors of a CPU: the classes are vLLM's own, and only what asks for
the device is replaced.

Operators that are compiled for CUDA alone are replaced too. Those that pack become permutations: a fresh load
makes the same of equal tensors, and nothing computes with the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.platforms import PlatformEnum
from vllm.platforms.cpu import CpuPlatform

from tests.integration.kernels import cases
from tests.integration.layouts import Case

_TABLES = [table for name, table in vars(linear).items() if name.startswith("_POSSIBLE_")]


def for_cuda() -> list[str]:
    """Return the names of the kernels of linear layers among which vLLM chooses on CUDA."""
    return sorted({kernel.__name__ for table in _TABLES for kernel in table.get(PlatformEnum.CUDA, [])})


def case_of(name: str) -> Case:
    kernels, _, experts = cases()[name]
    arguments = {"quantization": kernels.quantization, "moe_backend": experts}
    given = {key: value for key, value in arguments.items() if value is not None}
    if experts is None:
        config, fields = transformers.Qwen3Config, {"intermediate_size": 256, "head_dim": 64}
    else:
        config = transformers.Qwen3MoeConfig
        fields = {"hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 256}
        fields |= {"num_experts_per_tok": 2, "num_experts": 4, "head_dim": 64}
    return Case(config, fields, given, format=kernels.format)


@contextlib.contextmanager
def chosen(name: str) -> Iterator[None]:
    """Have vLLM choose a kernel, in the body, as if the device were one that it runs on."""
    _, kernel, experts = cases()[name]
    yes = classmethod(lambda *_, **__: (True, None))
    with contextlib.ExitStack() as stack:
        replaced = [mock.patch.object(CpuPlatform, "supported_quantization", [])]
        if experts is not None:
            asked = staticmethod(lambda *_, **__: (True, None))
            replaced.append(mock.patch.object(FusedMoEExperts, "is_supported_config", asked))
        if kernel is not None:
            kind = getattr(linear, kernel)
            for table in _TABLES:
                if kind in table.get(PlatformEnum.CUDA, []):
                    replaced.append(mock.patch.dict(table, {PlatformEnum.CPU: [kind]}))
            asks = [each for each in ("is_supported", "can_implement") if hasattr(kind, each)]
            replaced += [mock.patch.object(kind, each, yes) for each in asks]
        replaced += [mock.patch.object(_custom_ops, each, by) for each, by in _OPERATORS.items()]
        replaced.append(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self))
        for each in replaced:
            stack.enter_context(each)
        yield


def _packed(b_q_weight: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    """As Marlin's operators pack: `perm`, which those of AWQ have not, `size_k`, `size_n`, `num_bits`."""
    perm = named.get("perm", next((each for each in given if isinstance(each, torch.Tensor)), None))
    sizes = [each for each in given if isinstance(each, int)]
    size_k, size_n, num_bits = sizes[:3] or (named["size_k"], named["size_n"], named["num_bits"])
    moved = b_q_weight if perm is None or not perm.numel() else b_q_weight + perm.sum().to(b_q_weight.dtype)
    return moved.flip(0).reshape(size_k // 16, size_n * 16 // (32 // num_bits)).contiguous()


def _packed_experts(b_q_weight: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    return torch.stack([_packed(each, *_of_expert(given, n), **named) for n, each in enumerate(b_q_weight)])


def _of_expert(given: tuple[Any, ...], number: int) -> list[Any]:
    return [each[number] if isinstance(each, torch.Tensor) else each for each in given]


def _shuffled(q_weight: torch.Tensor, *_: Any) -> None:
    q_weight.copy_(q_weight.flip(0))


def _machete(b_q_weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return b_q_weight.flip(0)


def _scaled(
    input: torch.Tensor, scale: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = input.abs().max().float() / 448 if scale is None else scale
    return (input.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


_OPERATORS = {
    "gptq_marlin_repack": _packed,
    "awq_marlin_repack": _packed,
    "gptq_marlin_moe_repack": _packed_experts,
    "awq_marlin_moe_repack": _packed_experts,
    "gptq_shuffle": _shuffled,
    "machete_prepack_B": _machete,
    "scaled_fp8_quant": _scaled,
}
