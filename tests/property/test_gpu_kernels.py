"""The Triton kernels against the reference: on a GPU where there is one, else in a subprocess through Triton's interpreter.

The tests marked `gpu` are the same in both. Where there is no GPU, the tests at the end run this file again with the
triton that `make setup` keeps outside of the environment's site-packages.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.fingerprint import MASK
from deltasync.kernels import device_kernels, reference, torch_ops
from deltasync.types import index_dtype
from tests import strategies as our
from tests.interpreter import DEVICE, HAS_TRITON, INTERPRETED, RUNS, run_again

if HAS_TRITON:
    from deltasync.kernels import gpu

    if INTERPRETED:
        # Small blocks, so that small tensors have several.
        gpu._STREAM_BLOCK = 128

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not RUNS, reason="no GPU, and not through Triton's interpreter")]
on_gpu_only = [pytest.mark.gpu, pytest.mark.skipif(not RUNS or INTERPRETED, reason="no GPU")]
interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="for Triton's interpreter")
# The interpreter takes milliseconds per program.
some = settings(max_examples=50 if INTERPRETED else 200)

keys = st.integers(0, MASK)


def marked(marks):
    def apply(test):
        for mark in marks:
            test = mark(test)
        return test

    return apply


def _signed(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.copy().view(f"i{bits.itemsize}")).to(DEVICE)


def _bits(view: torch.Tensor) -> np.ndarray:
    array = view.cpu().numpy()
    return array.view(f"u{array.itemsize}")


def _assert_diff(found: tuple[torch.Tensor, torch.Tensor], old_N: np.ndarray, new_N: np.ndarray) -> None:
    index_K, step_K = reference.diff(old_N, new_N)
    np.testing.assert_array_equal(found[0].cpu().numpy(), index_K)
    assert found[0].cpu().numpy().dtype == index_K.dtype
    np.testing.assert_array_equal(_bits(found[1]), step_K)


def _bfloat16_of(master_N: np.ndarray) -> np.ndarray:
    """float32 bits to bfloat16 bits as torch rounds; NaNs, of which torch keeps nothing, truncated and made quiet."""
    values_N = torch.from_numpy(master_N.view("f4").copy())
    rounded_N = values_N.to(torch.bfloat16).view(torch.int16).numpy().view("u2")
    return np.where(np.isnan(values_N.numpy()), (master_N >> 16).astype("u2") | np.uint16(0x40), rounded_N)


@marked(on_gpu)
@some
@given(our.bit_pairs())
def test_diff_is_the_reference(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old_N, new_N = pair
    _assert_diff(gpu.diff(_signed(old_N), _signed(new_N)), old_N, new_N)


@marked(on_gpu)
def test_diff_has_wide_indices_where_the_tensor_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "index_dtype", lambda element_count: np.dtype(np.int64))
    index_K, _ = gpu.diff(_signed(np.zeros(300, np.uint16)), _signed(np.ones(300, np.uint16)))
    assert index_K.dtype == torch.int64
    assert index_K.tolist() == list(range(300))


@marked(on_gpu)
@some
@given(our.bit_pairs())
def test_diff_and_update_leaves_the_new_bits_in_the_shadow(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old_N, new_N = pair
    shadow_N, master_N = _signed(old_N), _signed(new_N)
    _assert_diff(gpu.diff_and_update(shadow_N, master_N), old_N, new_N)
    np.testing.assert_array_equal(_bits(shadow_N), new_N)
    np.testing.assert_array_equal(_bits(master_N), new_N)


@marked(on_gpu)
@some
@given(our.bit_pairs("float32"))
def test_a_float32_master_is_rounded_to_nearest_even(pair: tuple[np.ndarray, np.ndarray]) -> None:
    shadow_N, served_N = (_bfloat16_of(master_N) for master_N in pair)
    shadow = _signed(shadow_N)
    found = gpu.diff_and_update(shadow, _signed(pair[1]).view(torch.float32))
    _assert_diff(found, shadow_N, served_N)
    np.testing.assert_array_equal(_bits(shadow), served_N)


@marked(on_gpu)
def test_ties_carries_and_the_step_to_infinity_round_as_in_torch() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32)[:: 7 if INTERPRETED else 1] << 16
    master_N = (upper[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    if INTERPRETED:
        master_N = np.concatenate([master_N[::29], master_N[master_N >> 16 == 0x7F7F], np.array([0x7F7FFFFF], np.uint32)])
    served_N = _bfloat16_of(master_N)
    shadow = _signed(np.zeros_like(served_N))
    gpu.diff_and_update(shadow, _signed(master_N).view(torch.float32))
    np.testing.assert_array_equal(_bits(shadow), served_N)


@marked(on_gpu)
@some
@given(keys, our.bit_pairs())
def test_fingerprint_is_the_reference(key: int, pair: tuple[np.ndarray, np.ndarray]) -> None:
    assert gpu.fingerprint(key, _signed(pair[1])) == reference.fingerprint(key, pair[1])


@marked(on_gpu)
@pytest.mark.parametrize("density", [0.0, 0.001, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_kernels_are_the_reference_over_blocks_of_their_real_size(
    density: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_STREAM_BLOCK", 4096)
    random = np.random.default_rng(0)
    old_N = random.integers(0, 256, width * (3 * 4096 + 5), np.uint8).view(f"u{width}")
    new_N = np.where(random.random(old_N.size) < density, ~old_N, old_N)
    index_K, step_K = gpu.diff(_signed(old_N), _signed(new_N))
    _assert_diff((index_K, step_K), old_N, new_N)
    assert gpu.fingerprint(MASK, _signed(new_N)) == reference.fingerprint(MASK, new_N)


@interpreted_only
def test_diff_finds_elements_past_every_limit_of_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2**32 + 5 elements, the programs of the last two blocks; the rest of the memory is never touched."""
    from triton.runtime import interpreter

    size = (1 << 32) + 5
    block = gpu._STREAM_BLOCK
    blocks = -(-size // block)
    old_N, new_N = torch.empty(size, dtype=torch.int8), torch.empty(size, dtype=torch.int8)
    old_N[-2 * block :], new_N[-2 * block :] = 1, 1
    changed = [size - block, (1 << 32) - 1, 1 << 32, size - 1]
    new_N[changed] = 4
    mark_W = torch.zeros(blocks * (block // 32), dtype=torch.int32)
    count_B, end_B = torch.empty(blocks, dtype=torch.int32), torch.empty(blocks, dtype=torch.int64)
    index_K, step_K = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int8)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (blocks - 2 + x, y, z)))
    old, new, mark = gpu._unsigned(old_N), gpu._unsigned(new_N), gpu._unsigned(mark_W)
    gpu._mark[(2,)](old, new, mark, count_B, size, False, block)
    assert int(count_B[-2:].sum()) == 4
    end_B[-2:] = count_B[-2:].cumsum(0)
    gpu._compact[(2,)](old, new, mark, end_B, index_K, gpu._unsigned(step_K), False, False, block)
    assert index_K.tolist() == changed
    assert step_K.tolist() == [3, 3, 3, 3]


@marked(on_gpu_only)
def test_diff_and_fingerprint_of_a_tensor_of_more_than_2_to_the_31_elements() -> None:
    size = (1 << 31) + 4099
    if torch.cuda.mem_get_info()[0] < 6 * size:
        pytest.skip("the GPU has too little free memory")
    old_N = torch.zeros(size, dtype=torch.int8, device=DEVICE)
    new_N = old_N.clone()
    at = torch.tensor([0, (1 << 31) - 1, 1 << 31, size - 1], device=DEVICE)
    new_N[at] = 7
    index_K, step_K = gpu.diff(old_N, new_N)
    assert index_K.dtype == torch.int64
    assert index_K.tolist() == at.tolist()
    assert step_K.tolist() == [7] * 4
    assert gpu.diff_and_update(old_N, new_N)[0].tolist() == at.tolist()
    assert gpu.fingerprint(9, old_N) == gpu.fingerprint(9, new_N)


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="no triton that compiles")
@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=lambda t: str(t[1]))
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_kernels_compile(target: tuple[str, int | str, int], width: int) -> None:
    """To machine code, without such a device: what the interpreter accepts, the compiler's types may refuse."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def compiled(kernel, constants: dict[str, object], *types: str) -> set[str]:
        names = [p.name for p in kernel.params]
        signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
        fixed = {(names.index(name),): value for name, value in constants.items()}
        built = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget(*target), options={"num_warps": 8})
        return set(built.asm)

    bits, stream = f"*u{8 * width}", {"BLOCK": gpu._STREAM_BLOCK}
    binary = "cubin" if target[0] == "cuda" else "hsaco"
    assert binary in compiled(gpu._fingerprint, stream, "u64", bits, "*u64", "i64")
    for rounded in (False, True) if width == 2 else (False,):
        new = "*u32" if rounded else bits
        assert binary in compiled(gpu._mark, {"ROUND": rounded, **stream}, bits, new, "*u32", "*i32", "i32")
        constants = {"ROUND": rounded, "UPDATE": True, **stream}
        assert binary in compiled(gpu._compact, constants, bits, new, "*u32", "*i64", "*i64", bits)


def test_a_device_without_kernels_of_its_own_is_served_by_torch() -> None:
    assert device_kernels(torch.device("meta")) is torch_ops
    assert device_kernels(torch.device("cuda")) is (gpu if HAS_TRITON else torch_ops)


def test_int32_indices_end_where_int64_ones_begin() -> None:
    assert index_dtype((1 << 31) - 1) == np.int32
    assert index_dtype(1 << 31) == np.int64


@pytest.mark.skipif(RUNS, reason="the tests above run as they are")
def test_through_tritons_interpreter(tmp_path: Path) -> None:
    run_again(__file__, tmp_path, TRITON_INTERPRET="1")


@pytest.mark.skipif(HAS_TRITON, reason="the tests above run as they are")
def test_through_tritons_compiler(tmp_path: Path) -> None:
    run_again(__file__, tmp_path, "-k", "compile or a_device_without")
