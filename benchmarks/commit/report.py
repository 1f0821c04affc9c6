"""The result of `benchmarks.commit` as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import table


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as a table; of a server alone if commits in one process were not measured."""
    model, of_process, pause = result["model"], result["commit"], result["pause"]
    silence, usual, scatter = (
        pause["changed"]["silence_s"],
        pause["token_gap_s"],
        pause["changed"]["scatter_s"],
    )
    yield from table(
        ("", ""),
        [
            ("elements, changed", f"{model['element_count']:,}, {model['changed']:,}"),
            *([] if of_process is None else _times(of_process)),
            (
                "pause of generation, last token before to first after",
                f"{1e3 * silence:.0f} ms; {1e3 * usual:.0f} are usual between two tokens, "
                f"the scatter took {1e3 * scatter:.0f} next to vLLM's spinning threads",
            ),
            ("the same, of a version without a change", f"{1e3 * pause['unchanged']['silence_s']:.0f} ms"),
            (
                "throughput of the tiny model with a version per second",
                f"{result['throughput']['share']:.0%}",
            ),
            *([] if of_process is None else _memory(of_process, model["changed"])),
        ],
        words=2,
    )


def layout_lines(layouts: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the pauses of `measure.layouts` as a table."""
    first_s = next(iter(layouts.values()))["changed"]["pause_s"]
    yield from table(
        ("", "elements", "tensors in place, with twins, reloaded", "pause", "of the first", "stage"),
        [
            (
                name,
                f"{each['element_count']:,}",
                ", ".join(str(each[f"{kind}_tensors"]) for kind in ("patched", "twinned", "reloaded")),
                f"{1e3 * each['changed']['pause_s']:.1f} ms",
                f"{each['changed']['pause_s'] / first_s:.1f}",
                f"{1e3 * each['changed']['stage_s']:.0f} ms",
            )
            for name, each in layouts.items()
        ],
        words=3,
    )


def _times(commit: dict[str, Any]) -> Iterator[tuple[str, str]]:
    ours, peers = commit["deltasync"], commit["vllm"].values()
    commit_s = sum(ours[part]["median_s"] for part in ("commit", "confirm") if part in ours)
    peer_ms = " / ".join(f"{1e3 * peer['median_s']:.0f}" for peer in peers)
    times = " / ".join(f"{peer['median_s'] / commit_s:.0f}" for peer in peers)
    yield "fetch, decode, translate (while serving), median", f"{1e3 * ours['stage']['median_s']:.0f} ms"
    yield "commit with confirmation, median", f"{1e3 * commit_s:.0f} ms"
    yield "rollback, median", f"{1e3 * ours['rollback']['median_s']:.0f} ms"
    yield "a plain scatter in one thread, median", f"{1e3 * commit['plain']['median_s']:.0f} ms"
    yield "vLLM's own path, default / duplicates unchecked, median", f"{peer_ms} ms: {times} commits"


def _memory(commit: dict[str, Any], changed: int) -> Iterator[tuple[str, str]]:
    def each(name: str, digits: int) -> str:
        size = commit[f"{name}_bytes"]
        return "?" if size is None else f"{size / changed:.{digits}f}"

    yield "staged on the device, old values included", f"{each('staged', 1)} bytes per change"
    yield (
        "peak of staging, decoding on the host included / of vLLM's path",
        f"{each('stage_extra', 1)} / {each('vllm_extra', 0)} bytes per change",
    )
