"""`deltasync follow`: a replica in host memory, to watch a channel and prove its bits."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING

import click

from deltasync.cli.options import channel_command, timeout
from deltasync.cli.output import echo, echo_json, with_bars

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader
    from deltasync.stores import ObjectInfo


@channel_command("follow", "One JSON object per version.")
@click.option("--once", is_flag=True, help="Go to the newest version and exit.")
@click.option(
    "--pin", "where", metavar="WHERE", help="Take only some versions, as DELTASYNC_PIN says it: see deltasync pin."
)
@timeout
def command(reader: ChannelReader, once: bool, where: str | None, timeout_s: float | None, as_json: bool) -> None:
    """Follow CHANNEL with a replica in host memory; every version's bits are checked.

    Waits for the first version. Ends with Ctrl-C, or as the options say.
    """
    from deltasync.config import ReplicaSettings
    from deltasync.errors import DeltaSyncError, NotPublishedError
    from deltasync.replicas import NEWEST, Pin, Poll, Replica

    settings = ReplicaSettings.from_env(pin=where)
    pin = Pin.parse(settings.pin)
    replica = Replica(reader)
    changed = threading.Event()
    told: ObjectInfo | None = None

    def tell(info: ObjectInfo | None) -> None:
        nonlocal told
        told = info
        changed.set()

    seen_s = time.monotonic()
    waiting: DeltaSyncError | None = None
    poll = None
    while True:
        changed.clear()
        failed = False
        before, started = replica.identity, time.perf_counter()
        try:
            if before is not None:
                replica.poll(told, pin)
            else:
                with_bars(lambda progress: replica.sync() if pin == NEWEST else replica.poll(pin=pin))
            told = None
        except DeltaSyncError as error:
            if once or (before is None and not isinstance(error, NotPublishedError)):
                raise
            failed = before is not None
            if failed or waiting is None:
                then = f"Staying at version {before}." if failed else "Waiting for the first version."
                echo(f"deltasync: {error} {then}", err=True)
            waiting = None if failed else error
        identity = replica.identity
        if identity != before and identity is not None:
            seen_s = time.monotonic()
            sync_s = time.perf_counter() - started
            fingerprint = sum(replica.fingerprints.values()) % (1 << 64)
            if as_json:
                found = {**dataclasses.asdict(identity), "sync_s": round(sync_s, 4), "fingerprint": f"{fingerprint:016x}"}
                echo_json(found)
            else:
                echo(f"version {identity}  {sync_s:.3f} s  fingerprint {fingerprint:016x}")
        if once or (timeout_s is not None and time.monotonic() - seen_s > timeout_s):
            if identity is None and waiting is not None:
                raise waiting
            return
        if poll is None:
            poll = Poll(reader.store, settings.poll_interval_s, tell)
        changed.wait(poll.delay_s(identity != before, settled=not failed))
