"""`deltasync follow | relay`: take versions as they are published, to host memory or to other stores."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import click

from deltasync.cli.options import channel_command, timeout
from deltasync.cli.output import echo, echo_json, show_copied, with_bars

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader
    from deltasync.housekeeping import Copied
    from deltasync.stores import ObjectInfo


class _News(threading.Event):
    """Set when a store reports a new record."""

    _info: ObjectInfo | None = None

    def report(self, info: ObjectInfo | None) -> None:
        """Callback for `Poll`."""
        self._info = info
        self.set()

    def take(self) -> ObjectInfo | None:
        """Return what was reported since the last call, and clear the event."""
        self.clear()
        info, self._info = self._info, None
        return info


@channel_command("one JSON object per version")
@click.option("--once", is_flag=True, help="Go to the newest version and exit.")
@click.option(
    "--pin", "where", metavar="WHERE", help="Take only some versions, see `deltasync pin`. Default: DELTASYNC_PIN."
)
@timeout
def follow(reader: ChannelReader, once: bool, where: str | None, timeout_s: float | None, as_json: bool) -> None:
    """Follow CHANNEL with a replica in host memory. The bits of every version are checked.

    Waits for the first version. Ends with Ctrl-C, or as the options say.
    """
    from deltasync.config import ReplicaSettings
    from deltasync.errors import DeltaSyncError, NotPublishedError
    from deltasync.follow import NEWEST, Pin, Poll, Replica

    settings = ReplicaSettings.from_env(pin=where)
    pin = Pin.parse(settings.pin)
    replica = Replica(reader)
    news = _News()
    seen_s = time.monotonic()
    waiting: DeltaSyncError | None = None
    poll = None
    while True:
        known, failed = news.take(), False
        before, started = replica.identity, time.perf_counter()
        try:
            if before is not None:
                replica.poll(known, pin)
            else:
                with_bars(lambda progress: replica.sync() if pin == NEWEST else replica.poll(pin=pin))
        except DeltaSyncError as error:
            if once or (before is None and not isinstance(error, NotPublishedError)):
                raise
            failed = before is not None
            if failed or waiting is None:
                now = f"Staying at version {before}." if failed else "Waiting for the first version."
                echo(f"deltasync: {error} {now}", err=True)
            waiting = None if failed else error
        identity = replica.identity
        if identity != before and identity is not None:
            seen_s = time.monotonic()
            sync_s = time.perf_counter() - started
            fingerprint = sum(replica.fingerprints.values()) % (1 << 64)
            if as_json:
                checked = {"sync_s": round(sync_s, 4), "fingerprint": f"{fingerprint:016x}"}
                echo_json({**dataclasses.asdict(identity), **checked})
            else:
                echo(f"version {identity}  {sync_s:.3f} s  fingerprint {fingerprint:016x}")
        if once or (timeout_s is not None and time.monotonic() - seen_s > timeout_s):
            if identity is None and waiting is not None:
                raise waiting
            return
        if poll is None:
            poll = Poll(reader.store, settings.poll_interval_s, news.report)
        news.wait(poll.delay_s(identity != before, settled=not failed))


@channel_command("one JSON object per step that copied something", metavar="SOURCE")
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--once", is_flag=True, help="Copy what there is and exit, like `cp`.")
def relay(reader: ChannelReader, targets: tuple[str, ...], once: bool, as_json: bool) -> None:
    """Copy the channel SOURCE to each URL TARGET, then every new version as it is published. Every digest is checked.

    Waits for the channel. Only head is replaced at TARGET, and nothing is deleted. If this is stopped or killed, each TARGET
    can be read, and the same command continues. Ends with Ctrl-C or SIGTERM.
    """
    from deltasync import housekeeping
    from deltasync.config import ReplicaSettings
    from deltasync.errors import ChannelInUseError, ConfigError, DeltaSyncError, ObjectExistsError, RunMismatchError
    from deltasync.follow import Poll
    from deltasync.stores import open_store

    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def show(copied: Copied) -> int:
        return show_copied(copied, as_json, f"version {copied.version}: {copied.objects} objects, {copied.bytes:,} bytes")

    relay = housekeeping.Relay(reader, [open_store(target) for target in targets])
    if once:
        copied = with_bars(relay.step)
        sys.exit(0 if copied is None else show(copied))
    last_error, news = "", _News()
    with Poll(reader.store, ReplicaSettings.from_env().poll_interval_s, news.report) as poll:
        while True:
            known, copied, failed = news.take(), None, False
            try:
                copied = relay.step(known) if relay.version else with_bars(relay.step)
                last_error = ""
            except (RunMismatchError, ChannelInUseError, ObjectExistsError, ConfigError):
                raise  # a target holds something else
            except DeltaSyncError as error:
                failed = True
                if str(error) != last_error:
                    last_error = str(error)
                    echo(f"deltasync: {error} Trying again.", err=True)
            if copied is not None:
                show(copied)
            news.wait(poll.delay_s(copied is not None, settled=not failed))
