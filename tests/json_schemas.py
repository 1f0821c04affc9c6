"""The `--json` output of commands, which a test checks: `python -m tests.json_schemas` writes docs/reference/json.md."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict

from deltasync.channel.documents import VersionId
from deltasync.dashboard.snapshot import CompactionRow, ReplicaRow, VersionRow
from deltasync.maintenance.doctor import Finding
from deltasync.maintenance.repairs import Repaired


class LogLine(TypedDict):
    """A version, or a compaction or an announced anchor that produces one.

    Attributes:
        delta_bytes, anchor_bytes: Size of the payload.
    """

    version: int  # the version, or the one that the compaction or anchor produces
    epoch: str
    sha256: str | None  # digest of the record; null until another document names it
    key: str  # the object's key
    kind: str  # `delta`, `anchor`, `compaction` or `announced`
    reference: str | None  # the checkpoint that it refers to instead of holding weights
    base_version: int | None  # the base of a delta or compaction
    step: int | None  # the trainer's step
    created_at: str  # time of encoding on the writer's clock
    changed_fraction: float  # changed elements divided by all elements
    delta_bytes: int | None
    anchor_bytes: int | None
    bits_per_changed: float | None  # payload bits per changed element of a delta or compaction
    coalesced: int  # number of publications merged into it
    fingerprint: str | None  # the model's fingerprint


class Shown(TypedDict):
    """A record or compaction."""

    key: str
    sha256: str
    bytes: int  # the object's size
    document: dict[str, Any]  # the document that [the format](../format.md) defines


class Problem(TypedDict):
    """A problem of the channel."""

    error: str  # the kind of error
    exit_code: int  # the command's exit code for this problem alone
    message: str


class Checked(TypedDict):
    """The contents and the problems of a channel.

    Attributes:
        versions, anchors, compactions: Counts, including damaged objects.
    """

    problems: list[Problem]
    newest: VersionId | None  # the newest version, if it is known
    versions: int
    anchors: int
    compactions: int
    data_bytes: int  # size of all records, compactions, parts and anchors
    publishing: int  # files that no record names yet
    garbage_objects: int  # number of files that no record names
    garbage_bytes: int  # their size
    unreachable: list[int]  # versions that no chain reaches
    orphans: list[str]  # keys of versions that the newest one does not descend from
    proven: list[int] | None  # versions whose bits were proven; null if data was not read
    unproven: list[int]  # the other versions, if data was read


class RepairDone(TypedDict):
    """The result of a repair."""

    objects: list[Repaired]
    lost: list[int]  # versions that are still unreachable
    exit_code: int  # the command's exit code


class Forgot(TypedDict):
    """Numbers of versions, and keys of their records."""

    kept: list[int]
    forgotten: list[int]
    asked: list[str]  # records that an option selects
    leading: list[str]  # bases of the versions that were asked for
    recent: list[str]  # records kept because they were needed within the grace period
    deleted: list[str]  # keys of all objects that were deleted, or would be
    compactions: list[str]  # the compactions among them
    dry_run: bool


class Pruned(TypedDict):
    """Objects that were deleted, or would be.

    Attributes:
        waiting_objects, waiting_bytes: Kept, because they may be about to be published.
    """

    objects: list[str]  # their keys
    heartbeats: list[str]  # keys of heartbeats that are older than a week
    bytes: int  # size of the objects
    waiting_objects: int
    waiting_bytes: int
    young_objects: int  # kept, because they are newer than the grace period
    dry_run: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedFiles(VersionId):
    """A version as a checkpoint."""

    files: dict[str, int]  # sizes by path


class CopiedObjects(TypedDict):
    """The result of a copy.

    Attributes:
        objects, bytes: Number and size of the objects stored in the target, without head.
    """

    version: VersionId | None  # the newest version in the source's listing
    objects: int
    bytes: int
    skipped: int  # number of objects that the target had already
    problems: list[str]  # damaged or missing objects of the source, which were left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed(VersionId):
    """A version whose bits are in host memory."""

    sync_s: float  # seconds for fetching and applying it
    fingerprint: str  # the model's fingerprint


class Served(TypedDict):
    """The version that a server serves now."""

    version: int
    waited_s: float  # seconds until it served this version


class Waiting(TypedDict):
    """There is no version yet."""

    event: Literal["waiting"]
    channel: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionSeen(VersionRow):
    """A version."""

    event: Literal["version"]
    changed_fraction: float | None  # changed elements divided by all elements; null without a delta


class AnchorSeen(TypedDict):
    """An anchor that was announced after its version was printed."""

    event: Literal["anchor"]
    version: int
    sha256: str | None
    payload_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactionSeen(CompactionRow):
    """A compaction."""

    event: Literal["compaction"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSeen(ReplicaRow):
    """A replica, as of its last heartbeat."""

    event: Literal["replica"]


class Forgotten(TypedDict):
    """Versions that were forgotten."""

    event: Literal["forgotten"]
    count: int
    left: int  # number of versions that are still shown


class ProblemSeen(TypedDict):
    """An object of the channel is damaged."""

    event: Literal["problem"]
    problem: str


class ErrorSeen(TypedDict):
    """The store could not be read. The command tries again."""

    event: Literal["error"]
    error: str


LINES, ONE, LIST = "one object a line", "one object", "a list of objects"

SCHEMAS: dict[str, tuple[str, tuple[type, ...]]] = {
    "log": (LINES, (LogLine,)),
    "show": (ONE, (Shown,)),
    "watch": (LINES, (Waiting, VersionSeen, AnchorSeen, CompactionSeen, ReplicaSeen, Forgotten, ProblemSeen, ErrorSeen)),
    "check": (ONE, (Checked,)),
    "repair": (ONE, (RepairDone,)),
    "forget": (ONE, (Forgot,)),
    "prune": (ONE, (Pruned,)),
    "export": (ONE, (ExportedFiles,)),
    "cp": (ONE, (CopiedObjects,)),
    "relay": (LINES, (CopiedObjects,)),
    "follow": (LINES, (Followed,)),
    "doctor": (LIST, (Finding,)),
    "sync": (ONE, (Served,)),
    "pin": (ONE, (Served,)),
}
"""The number of objects that each command prints, and their types."""

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "json.md"


def fields(kind: type) -> dict[str, tuple[str, str]]:
    """Return the type and meaning of each field, from docstrings and comments of the class and its bases."""
    meanings: dict[str, str] = {}
    for each in reversed([found for found in inspect.getmro(kind) if found.__doc__]):
        text = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2]
        for names, meaning in re.findall(r"^    ([a-z0-9_, ]+): (.*(?:\n     .*)*)", text, re.MULTILINE):
            meanings |= dict.fromkeys(names.split(", "), re.sub(r"\s+", " ", meaning))
        if each.__module__.partition(".")[0] in ("deltasync", "tests", "__main__"):
            for name, meaning in re.findall(r"^    (\w+): .*  # (.*)", inspect.getsource(each), re.MULTILINE):
                meanings[name] = f"{meaning[0].upper()}{meaning[1:]}".rstrip(".") + "."
    return {
        name: (_said(hint), meanings.get(name, "").replace("None", "null"))
        for name, hint in typing.get_type_hints(kind).items()
    }


def parts(hint: Any) -> list[type]:
    """Return the typed objects inside a type."""
    if isinstance(hint, type) and typing.get_type_hints(hint):
        return [hint]
    return [found for each in typing.get_args(hint) for found in parts(each)]


def _said(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_said, inner))
    if origin in (list, tuple):
        return f"list of {_said(inner[0])}"
    if origin is dict:
        return "object" if inner[1] is Any else f"object of {_said(inner[1])}"
    return {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}.get(hint) or hint.__name__


def _rows(kind: type, told: set[type]) -> Iterator[str]:
    told.add(kind)
    hints = typing.get_type_hints(kind)
    yield from (f"`{kind.__name__}`: {inspect.cleandoc(kind.__doc__ or '').splitlines()[0]}", "")
    yield from ("| field | type | |", "| --- | --- | --- |")
    yield from (
        f"| `{name}` | {said} |{f' {meaning} ' if meaning else ' '}|" for name, (said, meaning) in fields(kind).items()
    )
    yield ""
    for other in (found for hint in hints.values() for found in parts(hint) if found not in told):
        yield from _rows(other, told)


def page() -> str:
    """The page of the documentation."""
    told: set[type] = set()
    lines = [
        "# JSON output of commands",
        "",
        "    deltasync log s3://bucket/run --json | jq .version",
        "",
        "Every field is always present. Errors are sentences on stderr, and `--json` does not change [exit codes](cli.md).",
        "`dashboard` serves the data of its page at `data.json`; that form may change.",
        "`python -m tests.json_schemas` writes this page.",
    ]
    for command, (count, kinds) in SCHEMAS.items():
        names = " or ".join(f"`{kind.__name__}`" for kind in kinds)
        lines += ["", f"## {command}", "", f"{count.capitalize()}: {names}.", ""]
        for kind in kinds:
            if kind not in told:
                lines += _rows(kind, told)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
