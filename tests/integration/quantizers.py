"""vLLM's own quantizers of whole weights beside its quantizers of elements, in a process of vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.quantization.online import fp8

from deltasync.tensors.bits import bits_of
from vllm_plugin.load.plain import PlainLayer, WeightPart, _quantizer

METHODS = {
    "fp8_per_channel": fp8.Fp8PtpcOnlineLinearMethod,
    "fp8_per_block": fp8.Fp8PerBlockOnlineLinearMethod,
}


def weight(dtype: torch.dtype) -> torch.Tensor:
    """A weight whose rows and columns do not fill blocks, with zeros of both signs, rows of them, subnormal and
    large elements.
    """
    made = 0.02 * torch.randn(300, 500, generator=torch.Generator().manual_seed(0))
    made[3], made[:130, :130], made[7, 200:], made[9] = 0, 0, -0.0, made[9] * 1e-38
    made[11] *= 1e6 if dtype == torch.bfloat16 else 1e3
    return made.to(dtype)


def layer_of(method: type, loaded: torch.Tensor) -> Any:
    """A layer, as vLLM's method leaves it after loading this weight, with a kernel that changes nothing."""
    rows, columns = loaded.shape
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(loaded.clone(), requires_grad=False)
    vars(layer).update(
        quant_method=method.__new__(method),  # its constructor asks for a kernel of another device
        tp_size=1,
        **{"input_size": columns, "input_size_per_partition": columns},
        **{"output_size": rows, "output_size_per_partition": rows},
    )
    kernel = SimpleNamespace(process_weights_after_loading=lambda _: None, input_quant_key=lambda: None)
    vars(layer.quant_method).update(
        fp8_linear=kernel, requantization_source=None, requantization_source_parameters={}
    )
    layer.quant_method.weight_block_size = [128, 128]
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def proven() -> dict[str, bool]:
    """Return, for each method and dtype, whether elements beside the largest of their group become what they do
    in the whole weight.
    """
    return {
        f"{name} {dtype}": _is_proven(method, weight(dtype))
        for name, method in METHODS.items()
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }


def _is_proven(method: type, loaded: torch.Tensor) -> bool:
    layer, (rows, columns) = layer_of(method, loaded), loaded.shape
    found = _quantizer(layer)
    assert found is not None
    part = WeightPart("", bits_of(loaded), 0, columns, 0, rows, columns)
    return PlainLayer(dict(layer.named_parameters()), loaded, [part], *found).prove()
