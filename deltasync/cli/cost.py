"""`deltasync cost`: bytes, requests and dollars of a run."""

from __future__ import annotations

import dataclasses

import click
from rich.filesize import decimal as size_of

from deltasync.cli.output import echo, echo_json, field


@click.command("cost")
@click.option("--params", type=click.FloatRange(min=1), required=True, metavar="N", help="Parameters of the model: 7e9.")
@click.option(
    "--changed",
    type=click.FloatRange(min=0, max=1, min_open=True),
    required=True,
    metavar="FRACTION",
    help="Fraction of them that changes per version, such as 0.01. `deltasync log` prints it for a run.",
)
@click.option("--every", type=click.FloatRange(min=0, min_open=True), default=30.0, metavar="S", help="Seconds per version.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=7.0, help="Length of the run.")
@click.option("--replicas", type=click.IntRange(min=0), default=4, help="Number of replicas.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="The trainer's DELTASYNC_KEEP_LAST. Default: keep all.",
)
@click.option("--full", is_flag=True, help="Version 1 has full weights. Default: it refers to a checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print the forecast as JSON.")
def cost(
    params: float, changed: float, every: float, days: float, replicas: int, keep_last: int | None, full: bool, as_json: bool
) -> None:
    """Compute bytes, requests and dollars of a run on S3, with default settings.

    The model is in bfloat16, and its changes are spread evenly. The command opens no channel.
    """
    from deltasync.dashboard.costs import S3_GB_MONTH_USD, forecast

    found = forecast(params, changed, every, days=days, replicas=replicas, keep_last=keep_last, by_reference=not full)
    if as_json:
        echo_json(dataclasses.asdict(found), indent=2)
        return
    echo(f"{params:,.0f} elements, {changed:.2%} changed every {every:g} s for {found.days:g} days")
    field(
        "versions", f"{found.versions:,}, each {size_of(found.delta_bytes)} ({found.bits_per_changed:.2f} bits per change)"
    )
    for item in found.uploads:
        field(item.what, f"{item.count:,}, {size_of(item.bytes)}, {item.requests:,} uploads")
    field("stored", f"{found.stored_per_delta:.2f} bytes per byte of delta, without the first weights")
    field("channel", f"{size_of(found.held_bytes)} at the end if nothing is deleted")
    if found.bounded_bytes is not None:
        field("", f"{size_of(found.bounded_bytes)} at most with DELTASYNC_KEEP_LAST={keep_last}")
    field("late joiner", f"{size_of(found.joiner_bytes)}, and the first weights of {size_of(found.full_bytes)}")
    field("each replica", f"{size_of(found.replica_bytes)}, {found.replica_requests:,} requests")
    field("uploads", f"${found.put_usd:,.2f}")
    field("downloads", f"${found.get_usd:,.2f} for requests of {replicas} replicas")
    held_bytes = found.held_bytes if found.bounded_bytes is None else found.bounded_bytes
    month_usd = held_bytes / 1e9 * S3_GB_MONTH_USD
    field("storage", f"${found.storage_usd:,.2f} during the run, ${month_usd:,.2f} for each month after it")
    field("traffic", f"${found.traffic_usd:,.2f} if the replicas are outside the bucket's region, else $0")
    echo("AWS list prices of S3 Standard in us-east-1.")
