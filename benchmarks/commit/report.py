"""The result of `benchmarks.commit` as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import table


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as tables."""
    of_process = result["commit"] is not None
    yield from _head(result)
    for part in (_commit, _pause, _throughput, _memory):
        if of_process or part in (_pause, _throughput):
            yield ""
            yield from part(result)


def _head(result: dict[str, Any]) -> Iterator[str]:
    model, commit = result["model"], result["commit"]
    yield (
        f"Qwen3 of random weights ({model['size']}): "
        f"{model['element_count']:,} elements in {model['tensor_count']} tensors; {model['changed']:,} changed "
        f"({model['changed'] / model['element_count']:.2%}), payload {model['payload_bytes'] / 1e6:.2f} MB"
    )
    if commit is not None:
        yield f"threads: {commit['threads']['numba']} in deltasync's kernels, {commit['threads']['torch']} in vLLM's"


def _commit(result: dict[str, Any]) -> Iterator[str]:
    commit, ratios = result["commit"], result["ratios"]
    texts = {
        "stage": "deltasync: stage (fetch, check, decode, translate)",
        "commit": "deltasync: commit (write, keep the old values, fingerprint)",
        "confirm": "deltasync: confirm (compare fingerprints)",
        "rollback": "deltasync: rollback",
    }
    rows = [(text, *_times(commit["deltasync"][name]), "") for name, text in texts.items()]
    for name, times in commit["vllm"].items():
        rows.append((f"vLLM's sparse path: {name}", *_times(times), f"{ratios['vllm_per_commit'][name]:.1f}"))
    share = f"{1 / ratios['commit_per_plain_scatter']:.2f}"
    rows.append(("plain scatter through the load plan, one thread", *_times(commit["plain"]), share))
    yield from table(("a version into live weights", "first, ms", "median, ms", "best, ms", "times the commit"), rows)
    yield "Tokens are generated while a version is staged. Times the commit: the median, by that of commit and confirm."


def _pause(result: dict[str, Any]) -> Iterator[str]:
    pause, ratios = result["pause"], result["ratios"]
    changed, unchanged = pause["changed"], pause["unchanged"]
    texts = {
        "silence_s": "from the last token before to the first after",
        "extra_s": f"of that, more than the usual {1e3 * pause['token_gap_s']:.1f} between two tokens",
        "pause_s": "server: from asking vLLM to pause until it had resumed",
        "scatter_s": "server: writing live weights",
        "stage_s": "server: staging, while tokens are generated",
    }
    yield from table(
        ("pause of generation, medians in ms", f"{changed['commits']} versions", "versions without a change"),
        [(text, f"{1e3 * changed[key]:.1f}", f"{1e3 * unchanged[key]:.1f}") for key, text in texts.items()],
    )
    yield (
        f"More than usual: {ratios['pause_per_scatter']:.2f} times the scatter; "
        f"{ratios['pause_beyond_empty_per_scatter']:.2f} times beyond that of a version without a change. "
        f"The first pause took {1e3 * pause['first_pause_s']:.1f} ms."
    )


def _throughput(result: dict[str, Any]) -> Iterator[str]:
    throughput = result["throughput"]
    rows = []
    for key, text in (("without", "no versions"), ("with_versions", "a version a second")):
        rates = throughput[key]
        rows.append((text, ", ".join(f"{rate:.0f}" for rate in rates), f"{sum(rates) / len(rates):.0f}"))
    yield from table((f"tokens/s, tiny model, {throughput['requests']} requests at a time", "windows", "mean"), rows)
    yield f"With versions: {throughput['share']:.1%} of the throughput without."


def _memory(result: dict[str, Any]) -> Iterator[str]:
    texts = {
        "staged_bytes": "deltasync: staged on the device, old values included",
        "stage_extra_bytes": "deltasync: stage, at its peak, decoding on the host included",
        "vllm_extra_bytes": "vLLM's sparse path, at its peak",
    }
    rows = []
    for key, name in texts.items():
        extra_bytes = result["commit"][key]
        if extra_bytes is None:
            rows.append((name, *"????"))
        else:
            each = extra_bytes / result["model"]["changed"]
            rows.append((name, f"{extra_bytes / 1e6:.1f}", f"{each:.1f}", f"{each / 2:.1f}", f"{each / 6:.1f}"))
    yield from table(("extra memory", "MB", "bytes per change", "times values", "times values and positions"), rows)
    yield "Values are 2 bytes per changed element, positions 4 more."


def _times(times: dict[str, float]) -> Iterator[str]:
    return (f"{1e3 * times[key]:,.2f}" for key in ("first_s", "median_s", "best_s"))
