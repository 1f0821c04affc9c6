"""Estimate the cost of a run: requests, bytes and, where list prices are known, dollars. `estimate` adds up a run so far.

`benchmarks/cost_sheet.py` counts the requests and bytes of each action without its payload, and compares them with those
given here. Counted without TLS, on S3 (moto) and a stand-in for the Hub, 2026-11-22.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from deltasync.channel.documents import Record
from deltasync.channel.heartbeat import Heartbeat
from deltasync.stores.base import ObjectInfo

HEARTBEATS_PER_HOUR = 360
S3_PUT_USD, S3_GET_USD = 0.005 / 1000, 0.0004 / 1000
S3_GB_MONTH_USD, S3_TRAFFIC_GB_USD = 0.023, 0.09
"""AWS list prices, S3 Standard in us-east-1; traffic that leaves the region for the internet."""
HOURS_PER_MONTH = 730


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """Requests and bytes of one action: whole HTTP messages, without the payload."""

    requests: int = 0
    up_bytes: int = 0
    down_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Requests and bytes of the actions at a store. A replica polls more often when a version is due (`Poll`)."""

    publish: Exchange = Exchange()  # publishing a version whose payload is in its record, then reading and replacing head
    put: Exchange = Exchange()  # storing one more object: a part, a file of an anchor, a compaction
    follow: Exchange = Exchange()  # reading a version whose payload is in its record
    get: Exchange = Exchange()  # reading one more object
    poll: Exchange = Exchange()  # requesting a record that does not exist yet
    heartbeat: Exchange = Exchange()  # replacing a replica's heartbeat
    polls_per_hour: int = 0
    polls_per_version: int = 0


_LOCAL = Rates()
_S3 = Rates(
    publish=Exchange(3, 2_300, 1_430),
    put=Exchange(1, 470, 345),
    follow=Exchange(1, 500, 1_050),
    get=Exchange(1, 450, 455),
    poll=Exchange(1, 497, 643),
    heartbeat=Exchange(1, 660, 345),
    polls_per_hour=3_600,
    polls_per_version=20,
)
_HUB = Rates(
    publish=Exchange(10, 4_800, 3_400),
    put=Exchange(3, 1_500, 640),
    follow=Exchange(3, 920, 1_900),
    get=Exchange(3, 840, 1_330),
    poll=Exchange(1, 358, 229),
    heartbeat=Exchange(3, 1_680, 660),
    polls_per_hour=120,
)
RATES = {"s3": _S3, "gs": _S3, "az": _S3, "hf": _HUB}  # rates by the scheme of a channel's URL


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CostRow:
    """All actions of one kind; `usd` is None if no price is known."""

    what: str
    times: int
    requests: int
    up_bytes: int
    down_bytes: int
    usd: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The cost of a run so far, by kind of action. Dollars are None if no price is known."""

    rows: list[CostRow]
    stored_bytes: int  # size of the channel now, without its small documents
    storage_usd: float | None
    traffic_usd: float | None  # cost of the replicas' downloads, if they are outside the bucket's region
    notes: list[str]  # the assumptions, in sentences

    @property
    def usd(self) -> float | None:
        """Dollars for requests and storage, without traffic."""
        return None if self.storage_usd is None else self.storage_usd + sum(row.usd or 0.0 for row in self.rows)


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
    rates = RATES.get(urlsplit(url).scheme, _LOCAL)
    priced = url.startswith("s3://") and "endpoint=" not in url
    rows: list[CostRow] = []

    def add(
        what: str, times: int, actions: list[tuple[int, Exchange]], request_usd: float, up: int = 0, down: int = 0
    ) -> None:
        requests = sum(count * each.requests for count, each in actions)
        rows.append(
            CostRow(
                what=what,
                times=times,
                requests=requests,
                up_bytes=up + sum(count * each.up_bytes for count, each in actions),
                down_bytes=down + sum(count * each.down_bytes for count, each in actions),
                usd=requests * request_usd if priced else None,
            )
        )

    for what, found in (
        ("deltas", deltas := [record for record in records if record.kind == "delta"]),
        ("anchors", [record for record in records if record.anchor is not None]),
        ("compactions", [record for record in records if record.kind == "compaction"]),
    ):
        if found:
            puts = sum(len(record.files) + (not record.is_version) for record in found)
            payload_bytes = sum(record.payload_bytes for record in found if record.reference is None)
            add(f"{what}, upload", len(found), [(puts, rates.put)], S3_PUT_USD, up=payload_bytes)
    versions = sum(record.is_version for record in records)
    add("records and head, upload", versions, [(versions, rates.publish)], S3_PUT_USD)

    by_version = {record.version: record for record in deltas}
    fetches = parts = fetched_bytes = polls = heartbeats = 0
    for beat in beats:
        had = [record for version, record in by_version.items() if beat.version is not None and version <= beat.version]
        fetches, parts = fetches + len(had), parts + sum(len(record.files) for record in had)
        fetched_bytes += sum(record.payload_bytes for record in had)
        hours = max(0.0, beat.time_s - created_s) / 3600
        polls += round(hours * rates.polls_per_hour) + len(had) * rates.polls_per_version
        heartbeats += round(hours * HEARTBEATS_PER_HOUR)
    add("deltas, download", fetches, [(fetches, rates.follow), (parts, rates.get)], S3_GET_USD, down=fetched_bytes)
    if rates is not _LOCAL:
        add("polls for a record", polls, [(polls, rates.poll)], S3_GET_USD)
        add("heartbeats", heartbeats, [(heartbeats, rates.heartbeat)], S3_PUT_USD)

    byte_s = sum(info.bytes * max(0.0, now_s - (info.modified_s or created_s)) for info in held)
    down_gb = sum(row.down_bytes for row in rows) / 1e9
    return Costs(
        rows=rows,
        stored_bytes=sum(info.bytes for info in held),
        storage_usd=byte_s / 1e9 / 3600 / HOURS_PER_MONTH * S3_GB_MONTH_USD if priced else None,
        traffic_usd=down_gb * S3_TRAFFIC_GB_USD if priced else None,
        notes=_notes(rates is not _LOCAL, rates is _HUB, priced, newest - versions),
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
