"""Estimate the cost of a run: requests, bytes and, where list prices are known, dollars. `estimate` adds up a run so far.

`benchmarks/cost_sheet.py` counts the requests and bytes of each action without its payload, and compares them with those
given here. Counted without TLS, on S3 (moto) and a stand-in for the Hub, 2026-11-22.

`forecast` simulates the versions of a run with the publisher's own budget (`maintenance.budget`), so that compactions and
anchors occur where the publisher writes them. Sizes are entropies. A delta needs `h(p) / p` bits for the position of a
changed element, and `STEP_BITS` for its step. Compactions are a random walk: each version moves a fraction `p` of the
elements by one step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

import numpy as np

from deltasync.channel.documents import Record
from deltasync.channel.heartbeat import Heartbeat
from deltasync.maintenance import quota
from deltasync.maintenance.budget import Budget
from deltasync.stores.base import ObjectInfo

HEARTBEATS_PER_HOUR = 360
S3_PUT_USD, S3_GET_USD = 0.005 / 1000, 0.0004 / 1000
S3_GB_MONTH_USD, S3_TRAFFIC_GB_USD = 0.023, 0.09
"""AWS list prices, S3 Standard in us-east-1; traffic that leaves the region for the internet."""
HOURS_PER_MONTH = 730
STEP_BITS = 1.8  # bits of a changed element's step in deltas of `packed` (`benchmarks.codec`)

PART_CHANGED, COMPACTION_PART_ELEMENTS = 1 << 20, 1 << 25
"""Changed elements in a part of a delta, and elements of a part of a compaction."""

_RECORD_BYTES = 1500  # header and document of a small record
_GC_EVERY = 16  # fewest versions between two garbage collections of the publisher


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


def storage_usd(byte_s: float) -> float:
    """Return the dollars for storing bytes on S3, from the sum of bytes times seconds."""
    return byte_s / 1e9 / 3600 / HOURS_PER_MONTH * S3_GB_MONTH_USD


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
        storage_usd=storage_usd(byte_s) if priced else None,
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
        notes += [*quota.sentences(), quota.ADVICE]
    if priced:
        notes.append(
            f"AWS list prices, S3 Standard in us-east-1: ${1000 * S3_PUT_USD:g} for 1,000 uploads, ${1000 * S3_GET_USD:g} "
            f"for 1,000 downloads, ${S3_GB_MONTH_USD:g} a GB and month, ${S3_TRAFFIC_GB_USD:g} a GB out of the region."
        )
    return notes


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """All objects of one kind: their number, the requests to store them, and their bytes."""

    what: str
    count: int
    requests: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The storage, requests and cost of a run. Dollars are list prices of S3, as in `costs`."""

    params: float
    changed_fraction: float
    every_s: float
    days: float
    replicas: int
    keep_last: int | None
    versions: int
    full_bytes: int
    delta_bytes: int
    bits_per_changed: float
    uploads: list[Item]  # the trainer's uploads, by kind
    stored_per_delta: float  # bytes of deltas, compactions and later anchors for each byte of delta
    joiner_bytes: int  # download at the end of the run of a late joiner that has the first weights
    joiner_of_full: float  # that download and the first weights, divided by the bytes of full weights
    held_bytes: int  # size of the channel at the end
    bounded_bytes: int | None  # largest size of the channel with `keep_last`; None without it
    replica_bytes: int  # download of one replica
    replica_requests: int  # requests of one replica
    put_usd: float  # cost of the uploads of the whole run with all replicas
    get_usd: float  # cost of the requests to download of the whole run with all replicas
    storage_usd: float  # cost of storing the objects during the run
    traffic_usd: float  # cost of the downloads, if the replicas are outside the bucket's region


def delta_bits(changed_fraction: float) -> float:
    """Return the bits of a delta per changed element."""
    share = np.array([changed_fraction, 1 - changed_fraction])
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum()) / changed_fraction + STEP_BITS


def compaction_bits(changed_fraction: float, versions: int) -> float:
    """Return the bits of a compaction over this number of versions, per element of the model, changed or not."""
    moves = changed_fraction * versions  # per element, expected
    size = 1 << max(6, math.ceil(math.log2(16 * math.sqrt(moves) + 32)))
    angle = 2 * np.pi * np.arange(size) / size
    share = np.fft.ifft(np.exp(moves * (np.cos(angle) - 1))).real  # distribution of the number of steps moved
    share = share[share > 1e-15]
    return float(-(share * np.log2(share)).sum())


def forecast(
    params: float,
    changed_fraction: float,
    every_s: float,
    *,
    days: float = 7.0,
    replicas: int = 4,
    keep_last: int | None = None,
    grace_s: float = 3600.0,
    by_reference: bool = True,
    bits_per_changed: float | None = None,
    versions: int | None = None,
) -> Forecast:
    """Forecast a run on S3 with default settings, of a model in bfloat16.

    Args:
        params: Number of elements of the model.
        changed_fraction: Fraction of them that changes from one version to the next.
        every_s: Seconds from one version to the next.
        days: Duration of the run; ignored if `versions` is given.
        replicas: Number of replicas, which fetch every version.
        keep_last: See `Retention.keep_last`.
        grace_s: See `Retention.prune_grace_s`.
        by_reference: Whether the channel begins with a reference to a checkpoint; otherwise version 1 has full weights.
        bits_per_changed: Bits of a delta per changed element, if known; otherwise computed.
        versions: Number of versions after the first.
    """
    count = round(days * 86_400 / every_s) if versions is None else versions
    full_bytes, bits = 2 * params, bits_per_changed or delta_bits(changed_fraction)
    delta_bytes = params * changed_fraction * bits / 8 + _RECORD_BYTES
    kept = None if keep_last is None else keep_last + max(_GC_EVERY, keep_last // 2) + math.ceil(grace_s / every_s)
    budget, base = Budget(1), 1  # `base` is the version with the newest full weights, `compacted_bytes` what leads from it
    first_bytes = held_bytes = 0.0 if by_reference else full_bytes
    bounded_bytes = compacted_bytes = byte_s = 0.0
    compactions, anchors = list[float](), 0

    def compaction_bytes() -> float:
        return params * compaction_bits(changed_fraction, version - base) / 8 + _RECORD_BYTES

    for version in range(2, count + 2):
        budget.earn(delta_bytes)
        held_bytes += delta_bytes
        found = budget.choose(version, full_bytes, compaction_bytes, compactions=True)
        if found is not None:
            compacted_bytes = compaction_bytes() if found == "compaction" else 0.0
            if found == "compaction":
                compactions.append(compacted_bytes)
            else:
                anchors, base = anchors + 1, version
            held_bytes += compacted_bytes or full_bytes
            budget.end(version, compacted_bytes or full_bytes)
        if kept is not None:
            tail_bytes = max(kept, version - budget.compacted) * delta_bytes
            least_bytes = (full_bytes if anchors else first_bytes) + compacted_bytes + tail_bytes
            bounded_bytes = max(bounded_bytes, min(held_bytes, least_bytes))
        byte_s += (held_bytes if kept is None else min(held_bytes, bounded_bytes)) * every_s

    rates, hours = RATES["s3"], count * every_s / 3600
    parts = max(0, math.ceil(params * changed_fraction / PART_CHANGED) - 1) if delta_bytes > 4 << 20 else 0
    whole, compaction_parts = anchors + (not by_reference), math.ceil(params / COMPACTION_PART_ELEMENTS)
    uploads = [
        Item("deltas", count, count * (rates.publish.requests + parts), round(count * delta_bytes)),
        Item("compactions", len(compactions), len(compactions) * (compaction_parts + 1), round(sum(compactions))),
        Item("anchors", whole, whole * (math.ceil(full_bytes / (1 << 26)) + 1), round(whole * full_bytes)),
    ]
    polls = round(hours * rates.polls_per_hour) + count * rates.polls_per_version
    replica_requests, replica_bytes = polls + count * (1 + parts), count * delta_bytes
    joiner_bytes = compacted_bytes + (count + 1 - budget.compacted) * delta_bytes
    puts = sum(item.requests for item in uploads) + round(replicas * hours * HEARTBEATS_PER_HOUR)
    return Forecast(
        params=params,
        changed_fraction=changed_fraction,
        every_s=every_s,
        days=count * every_s / 86_400,
        replicas=replicas,
        keep_last=keep_last,
        versions=count,
        full_bytes=round(full_bytes),
        delta_bytes=round(delta_bytes),
        bits_per_changed=bits,
        uploads=uploads,
        stored_per_delta=1 + (sum(compactions) + anchors * full_bytes) / (count * delta_bytes) if count else 1.0,
        joiner_bytes=round(joiner_bytes),
        joiner_of_full=1 + joiner_bytes / full_bytes,
        held_bytes=round(held_bytes),
        bounded_bytes=None if keep_last is None else round(bounded_bytes),
        replica_bytes=round(replica_bytes),
        replica_requests=replica_requests,
        put_usd=puts * S3_PUT_USD,
        get_usd=replicas * replica_requests * S3_GET_USD,
        storage_usd=storage_usd(byte_s),
        traffic_usd=replicas * replica_bytes / 1e9 * S3_TRAFFIC_GB_USD,
    )
