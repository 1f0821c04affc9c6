"""Every command that this repository prints, and what checks it: `python -m tests.docs.printed` lists them.

Commands stand in code blocks and code spans of the pages; in docstrings, messages and help texts of the
packages, examples and scripts; in the files under deploy/. They are found by the program that they start
(`CHECKS`), and each is checked by that program itself: its own parser, its options, the file that it names.
Placeholders (`URL`, `...`) stand for values.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
import shlex
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from deltasync.ops.cli import main as deltasync
from tests.docs.pages import PAGES, ROOT, blocks, spans

PACKAGES = ("deltasync", "vllm_plugin", "sglang_plugin", "mlx_plugin", "trl_callback")
FOLDERS = (*PACKAGES, "examples", "deploy", "benchmarks", "requirements")
_HISTORY = {"docs/LOG.md", "CHANGELOG.md"}  # what was run at the time
_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*(/[A-Z]+)*$|\.\.\.|.*[<{$]")
_OPTIONS = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@dataclasses.dataclass(frozen=True, order=True)
class Printed:
    """A command: where it is printed, and its words without assignments of variables, comments and
    redirections.
    """

    where: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)

    def check(self) -> None:
        """Raise AssertionError if the program would refuse it."""
        CHECKS[_start(self.words) or ""](self.words)


def found() -> list[Printed]:
    """All of them, once each."""
    return sorted({Printed(where, words) for where, text in _texts() for words in commands(text)})


def _texts() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        if name not in _HISTORY:
            yield from ((name, span) for span in spans(page))
            yield from ((name, block.text) for block in blocks(page) if block.is_shell or not block.language)
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py":
            yield from ((name, text) for text in _strings(path))
        elif path.suffix in (".yaml", ".cfg"):
            text = path.read_text(encoding="utf-8")
            yield name, "\n".join(re.findall(r"(?m)^# {5}(.*)", text))
            if path.suffix == ".yaml":
                yield from (
                    (name, " ".join(words)) for words in _yaml_commands(list(yaml.safe_load_all(text)))
                )
        elif path.suffix == ".sh":
            yield name, re.sub(r"(?m)^exec ", "", path.read_text(encoding="utf-8"))


def _strings(path: Path) -> Iterator[str]:
    """Spans and indented lines of docstrings, and spans of messages."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        yield from re.findall(r"`([^`\n]+)`", text)
        yield from re.findall(r"pip install [^\s.;:)]*[^\s.;:),]", text)
        if "\n" in text:
            yield "\n".join(re.findall(r"(?m)^(?:\s{4,}|\s*\$ )\S.*", text.replace("\\\n", " ")))


def _yaml_commands(node: Any) -> Iterator[list[str]]:
    """The values of `command`, and vLLM's arguments where a chart adds them."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "command":
                yield shlex.split(value) if isinstance(value, str) else [str(word) for word in value]
            elif key == "extraArgs":
                yield ["vllm", "serve", "MODEL", *map(str, value)]
            else:
                yield from _yaml_commands(value)
    elif isinstance(node, list):
        for each in node:
            yield from _yaml_commands(each)


def commands(text: str) -> Iterator[tuple[str, ...]]:
    """The words of each command of a text, without what is not typed: comments, brackets, redirections."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    joined = re.sub(r"\bsh -c ", "", joined)
    for line in joined.splitlines():
        bare = re.sub(r"(^|\s)#\s.*", "", line.strip().removeprefix("$ "))
        for piece in re.split(r"\s*(?:&&|\|\||;|,\s(?:and|or)\s|\s\|\s|\s&(?=\s|$))\s*", bare):
            piece = re.sub(r"(?<=\S)\s{2,}\S.*", "", piece)  # in a second column: what it does
            piece = re.sub(r"\s\d?>>?\s*\S+", "", piece)
            piece = re.sub(r"(?<=\s)\[[a-z][^\]]*\s[^\]]*\]", "...", piece)  # [any option of vLLM]
            piece = re.sub(r"(?<=\s)\[([^\]]*)\]", r"\1", piece)
            try:
                words = shlex.split(piece)
            except ValueError:
                continue  # a sentence with an apostrophe
            while words and re.fullmatch(r"\w+=.*", words[0]):
                del words[0]
            if words and words[0].startswith(".venv/bin/"):
                words[0] = words[0].removeprefix(".venv/bin/")
            if len(words) > 1 and _start(tuple(words)) is not None:
                yield tuple(words)


def _start(words: tuple[str, ...]) -> str | None:
    """The key of CHECKS by which a command begins."""
    for count in (2, 1):
        if " ".join(words[:count]) in CHECKS:
            return " ".join(words[:count])
    return None


def _is_placeholder(word: str) -> bool:
    return _PLACEHOLDER.match(word) is not None


def _deltasync(words: tuple[str, ...]) -> None:
    context = click.Context(deltasync)
    name, *rest = (*words[1:], "--help")
    if name.startswith("-") or _is_placeholder(name):
        return
    command = deltasync.get_command(context, name)
    assert command is not None, f"there is no command {name}"
    rest = [word for word in rest if word not in ("--help", "-h", "...")]
    with click.Context(command, info_name=name, **command.context_settings) as inner:  # type: ignore[arg-type]
        try:
            values, left, _ = command.make_parser(inner).parse_args(list(rest))
            for param in command.params:
                value = values.get(param.name or "")
                if isinstance(value, str) and not _is_placeholder(value) and "|" not in value:
                    param.type_cast_value(inner, value)
        except click.BadOptionUsage as error:
            # a mention of the option, without a value
            assert rest[-1:] == [error.option_name], error.format_message()
            return
        except click.UsageError as error:
            raise AssertionError(error.format_message()) from None
    assert not left or command.context_settings.get("ignore_unknown_options"), f"too many arguments: {left}"
    if command.context_settings.get("ignore_unknown_options"):
        more = values.get("vllm_arguments")
        _vllm(("vllm", "serve", "MODEL", *(more if isinstance(more, tuple | list) else ())))


@functools.cache
def _vllm_parser() -> Any:
    with warnings.catch_warnings(action="ignore"):  # of what vLLM imports
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        return make_arg_parser(FlexibleArgumentParser(exit_on_error=False))


def _vllm(words: tuple[str, ...]) -> None:
    start = words.index("serve") + 1
    arguments = [
        "1" if word in ("N", "K") else word for word in words[start:] if word not in ("...", "--help")
    ]
    arguments = [word for word in arguments if not word.startswith("${")]
    try:
        _, unknown = _vllm_parser().parse_known_args(arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever argparse raises, it is a refusal
        raise AssertionError(f"vLLM refuses {arguments}: {error}") from None
    assert not unknown, f"vLLM does not know {unknown}"


def _make(words: tuple[str, ...]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words[1:]:
        name, is_variable, _ = word.partition("=")
        if not _is_placeholder(name) or is_variable:
            pattern = rf"(?m)^{re.escape(name)} *[?:]?=" if is_variable else rf"(?m)^{re.escape(name)}:"
            exists = re.search(pattern, makefile) or (".venv-" in name and name.endswith("/.ready"))
            assert exists, f"the Makefile has no {name}"


def _pip(words: tuple[str, ...]) -> None:
    """Every extra exists, and nothing of this project is asked of an index, which does not have it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in (word for word in words[2:] if not word.startswith("-") and not _is_placeholder(word)):
        assert not re.match(r"deltasync(\b(?!.*\.whl)|$)", word), f"{word} is on no index"
        if word.startswith((".", "/")) and not word.endswith(".whl"):
            path, _, extras = word.partition("[")
            assert (ROOT / path / "pyproject.toml").is_file(), f"{path} is no project"
            given = {extra.strip() for extra in extras.rstrip("]").split(",") if extra}
            assert given <= project["optional-dependencies"].keys(), f"there is no extra of {given}"


@functools.cache
def _options_of(path: Path) -> set[str]:
    """Options of a program of this tree: literals in its file or folder; fields of what its parser takes."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    if re.search(r"(Trl|HfArgument)Parser\(", text):
        trl, transformers = (
            Path(str(importlib.util.find_spec(name).origin)).parent for name in ("trl", "transformers")
        )  # type: ignore[union-attr]
        configs = [
            ROOT / "trl_callback/config.py",
            transformers / "training_args.py",
            *trl.rglob("*config*.py"),
            path,
        ]
        fields = re.findall(
            r"(?m)^    (\w+): ", "".join(file.read_text(encoding="utf-8") for file in configs)
        )
        text += " ".join(f"--{field}" for field in fields)
    return set(_OPTIONS.findall(text.replace("_", "-")))


def _program(words: tuple[str, ...]) -> str | None:
    """The module or file that Python runs; None for code, Python itself, and what a placeholder stands
    for.
    """
    if words[1] == "-W":
        words = (words[0], *words[3:])
    name = words[2] if words[1] == "-m" and len(words) > 2 else words[1]
    return None if name.startswith("-") or re.search(r"[A-Z<{$]|\.\.\.", name) else name.rstrip(",")


def _is_ours(program: str) -> bool:
    top = program.split(".")[0].split("/")[0]
    return (
        top in ("benchmarks", "tests", "examples", "deploy", "requirements", "demo", "wordle")
        and "pytest" not in program
    )


def _python(words: tuple[str, ...]) -> None:
    program = _program(words)
    if words[1] == "-c":
        ast.parse(words[2])
    if program is None or program in ("-c", "venv"):
        return
    if program == "deltasync":
        return _deltasync(words[words.index("deltasync") :])
    if program.startswith("vllm.entrypoints"):
        model = words.index("--model") + 1
        return _vllm(("vllm", "serve", words[model], *words[3 : model - 1], *words[model + 1 :]))
    if not _is_ours(program):
        top = program.split(".")[0]
        # in an environment of its own
        elsewhere = re.search(rf"\b{top}\b", (ROOT / "Makefile").read_text(encoding="utf-8"))
        assert importlib.util.find_spec(top) is not None or elsewhere or "/" in program, (
            f"there is no module {program}"
        )
        return None
    path = ROOT / program
    if words[1] == "-m":
        path = (
            ROOT
            / ("examples" if program.split(".")[0] in ("demo", "wordle") else "")
            / program.replace(".", "/")
        )
    path = path if path.exists() else path.with_suffix(".py")
    assert path.exists(), f"there is no {program}"
    _files(words)
    given = set(_OPTIONS.findall(" ".join(words).replace("_", "-"))) - {"--help"}
    assert not given - _options_of(path), f"{program} does not know {given - _options_of(path)}"
    return None


def _files(words: tuple[str, ...]) -> None:
    """The files and folders that it names are there, and its wheels are those that `make dist` makes."""
    platforms = re.findall(r"WHEEL_PLATFORM=(\w+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for word in words[1:]:
        path = word.rpartition("=")[2]
        if path.endswith(".whl"):
            assert path.endswith(tuple(f"-cp311-abi3-{platform}.whl" for platform in platforms)), (
                f"make dist makes no {path}"
            )
        elif re.match(r"(deploy|examples|requirements|docs)/", path):
            assert (ROOT / path).exists(), f"there is no {path}"


CHECKS: dict[str, Callable[[tuple[str, ...]], None]] = {
    "deltasync": _deltasync,
    "vllm serve": _vllm,
    "python": _python,
    "python3": _python,
    "make": _make,
    "pip install": _pip,
    "cp": _files,
    "docker build": _files,
    "docker compose": _files,
    "kubectl apply": _files,
    "kubectl create": _files,
    "helm install": _files,
    "serve run": _files,
    "hf jobs": _files,
    "haproxy": _files,
}
"""What checks a command, by its beginning."""


if __name__ == "__main__":
    for each in found():
        try:
            each.check()
            print(f"{each.where}: {each}   [{CHECKS[_start(each.words) or ''].__name__.strip('_')}]")
        except AssertionError as error:
            print(f"{each.where}: {each}   FAILS: {error}")
