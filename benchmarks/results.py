"""Write the tables and figures of the documents from the result files in docs/results/.

    python -m benchmarks.results [--check]          or: make results-tables

A result file is what a benchmark prints with `--json` (command, date, commit, machine, result), such as

    python -m benchmarks.codec --json > docs/results/codec.json

A table stands between `<!-- results: NAME -->` and `<!-- /results -->`, a figure in a sentence between
`<!-- result: NAME -->` and `<!-- / -->`.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.codec import published, report
from benchmarks.corpus import report as corpus_report
from deltasync.config import CODECS
from deltasync.ops.compactor import SHARE

RESULTS = common.ROOT / "docs" / "results"
PAGES = (common.ROOT / "README.md", *sorted((common.ROOT / "docs").rglob("*.md")))

_MARKED = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- result: (\S+) -->).*?(<!-- / -->)")
_BOUNDS = (
    *("none", "exponent", "exponent, mantissa", "exponent, changed before"),
    "exponent, age and direction of the last change",
)
_README = {
    "int32 + bf16": "int32 + bf16 (TRL draft, vLLM, verl)",
    "COO u8/u16 + bf16, zstd": "COO, zstd (PULSE)",
    "dense XOR, zstd": "dense XOR, zstd (slime)",
    "u16 gap + XOR, zstd": "u16 gap + XOR, zstd (NeMo-DCR)",
    "packed": "**`packed`**",
    "context": "**`context`**",
}
"""Encodings in the README's table, and their names there."""

_README_RIVALS = ("PULSEPT v2", "PULSEPT v3")  # by their own code, on the real runs

_SPANS = {"one step": 1, "compaction of 8": 8, "compaction of 32": 32}

_QWEN3_8B = 8.19e9  # parameters of Qwen3-8B

Row = Sequence[object]


def load(name: str) -> dict[str, Any]:
    """Read a result file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def updated(text: str) -> str:
    """Return a document with its tables and figures filled in from the result files."""
    text = _MARKED.sub(lambda found: f"{found[1]}\n{chr(10).join(TABLES[found[2]]())}\n\n{found[3]}", text)
    return _FIGURE.sub(lambda found: f"{found[1]}{FIGURES[found[2]]()}{found[3]}", text)


def _table(columns: Row, rows: Iterable[Row], words: int | None = None) -> Iterator[str]:
    """Return a table in Markdown; columns after the first `words` are aligned to the right."""
    return _squeezed(common.table(columns, rows, len(columns) if words is None else words))


def _squeezed(lines: Iterable[str]) -> Iterator[str]:
    """Return a command's output without padding, its sentences as paragraphs."""
    for line in lines:
        if line.startswith("|"):
            yield re.sub(r"-{4,}", "---", re.sub(r" +", " ", line))
        else:
            yield f"\n{line}."


def _of_command(name: str, module: str = "", function: str = "lines") -> Callable[[], Iterator[str]]:
    """Return a function that yields the text output of a benchmark, and where it is from."""

    def table() -> Iterator[str]:
        lines = getattr(importlib.import_module(f"benchmarks.{module or name}"), function)
        yield from _squeezed(lines(load(name)["result"]))
        yield from _source(name)

    return table


def _source(*names: str) -> Iterator[str]:
    """Yield where the figures are from."""
    for name in names:
        found = load(name)
        commit = f" at {found['commit']}" if found["commit"] else ""
        machine = f"{found['machine']['cpu']} with {found['machine']['cores']} cores"
        yield ""
        yield f"`{found['command']}`{commit}, {found['date']}, {machine}; more in `docs/results/{name}.json`."


# --- the codecs
# ---------------------------------------------------------------------------------------------------------


def _codec_sizes(name: str) -> Iterator[str]:
    samples = [sample for sample in load(name)["result"]["samples"] if sample["label"] != "replaced"]
    samples.sort(key=lambda sample: sample["source"] == "finetune")
    yield from _sizes(samples)
    yield from _source(name)


def _sizes(samples: Sequence[dict[str, Any]], last: Iterable[Row] = ()) -> Iterator[str]:
    """Yield bits by encoding and bound, a column for each sample."""
    heads = [_sample_name(sample) for sample in samples]
    rows: list[Row] = []
    for encoding in sorted(samples[0]["encodings"], key=lambda each: -each["bits_per_changed"]):
        ours = encoding["systems"] == "deltasync"
        name = f"**`{encoding['name']}`**" if ours else encoding["name"]
        bits = (f"{_encoding(sample, encoding['name'])['bits_per_changed']:.2f}" for sample in samples)
        rows.append((name, "" if ours else encoding["systems"], *bits))
    for context in _BOUNDS:
        bits = (f"{_bound(sample, context):.2f}" for sample in samples)
        rows.append((f"*bound, given {'nothing' if context == 'none' else context}*", "", *bits))
    yield from _table(("encoding", "written from descriptions of", *heads), [*rows, *last], words=2)


def _sample_name(sample: dict[str, Any]) -> str:
    changed = f"{sample['changed_fraction']:.2%}"
    if sample["source"] == "simulation":
        return changed
    names = {
        "finetune": f"fine-tuning, {sample['label']}",
        "masters": sample["label"].replace(" 1.07%", ""),
        "demo": "demo",
    }
    return f"{names[sample['source']]}, {changed}"


def _encoding(sample: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in sample["encodings"] if each["name"] == name)
    return found


def _bound(sample: dict[str, Any], context: str) -> float:
    found: float = next(each["total_bits"] for each in sample["bounds"] if each["context"] == context)
    return found


def _master(label: str) -> dict[str, Any]:
    """Return a sample of `benchmarks.codec --data masters`."""
    found: dict[str, Any] = next(
        each for each in load("codec_masters")["result"]["samples"] if each["label"] == label
    )
    return found


def _nearest_to_rl() -> dict[str, Any]:
    """Return the sample that is nearest to RL: one step of a master that started on bf16 values."""
    return _master("bf16 start 1.07%, one step")


def codec_masters() -> Iterator[str]:
    """Yield sizes of one step and of compactions, by master, and the bytes of a compaction by those of its
    steps.
    """
    samples = [
        (_master(f"{master} 1.07%, {span}"), _master(f"{master} 1.07%, one step"), steps)
        for master in ("fp32", "bf16 start", "bf16")
        for span, steps in _SPANS.items()
    ]
    rows = []
    for name in ("packed", "context"):
        pairs = [(_encoding(sample, name), _encoding(step, name), steps) for sample, step, steps in samples]
        shares = (each["payload_bytes"] / one["payload_bytes"] / steps for each, one, steps in pairs)
        rows.append(
            (f"bytes of `{name}`, of those of single steps", "", *(f"{share:.0%}" for share in shares))
        )
    yield from _sizes([sample for sample, _, _ in samples], rows)
    yield from _source("codec_masters")


def _bits_at(master: str, span: str, encoding: str, changed_fraction: float) -> float:
    """Return an encoding's bits at a density, interpolated in its logarithm between the samples of a
    master.
    """
    samples = load("codec" if master == "fp32" else "codec_masters")["result"]["samples"]
    found = [
        each for each in samples if master == "fp32" or re.fullmatch(rf"{master} \S+%, {span}", each["label"])
    ]
    found.sort(key=lambda each: each["changed_fraction"])
    densities = [math.log(each["changed_fraction"]) for each in found]
    bits = [_encoding(each, encoding)["bits_per_changed"] for each in found]
    return float(np.interp(math.log(changed_fraction), densities, bits))


def codec_pulse() -> Iterator[str]:
    """Yield the bytes of PULSE's runs, from their fractions and the simulation of bf16 weights."""
    rows: list[Row] = []
    for run, parameters, fractions in published.PULSE_RUNS:
        cells = []
        for span, changed in zip(_SPANS, fractions, strict=True):
            bits = (
                _bits_at("bf16", span, name, changed)
                for name in ("COO u8/u16 + bf16, zstd", "packed", "context")
            )
            cells += [
                f"{changed:.2%}",
                " / ".join(_three_digits(parameters * changed * each / 8e6) for each in bits),
            ]
        rows.append((run, *cells))
    columns = [head for span in _SPANS for head in (f"{span} changes", "MB: COO / `packed` / `context`")]
    yield from _table(("model, learning rate", *columns), rows, words=1)
    yield from _source("codec_masters")


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def codec_reported() -> Iterator[str]:
    """Yield the bits that peers reported for their own code, and those of our implementation of it."""
    rows: list[Row] = []
    for whose, changed, reported, known, encoding, master in published.PEER_BITS:
        ours = _bits_at(master, "one step", encoding, changed)
        rows.append((whose, f"{changed:.2%}", reported, f"{ours:.2f}", master, known))
    columns = ("system, model", "changed", "bits, theirs", "bits, here", "simulation", "how theirs is known")
    yield from _table(columns, rows)


def _one_percent(result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = min(result["samples"], key=lambda each: abs(each["changed_fraction"] - 0.0107))
    return found


def codec_speed() -> Iterator[str]:
    """Yield rates and memory at 1 % changed."""
    sample = _one_percent(load("codec")["result"])
    rows = []
    for each in sample["encodings"]:
        peak = each["encode_peak_extra_bytes"]
        rates = (
            f"{each['encode_gb_s']:.1f}",
            f"{each['encode_of_memcpy']:.0%}",
            f"{each['apply_changed_per_s'] / 1e6:.0f}",
        )
        rows.append(
            (f"{each['name']} ({each['systems']})", *rates, "" if peak is None else f"{peak / 1e6:.1f}")
        )
    columns = ("diff + encode, GB/s", "of memcpy", "decode + scatter, M/s", "peak extra, MB")
    memcpy_gb_s = load("codec")["result"]["memcpy_gb_s"]
    yield (
        f"Simulation at {sample['changed_fraction']:.2%} changed, {sample['element_count']:,} elements; "
        f"memcpy {memcpy_gb_s:.1f} GB/s:"
    )
    yield ""
    yield from _table(("encoding", *columns), rows, words=1)
    yield from _source("codec")


def saved() -> Iterator[str]:
    """Yield the bytes of one step of a larger model, computed from the measured bits per changed element."""
    run, real = _real_steps()[-1]
    bits = {
        name: _encoding(_nearest_to_rl(), name)["bits_per_changed"]
        for name in ("int32 + bf16", "packed", "context")
    }
    step = {name: _QWEN3_8B * 0.01 * each / 8e6 for name, each in bits.items()}
    late = {name: step[name] * SHARE for name in ("packed", "context")}

    def cells(name: str) -> tuple[str, str]:
        measured = _encoding(real, name)["bits_per_changed"]
        return f"{_QWEN3_8B * real['changed_fraction'] * measured / 8e6:.0f} MB", f"{step[name]:.0f} MB"

    full = f"{2 * _QWEN3_8B / 1e9:.1f} GB"
    rows = [
        ("full weights in bf16", full, full, "0"),
        (
            "index and value of each change (TRL's draft, vLLM's sparse format, verl)",
            *cells("int32 + bf16"),
            "",
        ),
        ("**deltasync**", *(f"**{cell}**" for cell in cells("context")), f"{late['context']:.0f} MB"),
        (
            '**deltasync**, `codec="packed"`',
            *(f"**{cell}**" for cell in cells("packed")),
            f"{late['packed']:.0f} MB",
        ),
    ]
    heads = (
        f"sent, as in GRPO at {corpus_report.name(run)} ({real['changed_fraction']:.2%} change)",
        "sent, 1 % simulated",
    )
    yield from _table(("one step of Qwen3-8B", *heads, "stored for late joiners, at most"), rows, words=1)


def codec_readme() -> Iterator[str]:
    """Yield sizes of one step: of real runs, and of the simulation that is nearest to them."""
    rivals = {
        run["name"]: {each["name"]: each for each in run["systems"]}
        for run in load("rivals")["result"]["runs"]
    }
    samples = [(f"GRPO, {corpus_report.name(run)}", span, rivals[run["name"]]) for run, span in _real_steps()]
    samples.append(("simulation", _nearest_to_rl(), {}))
    rows = []
    for label, sample, others in samples:
        found = [f"{_encoding(sample, name)['bits_per_changed']:.2f}" for name in _README]
        bits = [f"**{each}**" if name in CODECS else each for name, each in zip(_README, found, strict=True)]
        bits += [f"{others[name]['bits_per_changed']:.2f}" if others else "" for name in _README_RIVALS]
        rows.append(
            (f"{label}, {sample['changed_fraction']:.2%}", *bits, f"{_bound(sample, 'exponent'):.2f}")
        )
    own_code = (f"{name}, its own code" for name in _README_RIVALS)
    yield from _table(
        ("one step, changed", *_README.values(), *own_code, "bound given the old exponent"), rows, words=1
    )
    yield from _source("corpus", "codec_masters", "rivals")


def _real_steps() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each run of `benchmarks.corpus`, and its middle step."""
    return [(run, corpus_report.middle(run)) for run in load("corpus")["result"]["runs"]]


def plot_codec(target: Path) -> None:
    """Plot the sizes of the simulation and of the real deltas."""
    report.plot(
        {
            "samples": [
                sample for name in ("codec", "codec_real") for sample in load(name)["result"]["samples"]
            ]
        },
        target,
    )


# --- hosts
# ---------------------------------------------------------------------------------------------------------


def hosts() -> Iterator[str]:
    """Yield the result, which is a table of texts."""
    result = load("hosts")["result"]
    yield from _table(result["columns"], result["rows"])
    yield from _source("hosts")


def machines() -> Iterator[str]:
    """Yield where each file is from."""
    rows: list[Row] = []
    for path in sorted(RESULTS.glob("*.json")):
        found = load(path.stem)
        of = found["machine"]
        rows.append(
            (f"`{path.name}`", of["cpu"], of["cores"], of["load_average"], found["commit"], found["date"])
        )
    yield from _table(("file", "CPU", "cores", "load before", "commit", "date"), rows)


_COMPARED: dict[str, dict[str, Callable[[Any], float]]] = {
    "codec": {
        "memory copy, GB/s": lambda result: result["memcpy_gb_s"],
        "`packed`, compare + encode at 1 %, GB/s": lambda result: _encoding(_one_percent(result), "packed")[
            "encode_gb_s"
        ],
        "`context`, the same": lambda result: _encoding(_one_percent(result), "context")["encode_gb_s"],
    },
    "step": {"publish of 1.2 GB, times a copy": lambda result: result["copies"]},
    "join": {"late joiner of 1.2 GB, s": lambda result: result["join"]["join_s"]},
    "recovery": {"rollback of 1 % of 1.2 GB, ms": lambda result: 1e3 * result["rollback_s"][0]},
    "commit": {
        "commit in vLLM, 0.6 B parameters, ms": lambda result: (
            1e3 * result["commit"]["deltasync"]["commit"]["median_s"]
        )
    },
    "lag": {"lag of 7 MB over 100 Mbit/s and 50 ms, p50, s": lambda result: result["large"]["lag_s"]["p50"]},
}
"""What machines are compared by, by file."""


def machines_compared() -> Iterator[str]:
    """Yield figures of the files here, and of those in each sub-folder, which are another machine's."""
    folders = [RESULTS, *sorted(path for path in RESULTS.iterdir() if path.is_dir())]
    rows: list[Row] = []
    for name, figures in _COMPARED.items():
        here = [f"{folder.relative_to(RESULTS)}/{name}" for folder in folders]
        found = [load(each)["result"] if (RESULTS / f"{each}.json").exists() else None for each in here]
        for what, figure in figures.items():
            rows.append(
                (what, *("" if result is None else _three_digits(figure(result)) for result in found))
            )
    yield from _table(("figure", "here", *(folder.name for folder in folders[1:])), rows, words=1)


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "codec-sizes": lambda: _codec_sizes("codec"),
    "codec-masters": codec_masters,
    "codec-pulse": codec_pulse,
    "codec-reported": codec_reported,
    "codec-real": lambda: _codec_sizes("codec_real"),
    "codec-speed": codec_speed,
    "saved": saved,
    "codec-readme": codec_readme,
    **{
        f"corpus-{what}": _of_command("corpus", "corpus.report", what.replace("-", "_"))
        for what in ("overview", "by-step", "by-kind", "by-layer", "sizes")
    },
    **{
        f"rivals-{what}": _of_command("rivals", "rivals.report", what)
        for what in ("costs", "damage", "snapshots")
    },
    "shards": _of_command("shards"),
    "commit": _of_command("commit", "commit.report"),
    "step": _of_command("step"),
    "recovery": _of_command("recovery"),
    "outage": _of_command("outage"),
    "learning": _of_command("learning"),
    "async-learning": _of_command("async_learning"),
    "curves": _of_command("curves"),
    "placement": _of_command("placement"),
    "cost-sheet": _of_command("cost_sheet"),
    "demo": _of_command("demo"),
    "hosts": hosts,
    "lag": _of_command("lag"),
    "join": _of_command("join"),
    "age": _of_command("age"),
    "fleet-replicas": _of_command("fleet", function="followed"),
    "fleet-trainer": _of_command("fleet", function="trained"),
    "fleet-polls": _of_command("fleet", function="polls"),
    "trillion-bars": _of_command("trillion", function="bars"),
    "trillion-roles": _of_command("trillion", function="roles"),
    "scale": _of_command("scale", function="measured"),
    "scale-computed": _of_command("scale", function="computed"),
    "wordle": _of_command("wordle", "demo"),
    "machines": machines,
    "machines-compared": machines_compared,
}


def _bits(name: str) -> float:
    found: float = _encoding(_nearest_to_rl(), name)["bits_per_changed"]
    return found


def _tuned(label: str) -> float:
    """Return the changed fraction of the fine-tuning at this learning rate."""
    samples = load("codec_real")["result"]["samples"]
    found: float = next(sample["changed_fraction"] for sample in samples if sample["label"] == label)
    return found


FIGURES: dict[str, Callable[[], str]] = {
    "packed-bits": lambda: f"{_bits('packed'):.2f}",
    "context-bits": lambda: f"{_bits('context'):.2f}",
    # of a billion parameters with 1 % changed
    "packed-mb": lambda: f"{1e7 * _bits('packed') / 8e6:.1f}",
    "context-mb": lambda: f"{1e7 * _bits('context') / 8e6:.1f}",
    "changed-least": lambda: f"{_tuned('lr 1e-06'):.1%}",
    "changed-most": lambda: f"{_tuned('lr 1e-05'):.1%}",
}


def main(words: Sequence[str]) -> None:
    """Update the documents, or with `--check` say which are out of date."""
    behind: list[Path] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (wanted := updated(text)) != text:
            behind.append(page)
            if "--check" not in words:
                page.write_text(wanted, encoding="utf-8")
    for page in behind:
        print(page.relative_to(common.ROOT))
    if "--check" in words and behind:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
