"""Record every file of docs/results/ anew on this machine, then the tables and pictures of the documents.

    make results                          # hours; an interrupted one goes on where it stopped
    make results RESULTS='--list'         # the files, their commands, minutes, and what this machine cannot do
    make results RESULTS='--only shards --only codec'
    make results RESULTS='--into docs/results/h100'     # another machine's files, for docs/benchmarks/machines.md

Each command prints a result with machine, versions and commit. They are kept in `--state`, with a log each,
until all that were asked for have ended; only then the documents change, so that all results are of one
commit. What cannot run here is named, and its file stays as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import common, results
from benchmarks.corpus.runs import BASE
from deltasync.errors import ConfigError
from tests.hosts.services import why_not_runnable

IMAGES = common.ROOT / "docs" / "images"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """How one file is recorded.

    Attributes:
        minutes: What it takes on two cores.
        command: Arguments of Python. `{state}` is the folder of the state, `{corpus}` that of the real runs.
        refusal: Says why this machine cannot run it, by the folders of the state and of the real runs; None
            if it can.
        pictures: Files of the state, and the pictures of the documents that they become.
    """

    minutes: int
    command: str
    refusal: Callable[[Path, Path], str | None] = lambda state, corpus: None
    pictures: tuple[tuple[str, str], ...] = ()


def _without(*modules: str) -> Callable[[Path, Path], str | None]:
    def refusal(state: Path, corpus: Path) -> str | None:
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        return f"{missing[0]} is not installed" if missing else None

    return refusal


def _no_memory(gigabytes: float) -> Callable[[Path, Path], str | None]:
    def refusal(state: Path, corpus: Path) -> str | None:
        found = common.machine()["memory_bytes"] / 1e9
        return (
            f"it needs {gigabytes:g} GB of memory, and there are {found:.0f}" if found < gigabytes else None
        )

    return refusal


def _no_demo(state: Path, corpus: Path) -> str | None:
    return None if (state / "demo" / "channel").exists() else "it needs the channel of the entry demo"


def _no_runs(state: Path, corpus: Path) -> str | None:
    if not any(corpus.glob("*/channel.json")):
        return f"{corpus} has no real runs: make corpus, or name another folder"
    return (
        None
        if (corpus / BASE).exists()
        else f"{corpus / BASE} is missing, the checkpoint that the runs start from"
    )


def _no_rivals(state: Path, corpus: Path) -> str | None:
    return _no_runs(state, corpus) or (
        None if _rivals() else "the rivals are not installed: make .venv-rivals/.ready"
    )


def _no_hosts(state: Path, corpus: Path) -> str | None:
    return why_not_runnable("s3") if os.geteuid() == 0 else "it needs root, for network namespaces"


_VLLM = _without("vllm", "trl")

ENTRIES = {
    "placement": Entry(1, "-m benchmarks.placement --json"),
    "shards": Entry(1, "-m benchmarks.shards --json"),
    "codec": Entry(2, "-m benchmarks.codec --json"),
    "codec_masters": Entry(6, "-m benchmarks.codec --data masters --json"),
    "recovery": Entry(3, "-m benchmarks.recovery --json", _no_memory(8)),
    "step": Entry(3, "-m benchmarks.step --json", _no_memory(8)),
    "join": Entry(3, "-m benchmarks.join --gigabytes 1.19 --json", _no_memory(12)),
    "scale": Entry(10, "-m benchmarks.scale --json", _no_memory(20)),
    "age": Entry(2, "-m benchmarks.age --json", _no_memory(8)),
    "trillion": Entry(3, "-m benchmarks.trillion --json", _no_memory(8)),
    "fleet": Entry(6, "-m benchmarks.fleet --replicas 200 --json", _without("moto")),
    "cost_sheet": Entry(2, "-m benchmarks.cost_sheet --json", _without("moto")),
    "lag": Entry(5, "-m benchmarks.lag small large idle --json", _without("moto")),
    "outage": Entry(5, "-m benchmarks.outage --json", _without("moto")),
    "curves": Entry(25, "-m benchmarks.curves {state}/curves --json", _without("trl")),
    "corpus": Entry(8, "-m benchmarks.corpus {corpus} --json", _no_runs),
    "rivals": Entry(12, "-m benchmarks.rivals {corpus} --json", _no_rivals),
    "demo": Entry(4, "-m benchmarks.demo --out {state}/demo --json", _VLLM, (("demo/run.png", "demo.png"),)),
    "codec_real": Entry(
        4, "-m benchmarks.codec --data real --channel file://{state}/demo/channel --json", _no_demo
    ),
    "commit": Entry(4, "-m benchmarks.commit --json", _VLLM),
    "learning": Entry(5, "-m benchmarks.learning --out {state}/learning --json", _VLLM),
    "async_learning": Entry(12, "-m benchmarks.async_learning --out {state}/async_learning --json", _VLLM),
    "wordle": Entry(
        9,
        "-m benchmarks.demo --task wordle --steps 50 --out {state}/wordle --json",
        _VLLM,
        (("wordle/run.png", "wordle.png"),),
    ),
    "hosts": Entry(25, "-m tests.hosts --store s3 --shape --out {state}/hosts --json", _no_hosts),
}
"""By the name of the file, the quick ones first."""


def _rivals() -> str | None:
    """Return where the packages of `benchmarks.rivals` are installed."""
    return next((str(path) for path in common.ROOT.glob(".venv-rivals/lib/python*/site-packages")), None)


def record(name: str, state: Path, corpus: Path) -> str | None:
    """Run a command unless its file is there. Return why there is no file afterwards."""
    entry, target = ENTRIES[name], state / f"{name}.json"
    if target.exists():
        common.say(f"{name}: recorded before")
        return None
    if (refusal := entry.refusal(state, corpus)) is not None:
        common.say(f"{name}: skipped, {refusal}")
        return refusal
    common.say(f"{name}: about {entry.minutes} minutes on two cores")
    partial = state / f"{name}.partial"
    places = [
        str(common.ROOT),
        str(common.ROOT / "examples"),
        *filter(None, [_rivals() if name == "rivals" else None]),
    ]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "CI": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    words = [word.format(state=state, corpus=corpus) for word in entry.command.split()]
    with partial.open("wb") as found, (state / f"{name}.log").open("ab") as log:
        code = subprocess.run(
            [sys.executable, *words], cwd=common.ROOT, env=environ, stdout=found, stderr=log
        ).returncode
    if code:
        common.say(f"{name}: failed with exit code {code}; see {state / name}.log")
        return f"exit code {code}"
    document = json.loads(partial.read_text(encoding="utf-8"))
    document["command"] = f"python {entry.command.format(state='DIR', corpus='FOLDER')}"
    target.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.unlink()
    return None


def main() -> None:
    """Record what was asked for and is missing; exit with 1 if something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=tuple(ENTRIES), metavar="NAME", help="may be given several times"
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument(
        "--state", type=Path, default=common.ROOT / "results-state", help="what was recorded so far"
    )
    parser.add_argument(
        "--corpus", type=Path, default=common.ROOT / "corpus", help="the folder of the real runs"
    )
    parser.add_argument("--into", type=Path, default=results.RESULTS, help="where the files go at the end")
    given = parser.parse_args()
    names, state, corpus = given.only or list(ENTRIES), given.state.resolve(), given.corpus.resolve()
    if given.list:
        rows = [
            (name, ENTRIES[name].minutes, _state_of(name, state, corpus), ENTRIES[name].command)
            for name in names
        ]
        print("\n".join(common.table(("file", "minutes", "here", "python"), rows)))
        return
    state.mkdir(parents=True, exist_ok=True)
    _check_commit(state)
    problems = {name: record(name, state, corpus) for name in names}
    publish([name for name, problem in problems.items() if problem is None], state, given.into.resolve())
    if any(problem is not None and problem.startswith("exit code") for problem in problems.values()):
        sys.exit(1)


def _state_of(name: str, state: Path, corpus: Path) -> str:
    return (
        "recorded" if (state / f"{name}.json").exists() else ENTRIES[name].refusal(state, corpus) or "to do"
    )


def _check_commit(state: Path) -> None:
    """Raise ConfigError if the state holds results of another commit."""
    mark, commit = state / "commit", common.commit() or "none"
    if not mark.exists():
        mark.write_text(commit)
    if (found := mark.read_text()).removesuffix("+") != commit.removesuffix("+"):
        raise ConfigError(
            f"{state} holds results of commit {found}, and {commit} is checked out. Remove it, or check out "
            "that."
        )


def publish(names: list[str], state: Path, into: Path) -> None:
    """Copy results to where they belong; of the documents' own also the pictures, and write the tables."""
    into.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(state / f"{name}.json", into / f"{name}.json")
    if into == results.RESULTS:
        for name in names:
            for source, picture in ENTRIES[name].pictures:
                shutil.copy(state / source, IMAGES / picture)
        if {"codec", "codec_real"} & set(names):
            results.plot_codec(IMAGES / "codec.png")
    if into.is_relative_to(results.RESULTS):
        results.main([])


if __name__ == "__main__":
    common.run(main)
