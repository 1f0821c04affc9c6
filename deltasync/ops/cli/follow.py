"""`deltasync follow | relay`: fetch versions as they are published, into host memory or into other stores."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from deltasync.ops.cli.options import DIRECTORIES, channel_command, timeout
from deltasync.ops.cli.output import ReportedStore, count, echo, echo_json, reported, show_copied, with_bars

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader
    from deltasync.following import Commit, Follow, MemoryTarget
    from deltasync.ops import Copied, Relay


_SERVER_S = 60.0  # wait for a server by default


class _Printer:
    """Prints the progress of a `Follow`. Ends it after `timeout_s` without a new version, or if the first one
    fails.
    """

    def __init__(self, target: MemoryTarget, timeout_s: float | None, as_json: bool) -> None:
        self._target, self._timeout_s, self._as_json = target, timeout_s, as_json
        self._seen_s = self._begun_s = time.monotonic()
        self._waits = False
        self.joins = True  # True until the newest version is reached; nothing is printed before
        self.problem: BaseException | None = None  # the last error

    def committed(self, commit: Commit, chain: Any) -> None:
        if not self.joins:
            self.show()

    def show(self) -> None:
        """Print the current version."""
        identity, now_s = self._target.version, time.monotonic()
        assert identity is not None and self._target.weights is not None
        sync_s, self._seen_s = now_s - self._begun_s, now_s
        fingerprint = sum(self._target.weights.memory.fingerprints.values()) % (1 << 64)
        if self._as_json:
            checked = {"sync_s": round(sync_s, 4), "fingerprint": f"{fingerprint:016x}"}
            echo_json({**dataclasses.asdict(identity), **checked})
        else:
            echo(f"version {identity}  {sync_s:.3f} s  fingerprint {fingerprint:016x}")

    def failed(self, error: BaseException) -> None:
        self.problem = error
        if self._target.version is not None:
            echo(f"deltasync: {error} Staying at version {self._target.version}.", err=True)

    def stepped(self, follow: Follow) -> None:
        if not self.joins:
            self._begun_s = time.monotonic()
        if follow.state == "waiting" and not self._waits:
            echo(f"deltasync: {follow.error}", err=True)
        self._waits = follow.state == "waiting"
        is_over = self._timeout_s is not None and self._begun_s - self._seen_s > self._timeout_s
        if is_over or (self._target.version is None and self.problem is not None):
            follow.end()


def _ask_server(
    server: str, *, once: bool, pin: str | None, timeout_s: float | None, as_json: bool, **_: object
) -> None:
    """Pin a server, or make it refresh, and wait until it serves the version."""
    from deltasync.serve import heartbeat

    if not once and pin is None:
        raise click.UsageError(
            "A server follows its channel by itself. Use --once to refresh it now, or --pin VERSION."
        )
    route, body = ("sync", {}) if pin is None else ("pin", {"pin": pin})
    wait_s = _SERVER_S if timeout_s is None else timeout_s
    with reported(
        f"{route} of {server}", f"It ends after {wait_s:g} s; GET {server}/deltasync/status says why."
    ):
        answer = with_bars(heartbeat.post, server, route, body, wait_s)
    if as_json:
        echo_json(answer)
    else:
        echo(f"{server} serves version {answer['version']}")


@channel_command(
    "one JSON object per version", metavar="CHANNEL|SERVER", server=_ask_server, directories=True
)
@click.option("--once", is_flag=True, help="Fetch the newest version and exit.")
@click.option(
    "--pin",
    metavar="VERSION",
    help="Stay at this version; `newest` unpins a server. Default: DELTASYNC_PIN, or the newest.",
)
@timeout
def follow(
    reader: ChannelReader | str,
    once: bool,
    pin: str | None,
    timeout_s: float | None,
    base: str | None,
    as_json: bool,
) -> None:
    """Follow CHANNEL with a replica in host memory, and check the bits of every version.

    Waits for the first version. Ends with Ctrl-C, --once or --timeout. CHANNEL may be weight_v+URL: version
    directories as slime, miles and ModelExpress write them.

    With SERVER, the http URL of a vLLM or SGLang server that follows a channel, --once makes it poll its
    channel now, and --pin VERSION makes it serve that version, older or newer, and stay there, until --pin
    newest. The command returns when the version is served, and fails after --timeout, by default 60 s.
    Trainers do not wait for a pinned server. DELTASYNC_HTTP_TOKEN is sent to the server if it is set.
    """
    from deltasync.channel.reading import ChannelReader
    from deltasync.config import ReplicaSettings
    from deltasync.errors import DeltaSyncError, NotPublishedError
    from deltasync.following import Follow, MemoryTarget
    from deltasync.ops.cli.interchange import published
    from deltasync.stores import open_store

    if isinstance(reader, str):
        reader = ChannelReader(open_store(published(reader, base)))
    target = MemoryTarget(reader)
    printer = _Printer(target, timeout_s, as_json)
    settings = ReplicaSettings.from_env(pin=pin)
    following = Follow(reader, target, settings, observer=printer)
    target.joining = True
    try:
        with_bars(following.catch_up)
        printer.show()
    except DeltaSyncError as error:
        if once or (following.version is None and not isinstance(error, NotPublishedError)):
            raise
    target.joining = printer.joins = False
    if not once:
        following.run()
    if following.version is None:
        raise printer.problem or NotPublishedError(f"{reader.store.url} holds no version yet.")


@channel_command("the counts as JSON, per step that copied something", metavar="SOURCE", directories=True)
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--once", is_flag=True, help="Copy the current objects and exit.")
def relay(
    reader: ChannelReader | str, targets: tuple[str, ...], once: bool, base: str | None, as_json: bool
) -> None:
    """Copy the channel SOURCE to each URL TARGET, then every new version as it is published. Every digest is
    checked.

    Waits for the channel. At TARGET only head is replaced, and nothing is deleted. Safe to interrupt: each
    TARGET stays readable, and the same command resumes. Damaged objects are left out and named. Ends with
    Ctrl-C, SIGTERM or --once, which does not wait, and then exits non-zero if objects were left out.

    SOURCE or the only TARGET may be weight_v+URL: version directories as slime, miles and ModelExpress write
    and read them.
    """
    from deltasync import ops
    from deltasync.ops.cli.interchange import relay_from, write
    from deltasync.stores import open_store

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ends = [url for url in (reader, *targets) if isinstance(url, str) and url.startswith(DIRECTORIES)]
    if ends and (len(targets) > 1 or len(ends) > 1):
        raise click.UsageError(f"{DIRECTORIES}URL can be SOURCE or TARGET, with one TARGET.")
    if isinstance(reader, str):
        relay_from(reader, targets[0], base, once=once, as_json=as_json)
        return
    if ends:
        write(reader, targets[0], as_json=as_json, once=once)
        return
    stores = [ReportedStore(open_store(target)) for target in targets]
    if once:
        copied = with_bars(ops.copy, reader, *stores)
        skipped = f", {count(copied.skipped, 'object')} there already" if copied.skipped else ""
        stored = f"copied {count(copied.objects, 'object')}, {copied.bytes:,} bytes{skipped}"
        sys.exit(
            show_copied(copied, as_json, f"{', '.join(targets)} is at version {copied.version}: {stored}")
        )
    printer = _CopyPrinter(as_json)
    printer.relay = relay = ops.Relay(reader, stores, printer)
    relay.follow.run()
    if printer.problem is not None:
        raise printer.problem


class _CopyPrinter:
    """Prints the progress of a relay. Ends the relay if a target holds another channel."""

    relay: Relay

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._printed_error = ""
        self.problem: BaseException | None = None

    def show(self, copied: Copied) -> int:
        line = f"version {copied.version}: {copied.objects} objects, {copied.bytes:,} bytes"
        return show_copied(copied, self._as_json, line)

    def committed(self, commit: Commit, chain: Any) -> None:
        """Do nothing: `stepped` prints the copied objects."""

    def failed(self, error: BaseException) -> None:
        from deltasync.errors import ChannelInUseError, ConfigError, ObjectExistsError, RunMismatchError

        if isinstance(error, RunMismatchError | ChannelInUseError | ObjectExistsError | ConfigError):
            self.problem = error
            self.relay.follow.end()

    def stepped(self, follow: Follow) -> None:
        if (copied := self.relay.pop_copied()) is not None and (copied.objects or copied.problems):
            self.show(copied)
        if follow.error is not None and follow.error != self._printed_error and self.problem is None:
            echo(f"deltasync: {follow.error} Trying again.", err=True)
        self._printed_error = follow.error or ""
