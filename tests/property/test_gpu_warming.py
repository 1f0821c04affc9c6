"""What a GPU decodes while it serves, compiled for one that is not there: warming up has compiled all of it."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from deltasync import codec
from deltasync.tensors import Delta, Layout, Sparse, TensorSpec
from tests.devices import StandIn
from tests.interpreter import HAS_TRITON, INTERPRETED, run_again

COMPILES = HAS_TRITON and not INTERPRETED

if COMPILES:
    from triton import knobs

    from deltasync.codec import tiles
    from deltasync.gpu import classes as gpu_classes
    from deltasync.gpu import codec as on_device
    from deltasync.gpu import coder as gpu_coder
    from tests.triton_compiled import compiling


@pytest.mark.skipif(not COMPILES, reason="no triton that compiles")
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_decoding_compiles_nothing_that_warming_up_has_not(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches begin at odd changes; numbers of blocks and streams are 1, odd, and multiples of 16."""
    device, width = StandIn(), getattr(torch, dtype).itemsize
    nothing_runs = mock.patch.object(torch.Tensor, "all", lambda *_: True)
    with compiling("sm_90", gpu_coder, gpu_classes) as found, nothing_runs:
        on_device.warm_up.__wrapped__(device, width)
        warm = _compiled()
        assert warm > 8
        monkeypatch.setattr(gpu_classes, "MOST_BYTES", 20_000)
        for rows, columns, every in ((256, 256, 3), (512, 260, 7), (272, 256, 11), (16, 256, 2)):
            _decode(device, dtype, width, (rows, columns), every)
        assert _compiled() == warm
    assert len(found) == warm


@pytest.mark.skipif(not COMPILES, reason="no triton that compiles")
def test_vllms_monitor_of_compilations_finds_none_while_serving() -> None:
    """In mode `error`, as vLLM activates it behind its warm-up. It raises where nothing was warmed up."""
    monitor = pytest.importorskip("vllm.utils.jit_monitor", exc_type=ImportError)
    hooks = ("_setup_triton_autotuning_print", "_setup_cutedsl_jit_hook", "_setup_tilelang_jit_hook")
    of_others = dict.fromkeys(hooks, lambda: None)
    nothing_runs = mock.patch.object(torch.Tensor, "all", lambda *_: True)
    with (
        compiling("sm_90", gpu_coder, gpu_classes),
        nothing_runs,
        mock.patch.multiple(monitor, HAS_TRITON=True, _active=False, **of_others),
        mock.patch.object(knobs.runtime, "jit_post_compile_hook", None),
    ):
        on_device.warm_up.__wrapped__(StandIn(), 2)
        monitor.activate(mode="error")
        _decode(StandIn(), "bfloat16", 2, (256, 256), 3)
        with pytest.raises(RuntimeError, match="compilation during inference"):
            on_device.warm_up.__wrapped__(StandIn(), 1)


def _compiled() -> int:
    kernels = [*vars(gpu_coder).values(), *vars(gpu_classes).values()]
    caches = {id(each): each.device_caches for each in kernels if hasattr(each, "device_caches")}
    return sum(len(cache) for held in caches.values() for cache, *_ in held.values())


def _decode(device: StandIn, dtype: str, width: int, shape: tuple[int, int], every: int) -> None:
    """Decode a delta of three matrices and two vectors between them, of which some elements change."""
    shapes = shape, (33,), (shape[0], 128), (7,), (256, 256)
    layout = Layout({f"w{n}": TensorSpec(f"w{n}", dtype, shape) for n, shape in enumerate(shapes)})
    of = layout.vectors[width]
    at_K = np.arange(1, of.element_count, every, dtype=of.index_dtype)
    new_N = np.zeros(of.element_count, f"u{width}")
    new_N[at_K] = 1
    first_T = of.first_T.tolist()
    new = {name: new_N[first_T[t] : first_T[t + 1]] for t, name in enumerate(of.names)}
    delta = Delta(layout, {width: Sparse(at_K, new_N[at_K])})
    for name in ("packed", "context"):
        written = codec.get(name).encode(
            delta, lambda tensor: (new[tensor], 0), dict.fromkeys(layout.specs, 0), 8, 7
        )
        places = {width: on_device.BitAddresses(of.first_T[:-1] * width, tiles.whole(of))}
        coder = on_device.DeviceCodec(layout, device.device, device.send)
        coder.decode([codec.open_payload(written.to_bytes())], places)


@pytest.mark.skipif(HAS_TRITON, reason="the test above runs as it is")
def test_through_tritons_compiler(tmp_path: Path) -> None:
    run_again([__file__], tmp_path)
