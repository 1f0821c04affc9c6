"""The Triton kernels against the reference: on a GPU where there is one, else in a subprocess through Triton's interpreter.

The tests marked `gpu` are the same in both. Where there is no GPU, the tests at the end run this file again with the
triton that `make setup` keeps outside of the environment's site-packages.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.fingerprint import MASK, tensor_key
from deltasync.kernels import device_kernels, reference, torch_ops
from deltasync.live import LiveMemory, Segment
from deltasync.types import Patch, TensorSpec, index_dtype
from tests import strategies as our

TRITON_SITE = Path(sys.prefix) / "triton-site"
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or (HAS_TRITON and torch.cuda.is_available())
DEVICE = "cpu" if INTERPRETED else "cuda"

if HAS_TRITON:
    from deltasync.kernels import gpu

    if INTERPRETED:
        # Small blocks, so that small tensors have several.
        gpu._STREAM_BLOCK, gpu._SCATTER_BLOCK = 128, 32

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


def _scatter(
    key: int, dest: torch.Tensor, at_K: torch.Tensor, data_K: torch.Tensor, absolute: bool, index_K: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """As `reference.scatter`, in two writes."""
    before = dest[at_K].clone()
    new_K, added, check = gpu.prepare(key, dest, at_K, data_K, absolute, index_K)
    assert torch.equal(dest[at_K], before)
    half = at_K.numel() // 2
    value_K = new_K.clone()
    writes = [(dest, at_K[part], value_K[part]) for part in (slice(half), slice(half, None))]
    assert gpu.swap(writes) == check
    assert torch.equal(dest[at_K], new_K)
    return value_K, added


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
@some
@given(keys, our.bit_pairs(), st.booleans(), st.sampled_from([np.int32, np.int64]), our.seeds)
def test_scatter_is_the_reference(
    key: int, pair: tuple[np.ndarray, np.ndarray], absolute: bool, dtype: type, seed: int
) -> None:
    old_N, new_N = pair
    index_K, step_K = reference.diff(old_N, new_N)
    data_K = new_N[index_K] if absolute else step_K
    # The destination may lie anywhere: another order, with gaps, and no alignment.
    address_N = np.random.default_rng(seed).permutation(2 * old_N.size)[: old_N.size]
    memory = np.zeros(2 * old_N.size, old_N.dtype)
    memory[address_N] = old_N
    dest = _signed(np.concatenate((memory[:1], memory)))
    at, index = (torch.from_numpy(x.astype(dtype)).to(DEVICE) for x in (address_N[index_K], index_K))
    old_K, added = _scatter(key, dest[1 if memory.size else 0 :], at, _signed(data_K), absolute, index)

    expected = memory.copy()
    expected_old_K, expected_added = reference.scatter(key, expected, address_N[index_K], data_K, absolute, index_K)
    np.testing.assert_array_equal(_bits(old_K), expected_old_K)
    np.testing.assert_array_equal(_bits(dest)[1 if memory.size else 0 :], expected)
    np.testing.assert_array_equal(_bits(dest)[:1], memory[:1])
    assert added == expected_added


@marked(on_gpu)
@pytest.mark.parametrize("density", [0.0, 0.001, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_kernels_are_the_reference_over_blocks_of_their_real_size(
    density: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_STREAM_BLOCK", 4096)
    monkeypatch.setattr(gpu, "_SCATTER_BLOCK", 1024)
    random = np.random.default_rng(0)
    old_N = random.integers(0, 256, width * (3 * 4096 + 5), np.uint8).view(f"u{width}")
    new_N = np.where(random.random(old_N.size) < density, ~old_N, old_N)
    index_K, step_K = gpu.diff(_signed(old_N), _signed(new_N))
    _assert_diff((index_K, step_K), old_N, new_N)
    dest = _signed(old_N)
    _, added = _scatter(MASK, dest, index_K, step_K, False, index_K)
    np.testing.assert_array_equal(_bits(dest), new_N)
    assert added == (gpu.fingerprint(MASK, dest) - reference.fingerprint(MASK, old_N)) & MASK


@marked(on_gpu)
def test_warming_up_compiles_all_that_commits_need() -> None:
    gpu.warm_up.cache_clear()
    gpu.warm_up(torch.device(DEVICE), torch.int16)
    if INTERPRETED:
        return
    device = torch.cuda.current_device()
    compiled = [len(kernel.device_caches[device][0]) for kernel in (gpu._prepare, gpu._swap)]
    for count in (1, 3, 16, 1024):
        dest = torch.zeros(2048, dtype=torch.int16, device=DEVICE)[count % 16 :]
        narrow = torch.arange(count, dtype=torch.int32, device=DEVICE)
        for at, index, key in itertools.product((narrow, narrow.long()), (narrow, narrow.long()), (0, 1, 1 << 40, MASK)):
            for absolute in (True, False):
                _scatter(key, dest, at, dest[:count].clone(), absolute, index)
    assert [len(kernel.device_caches[device][0]) for kernel in (gpu._prepare, gpu._swap)] == compiled


@marked(on_gpu)
def test_scatter_reaches_elements_past_every_limit_of_int32() -> None:
    # The interpreter's host memory is never touched where nothing is written.
    size = (1 << 32) + 5
    dest = torch.empty(size, dtype=torch.int8, device=DEVICE)
    at = torch.tensor([0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, size - 1], device=DEVICE)
    data_K = torch.arange(1, 6, dtype=torch.int8, device=DEVICE)
    old_K = dest[at].clone()
    found_old_K, added = _scatter(3, dest, at, data_K, True, at)
    assert dest[at].tolist() == [1, 2, 3, 4, 5]
    assert found_old_K.tolist() == old_K.tolist()
    expected = torch_ops.cell_hash(3, at, data_K).sum() - torch_ops.cell_hash(3, at, old_K).sum()
    assert added == int(expected) & MASK


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
    before = gpu.fingerprint(9, old_N)
    _, added = _scatter(9, old_N, index_K, step_K, False, index_K)
    assert (before + added) & MASK == gpu.fingerprint(9, new_N)


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

    bits, stream, scatter = f"*u{8 * width}", {"BLOCK": gpu._STREAM_BLOCK}, {"BLOCK": gpu._SCATTER_BLOCK}
    binary = "cubin" if target[0] == "cuda" else "hsaco"
    assert binary in compiled(gpu._fingerprint, stream, "u64", bits, "*u64", "i64")
    for rounded in (False, True) if width == 2 else (False,):
        new = "*u32" if rounded else bits
        assert binary in compiled(gpu._mark, {"ROUND": rounded, **stream}, bits, new, "*u32", "*i32", "i32")
        constants = {"ROUND": rounded, "UPDATE": True, **stream}
        assert binary in compiled(gpu._compact, constants, bits, new, "*u32", "*i64", "*i64", bits)
    for absolute in (False, True):
        types = ("u64", bits, "*i32", bits, "*i64", bits, "*u64", "*u64", "i64")
        assert binary in compiled(gpu._prepare, {"ABSOLUTE": absolute, **scatter}, *types)
    for index in ("*i32", "*i64"):
        assert binary in compiled(gpu._swap, scatter, bits, index, bits, "*u64", "i64")


def test_a_device_without_kernels_of_its_own_is_served_by_torch() -> None:
    assert device_kernels(torch.device("meta")) is torch_ops
    assert device_kernels(torch.device("cuda")) is (gpu if HAS_TRITON else torch_ops)


@marked(on_gpu)
def test_a_commit_on_the_device_and_its_undoing() -> None:
    spec = TensorSpec("w", "bfloat16", (64, 32))
    random = np.random.default_rng(0)
    old_N = random.integers(0, 1 << 16, spec.element_count, np.uint16)
    new_N = np.where(random.random(old_N.size) < 0.1, ~old_N, old_N)
    # Two halves of the columns, one after the other with a gap, as fused parameters lie.
    live = torch.zeros(2 * old_N.size, dtype=torch.int16, device=DEVICE)
    segments = [Segment(live.as_strided((64, 16), (16, 1), at), (32, 1), column) for at, column in ((3, 0), (2000, 16))]
    for segment in segments:
        segment.live.copy_(segment.source(_signed(old_N)))
    memory = LiveMemory({"w": spec}, {"w": segments})
    memory.audit()
    before, parts = dict(memory.fingerprints), dict(memory.parts)
    index_K, step_K = reference.diff(old_N, new_N)
    expected = reference.fingerprint(tensor_key("w"), new_N)
    report = memory.commit(memory.stage([(Patch("w", index_K, step_K, absolute=False), expected)]))
    assert memory.fingerprints == {"w": expected}
    np.testing.assert_array_equal(memory.gather("w"), new_N)
    memory.rollback(report, parts)
    np.testing.assert_array_equal(memory.gather("w"), old_N)
    assert memory.fingerprints == before


def test_int32_indices_end_where_int64_ones_begin() -> None:
    assert index_dtype((1 << 31) - 1) == np.int32
    assert index_dtype(1 << 31) == np.int64


def _run_here(tmp_path: Path, tests: list[str], **environment: str) -> None:
    if not TRITON_SITE.is_dir():
        pytest.skip(f"no {TRITON_SITE}; `make setup` installs triton there")
    root = Path(__file__).parents[2]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TRITON_SITE), str(root)]),
        "TRITON_CACHE_DIR": str(tmp_path),
        **environment,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, *tests]
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(RUNS, reason="the tests above run as they are")
def test_through_tritons_interpreter(tmp_path: Path) -> None:
    _run_here(tmp_path, [], TRITON_INTERPRET="1")


@pytest.mark.skipif(HAS_TRITON, reason="the tests above run as they are")
def test_through_tritons_compiler(tmp_path: Path) -> None:
    _run_here(tmp_path, ["-k", "compile or a_device_without"])
