"""Maintain a channel: `deltasync check | repair | gc | export | keygen | doctor`."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from deltasync.ops.cli.options import COUNT, channel_command, seconds, version_number
from deltasync.ops.cli.output import cell, count, echo, echo_json, field, ranges, with_bars

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader
    from deltasync.channel.signing import Signer
    from deltasync.errors import DeltaSyncError
    from deltasync.ops import ChannelComparison, RetentionPlan
    from deltasync.ops.doctor import Finding


def _problem(error: DeltaSyncError) -> dict[str, object]:
    return {"error": type(error).__name__, "exit_code": error.exit_code, "message": str(error)}


@channel_command("the report as JSON")
@click.option(
    "--read-data", is_flag=True, help="Read every file and replay every version, anchor and compaction. Slow."
)
@click.option(
    "--against",
    metavar="PLACE",
    help="Compare the bits of one version with a file, a directory, or a server instead.",
)
@click.option(
    "--version",
    type=COUNT,
    metavar="N",
    help="With --against: the version. Default: the newest, or the server's.",
)
def check(
    reader: ChannelReader, read_data: bool, against: str | None, version: int | None, as_json: bool
) -> None:
    """Check that CHANNEL is complete. Problems are printed one per line; nothing is repaired.

    Records and compactions are read; parts and anchors are only listed. With --read-data, the bits of every
    version are also proven in host memory. Exits with the highest exit code of the problems, 0 if there are
    none. Unnamed files are no problem.

    With --against, PLACE is a safetensors file, a checkpoint directory, a model on the Hub, or the http URL
    of a server that follows. Each tensor that differs is named, with its first differing element, and the
    exit code is 8 if there is one.
    """
    from deltasync import ops

    if version is not None and against is None:
        raise click.UsageError("--version is for --against.")
    if against is not None:
        sys.exit(_show_comparison(against, with_bars(ops.compare, reader, against, version), as_json))
    report = with_bars(ops.check, reader, read_data=read_data)
    if as_json:
        echo_json(msgspec.to_builtins(report, enc_hook=_problem), indent=2)
        sys.exit(report.exit_code)
    for problem in report.problems:
        echo(f"{type(problem).__name__}: {problem}")
    holds = ", ".join(
        (
            count(report.versions, "version"),
            count(report.anchors, "anchor"),
            count(report.compactions, "compaction"),
        )
    )
    echo(f"{reader.store.url}  newest version {report.newest or 'unknown'}")
    field("holds", f"{holds}, {report.data_bytes:,} bytes")
    if report.publishing:
        field("publishing", f"{count(report.publishing, 'file')} that no record names yet")
    for key in report.orphans:
        field("orphan", f"{key}: stored after another publisher had opened the channel; nothing builds on it")
    if report.garbage_objects and not report.problems:
        garbage = f"{count(report.garbage_objects, 'file')}, {report.garbage_bytes:,} bytes"
        field("garbage", f"{garbage} that no record names; `deltasync gc` deletes them")
    if report.proven is None:
        field(
            "proven",
            "nothing: files were listed, and no version's bits compared with its fingerprints (--read-data)",
        )
    else:
        field("proven", f"the bits of {count(len(report.proven), 'version')}")
    if report.unproven:
        field(
            "not proven", f"the bits of {count(len(report.unproven), 'version')}: {ranges(report.unproven)}"
        )
    if report.unreachable:
        field("not reachable", f"{ranges(report.unreachable)}; try `deltasync repair`")
    field("problems", len(report.problems) or "none")
    sys.exit(report.exit_code)


def _show_comparison(place: str, found: ChannelComparison, as_json: bool) -> int:
    """Print the result of a comparison, and return the exit code."""
    if as_json:
        echo_json(dataclasses.asdict(found), indent=2)
        return found.exit_code
    tensors = count(found.equal + len(found.differences), "tensor")
    echo(f"version {found.version} and {place}: {len(found.differences)} of {tensors} differ")
    for each in found.differences:
        where = (
            ""
            if each.index is None
            else f"{each.index}: {each.expected} in the channel, {each.found} there; "
        )
        field("differs", f"{each.tensor}{where or ': '}{each.problem}")
    for names, text in ((found.absent, "not there"), (found.extra, "only there")):
        if names:
            field(
                "not compared",
                f"{count(len(names), 'tensor')} {text}: {', '.join(names[:5])}{', ...' * (len(names) > 5)}",
            )
    return found.exit_code


@channel_command("the repairs as JSON", signs=True)
@click.option(
    "--from",
    "source",
    metavar="URL|DIR",
    help="A copy of the channel, or a directory of files named by sha256.",
)
@click.option("--no-replay", is_flag=True, help="Compare digests only; do not apply every version.")
def repair(
    reader: ChannelReader, source: str | None, no_replay: bool, signer: Signer | None, as_json: bool
) -> None:
    """Find missing and damaged objects of CHANNEL, repair them, and print the result for each.

    An object is restored from --from: a copy of the channel, or a node's cache. Otherwise a compaction that
    skips it is stored, or an anchor that replaces it. Nothing is deleted, and the publisher may keep running.
    channel.json can only be restored from a copy. Exits with 0 if every version of CHANNEL is reachable
    afterwards, else with 5.
    """
    from deltasync import ops

    lost_bytes = None if source is None else ops.source_of(source)
    repaired = with_bars(ops.repair, reader, source=lost_bytes, replay=not no_replay, signer=signer)
    if as_json:
        echo_json({**dataclasses.asdict(repaired), "exit_code": repaired.exit_code}, indent=2)
        sys.exit(repaired.exit_code)
    for done in repaired.objects:
        field(done.outcome, f"{done.key}: {done.how}")
        field("", done.problem)
    if repaired.lost:
        field("not reachable", ranges(repaired.lost))
    if not repaired.objects:
        echo(f"{reader.store.url}: nothing to repair")
    sys.exit(repaired.exit_code)


@channel_command("versions and objects as JSON")
@click.option("--keep-last", "last", type=COUNT, metavar="N", help="Keep the newest N versions.")
@click.option(
    "--keep-anchors", "anchors", type=COUNT, metavar="N", help="Keep the newest N versions with an anchor."
)
@click.option(
    "--keep-step-every",
    "step_every",
    type=COUNT,
    metavar="N",
    help="Keep versions whose trainer step is a multiple of N.",
)
@click.option(
    "--grace",
    "grace_s",
    callback=seconds,
    metavar="DURATION",
    default="1h",
    help="Keep what was needed or stored within this time, for replicas that still read it. Examples: 90s, 30m, 1h, 7d.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; change nothing.")
def gc(reader: ChannelReader, grace_s: float, dry_run: bool, as_json: bool, **keep: int | None) -> None:
    """Drop versions of CHANNEL, and delete the parts and anchors that no record and no compaction names.

    A version is kept if any --keep option selects it, together with its bases. The newest is always kept, and
    so are versions that live replicas serve or are pinned to. Without a --keep option all versions stay, and
    only files that dead publishers left are deleted. If a version to be kept is not readable, nothing is
    deleted. Safe while a publisher writes and replicas read. Heartbeats older than a week, and than the
    grace, are deleted too. After an interruption, run the command again.
    """
    from deltasync import ops

    policy = ops.KeepPolicy(**keep) if any(keep.values()) else None
    found = with_bars(ops.gc, reader, policy, grace_s=grace_s, dry_run=dry_run)
    plan = found.plan
    freed, waiting, young = (
        sum(info.bytes for info in infos) for infos in (found.objects, found.waiting, found.young)
    )
    if as_json:
        chosen = ("kept", "forgotten", "asked", "leading", "recent")
        versions = {
            name: [] if plan is None else [slot.version for slot in getattr(plan, name)] for name in chosen
        }
        deleted = {
            "records": [] if plan is None else plan.keys,
            "objects": [info.key for info in found.objects],
        }
        kept = {
            "waiting_objects": len(found.waiting),
            "waiting_bytes": waiting,
            "young_objects": len(found.young),
        }
        echo_json(
            {
                **versions,
                **deleted,
                "heartbeats": found.heartbeats,
                "bytes": freed,
                **kept,
                "dry_run": dry_run,
            }
        )
        return
    if dry_run:
        for info in found.objects:
            echo(f"{info.bytes:>16,} {info.key}")
    if plan is not None:
        _show_versions(plan, grace_s, dry_run)
    deleted_or_not = "would delete" if dry_run else "deleted"
    field(deleted_or_not, f"{count(len(found.objects), 'object')}, {freed:,} bytes")
    if found.waiting:
        field("kept", f"{count(len(found.waiting), 'object')}, {waiting:,} bytes: being published")
    if found.young:
        field(
            "not checked",
            f"{count(len(found.young), 'object')}, {young:,} bytes: stored less than {grace_s:g} s ago",
        )
    if found.heartbeats:
        field(deleted_or_not, count(len(found.heartbeats), "stale heartbeat"))


def _show_versions(plan: RetentionPlan, grace_s: float, dry_run: bool) -> None:
    kept, gone = [slot.version for slot in plan.kept], [slot.version for slot in plan.forgotten]
    reasons = (
        (plan.leading, "are bases of others"),
        (plan.recent, f"were needed less than {grace_s:g} s ago, or replicas serve them"),
    )
    why = "".join(f"; {len(slots)} of them {reason}" for slots, reason in reasons if slots)
    field("would keep" if dry_run else "kept", f"{count(len(kept), 'version')}: {ranges(kept)}{why}")
    compactions = f", and {count(len(plan.compactions), 'compaction')}" if plan.compactions else ""
    shown = f": {ranges(gone)}" if gone else ""
    field("would forget" if dry_run else "forgot", f"{count(len(gone), 'version')}{shown}{compactions}")


@channel_command("the version and its files as JSON")
@click.argument("version", callback=version_number)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(["checkpoint", "weight_v"]),
    default="checkpoint",
    help="weight_v: a directory for each version from the oldest to VERSION, as slime, miles and ModelExpress read them.",
)
def export(reader: ChannelReader, version: int | None, directory: Path, layout: str, as_json: bool) -> None:
    """Write VERSION (a number, or `latest`) of CHANNEL to DIRECTORY, as a checkpoint that transformers and
    vLLM load.

    DIRECTORY must be missing or empty. Every bit is checked. Config and tokenizer are written if the
    publisher stored them.
    """
    from deltasync import ops

    if layout == "weight_v":
        from deltasync.ops.cli.interchange import write

        write(
            reader,
            str(directory.absolute()),
            version,
            min((one.version for one in reader.versions()), default=1),
            as_json=as_json,
        )
        return

    exported = with_bars(ops.export, reader, version, directory)
    files = {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file()
    }
    if as_json:
        echo_json({**dataclasses.asdict(exported), "files": dict(sorted(files.items()))})
        return
    echo(f"version {exported} in {directory}: {count(len(files), 'file')}, {sum(files.values()):,} bytes")
    if "config.json" not in files:
        echo(
            "deltasync: the channel holds no config.json. Copy the model's config and tokenizer to the "
            "directory.",
            err=True,
        )


@click.command("keygen")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", help="Name that people see. Default: the file's name.")
def keygen(path: Path, name: str | None) -> None:
    """Make an Ed25519 key pair: the private key in PATH, readable by its owner only, the public key in
    PATH.pub.

    The publisher signs with PATH (DELTASYNC_SIGNING_KEY). Replicas trust the lines of a file such as PATH.pub
    (DELTASYNC_TRUSTED_KEYS). That file may hold several keys, and is read again when it changes.
    """
    from deltasync.channel import signing

    echo(signing.new_key(path, name or path.name).rstrip("\n"))


_SCALE = {"M": 1e6, "B": 1e9, "T": 1e12}
_STYLE = {"ok": "green", "warning": "yellow", "failure": "red"}


def _parameters(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Return the number of parameters of a size such as `600M`, `8B` or `1T`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MBT])", value)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is not the size of a model, such as 600M, 8B or 1T.")
    return float(match[1]) * _SCALE[match[2]]


@channel_command("the findings as JSON")
@click.option(
    "--model",
    callback=_parameters,
    metavar="SIZE",
    default="8B",
    help="Size of the model, to estimate transfer times.",
)
def doctor(reader: ChannelReader, model: float, as_json: bool) -> None:
    """Test whether a trainer and a replica on this machine can use CHANNEL, and how fast.

    Lists, writes (8 MiB, deleted again) and reads objects, creates the same object twice, measures times and
    compares clocks. Checks the channel, its replicas, and the installed vLLM, TRL and PyTorch. CHANNEL need
    not exist yet. Exits with 1 if a line says failure.
    """
    from rich.console import Console
    from rich.table import Table

    findings = with_bars(_findings, reader, model)
    if as_json:
        echo_json([dataclasses.asdict(finding) for finding in findings], indent=2)
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in findings:
            text = f"{finding.found} {finding.advice}".strip()
            table.add_row(cell(finding.state, _STYLE[finding.state]), cell(finding.check), cell(text))
        Console(soft_wrap=not sys.stdout.isatty()).print(table)
    sys.exit(any(finding.state == "failure" for finding in findings))


def _findings(reader: ChannelReader, model: float) -> list[Finding]:
    from deltasync.ops import progressed
    from deltasync.ops.doctor import examine

    findings: list[Finding] = []
    for finding in examine(reader, parameters=model):
        findings.append(finding)
        progressed(finding.check, 1, 1)
    return findings
