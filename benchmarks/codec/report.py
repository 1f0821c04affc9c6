"""The result of `benchmarks.codec` as tables and a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import table

_PLOTTED_BOUNDS = ("none", "exponent")
_TICKS = (4, 5, 6, 8, 10, 15, 20, 30, 48)


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as tables."""
    yield f"memcpy {result['memcpy_gb_s']:.1f} GB/s read + written"
    for sample in result["samples"]:
        yield ""
        yield from _sample_lines(sample)


def _sample_lines(sample: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{sample['source']} {sample['label']}: {sample['delta_count']} x {sample['element_count']:,} bf16 "
        "elements, "
        f"{sample['changed_fraction']:.3%} changed"
    )
    yield from table(
        ("encoding", "as described by", "bits/changed", "encode GB/s", "of memcpy", "apply M/s", "peak MB"),
        [
            (
                row["name"],
                row["systems"],
                f"{row['bits_per_changed']:.2f}",
                f"{row['encode_gb_s']:.2f}",
                f"{row['encode_of_memcpy']:.0%}",
                f"{row['apply_changed_per_s'] / 1e6:.1f}",
                "-" if (peak := row["encode_peak_extra_bytes"]) is None else f"{peak / 1e6:.1f}",
            )
            for row in sorted(sample["encodings"], key=lambda row: row["bits_per_changed"])
        ],
    )
    kinds = ("total_bits", "index_bits", "step_bits", "model_bits")
    yield ""
    yield from table(
        ("bound, given", "bits/changed", "index", "step", "(+ model)"),
        [(bound["context"], *(f"{bound[kind]:.3f}" for kind in kinds)) for bound in sample["bounds"]],
    )


def plot(result: dict[str, Any], target: Path) -> None:
    """Plot bits per changed element by encoding and density: the simulation as lines, each other sample as a
    column.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    simulated = sorted(
        (sample for sample in result["samples"] if sample["source"] == "simulation"),
        key=lambda s: s["changed_fraction"],
    )
    real = [sample for sample in result["samples"] if sample["source"] != "simulation"]
    widths = [6.0] * bool(simulated) + [1.5 + 1.1 * len(real)] * bool(real)
    figure, axes = pyplot.subplots(
        1,
        len(widths),
        figsize=(sum(widths) + 3, 6),
        sharey=True,
        squeeze=False,
        width_ratios=widths,
        layout="constrained",
    )
    panels = list(axes[0])
    if simulated:
        axis = panels[0]
        _draw(axis, simulated, [100 * sample["changed_fraction"] for sample in simulated], "-")
        axis.set_xscale("log")
        axis.set_xticks([100 * sample["changed_fraction"] for sample in simulated])
        axis.set_xticklabels([f"{sample['changed_fraction']:.2%}" for sample in simulated])
        axis.minorticks_off()
        axis.set_xlabel("changed elements")
        axis.set_title(f"simulation, {simulated[0]['element_count']:,} weights", fontsize=10)
    if real:
        axis = panels[-1]
        _draw(axis, real, list(range(len(real))), "")
        axis.set_xticks(range(len(real)))
        axis.set_xticklabels(
            [
                f"{s['source']}\n{s['label'].replace(', ', chr(10))}\n{s['changed_fraction']:.2%}"
                for s in real
            ],
            fontsize=8,
        )
        axis.set_xlim(-0.6, len(real) - 0.4)
        axis.set_title("other deltas", fontsize=10)
    for axis in panels:
        axis.set_yscale("log")
        axis.set_yticks(_TICKS)
        axis.set_yticklabels([str(tick) for tick in _TICKS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("bits per changed element")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _draw(axis: Any, samples: list[dict[str, Any]], x: list[float], line: str) -> None:
    """Order encodings by their size in the first sample, as the lines of the plot lie."""
    first = sorted(samples[0]["encodings"], key=lambda row: -row["bits_per_changed"])
    for row in first:
        ours = row["systems"] == "deltasync"
        y = [
            next(e["bits_per_changed"] for e in sample["encodings"] if e["name"] == row["name"])
            for sample in samples
        ]
        style = (
            {"marker": "D", "linewidth": 2.2, "zorder": 3}
            if ours
            else {"marker": "o", "linewidth": 1.0, "alpha": 0.8}
        )
        label = f"deltasync {row['name']}" if ours else f"{row['systems']}: {row['name']}"
        axis.plot(
            x,
            y,
            linestyle=line,
            markersize=6 if ours else 4,
            color=_color(row["name"], first),
            label=label,
            **style,
        )
    for context, dash in zip(_PLOTTED_BOUNDS, ("--", ":"), strict=True):
        y = [next(b["total_bits"] for b in sample["bounds"] if b["context"] == context) for sample in samples]
        label = f"bound, given {'nothing' if context == 'none' else f'the old {context}'}"
        if line:
            axis.plot(x, y, linestyle=dash, color="black", linewidth=1.2, label=label)
        else:
            axis.hlines(
                y, [at - 0.3 for at in x], [at + 0.3 for at in x], linestyle=dash, color="black", label=label
            )


def _color(name: str, rows: list[dict[str, Any]]) -> str:
    return f"C{sorted(row['name'] for row in rows).index(name) % 10}"
