"""The results of the demo's engines: the comparison, the table and the picture."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from deltasync import Replica
from deltasync.tensors.bits import bits_of
from demo.report import read_lines
from demo.task import FIRST_STARTS, prompt_text


def prompt(tokenizer: Any) -> str:
    """Return the prompt that every engine answers, with the chat template."""
    question = [{"role": "user", "content": prompt_text(FIRST_STARTS[7])}]
    text: str = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    return text


_ROUNDING = 2.0**-7
"""Most by which a greedy token's logit is below the largest, as a part of that: one unit in the last place of
bfloat16.

Engines add in different orders, so where two logits are as near as that, they choose either.
"""


def reference(out: Path, tokenizer: Any, prompt: str, answers: Mapping[str, str]) -> dict[str, Any]:
    """Return the final weights' sha256, their greedy tokens, and whose answers are greedy too, by
    transformers.
    """
    replica = Replica(f"file://{out}/channel")
    version = replica.sync()
    model = AutoModelForCausalLM.from_pretrained(out / "untrained", dtype=torch.bfloat16)
    model.load_state_dict(replica.state_dict())
    sha256 = {
        name: hashlib.sha256(bits_of(tensor).data).hexdigest() for name, tensor in model.state_dict().items()
    }
    asked = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**asked, max_new_tokens=32, do_sample=False)[0, asked["input_ids"].shape[1] :]
        model.float()  # so that the reference itself does not round
        greedy = [
            name for name, text in answers.items() if _is_greedy(model, asked["input_ids"], tokenizer, text)
        ]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return {"version": version, "sha256": sha256, "text": text, "greedy": greedy}


def _is_greedy(model: Any, prompt_1N: torch.Tensor, tokenizer: Any, text: str) -> bool:
    """Whether each token of an answer has the largest logit after those before it, up to rounding."""
    answer_1T = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    if not answer_1T.numel():
        return False
    logits_TV = model(torch.cat([prompt_1N, answer_1T], dim=1)).logits[0, prompt_1N.shape[1] - 1 : -1]
    largest_T = logits_TV.max(dim=-1).values
    chosen_T = logits_TV.gather(1, answer_1T[0][:, None])[:, 0]
    return bool((largest_T - chosen_T <= _ROUNDING * largest_T.abs()).all())


def summarize(
    out: Path,
    proofs: dict[str, list[dict[str, Any]]],
    statuses: dict[str, Any],
    answers: dict[str, str],
    expected: dict[str, Any],
    tokenizer: Any,
) -> dict[str, Any]:
    """Compare the engines with the trainer and with transformers."""
    published = {line["version"]: line["sha256"] for line in read_lines(out / "published.jsonl")}
    last = max(published)
    tokens = tokenizer.encode(expected["text"], add_special_tokens=False)
    engines: dict[str, Any] = {}
    for name, taken in proofs.items():
        commits = statuses[name]["commits"]
        lags = [commit["lag_s"] for commit in commits if commit["lag_s"] is not None]
        engines[name] = {
            "sha256_equal_at": sorted(
                {each["version"] for each in taken if each["sha256"] == published[each["version"]]}
            ),
            "sha256_differs_at": sorted(
                {each["version"] for each in taken if each["sha256"] != published[each["version"]]}
            ),
            "versions_committed": sorted({commit["version"] for commit in commits}),
            "pause_ms": [1e3 * commit["pause_s"] for commit in commits],
            "lag_s": lags,
            "tokens": tokenizer.encode(answers[name], add_special_tokens=False),
            "tokens_greedy": name in expected["greedy"],
        }
    equal = all(
        not each["sha256_differs_at"]
        and last in each["sha256_equal_at"]
        and each["tokens_greedy"]
        and each["versions_committed"] == sorted(published)
        for each in engines.values()
    )
    return {
        "versions_published": len(published),
        "equal": equal
        and expected["version"] == last
        and expected["sha256"] == published[last]
        and bool(tokens),
        "answer": expected["text"],
        "tokens": tokens,
        "engines": engines,
    }


def table(summary: dict[str, Any]) -> list[str]:
    """Return the summary in lines."""
    times = f"{summary['wall_s']:.0f} s, {summary['cpu_s']:.0f} s of CPU"
    rows = [
        f"{summary['versions_published']} versions of one run in {times}; the answer: {summary['answer']!r}"
    ]
    for name, each in summary["engines"].items():
        if not each["tokens_greedy"]:
            same = f"OTHER TOKENS: {each['tokens']}"
        elif each["tokens"] == summary["tokens"]:
            same = "the same tokens"
        else:
            same = "other tokens where two are equally likely"
        wrong = f", DIFFERENT at {each['sha256_differs_at']}" if each["sha256_differs_at"] else ""
        rows.append(
            f"{name:13} {len(each['versions_committed'])} versions committed; "
            f"sha256 equal at {each['sha256_equal_at']}{wrong}; {same}; "
            f"pause p50 {np.median(each['pause_ms'] or [0]):.1f} ms, lag p50 "
            f"{np.median(each['lag_s'] or [0]):.2f} s"
        )
    rows.append(
        "all bits are equal, and all tokens greedy"
        if summary["equal"]
        else "NOT ALL BITS AND TOKENS ARE RIGHT"
    )
    return rows


def plot(out: Path, summary: dict[str, Any]) -> None:
    """Draw who committed which version, with the proofs, and lags and pauses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [*summary["engines"]]
    figure, (served, lag, pause) = pyplot.subplots(
        1, 3, figsize=(14, 3.6), width_ratios=[2.2, 1, 1], layout="constrained"
    )
    for row, each in enumerate(summary["engines"].values()):
        served.scatter(
            each["versions_committed"], [row] * len(each["versions_committed"]), s=9, color="#3b6ea5"
        )
        served.scatter(
            each["sha256_equal_at"],
            [row] * len(each["sha256_equal_at"]),
            s=70,
            facecolors="none",
            edgecolors="#2e8b57",
        )
        served.scatter(
            each["sha256_differs_at"],
            [row] * len(each["sha256_differs_at"]),
            s=70,
            marker="x",
            color="#c0392b",
        )
    served.set_yticks(range(len(names)), names)
    served.invert_yaxis()
    served.set_xlabel("version")
    served.set_title(
        "committed (dots); sha256 of all live weights equal to the trainer's (rings)", fontsize=9
    )
    for axis, key, title in ((lag, "lag_s", "lag, encoded to served (s)"), (pause, "pause_ms", "pause (ms)")):
        axis.boxplot([each[key] for each in summary["engines"].values()], tick_labels=names, showfliers=False)
        axis.set_title(title, fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(alpha=0.3)
    figure.suptitle("One channel, every engine: a GRPO run, followed at once", fontsize=11)
    figure.savefig(out / "run.png", dpi=110)
    pyplot.close(figure)
