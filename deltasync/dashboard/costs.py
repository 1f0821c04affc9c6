"""Estimate the cost of a run: requests, bytes and, where list prices are known, dollars. `estimate` adds up a run so far.

`benchmarks/cost_sheet.py` counts the requests and bytes of each action without its payload, and compares them with those
given here. Counted without TLS, on S3 (moto) and a stand-in for the Hub, 2026-11-22.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any
from urllib.parse import urlsplit

from deltasync.channel.documents import Record
from deltasync.channel.heartbeat import Heartbeat
from deltasync.stores.base import ObjectInfo

HEARTBEATS_PER_HOUR = 360
S3_PUT_USD, S3_GET_USD = 0.005 / 1000, 0.0004 / 1000
S3_GB_MONTH_USD, S3_TRAFFIC_GB_USD = 0.023, 0.09
"""AWS list prices, S3 Standard in us-east-1; traffic that leaves the region for the internet."""
HOURS_PER_MONTH = 730


Exchange = tuple[int, int, int]
"""Requests, bytes up and bytes down of one action: whole HTTP messages, without the payload."""

_S3: dict[str, Exchange] = {
    "publish": (3, 2_300, 1_430),  # a version whose payload is in its record; then head is read and replaced
    "put": (1, 470, 345),  # storing one more object: a part, a file of an anchor, a compaction
    "follow": (1, 500, 1_050),  # reading a version whose payload is in its record
    "get": (1, 450, 455),  # reading one more object
    "poll": (1, 497, 643),  # requesting a record that does not exist yet
    "heartbeat": (1, 660, 345),  # replacing a replica's heartbeat
}
_HUB: dict[str, Exchange] = {
    "publish": (10, 4_800, 3_400),
    "put": (3, 1_500, 640),
    "follow": (3, 920, 1_900),
    "get": (3, 840, 1_330),
    "poll": (1, 358, 229),
    "heartbeat": (3, 1_680, 660),
}
RATES = {"s3": _S3, "gs": _S3, "az": _S3, "hf": _HUB}
"""Requests and bytes of the actions at a store, by the scheme of its URL. A directory has none."""
_POLLS = {"s3": (3_600, 20), "gs": (3_600, 20), "az": (3_600, 20), "hf": (120, 0)}
"""Polls of a replica in an hour, and for each version, which it expects."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The cost of a run so far, by kind of action. Dollars are None if no price is known.

    Attributes:
        rows: For each kind of action `what`, `times`, `requests`, `up_bytes`, `down_bytes` and `usd`.
    """

    rows: list[dict[str, Any]]
    stored_bytes: int  # size of the channel now, without its small documents
    storage_usd: float | None
    traffic_usd: float | None  # cost of the replicas' downloads, if they are outside the bucket's region
    notes: list[str]  # the assumptions, in sentences

    @property
    def usd(self) -> float | None:
        """Dollars for requests and storage, without traffic."""
        return None if self.storage_usd is None else self.storage_usd + sum(row["usd"] or 0.0 for row in self.rows)


def estimate(
    url: str,
    records: Collection[Record],
    held: Collection[ObjectInfo],
    beats: Iterable[Heartbeat],
    *,
    newest: int,
    created_s: float,
    now_s: float,
) -> Costs:
    """Add up the cost of a run's publications, stored objects and downloads.

    `records` are all records and compactions ever seen, `held` all current records, compactions and files. Times are
    seconds since the epoch. `created_s` is the channel's creation time, and stands in for unknown ages of objects.
    """
    scheme = urlsplit(url).scheme
    rates, (hourly, expected) = RATES.get(scheme), _POLLS.get(scheme, (0, 0))
    priced = url.startswith("s3://") and "endpoint=" not in url
    rows: list[dict[str, Any]] = []

    def add(what: str, times: int, actions: dict[str, int], request_usd: float, up: int = 0, down: int = 0) -> None:
        asked = [(count, (rates or {}).get(action, (0, 0, 0))) for action, count in actions.items()]
        requests, up_bytes, down_bytes = (sum(count * each[of] for count, each in asked) for of in range(3))
        usd = requests * request_usd if priced else None
        counts = {"requests": requests, "up_bytes": up + up_bytes, "down_bytes": down + down_bytes}
        rows.append({"what": what, "times": times, **counts, "usd": usd})

    for what, found in (
        ("deltas", deltas := [record for record in records if record.kind == "delta"]),
        ("anchors", [record for record in records if record.anchor is not None]),
        ("compactions", [record for record in records if record.kind == "compaction"]),
    ):
        if found:
            puts = sum(len(record.files) + (not record.is_version) for record in found)
            payload_bytes = sum(record.payload_bytes for record in found if record.reference is None)
            add(f"{what}, upload", len(found), {"put": puts}, S3_PUT_USD, up=payload_bytes)
    versions = sum(record.is_version for record in records)
    add("records and head, upload", versions, {"publish": versions}, S3_PUT_USD)

    by_version = {record.version: record for record in deltas}
    fetches = parts = fetched_bytes = polls = heartbeats = 0
    for beat in beats:
        had = [record for version, record in by_version.items() if beat.version is not None and version <= beat.version]
        fetches, parts = fetches + len(had), parts + sum(len(record.files) for record in had)
        fetched_bytes += sum(record.payload_bytes for record in had)
        hours = max(0.0, beat.time_s - created_s) / 3600
        polls += round(hours * hourly) + len(had) * expected
        heartbeats += round(hours * HEARTBEATS_PER_HOUR)
    add("deltas, download", fetches, {"follow": fetches, "get": parts}, S3_GET_USD, down=fetched_bytes)
    if rates is not None:
        add("polls for a record", polls, {"poll": polls}, S3_GET_USD)
        add("heartbeats", heartbeats, {"heartbeat": heartbeats}, S3_PUT_USD)

    byte_s = sum(info.bytes * max(0.0, now_s - (info.modified_s or created_s)) for info in held)
    down_gb = sum(row["down_bytes"] for row in rows) / 1e9
    return Costs(
        rows=rows,
        stored_bytes=sum(info.bytes for info in held),
        storage_usd=byte_s / 1e9 / 3600 / HOURS_PER_MONTH * S3_GB_MONTH_USD if priced else None,
        traffic_usd=down_gb * S3_TRAFFIC_GB_USD if priced else None,
        notes=_notes(rates is not None, scheme == "hf", priced, newest - versions),
    )


def _notes(remote: bool, on_hub: bool, priced: bool, unseen: int) -> list[str]:
    notes = ["Each replica is assumed to have fetched every delta up to its version once, and nothing else."]
    if unseen:
        notes.append(f"{unseen:,} more versions, forgotten or older than those read, are not counted.")
    if remote:
        notes.append(
            "Requests, and bytes without payloads, are estimates from benchmarks/cost_sheet.py: "
            "replicas are assumed to have polled and sent heartbeats since the channel was created."
        )
    if on_hub:
        notes.append("On the Hub trainer and servers with one token share its quota; see docs/operations/hub.md.")
    if priced:
        notes.append(
            f"AWS list prices, S3 Standard in us-east-1: ${1000 * S3_PUT_USD:g} for 1,000 uploads, ${1000 * S3_GET_USD:g} "
            f"for 1,000 downloads, ${S3_GB_MONTH_USD:g} a GB and month, ${S3_TRAFFIC_GB_USD:g} a GB out of the region."
        )
    return notes
