"""The cost of a commit: in a real vLLM, compared with vLLM's own sparse path, and on a real server under
load.

    versions   the model and the versions
    engine     commits in one process, compared with vLLM's own path (patch)
    server     pauses and throughput of a server

Needs vLLM, and for the tokenizer's template TRL. Everything is written to a temporary folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commit import server
from benchmarks.commit.versions import Versions, prepare
from benchmarks.common import say
from deltasync.errors import ConfigError
from deltasync.ops.cli.serve import require_vllm
from demo.processes import Child

LAYOUTS = {
    "in place": ("82m", ()),
    "fp8_per_channel": ("82m", ("--quantization", "fp8_per_channel")),
    "packed experts": ("experts", ()),
}
"""Ways in which vLLM holds weights: the model, one of `versions.SIZES`, and options."""

_REPEATS = 5
_ENGINE_S = 1800.0


def run(
    size: str,
    changed_fraction: float,
    commits: int,
    window_s: float,
    pairs: int,
    device: str,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure commits, pauses and throughput.

    Args:
        size: Model that commits are measured on, one of `versions.SIZES`.
        changed_fraction: Changed elements of each version.
        commits: Number of pauses measured; as many more are measured for versions that change nothing.
        window_s: Length of one window of the throughput, a version a second.
        pairs: Number of windows with and without versions.
        device: Where vLLM runs, `cpu` or `cuda`. On a GPU only its server is measured, with its CUDA graphs:
            the commit in one process writes into memory of the host.
        options: Further options for vLLM's servers.

    Returns:
        `model`: its size, elements, tensors, changed elements and payload; `commit`: see `patch.measure`,
            None on a GPU;
            `pause`: see `server.pauses`; `throughput`: see `server.throughput`, of the tiny model.
    """
    _require_packages()
    pauses = [changed_fraction, 0.0] * commits
    arrivals = [changed_fraction] * (pairs * int(window_s))
    tiny = size == "tiny"
    with _workspace() as folder:
        versions = prepare(size, folder / size, pauses + (arrivals if tiny else []))
        commit = None
        if device == "cpu":
            say("commits into a model that vLLM loaded")
            commit = _commit(folder, versions)
        say(f"starting a server ({size})")
        with server.serve(versions, folder / "server.log", device, options) as serving:
            say(f"{commits} pauses")
            pause = server.pauses(serving, commits)
            if tiny:
                say("throughput")
                throughput = server.throughput(serving, window_s, pairs)
        if not tiny:
            versions_of_tiny = prepare("tiny", folder / "tiny", arrivals)
            say("starting a server (tiny)")
            with server.serve(versions_of_tiny, folder / "tiny.log", device, options) as serving:
                say("throughput")
                throughput = server.throughput(serving, window_s, pairs)
    model = {
        "size": size,
        "element_count": versions.element_count,
        "tensor_count": versions.tensor_count,
        "changed": versions.changed,
        "payload_bytes": versions.payload_bytes,
    }
    return {"model": model, "commit": commit, "pause": pause, "throughput": throughput}


def layouts(
    changed_fraction: float, commits: int, device: str, options: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Measure pauses of servers of each of `LAYOUTS`, one after the other. Arguments as of `run`.

    Returns, for each, `server.pauses`, and how many tensors it patches in place, has twins for and reloads.
    """
    _require_packages()
    found = {}
    with _workspace() as folder:
        for number, (name, (size, own)) in enumerate(LAYOUTS.items()):
            versions = prepare(size, folder / str(number), [changed_fraction, 0.0] * commits)
            say(f"starting a server ({name})")
            log = folder / f"{number}.log"
            with server.serve(versions, log, device, [*own, *options]) as serving:
                say(f"{commits} pauses")
                pauses, status = server.pauses(serving, commits), serving.status()
            kinds = ("patched", "twinned", "reloaded")
            counts = {f"{kind}_tensors": status[f"{kind}_tensors"] for kind in kinds}
            found[name] = {"element_count": versions.element_count, **counts, **pauses}
    return found


def _commit(folder: Path, versions: Versions) -> dict[str, Any]:
    """Run `engine` in a process of its own."""
    versions.show(2)
    request, result = folder / "request.json", folder / "result.json"
    arguments = {
        "checkpoint": str(versions.checkpoint),
        "channel": versions.channel,
        "old_sha256": versions.sha256[1],
        "new_sha256": versions.sha256[2],
        "repeats": _REPEATS,
    }
    request.write_text(json.dumps(arguments))
    command = [sys.executable, "-m", "benchmarks.commit.engine", str(request), str(result)]
    env = server.environ(VLLM_ENABLE_V1_MULTIPROCESSING="0", DELTASYNC_CHANNEL=versions.channel)
    with Child("vLLM", command, env, folder / "engine.log") as child:
        child.wait(_ENGINE_S)
        child.check()
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@contextlib.contextmanager
def _workspace() -> Iterator[Path]:
    """Make a temporary folder; after a failure its logs are kept."""
    folder = Path(tempfile.mkdtemp(prefix="deltasync-bench-"))
    try:
        yield folder
    except BaseException:
        for child in folder.iterdir():
            if child.is_dir():
                shutil.rmtree(child)
        raise
    shutil.rmtree(folder)


def _require_packages() -> None:
    require_vllm()
    for module in ("transformers", "trl"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"This benchmark needs {module}. `make setup` installs it into .venv.")
