"""Layouts of vLLM's kernels for GPUs that its classes also make of tensors on a CPU, and what becomes of them."""

from __future__ import annotations

import dataclasses

_FI = "FlashInfer{}LinearKernel"


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels that lay the weights of a checkpoint out.

    Attributes:
        weights: Of the checkpoint, as the documentation names them.
        format: As `layouts.Case` has it.
        linear: Classes of kernels of linear layers.
        experts: Kernels of experts, as `--moe-backend` names them; beside the first one of `linear`.
        quantization: As `--quantization` has it.
        how: Of all of them: `in place`, `twins` or `refused`.
    """

    weights: str
    format: str | None
    linear: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    quantization: str | None = None
    how: str = "twins"


_NVFP4 = (
    "CutlassNvFp4LinearKernel",
    "TorchNvFp4LinearKernel",
    "FbgemmNvFp4LinearKernel",
    "EmulationNvFp4LinearKernel",
    "MarlinNvFp4LinearKernel",
    *(_FI.format(f"{kind}NvFp4") for kind in ("Cutlass", "CuteDsl", "Cudnn")),
)
_MXFP8 = (
    "EmulationMxfp8LinearKernel",
    "MarlinMxfp8LinearKernel",
    *(_FI.format(f"{kind}Mxfp8") for kind in ("Cutlass", "Cutedsl")),
)
_FP8 = (
    "CutlassFP8ScaledMMLinearKernel",
    "FlashInferFP8ScaledMMLinearKernel",
    "PerTensorTorchFP8ScaledMMLinearKernel",
    "MarlinFP8ScaledMMLinearKernel",
)
_CHANNELS = ("ChannelWiseTorchFP8ScaledMMLinearKernel", "CutlassFP8ScaledMMLinearKernel")
_BLOCKS = (
    "CutlassFp8BlockScaledMMKernel",
    "TritonFp8BlockScaledMMKernel",
    "DeepGemmFp8BlockScaledMMKernel",
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    "BlockWiseTorchFP8ScaledMMLinearKernel",
)
_INTEGERS = (
    "TritonW4A16LinearKernel",
    "MarlinLinearKernel",
    "MacheteLinearKernel",
    "ConchLinearKernel",
    "ExllamaLinearKernel",
)

KERNELS = (
    Kernels("NVFP4 of ModelOpt", "nvfp4_modelopt", _NVFP4, ("cutlass", "flashinfer_cutlass", "marlin")),
    Kernels("NVFP4 of compressed-tensors", "nvfp4", _NVFP4, ("cutlass", "marlin")),
    Kernels("MXFP8 of ModelOpt", "mxfp8", _MXFP8, ("triton", "marlin")),
    Kernels(
        "MXFP4 of compressed-tensors",
        "mxfp4",
        ("EmulationMxfp4LinearKernel", "FlashInferMxFp4LinearKernel", "MarlinMxFp4LinearKernel"),
        ("marlin", "emulation", "triton"),
    ),
    Kernels("FP8, static, a scale for each tensor", "fp8_tensor", _FP8),
    Kernels("FP8, static, a scale for each tensor", "fp8_tensor", experts=("triton",), how="refused"),
    Kernels("FP8, a scale for each channel", "float8", _CHANNELS, ("triton", "cutlass")),
    Kernels("FP8 in blocks", "fp8_blocks", _BLOCKS, ("triton",), how="in place"),
    Kernels("FP8 in blocks", "fp8_blocks", ("MarlinFP8ScaledMMLinearKernel",), ("marlin",)),
    Kernels(
        "int8, a scale for each channel",
        "int8",
        ("CutlassInt8ScaledMMLinearKernel", "TritonInt8ScaledMMLinearKernel"),
        ("triton",),
    ),
    Kernels("GPTQ", "gptq", _INTEGERS, ("marlin",)),
    Kernels("AWQ", "awq", _INTEGERS[:-1], ("marlin",)),
    Kernels("16 bits, `mxfp8`", None, _MXFP8, ("triton", "marlin"), "mxfp8"),
    Kernels("16 bits, `fp8_per_tensor`", None, _FP8[:1], ("triton",), "fp8_per_tensor"),
    Kernels("16 bits, `fp8_per_channel`", None, _CHANNELS, ("triton",), "fp8_per_channel"),
    Kernels("16 bits, `fp8_per_block`", None, _BLOCKS[:1], ("triton",), "fp8_per_block"),
    Kernels("16 bits, `int8_per_channel_weight_only`", None, (), ("triton",), "int8_per_channel_weight_only"),
    Kernels("16 bits", None, experts=("triton",), how="in place"),
    Kernels("16 bits", None, experts=("flashinfer_cutlass",)),
)

NEEDS_A_GPU = {
    "FlashInfer's own library": (
        "FlashInferTrtllmNvFp4LinearKernel",
        "FlashInferCuteDslNvFp4W4A16LinearKernel",
        "FlashInferB12xNvFp4LinearKernel",
        "FlashInferTrtllmMxfp8LinearKernel",
    ),
    "b12x": (
        "B12xNvFp4LinearKernel",
        "B12xNvFp4W4A16LinearKernel",
        "B12xMxFp4LinearKernel",
        "B12xMxfp8LinearKernel",
        "B12xTensorFP8ScaledMMLinearKernel",
        "B12xFp8BlockScaledMMKernel",
    ),
    "Humming": (
        "HummingNvFp4LinearKernel",
        "HummingMxFp6LinearKernel",
        "HummingMxFp4LinearKernel",
        "HummingMxfp8LinearKernel",
        "HummingInt8ScaledMMLinearKernel",
        "HummingFP8ScaledMMLinearKernel",
        "HummingLinearKernel",
    ),
    "another checkpoint than these": ("CutlassW4A8LinearKernel", "EmulationMxfp6LinearKernel"),
}
"""Kernels of vLLM for CUDA that were only read, by what they need."""

NEWER = {"TorchMxFp8LinearKernel"}
"""Kernels that vLLM 0.33 has and 0.32 has not."""


def cases() -> dict[str, tuple[Kernels, str | None, str | None]]:
    """Return the kernels by name, each with its linear kernel and that of its experts."""
    found = dict[str, tuple[Kernels, str | None, str | None]]()
    for each in KERNELS:
        name = f"kernel:{each.format or f'16-bit-{each.quantization}'}"
        found |= {f"{name}:{kernel}": (each, kernel, None) for kernel in each.linear}
        linear = each.linear[0] if each.linear else None
        found |= {f"{name}:experts:{kernel}": (each, linear, kernel) for kernel in each.experts}
    return found


def rows() -> list[str]:
    """Return the rows of the documentation's table."""
    made = [(each.weights, each.linear, each.experts, each.how) for each in KERNELS]
    read = [("any", names, (), f"read only: needs {need}") for need, names in NEEDS_A_GPU.items()]
    return [
        f"| {weights} | {_listed(linear)} | {_listed(experts)} | {how} |"
        for weights, linear, experts, how in [*made, *read]
    ]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name.removesuffix('LinearKernel')}`" for name in names) or "-"
