"""The result of `benchmarks.corpus` as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common import table

_SHOWN_STEPS = 8  # rows of the table by step


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield all tables."""
    for make in (overview, by_step, by_kind, by_layer, sizes):
        yield from make(result)
        yield ""


def name(run: dict[str, Any]) -> str:
    """Return a run's learning rate, with task and master if they are known; its name, if the rate is not."""
    rate = run["learning_rate"]
    if rate is None:
        found: str = run["name"]
        return found
    return ", ".join(
        [
            *filter(None, [run.get("task")]),
            f"{rate:.0e}".replace("e-0", "e-"),
            *filter(None, [run.get("master")]),
        ]
    )


def overview(result: dict[str, Any]) -> Iterator[str]:
    """Yield what a step changes, on average over a run."""
    runs = result["runs"]

    def row(label: str, cell: Any) -> tuple[str, ...]:
        return (label, *(cell(run) for run in runs))

    def share(field: str, of: str = "changed") -> Any:
        return lambda run: f"{_sum(run, field) / max(_sum(run, of), 1):.1%}"

    def first_and_last(run: dict[str, Any]) -> str:
        of = [step["changed"] / run["elements"] for step in run["steps"]]
        return f"{of[0]:.2%}, {sum(of) / len(of):.2%}, {of[-1]:.2%}"

    def rewards(run: dict[str, Any]) -> str:
        of = [step["reward"] for step in run["steps"] if step["reward"] is not None]
        return f"{sum(of[:5]) / len(of[:5]):.2f} -> {sum(of[-5:]) / len(of[-5:]):.2f}" if of else ""

    def bits_in_all(codec: str) -> Any:
        return lambda run: (
            f"{8 * sum(step['payload_bytes'][codec] for step in run['steps']) / _sum(run, 'changed'):.2f}"
        )

    ulps = [f"of {low}" if low == high else f"of {low} to {high}" for low, high in _ranges(result["ulps"])]
    rows = [
        row("steps", lambda run: run["total"]["steps"]),
        row("changed: first step, mean, last step", first_and_last),
        *(
            row(f"bits per change of `{codec}`, all steps", bits_in_all(codec))
            for codec in ("packed", "context")
        ),
        row("reward, mean of the first and the last 5 steps", rewards),
        *(row(f"steps {label} ulp", lambda run, at=at: _ulp_share(run, at)) for at, label in enumerate(ulps)),
        row(f"steps of more than {result['ulps'][-1]} ulp", lambda run: _ulp_share(run, len(ulps))),
        row("raise the magnitude", share("grew")),
        row("change the sign", share("sign_changed")),
        row("changed before in the run", share("changed_before")),
        row("changed in the step before", share("changed_in_the_step_before")),
        row("of these, in the same direction", share("in_the_same_direction", "changed_in_the_step_before")),
        row("return to the bits before their last change", share("returned")),
        row(
            "elements that ever changed", lambda run: f"{run['total']['ever_changed'] / run['elements']:.2%}"
        ),
        row(
            "of these, as at the start in the end",
            lambda run: f"{run['total']['as_at_the_start'] / max(run['total']['ever_changed'], 1):.1%}",
        ),
    ]
    yield from table(("learning rate", *map(name, runs)), rows)


def by_step(result: dict[str, Any]) -> Iterator[str]:
    """Yield changed fraction, bits and reward of some steps of every run."""
    rows = []
    for run in [*result["runs"], *result["figures_only"]]:
        for at in _some(len(run["steps"])):
            step = run["steps"][at]
            changed = step.get("changed")
            fraction = step["changed_fraction"] if changed is None else changed / run["elements"]
            bits = {
                codec: step["bits_per_changed"] if changed is None else 8 * size / changed
                for codec, size in step["payload_bytes"].items()
            }
            cells = (f"{bits[codec]:.2f}" if codec in bits else "" for codec in ("packed", "context"))
            reward = "" if step["reward"] is None else f"{step['reward']:.2f}"
            rows.append((name(run), step["step"], f"{fraction:.3%}", *cells, reward))
    yield from table(("learning rate", "step", "changed", "`packed`", "`context`", "reward"), rows)


def by_kind(result: dict[str, Any]) -> Iterator[str]:
    """Yield the changed fraction of a step by kind of tensor, on average over a run."""
    yield from _by(result, "kind", sorted(result["runs"][0]["total"]["elements_by_kind"]))


def by_layer(result: dict[str, Any]) -> Iterator[str]:
    """Yield the changed fraction of a step by layer, on average over a run."""
    layers = result["runs"][0]["total"]["elements_by_layer"]
    yield from _by(result, "layer", [layer for layer in layers if layer.isdecimal()])


def _by(result: dict[str, Any], what: str, names: Sequence[str]) -> Iterator[str]:
    rows = []
    for each in names:
        cells = []
        for run in result["runs"]:
            total = run["total"]
            cells.append(
                f"{total[f'changes_by_{what}'][each] / total[f'elements_by_{what}'][each] / total['steps']:.3%}"
            )
        rows.append((each, f"{result['runs'][0]['total'][f'elements_by_{what}'][each]:,}", *cells))
    yield from table((what, "elements", *map(name, result["runs"])), rows)


def sizes(result: dict[str, Any]) -> Iterator[str]:
    """Yield bits per changed element by encoding and bound, a column for each span."""
    spans = [
        (run, span)
        for run in result["runs"]
        for span in run["spans"]
        if span["first_step"] < run["total"]["steps"]
    ]
    heads = [f"{name(run)}, {_span(span)}, {span['changed_fraction']:.2%}" for run, span in spans]
    rows = []
    one = middle(result["runs"][0])
    for encoding in sorted(one["encodings"], key=lambda each: -each["bits_per_changed"]):
        bits = (f"{bits_of(span, encoding['name']):.2f}" for _, span in spans)
        ours = encoding["systems"] == "deltasync"
        rows.append(
            (
                f"**`{encoding['name']}`**" if ours else encoding["name"],
                "" if ours else encoding["systems"],
                *bits,
            )
        )
    for context in [bound["context"] for bound in one["bounds"]]:
        cells = (
            f"{found:.2f}" if (found := bound_of(span, context)) is not None else "" for _, span in spans
        )
        rows.append((f"*bound, given {'nothing' if context == 'none' else context}*", "", *cells))
    yield from table(("encoding", "written from descriptions of", *heads), rows, words=2)


def middle(run: dict[str, Any]) -> dict[str, Any]:
    """Return the span that is the middle step."""
    first = run["total"]["steps"] // 2 + 1
    found: dict[str, Any] = next(
        each for each in run["spans"] if each["first_step"] == each["last_step"] == first
    )
    return found


def bits_of(span: dict[str, Any], encoding: str) -> float:
    """Return the bits per changed element of an encoding."""
    found: float = next(each["bits_per_changed"] for each in span["encodings"] if each["name"] == encoding)
    return found


def bound_of(span: dict[str, Any], context: str) -> float | None:
    """Return the bound given a context; None where it was not computed."""
    found: float | None = next(
        (each["total_bits"] for each in span["bounds"] if each["context"] == context), None
    )
    return found


def _span(span: dict[str, Any]) -> str:
    length = span["last_step"] - span["first_step"] + 1
    return f"step {span['last_step']}" if length == 1 else f"compaction of {length}"


def _ranges(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    below = 0
    for end in ends:
        yield below + 1, end
        below = end


def _some(count: int) -> list[int]:
    return sorted({round(at * (count - 1) / (_SHOWN_STEPS - 1)) for at in range(_SHOWN_STEPS)})


def _sum(run: dict[str, Any], field: str) -> int:
    return sum(step[field] for step in run["steps"])


def _ulp_share(run: dict[str, Any], at: int) -> str:
    return f"{sum(step['by_ulps'][at] for step in run['steps']) / max(_sum(run, 'changed'), 1):.1%}"
