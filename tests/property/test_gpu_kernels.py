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
from deltasync.memory import LiveMemory, Segment
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
    index_K, step_K = (torch.from_numpy(x.view(f"i{x.itemsize}")).to(DEVICE) for x in reference.diff(old_N, new_N))
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
