"""`deltasync cost`: what a run will store, request and cost."""

from __future__ import annotations

import dataclasses

import click
from rich.filesize import decimal as size_of

from deltasync.cli.output import echo, echo_json, field


@click.command("cost")
@click.option("--params", type=click.FloatRange(min=1), required=True, metavar="N", help="Elements of the model, as in 7e9.")
@click.option(
    "--changed",
    type=click.FloatRange(min=0, max=1, min_open=True),
    required=True,
    metavar="SHARE",
    help="Share of them that changes from version to version; `deltasync log` shows a run's.",
)
@click.option("--every", type=click.FloatRange(min=0, min_open=True), default=30.0, metavar="S", help="Seconds to the next.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=7.0, help="How long the run takes.")
@click.option("--replicas", type=click.IntRange(min=0), default=4, help="How many follow it.")
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="N", help="As DELTASYNC_KEEP_LAST. Default: keep all versions."
)
@click.option("--full", is_flag=True, help="The channel begins with full weights, not with a reference to a checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print the forecast as JSON.")
def cost(
    params: float, changed: float, every: float, days: float, replicas: int, keep_last: int | None, full: bool, as_json: bool
) -> None:
    """Compute what a run will store, request and cost on S3, with default settings.

    Sizes are those of a model in bfloat16 whose changes are spread evenly. Nothing is read or asked for.
    """
    from deltasync.dashboard.costs import S3_GB_MONTH_USD
    from deltasync.dashboard.forecast import forecast

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
    field("stored", f"{found.stored_per_delta:.2f} bytes for each byte of delta, beside the first weights")
    field("channel", f"{size_of(found.held_bytes)} at the end")
    if found.bounded_bytes is not None:
        field("", f"{size_of(found.bounded_bytes)} at most with DELTASYNC_KEEP_LAST={keep_last}")
    field("late joiner", f"{size_of(found.joiner_bytes)} beside the first weights of {size_of(found.full_bytes)}")
    field("each replica", f"{size_of(found.replica_bytes)}, {found.replica_requests:,} requests")
    field("uploads", f"${found.put_usd:,.2f}")
    field("downloads", f"${found.get_usd:,.2f} for requests of {replicas} replicas")
    held_bytes = found.held_bytes if found.bounded_bytes is None else found.bounded_bytes
    month_usd = held_bytes / 1e9 * S3_GB_MONTH_USD
    field("storage", f"${found.storage_usd:,.2f} until then, ${month_usd:,.2f} for each month that all of it stays")
    field("traffic", f"${found.traffic_usd:,.2f} if the replicas are outside the bucket's region, else nothing")
    echo("AWS list prices of S3 Standard in us-east-1.")
