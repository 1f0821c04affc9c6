"""What a reader meets on the way of one version, out and in: `python -m tests.version_path` prints it.

Traces one publish and one sync of a host replica in steady state, with all threads. Figures are of the
functions that ran: their files, lines and tokens; of the nine files that docs/architecture.md asks a stranger
to read, their lines and how many of 100 stand in no such function.
"""

from __future__ import annotations

import ast
import collections
import io
import json
import sys
import threading
import tokenize
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from deltasync import Publisher, Replica, Retention

ROOT = Path(__file__).parents[1]
PACKAGES = ("deltasync", "vllm_plugin", "sglang_plugin", "mlx_plugin", "trl_callback")
NINE = (
    "publish/publisher.py",
    "publish/shadow.py",
    "publish/encode.py",
    "publish/log.py",
    "channel/record.py",
    "following/cursor.py",
    "following/weights.py",
    "live/memory.py",
    "following/loop.py",
)
"""The files to read, in the order of one version."""
_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
}

Functions = set[tuple[Path, int]]
"""A file and the line where a function begins in it."""


def _docstrings(tree: ast.AST) -> set[int]:
    """Return the lines of docstrings, of attributes' too."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def tokens(text: str, lines: set[int] | None = None) -> int:
    """Count the tokens of a Python text, without comments and docstrings; those of some of its lines."""
    documented = _docstrings(ast.parse(text))
    return sum(
        token.type not in _LAYOUT
        and token.start[0] not in documented
        and (lines is None or token.start[0] in lines)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


@cache
def _spans(path: Path) -> Mapping[int, range]:
    """Return the lines of each function of a file, by the first of them, decorators included."""
    found = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {
        min([node.lineno, *(each.lineno for each in node.decorator_list)]): range(
            node.lineno, (node.end_lineno or 0) + 1
        )
        for node in found
    }


class _Trace:
    """Notes the functions of the product that run, in threads that were started since it began, too."""

    def __init__(self) -> None:
        self._found: Functions | None = None
        self._folders = tuple(str(ROOT / package) for package in PACKAGES)

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def of(self, action: Callable[[], object]) -> Functions:
        """Return the functions that run until an action returns."""
        self._found = found = set[tuple[Path, int]]()
        action()
        self._found = None
        return found

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code, found = frame.f_code, self._found
        if found is not None and event == "call" and code.co_filename.startswith(self._folders):
            found.add((Path(code.co_filename), code.co_firstlineno))


def _steps(model: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Change a hundredth of the bits each time."""
    generator = torch.Generator().manual_seed(0)
    while True:
        for tensor in model.values():
            tensor.view(torch.int16)[torch.rand(tensor.shape, generator=generator) < 0.01] += 1
        yield


def walked() -> tuple[Functions, Functions]:
    """Return the functions that the fourth version passes on its way out, and into a replica that has the
    third.
    """
    generator = torch.Generator().manual_seed(1)
    model = {
        f"layers.{index}.weight": torch.randn(64, 64, generator=generator).bfloat16() for index in range(6)
    }
    url, step = f"memory://{uuid.uuid4().hex}", _steps(model)
    with _Trace() as trace, Publisher(url, retention=Retention(compact_every=0)) as publisher:
        replica = Replica(url)
        for _ in range(3):
            publisher.publish(model.items()).wait(60)
            replica.sync()
            next(step)
        out = trace.of(lambda: publisher.publish(model.items()).wait(60))
        into = trace.of(replica.sync)
    assert all(
        torch.equal(replica.state_dict()[name].view(torch.int16), model[name].view(torch.int16))
        for name in model
    )
    return out, into


def figures(functions: Functions) -> dict[str, int]:
    """Return how many files, lines of functions and tokens of them a reader meets, and how many lines these
    files have.
    """
    lines = covered(functions)
    texts = {path: path.read_text() for path in lines}
    return {
        "files": len(lines),
        "lines": sum(map(len, lines.values())),
        "tokens": sum(tokens(texts[path], found) for path, found in lines.items()),
        "lines_of_files": sum(text.count("\n") for text in texts.values()),
    }


def covered(functions: Functions) -> dict[Path, set[int]]:
    """Return the lines of these functions in each file."""
    found = collections.defaultdict[Path, set[int]](set)
    for path, first in functions:
        found[path] |= set(_spans(path).get(first, ()))  # comprehensions and lambdas stand in one of them
    return {path: lines for path, lines in found.items() if lines}


def nine(functions: Functions) -> dict[str, int]:
    """Return how many lines the files of `NINE` have, and how many of 100 the path does not execute."""
    lines, paths = covered(functions), [ROOT / "deltasync" / name for name in NINE]
    whole = sum(path.read_text().count("\n") for path in paths)
    on_path = sum(len(lines.get(path, ())) for path in paths)
    return {"nine_lines": whole, "nine_off_path": round(100 * (1 - on_path / whole))}


def main() -> None:
    out, into = walked()
    result: dict[str, Any] = {"out": figures(out), "in": figures(into), "both": figures(out | into)}
    result["nine"] = nine(out | into)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
