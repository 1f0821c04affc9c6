"""`deltasync fold`: one delta over several versions."""

from __future__ import annotations

import click
import msgspec

from deltasync.cli.keys import signing_key, trusted_keys
from deltasync.cli.output import echo, echo_json
from deltasync.config import CODECS


@click.command("fold")
@click.argument("channel")
@click.argument("base", type=click.IntRange(min=1))
@click.argument("version", type=click.IntRange(min=1))
@click.option("--codec", type=click.Choice(CODECS), default="packed", show_default=True, help="Encoding of the fold.")
@signing_key
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="The fold's document as JSON.")
def command(
    channel: str, base: int, version: int, codec: str, signing_key: str | None, trusted_keys: str | None, as_json: bool
) -> None:
    """Store the fold from version BASE to VERSION of CHANNEL, for replicas that catch up.

    Does nothing if the channel has that fold. Holds the weights twice in memory.
    """
    from deltasync import housekeeping
    from deltasync.channel import signing
    from deltasync.channel.reading import ChannelReader
    from deltasync.cli.progress import progress_bars
    from deltasync.config import PublisherSettings
    from deltasync.stores import open_store

    signer = signing.signer_of(PublisherSettings.from_env(signing_key=signing_key, trusted_keys=trusted_keys))
    reader = ChannelReader(open_store(channel), None if signer is None else signer.trusted)
    with progress_bars() as progress:
        fold = housekeeping.write_fold(reader, base, version, codec_name=codec, signer=signer, progress=progress)
    delta = fold.record.delta
    assert delta is not None
    if as_json:
        echo_json({"key": fold.key, "sha256": fold.sha256, "bytes": fold.size, **msgspec.to_builtins(fold.record)}, indent=2)
        return
    echo(f"fold {base}-{version}: {delta.changed:,} elements changed, {fold.payload_bytes:,} bytes of {delta.codec}")
    echo(f"{fold.key}  sha256 {fold.sha256[:12]}")
