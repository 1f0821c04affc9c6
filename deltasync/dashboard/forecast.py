"""Forecast the storage, requests and cost of a run, from the size of its model and the fraction that changes.

The forecast simulates the versions with the publisher's own budget (`maintenance.budget`), so that compactions and anchors
occur where the publisher writes them. Sizes are entropies. A delta needs `h(p) / p` bits for the position of a changed
element, and `STEP_BITS` for its step. Compactions are modelled as a random walk: each version moves a fraction `p` of the
elements by one step.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from deltasync.dashboard.costs import (
    HEARTBEATS_PER_HOUR,
    RATES,
    S3_GET_USD,
    S3_PUT_USD,
    S3_TRAFFIC_GB_USD,
    storage_usd,
)
from deltasync.maintenance.budget import Budget

STEP_BITS = 1.8  # bits of a changed element's step in deltas of `packed` (`benchmarks.codec`)

PART_CHANGED, COMPACTION_PART_ELEMENTS = 1 << 20, 1 << 25
"""Changed elements in a part of a delta, and elements of a part of a compaction."""

_RECORD_BYTES = 1500  # header and document of a small record
_GC_EVERY = 16  # fewest versions between two garbage collections of the publisher


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
