"""The history of a channel: `deltasync log | diff | bisect | blame`."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.filesize import decimal as size_of

from deltasync.ops.cli.options import COUNT, channel_command, version_number
from deltasync.ops.cli.output import cell, count, echo, echo_json, field, print_table, text_of, with_bars

if TYPE_CHECKING:
    from rich.text import Text

    from deltasync.channel.documents import Record
    from deltasync.channel.reading import ChannelReader
    from deltasync.channel.record import StoredRecord
    from deltasync.errors import DeltaSyncError

_COLUMNS = ("version", "digest", "kind", "step", "time", "changed", "delta", "bits", "anchor")
_SHOWN = 100  # versions in a table
_BLAMED = 20  # versions in the table of `blame`
_DIFFERING = 20  # tensors in the table of `diff`
_SKIP = 125  # as `git bisect run` has it

_field = functools.partial(field, width=16)


def row(key: str, record: Record, sha256: str | None, total: int) -> dict[str, Any]:
    """Return the row that `log` prints for a version, a compaction or an announced anchor, as plain data.

    `sha256` is the digest of the version that the record produces. `total` is the number of elements of all
    tensors.
    """
    delta, anchor, reference = record.delta, record.anchor, record.reference
    changed = total if delta is None else delta.changed
    delta_bytes = None if delta is None else record.payload_bytes
    return {
        "version": record.version,
        "epoch": record.epoch,
        "sha256": sha256,
        "key": key,
        "kind": "announced" if record.kind == "announcement" else record.kind,
        "reference": None if reference is None else str(reference),
        "base_version": None if delta is None or record.base is None else record.base.version,
        "step": record.step,
        "created_at": record.created_at,
        "changed_fraction": changed / total if total else 0.0,
        "delta_bytes": delta_bytes,
        "anchor_bytes": None if anchor is None or reference is not None else record.payload_bytes,
        "bits_per_changed": 8 * delta_bytes / changed if delta_bytes and changed else None,
        "coalesced": record.coalesced,
        "fingerprint": record.fingerprint,
    }


@channel_command("one JSON object per row, oldest first, or the document with its key and digest")
@click.argument("what", metavar="[VERSION|KEY]", required=False)
@click.option(
    "--last",
    type=COUNT,
    metavar="N",
    help=f"Show only the newest N versions. Default: {_SHOWN}, JSON: all.",
)
def log(reader: ChannelReader, what: str | None, last: int | None, as_json: bool) -> None:
    """List the versions of CHANNEL, oldest first, each followed by compactions and anchors that produce it.

    Read are the records of the listed versions, and without --last those that somebody needs to join: where
    an object is missing among these, it ends with an error. With a version's number, `latest`, or the key of a record,
    seal or compaction as printed by `log --json`, one record is shown in full: its document, signature,
    shortcuts and most changed tensors.
    """
    if what is not None:
        if last is not None:
            raise click.UsageError("--last is for the list of versions.")
        _show(reader, what, as_json)
        return
    from deltasync import ops

    ops.described(reader)
    _print(reader, _SHOWN if last is None and not as_json else last, as_json)
    if last is None:
        ops.check_join(reader)


def _print(reader: ChannelReader, last: int | None, as_json: bool) -> None:
    rows, newest, problems = with_bars(_read, reader, last)
    for problem in problems:
        echo(f"deltasync: {problem}", err=True)
    if as_json:
        for each in rows:
            echo_json(each)
        return
    days = {each["created_at"][:10] for each in rows}
    time = slice(11, 19) if len(days) < 2 else slice(5, 16)  # the time of day, or also the day
    run = f"run {reader.channel().run_id[:12]}  newest version {newest}  {max(days, default='')}"
    title = cell(reader.store.url).append("\n").append_text(cell(run))
    print_table(
        _COLUMNS,
        (_cells(each, each["created_at"][time].replace("T", " ")) for each in rows),
        ("digest", "kind", "time"),
        title=title,
        caption=_totals(rows),
    )


def _cells(each: dict[str, Any], time: str) -> list[str | Text]:
    """Return the cells of a row, in the order of `_COLUMNS`."""
    is_compaction, is_version = each["kind"] == "compaction", each["kind"] in ("delta", "anchor")
    return [
        f"{each['base_version']}-{each['version']}" if is_compaction else str(each["version"]),
        (each["sha256"] or "")[:12] if is_version else "",
        each["kind"] if is_version else "compact" if is_compaction else "anchor",
        text_of(each["step"]),
        cell(time),
        "" if each["delta_bytes"] is None else f"{each['changed_fraction']:.3%}",
        text_of(each["delta_bytes"], size_of),
        text_of(each["bits_per_changed"], "{:.2f}".format),
        "reference" if each["reference"] else text_of(each["anchor_bytes"], size_of),
    ]


def _read(reader: ChannelReader, last: int | None) -> tuple[list[dict[str, Any]], str, list[DeltaSyncError]]:
    """Return the rows, the newest version as text, and the problems."""
    from deltasync import ops
    from deltasync.tensors import weight_elements

    oldest, newest = 1, [] if last is None else reader.newest_slots()
    if last is not None and newest:
        oldest = max(1, newest[-1][0].version - last - 1)  # each epoch that ends among them has a seal
    held = ops.scan_channel(reader, oldest=oldest, shortcuts_wanted=lambda span: span.version >= oldest)
    shown = ops.lineage(held.records)[: last or None][::-1]
    digests = ops.identities(reader, held, shown)
    total = weight_elements(reader.specs.values())
    rows = []
    for slot in shown:
        record = held.records[slot]
        if record is not None:
            rows.append(row(slot.key, record, digests.get(slot), total))
        for key, shortcut in held.shortcuts.items():
            if shortcut is not None and shortcut.slot == slot:
                rows.append(row(key, shortcut, shortcut.sha256, total))
    newest_version = f"{shown[-1].version} ({(digests.get(shown[-1]) or '')[:12]})" if shown else "none"
    return rows, newest_version, [*held.problems.values()]


def _totals(rows: Iterable[dict[str, Any]]) -> str:
    """Return the number and the size of the rows of each kind, as text."""
    sizes: dict[str, list[int]] = {"deltas": [], "anchors": [], "compactions": []}
    for each in rows:
        if each["delta_bytes"] is not None:
            sizes["compactions" if each["kind"] == "compaction" else "deltas"].append(each["delta_bytes"])
        if each["anchor_bytes"] is not None:
            sizes["anchors"].append(each["anchor_bytes"])
    return ", ".join(
        f"{len(listed)} {kind} {size_of(sum(listed))}" for kind, listed in sizes.items() if listed
    )


def _show(reader: ChannelReader, what: str, as_json: bool) -> None:
    from deltasync.channel.record import signed_by
    from deltasync.tensors import weight_elements

    stored = _find(reader, what)
    assert stored.data is not None
    signer = signed_by(stored.data)
    document = msgspec.to_builtins(stored.record)
    if as_json:
        echo_json(
            {"key": stored.key, "sha256": stored.sha256, "bytes": stored.size, "document": document}, indent=2
        )
        return
    _field("key", stored.key)
    _field("sha256", stored.sha256)
    _field("bytes", f"{stored.size:,}")
    for name, value in document.items():
        if name == "base" and value is not None:
            _field("base", f"{stored.record.base}  {value['epoch']}")
        elif name == "sha256" and value is not None:
            _field("of record", value)
        elif name not in ("delta", "anchor", "sha256") and value not in (None, []):
            _field(name, value)
    if signer is not None:
        _field("signed by", f"{signer}{'' if reader.trusted else ' (not checked)'}")
    if stored.record.reference is not None:
        _field("reference", stored.record.reference)
    for file in stored.record.files:
        _field("file", f"{file.key}  {file.bytes:,} bytes  sha256 {file.sha256[:12]}")
    shortcuts, changed = with_bars(_shortcuts_and_changes, reader, stored)
    for key, document in shortcuts.items():
        more = "" if document.delta is None else f"  {document.delta.changed:,} changed"
        _field(
            "anchor" if document.delta is None else "compaction",
            f"{key}  {document.payload_bytes:,} bytes{more}",
        )
    if stored.record.delta is not None and stored.record.base is not None:
        total = weight_elements(reader.specs.values())
        since = f"since version {stored.record.base.version}"
        _field("changed", f"{stored.record.delta.changed:,} of {total:,} elements {since}")
    fractions = {
        name: changed[name] / spec.element_count for name, spec in reader.specs.items() if name in changed
    }
    for name in sorted(fractions, key=fractions.__getitem__, reverse=True)[:10]:
        echo(f"{fractions[name]:16.4%} {reader.specs[name]}")


def _find(reader: ChannelReader, what: str) -> StoredRecord:
    from deltasync.channel import keys
    from deltasync.errors import ConfigError, NotPublishedError

    if what.isdecimal() and int(what) > 0:
        return reader.numbered(int(what))
    if what == "latest":
        if (newest := reader.newest_version()) is None:
            reader.channel()
            raise NotPublishedError(f"{reader.store.url} holds no version yet.")
        return reader.record(newest)
    if keys.slot_of(what) is None and keys.shortcut_of(what) is None:
        raise ConfigError(
            f"{what!r} is neither a version, nor `latest`, nor the key of a record or compaction."
        )
    return reader.stored(what)


def _shortcuts_and_changes(
    reader: ChannelReader, stored: StoredRecord
) -> tuple[dict[str, Record], dict[str, int]]:
    """Return a version's compactions and announced anchors by key, and the number of changed elements by
    tensor.

    The numbers come from the headers of payloads, whose digests are not checked.
    """
    from deltasync.ops import in_parallel
    from deltasync.ops.heat import changed_of
    from deltasync.stores import ObjectInfo

    record, found, changed = stored.record, {}, Counter[str]()
    if record.is_version:
        infos = [info for span, info in reader.shortcuts() if span.version == record.version]
        shortcuts = in_parallel(reader.document, infos, "compactions")
        found = {
            info.key: each
            for info, each in zip(infos, shortcuts, strict=True)
            if each.sha256 == stored.sha256
        }
    if record.delta is not None and record.base is not None:
        changed = changed_of(reader.store, ObjectInfo(stored.key, stored.size), record.delta, reader.layout)
    return found, changed


@channel_command("one JSON object per tested version, then the result")
@click.option(
    "--run",
    "run",
    required=True,
    metavar="COMMAND",
    help="Shell command; {} is the directory of a checkpoint.",
)
@click.option(
    "--good",
    type=COUNT,
    metavar="VERSION",
    help="A version that passes. Default: the oldest.",
)
@click.option(
    "--bad",
    type=COUNT,
    metavar="VERSION",
    help="A later one that fails. Default: the newest.",
)
def bisect(reader: ChannelReader, run: str, good: int | None, bad: int | None, as_json: bool) -> None:
    """Find the first version of CHANNEL that fails a check, by some log2 of its versions.

    COMMAND exits with 0 for a good version, 125 for one that cannot be tested, 1 to 127 for a bad one;
    anything else ends the search. Each version is written as a checkpoint to temporary disk. In COMMAND, {}
    is its directory, and $VERSION its number.
    """
    from deltasync import ops

    if "{}" not in run:
        raise click.UsageError(
            "--run needs {}, where the directory of the checkpoint stands: --run 'python check.py {}'"
        )

    def test(version: int, directory: Path) -> bool | None:
        done = subprocess.run(
            (
                "sh",
                "-c",
                run.replace("{}", shlex.quote(str(directory))),
            ),  # typed by the user; nothing of the channel is in it
            env={**os.environ, "VERSION": str(version)},
            stdout=2 if as_json else None,  # stderr
            check=False,
        )
        if not 0 <= done.returncode <= 127:
            raise click.ClickException(
                f"The check of version {version} ended with {done.returncode}: the search ends."
            )
        return None if done.returncode == _SKIP else done.returncode == 0

    def show(version: int, is_good: bool | None, left: int) -> None:
        said = "could not be tested" if is_good is None else "good" if is_good else "bad"
        if as_json:
            echo_json({"version": version, "good": is_good, "between": left})
        else:
            echo(f"version {version}: {said}")

    last_good, first_bad, skipped = ops.bisect(reader, test, good, bad, show)
    step = reader.numbered(first_bad).record.step
    if as_json:
        echo_json({"first_bad": first_bad, "step": step, "last_good": last_good, "skipped": skipped})
        return
    of = "" if step is None else f" (step {step})"
    among = f", or one of {', '.join(map(str, skipped))}, which could not be tested" if skipped else ""
    echo(f"version {first_bad}{of} is the first bad one{among}; version {last_good} is good")


@channel_command("one JSON object per version, oldest first")
@click.argument("tensor")
@click.option(
    "--last",
    type=COUNT,
    default=_BLAMED,
    help="Show the N versions that changed most.",
    metavar="N",
)
def blame(reader: ChannelReader, tensor: str, last: int, as_json: bool) -> None:
    """Show which versions of CHANNEL changed TENSOR most: a name, or a pattern such as '*.mlp.*'. Reads
    counts alone.
    """
    from deltasync import ops

    changes = with_bars(ops.blame, reader, tensor)
    for change in changes:
        if change.problem is not None:
            echo(f"deltasync: {change.problem}", err=True)
    if as_json:
        for change in changes:
            echo_json({"version": change.version, "step": change.step, "changed": change.changed})
        return
    rows = [(sum(change.changed.values()), change) for change in changes if change.changed is not None]
    names = ops.matching(reader, tensor)
    total = sum(reader.specs[name].element_count for name in names)
    full = [change.version for change in changes if change.changed is None and change.problem is None]
    caption = f"{count(len(names), 'tensor')}, {total:,} elements; {count(len(rows), 'delta')}"
    caption += f"; full weights, which tell nothing: {', '.join(map(str, full))}" if full else ""

    def most(changed: dict[str, int] | None) -> str:
        return max(changed, key=changed.__getitem__) if changed else ""

    shown = sorted(rows, key=lambda row: (-row[0], row[1].version))[:last]
    print_table(
        ("version", "step", "changed", "fraction", "most in"),
        (
            (
                *(str(each.version), text_of(each.step), f"{changed:,}", f"{changed / total:.3%}"),
                cell(most(each.changed)),
            )
            for changed, each in shown
        ),
        ("most in",),
        caption=caption,
    )


@channel_command("one object: both versions, the number of equal tensors, and each tensor that differs")
@click.argument("first", metavar="A", callback=version_number)
@click.argument("second", metavar="B", callback=version_number)
@click.option(
    "--last",
    default=_DIFFERING,
    type=COUNT,
    metavar="N",
    help="Show only N tensors. JSON: all.",
)
def diff(reader: ChannelReader, first: int | None, second: int | None, last: int, as_json: bool) -> None:
    """Compare the bits of versions A and B of CHANNEL: which tensors differ, in how many elements.

    A version is a number, or 'latest'. Both are read in full and checked. Needs memory for the weights twice.
    """
    from deltasync import ops

    found = with_bars(ops.diff, reader, first, second)
    sizes = {name: spec.element_count for name, spec in reader.specs.items()}
    counts = {each.tensor: each.count or 0 for each in found.differences}
    if as_json:
        ends = {"from": dataclasses.asdict(found.first), "to": dataclasses.asdict(found.second)}
        rows = [
            {
                "tensor": each.tensor,
                "changed": each.count,
                "elements": sizes[each.tensor],
                "index": each.index,
            }
            | {"from": each.expected, "to": each.found}
            for each in found.differences
        ]
        echo_json({**ends, "equal": found.equal, "differences": rows})
        return
    title = f"version {found.first.version} to version {found.second.version}"
    if not counts:
        echo(f"{title}: all {count(found.equal, 'tensor')} have equal bits")
        return
    changed, total = sum(counts.values()), sum(sizes.values())
    differ = f"{len(counts)} of {count(len(sizes), 'tensor')} differ, in {changed:,} of {total:,} elements"
    echo(f"{title}: {differ} ({changed / total:.3%})")
    print_table(
        ("changed", "fraction", "tensor"),
        (
            (f"{counts[name]:,}", f"{counts[name] / sizes[name]:.3%}", cell(name))
            for name in sorted(counts, key=lambda name: -counts[name])[:last]
        ),
        ("tensor",),
    )
