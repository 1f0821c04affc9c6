"""The cache of compiled kernels gives what was saved for a key, or nothing, whoever else uses it."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numba
import pytest
from click.testing import CliRunner

from deltasync.cli import main
from deltasync.kernels import compiled
from deltasync.kernels.compiled import _SOURCES, CacheFile
from deltasync.live import compiling
from deltasync.tensors import ITEM_BYTES, Delta, Layout, TensorSpec


def cache_file(folder: Path, stamp: object = _SOURCES) -> CacheFile:
    return CacheFile(str(folder), "module.function-1.py311", stamp)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    cache = cache_file(tmp_path)
    assert cache.load("a") is None
    cache.save("a", b"A")
    cache.save("b", b"B")
    assert (cache.load("a"), cache.load("b")) == (b"A", b"B")


def test_another_version_of_the_sources_finds_nothing_and_removes_what_is_left(tmp_path: Path) -> None:
    cache_file(tmp_path, "before").save("a", b"old")
    cache = cache_file(tmp_path)
    assert cache.load("a") is None
    cache.save("b", b"B")
    assert cache.load("a") is None
    assert len(list(tmp_path.glob("*.nbc"))) == 1


@pytest.mark.parametrize("step", ["_load_index", "_save_data", "_save_index"])
@pytest.mark.parametrize("key", ["a", "b"])
def test_another_process_saves_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, key: str
) -> None:
    """Whatever is then in the index is right; what was lost is compiled again."""
    cache, other = cache_file(tmp_path), cache_file(tmp_path)
    done = getattr(cache, step)

    def interrupted(*arguments: object) -> object:
        found = done(*arguments)
        monkeypatch.undo()
        other.save(key, b"other's")
        return found

    monkeypatch.setattr(cache, step, interrupted)
    cache.save("a", b"A")
    found = {name: cache_file(tmp_path).load(name) for name in ("a", "b")}
    assert found["a"] in ((b"A", b"other's", None) if key == "a" else (b"A", None))
    assert found["b"] in ((None,) if key == "a" else (b"other's", None))


def test_an_index_names_nothing_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_file(tmp_path)
    save_index = cache._save_index

    def check(overloads: dict[str, str]) -> None:
        assert all((tmp_path / name).is_file() for name in overloads.values())
        save_index(overloads)

    monkeypatch.setattr(cache, "_save_index", check)
    for key in "abc":
        cache.save(key, key.encode())


def test_processes_that_compile_at_once_and_their_successors_agree(tmp_path: Path) -> None:
    script = (
        "import numpy as np; from deltasync.kernels import cpu; "
        "print([hex(cpu.fingerprint(7, np.arange(999, dtype=kind))) for kind in ('u1', 'u8')])"
    )
    environ = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    printed = set()
    for count in (2, 1):
        command = [sys.executable, "-c", script]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) for _ in range(count)]
        printed |= {child.communicate(timeout=300)[0] for child in running}
        assert [child.returncode for child in running] == [0] * count
    assert len(printed) == 1 and "0x" in printed.pop()


ROOT = Path(__file__).parents[2]

LARGE = """
import numpy as np
from deltasync.live import compiling
from deltasync.tensors import layout

layout.index_dtype = lambda count: np.dtype(np.int64 if count > 100_000 else np.int32)
compiling._MOST = 100_001
"""
"""From here on models of a few elements need the kernels of large ones."""

VERSIONS = """
import sys, threading
import torch
from deltasync import Publisher, Replica
from deltasync.kernels import compiled

def wait():
    for thread in threading.enumerate():
        if thread.name == "deltasync-compile":
            thread.join()

def train(step):
    for tensor in weights.values():
        tensor.view(torch.int16).reshape(-1)[step::50] += 1

url, codec = "memory://" + sys.argv[1], sys.argv[1]
weights = {
    "matrix": torch.linspace(-1, 1, 1 << 17).reshape(256, 512).bfloat16(),
    "bias": torch.ones(99, dtype=torch.bfloat16),
    "none": torch.ones(0, dtype=torch.bfloat16),
}
with Publisher(url, codec=codec, dtype="keep") as publisher:
    publisher.publish(weights).wait(100)
    wait()
    found = [*compiled.functions]
    for step in (1, 2):
        train(step)
        publisher.publish(weights if step == 1 else iter(weights.items())).wait(100)
    train(3)
    weights["matrix"][:2] = 0  # so that little is changed elsewhere
    publisher.publish(weights).wait(100)
"""


def run(code: str, cache: Path, *arguments: str) -> str:
    """Run code in a process of its own, with a cache of its own."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("codec", ["packed", pytest.param("context", marks=pytest.mark.slow)])
def test_no_version_after_the_first_waits_for_the_compiler(codec: str, size: str, tmp_path: Path) -> None:
    """On a machine that has compiled nothing: what later versions need is compiled while the first one is stored."""
    report = "print(len(found), *compiled.functions[len(found):], *(set(compiled.waited) - {'_take'}))"
    count, *later = run((LARGE if size == "large" else "") + VERSIONS + report, tmp_path, codec).split()
    assert int(count) > 10 and later == []


@pytest.mark.slow
def test_an_image_leaves_nothing_to_compile(tmp_path: Path) -> None:
    """`deltasync compile` in one process; in others trainers and replicas of small and of large models."""
    image = "from deltasync.cli import main; main(['compile', '--dtype', 'bfloat16'], standalone_mode=False)"
    printed = run(image, tmp_path)
    assert re.fullmatch(rf"compiled [1-9]\d+ functions in [\d.]+ s; they are kept in {tmp_path}/\S+\n", printed)
    follow = """
replica = Replica(url)
for version in (1, 2, 4):
    replica.sync(version)
replica.sync(3)
replica = Replica(url)
replica.sync()
wait()
print(*compiled.functions)
"""
    for codec in ("packed", "context"):
        for size in ("", LARGE):
            assert run(size + VERSIONS + follow, tmp_path, codec).split() == []


def test_layers_of_images_may_round_the_times_of_files(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deltasync", tmp_path / "copy" / "deltasync", ignore=shutil.ignore_patterns("__pycache__"))
    script = f"""
import sys; sys.path.insert(0, {str(tmp_path / "copy")!r})
import numpy as np
from deltasync.kernels import compiled, cpu
assert cpu.__file__.startswith({str(tmp_path)!r})
cpu.fingerprint(7, np.arange(999, dtype="u1"))
print(*compiled.functions)
"""
    assert run(script, tmp_path / "cache").split() == ["_fingerprint"]
    for path in (tmp_path / "copy").rglob("*.py"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    assert run(script, tmp_path / "cache").split() == []


def test_an_image_that_is_read_only_has_its_kernels_still(tmp_path: Path) -> None:
    """numba then keeps what it compiles in the user's folder, and finds there what only later processes compiled."""
    if not hasattr(numba.config, "CACHE_LOCATOR_CLASSES"):
        pytest.skip("this numba cannot be told not to use NUMBA_CACHE_DIR")
    script = "import sys, numpy as np; from deltasync.kernels import compiled, cpu; " + (
        "cpu.fingerprint(7, np.arange(999, dtype=sys.argv[1])); print(*compiled.functions, compiled.folder)"
    )
    assert run(script, tmp_path / "image", "u1").split()[0] == "_fingerprint"
    before = sorted((tmp_path / "image").rglob("*"))
    user = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserWideCacheLocator", "XDG_CACHE_HOME": str(tmp_path / "user")}
    with mock.patch.dict(os.environ, user):
        (folder,) = run(script, tmp_path / "image", "u1").split()
        assert folder.startswith(str(tmp_path / "user"))
        assert run(script, tmp_path / "image", "u2").split() == ["_fingerprint", folder]
        assert run(script, tmp_path / "image", "u2").split() == [folder]
    assert sorted((tmp_path / "image").rglob("*")) == before


def test_a_wait_for_the_compiler_is_logged_once_for_each_thread(caplog: pytest.LogCaptureFixture) -> None:
    noted = compiled._Compilations()

    def compile_(function: Callable[..., object]) -> None:
        noted.on_start(SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=function)}))

    with mock.patch.multiple(compiled, functions=[], waited=[]), caplog.at_level(logging.INFO):
        compile_(json.dumps)  # somebody else's
        with compiled.ahead():
            compile_(compiled.kernel)
        assert compiled.functions == ["kernel"] and compiled.waited == [] and not caplog.records
        for _ in range(2):
            compile_(compiled.kernel)
        upload = threading.Thread(target=compile_, args=(compiled.kernel,), name="deltasync-upload")
        upload.start()
        upload.join()
        assert compiled.waited == ["kernel"] * 3
    assert [(record.levelname, record.message.partition(" waits")[0]) for record in caplog.records] == [
        ("WARNING", threading.current_thread().name),
        ("INFO", "deltasync-upload"),
    ]
    assert "`deltasync compile` does it ahead" in caplog.text


@pytest.mark.parametrize("codec", ["packed", "context", "raw"])
def test_every_dtype_can_be_compiled_for(codec: str) -> None:
    """By a change of a matrix, which `context` codes by classes, and of a tensor too small for that."""
    specs = tuple(spec for dtype in ITEM_BYTES for spec in compiling.of_dtype(dtype))
    changed: dict[str, int] = {}
    counted = Delta.counts

    def counts(self: Delta) -> dict[str, int]:
        found = counted(self)
        changed.update(found)
        return found

    with mock.patch.object(Delta, "counts", counts):
        assert sum(1 for _ in compiling.steps(compiling.Kinds(specs, (codec,), publishes=True, on_host=False))) > len(specs)
    assert changed == {spec.name: spec.element_count // 64 for spec in specs}


def test_the_small_model_has_the_kinds_of_the_real_one() -> None:
    """Its dtypes of most elements, no matrix where there is none, and positions of 64 bits where they are needed."""
    shapes = {"bfloat16": [(1 << 20, 1 << 11), (7, 7)], "float16": [(512, 512)], "float32": [(99,)], "uint8": [(1 << 17,)]}
    specs = [TensorSpec(f"{dtype} {shape}", dtype, shape) for dtype, of in shapes.items() for shape in of]
    small = Layout({spec.name: spec for spec in compiling.of_model(Layout({spec.name: spec for spec in specs}))})
    assert {width: [spec.dtype for spec in vector.specs] for width, vector in small.vectors.items()} == {
        1: ["uint8"] * 2,
        2: ["bfloat16"] * 3,
        4: ["float32"],
    }
    assert {width: vector.index_dtype for width, vector in small.vectors.items()} == {1: "i4", 2: "i8", 4: "i4"}


def test_kernels_are_compiled_once_in_a_process_and_no_error_matters(caplog: pytest.LogCaptureFixture) -> None:
    kinds = compiling.Kinds((TensorSpec("w", "float64", (3,)),))
    ran = []

    def steps(wanted: compiling.Kinds) -> Iterator[None]:
        ran.append(wanted)
        yield
        raise MemoryError

    with mock.patch.object(compiling, "steps", steps), mock.patch.object(compiling, "_begun", set()):
        for _ in range(2):
            compiling.start(kinds)
            for thread in threading.enumerate():
                if thread.name == "deltasync-compile":
                    thread.join()
        assert ran == [kinds]
    assert "Kernels could not be compiled ahead" in caplog.text


def test_an_image_without_a_folder_for_kernels_is_refused() -> None:
    with mock.patch.object(compiled, "uncached", ["no locator"]):
        done = CliRunner().invoke(main, ["compile"])
    assert done.exit_code == 3
    assert "Compiled kernels cannot be kept: no locator. Set NUMBA_CACHE_DIR" in done.output


def test_payloads_are_decoded_where_kernels_run_as_python() -> None:
    """Fuzzing runs them so, to see what it covers."""
    script = """
from pathlib import Path
from tests.fuzz.targets import TARGETS

for target in ("raw", "packed", "context"):
    for path in sorted(Path("tests/fuzz/corpus", target).iterdir())[:5]:
        TARGETS[target](path.read_bytes())
        print(path)
"""
    environ = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 15
