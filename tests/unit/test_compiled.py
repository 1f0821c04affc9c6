"""The cache of compiled kernels gives what was saved for a key, or nothing, whoever else uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltasync.kernels.compiled import _SOURCES, CacheFile


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


def test_the_first_delta_finds_its_kernels_compiled() -> None:
    script = """
import sys
import torch
from deltasync import Publisher
from deltasync.kernels import coder, counts, cpu, cpu_diff

def compiled():
    return {
        (module.__name__, name, repr(each.signatures))
        for module in (coder, counts, cpu, cpu_diff)
        for name, each in vars(module).items()
        if hasattr(each, "signatures")
    }

weights = {"w": torch.linspace(-1, 1, 1 << 17).reshape(256, 512).bfloat16(), "b": torch.ones(99, dtype=torch.bfloat16)}
with Publisher("memory://" + sys.argv[1], codec=sys.argv[1], dtype="keep") as publisher:
    publisher.publish(weights.items()).wait(100)
    publisher._uploader._puts.close()
    before = compiled()
    for tensor in weights.values():
        tensor.view(torch.int16).reshape(-1)[::50] += 1
    publisher.publish(weights.items()).wait(100)
    print(*sorted(compiled() - before))
"""
    root = Path(__file__).parents[2]
    for codec in ("packed", "context"):
        command = [sys.executable, "-W", "ignore", "-c", script, codec]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert not done.stdout.strip()


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
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 15
