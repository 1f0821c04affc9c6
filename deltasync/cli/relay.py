"""`deltasync relay`: keep copies of a channel in other stores up to date."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
from typing import TYPE_CHECKING

import click

from deltasync.cli.options import channel_command
from deltasync.cli.output import echo, echo_json, with_bars

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader
    from deltasync.housekeeping import Copied
    from deltasync.stores import ObjectInfo


@channel_command("relay", "One JSON object per step that copied something.", metavar="SOURCE")
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--once", is_flag=True, help="Copy what there is and exit, as `cp` does.")
def command(reader: ChannelReader, targets: tuple[str, ...], once: bool, as_json: bool) -> None:
    """Copy the channel SOURCE to each URL TARGET, then every new version as it is published. Every digest is checked.

    Waits for the channel. Nothing at TARGET is replaced but head, and nothing is deleted. Stopped or killed, each TARGET can
    be read, and running it again goes on. Ends with Ctrl-C or SIGTERM.
    """
    from deltasync import housekeeping
    from deltasync.config import ReplicaSettings
    from deltasync.errors import ChannelInUseError, ConfigError, DeltaSyncError, ObjectExistsError, RunMismatchError
    from deltasync.replicas import Poll
    from deltasync.stores import open_store

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    changed = threading.Event()
    told: ObjectInfo | None = None

    def tell(info: ObjectInfo | None) -> None:
        nonlocal told
        told = info
        changed.set()

    relay = housekeeping.Relay(reader, [open_store(target) for target in targets])
    if once:
        copied = with_bars(relay.step)
        if copied is not None:
            _show(copied, as_json)
            sys.exit(max((problem.exit_code for problem in copied.problems), default=0))
        return
    said = ""
    with Poll(reader.store, ReplicaSettings.from_env().poll_interval_s, tell) as poll:
        while True:
            changed.clear()
            known, told, copied, failed = told, None, None, False
            try:
                copied = relay.step(known) if relay.version else with_bars(relay.step)
                said = ""
            except (RunMismatchError, ChannelInUseError, ObjectExistsError, ConfigError):
                raise  # a target is something else
            except DeltaSyncError as error:
                failed = True
                if str(error) != said:
                    said = str(error)
                    echo(f"deltasync: {error} Trying again.", err=True)
            if copied is not None:
                _show(copied, as_json)
            changed.wait(poll.delay_s(copied is not None, settled=not failed))


def _show(copied: Copied, as_json: bool) -> None:
    if as_json:
        echo_json({**dataclasses.asdict(dataclasses.replace(copied, problems=[])), "problems": [*map(str, copied.problems)]})
        return
    for problem in copied.problems:
        echo(f"not copied: {problem}", err=True)
    echo(f"version {copied.version}: {copied.objects} objects, {copied.bytes:,} bytes")
