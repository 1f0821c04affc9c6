"""Compute bytes, requests and dollars of a run, from the size of its model and the fraction that changes per version.

The forecast steps through the versions with the publisher's own budget (`publish.budget`), so compactions and anchors come
where the publisher writes them. Sizes are entropies. A delta takes `h(p) / p` bits for the position of a changed element and
`STEP_BITS` for its step. A compaction is that of a random walk: each version moves a fraction `p` of the elements by a step.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from deltasync.dashboard.costs import (
    HEARTBEATS_PER_HOUR,
    HOURS_PER_MONTH,
    RATES,
    S3_GB_MONTH_USD,
    S3_GET_USD,
    S3_PUT_USD,
    S3_TRAFFIC_GB_USD,
)
from deltasync.publish.budget import Budget

STEP_BITS = 1.8
"""Bits of a changed element's step in deltas of `packed` (`benchmarks.codec`)."""

PART_CHANGED, COMPACTION_PART_ELEMENTS = 1 << 20, 1 << 25
"""Changed elements in a part of a delta, and elements of a part of a compaction."""

_RECORD_BYTES = 1500  # header and document of a small record
_DROPPED_EVERY = 16  # least number of versions between two garbage collections, as in `publish.keep`


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """All objects of one kind: how many there are, their requests to store them, and their bytes."""

    what: str
    count: int
    requests: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Bytes, requests and dollars of a run. Dollars are list prices of S3, as in `costs`.

    Attributes:
        uploads: The objects that the trainer stores, by kind.
        stored_per_delta: Bytes of deltas, compactions and later anchors for each byte of delta.
        joiner_bytes: Bytes that a late joiner downloads at the end, without the first weights.
        joiner_of_full: These and the first weights, divided by the bytes of full weights.
        held_bytes: Bytes in the channel at the end, if nothing is deleted.
        bounded_bytes: Most bytes in the channel with `keep_last`; None without it.
        replica_bytes, replica_requests: Downloads of one replica.
        put_usd, get_usd, storage_usd, traffic_usd: For the whole run and all replicas. Storage counts the bytes that the
            channel holds during the run. Traffic costs only if the replicas are outside the bucket's region.
    """

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
    uploads: list[Item]
    stored_per_delta: float
    joiner_bytes: int
    joiner_of_full: float
    held_bytes: int
    bounded_bytes: int | None
    replica_bytes: int
    replica_requests: int
    put_usd: float
    get_usd: float
    storage_usd: float
    traffic_usd: float


def delta_bits(changed_fraction: float) -> float:
    """Return the bits of a delta per changed element."""
    share = np.array([changed_fraction, 1 - changed_fraction])
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum()) / changed_fraction + STEP_BITS


def compaction_bits(changed_fraction: float, versions: int) -> float:
    """Return the bits of a compaction over this many versions, per element of the model."""
    moves = changed_fraction * versions  # per element, expected
    size = 1 << max(6, math.ceil(math.log2(16 * math.sqrt(moves) + 32)))
    angle = 2 * np.pi * np.arange(size) / size
    share = np.fft.ifft(np.exp(moves * (np.cos(angle) - 1))).real  # probability of each distance in steps
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
    item_bytes: int = 2,
    bits_per_changed: float | None = None,
    versions: int | None = None,
) -> Forecast:
    """Compute a run on S3 with default settings.

    Args:
        params: Parameters of the model.
        changed_fraction: Fraction of them that changes from one version to the next.
        every_s: Seconds from one version to the next.
        days: Length of the run; `versions` beats it.
        replicas: Number of replicas that download every version.
        keep_last: As `Retention.keep_last`.
        grace_s: As `Retention.prune_grace_s`.
        by_reference: Whether the channel begins with a reference to a checkpoint; otherwise version 1 has full weights.
        item_bytes: Bytes of an element.
        bits_per_changed: Bits of a delta per changed element, if known.
        versions: Number of versions after the first.
    """
    count = round(days * 86_400 / every_s) if versions is None else versions
    full_bytes, bits = params * item_bytes, bits_per_changed or delta_bits(changed_fraction)
    delta_bytes = params * changed_fraction * bits / 8 + _RECORD_BYTES
    rates = RATES["s3"]
    budget, base, compacted_bytes = Budget(1), 1, 0.0
    compactions, anchors, byte_s, held = list[float](), 0, 0.0, 0.0 if by_reference else full_bytes
    bounded = 0.0
    for version in range(2, count + 2):
        budget.earn(delta_bytes)
        held += delta_bytes
        span = version - base

        def compaction_bytes(span: int = span) -> float:
            return params * compaction_bits(changed_fraction, span) / 8 + _RECORD_BYTES

        found = budget.choose(version, full_bytes, compaction_bytes, compactions=True)
        if found == "compaction":
            compacted_bytes = compaction_bytes()
            compactions.append(compacted_bytes)
            held += compacted_bytes
            budget.end(version, compacted_bytes)
        elif found == "anchor":
            anchors, base, compacted_bytes = anchors + 1, version, 0.0
            held += full_bytes
            budget.end(version, full_bytes)
        if keep_last is not None:
            dropped_every = max(_DROPPED_EVERY, keep_last // 2)
            tail = max(keep_last + dropped_every + math.ceil(grace_s / every_s), version - budget.compacted)
            based_bytes = 0.0 if by_reference and not anchors else full_bytes
            bounded = max(bounded, min(held, based_bytes + compacted_bytes + tail * delta_bytes))
        byte_s += (held if keep_last is None else min(held, bounded)) * every_s
    parts = max(0, math.ceil(params * changed_fraction / PART_CHANGED) - 1) if delta_bytes > 4 << 20 else 0
    compaction_parts = math.ceil(params / COMPACTION_PART_ELEMENTS)
    files = math.ceil(full_bytes / (1 << 26)) + 1
    whole = anchors + (not by_reference)
    uploads = [
        Item(
            what="deltas", count=count, requests=count * (rates.publish.requests + parts), bytes=round(count * delta_bytes)
        ),
        Item(
            what="compactions",
            count=len(compactions),
            requests=len(compactions) * (compaction_parts + 1),
            bytes=round(sum(compactions)),
        ),
        Item(what="anchors", count=whole, requests=whole * files, bytes=round(whole * full_bytes)),
    ]
    hours = count * every_s / 3600
    looks = round(hours * rates.looks_per_hour) + count * rates.looks_per_version
    replica_requests = looks + count * (1 + parts)
    replica_bytes = count * delta_bytes
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
        held_bytes=round(held),
        bounded_bytes=None if keep_last is None else round(bounded),
        replica_bytes=round(replica_bytes),
        replica_requests=replica_requests,
        put_usd=puts * S3_PUT_USD,
        get_usd=replicas * replica_requests * S3_GET_USD,
        storage_usd=byte_s / 1e9 / 3600 / HOURS_PER_MONTH * S3_GB_MONTH_USD,
        traffic_usd=replicas * replica_bytes / 1e9 * S3_TRAFFIC_GB_USD,
    )
