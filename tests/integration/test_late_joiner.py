"""How many requests it takes to catch up with 1,000 versions."""

from __future__ import annotations

import torch

from deltasync import ops
from deltasync.channel.reading import ChannelReader
from deltasync.following import Replica
from deltasync.ops import KeepPolicy
from deltasync.stores import open_store
from tests.channels import Made, filled
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

NEWEST = 1001
# channel.json, head at the beginning and the end, listings of records and of compactions, a poll
DOCUMENTS = 8


def _states(element_count: int) -> list[dict[str, torch.Tensor]]:
    """One element changes with each version; the others share their bits."""
    weights = torch.zeros(element_count, dtype=torch.bfloat16)
    states = []
    for number in range(NEWEST):
        weights.view(torch.int16)[number] += 1
        states.append({"w": weights.clone()})
    return states


def _requests(store: FaultyStore, replica: Replica, channel: Made) -> list[str]:
    store.calls.clear()
    assert replica.sync() == NEWEST
    assert replica.digest is not None
    assert_same_bits(replica.state_dict(), channel.bits[replica.digest])
    return [key for _, key in store.calls]


def test_with_compactions_and_anchors_it_is_one_for_each_of_them(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    compactions = [(base, base + 32) for base in range(1, NEWEST - 31, 32)]
    channel, _ = filled(store.inner, _states(20_000), anchors=(900,), compactions=compactions)
    behind = Replica(store)
    behind.sync(1)
    edges = len(compactions) + (NEWEST - compactions[-1][1])
    assert len(_requests(store, behind, channel)) <= edges + DOCUMENTS
    # From nothing: the anchor, single versions until a compaction begins, and what follows the last
    # compaction.
    assert len(_requests(store, Replica(store), channel)) <= 2 + 32 + 4 + 32 + DOCUMENTS


def test_collecting_garbage_reads_each_document_once(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    filled(store.inner, _states(2000), anchors=(900, 1000))
    ops.gc(ChannelReader(store), KeepPolicy(last=2), grace_s=0)
    reads = [key for operation, key in store.calls if operation == "read"]
    assert len(set(reads)) == 2 + NEWEST + 1 + 2 + 1, (
        "channel and head, records and the slot after them, announced anchors, what may announce the first "
        "one"
    )
    assert len(reads) == len(set(reads)) + 1, "the newest twice: the listing is held against head"
    listed = [key for operation, key in store.calls if operation == "list"]
    # Files twice: before the documents, and to see whether the announced anchors are complete. Heartbeats
    # twice: to find the stale ones, and after the documents to see what replicas serve by then.
    folders = {"probe/", "replicas/", "parts/", "anchors/", "versions/", "compactions/", "announcements/"}
    assert {key.split("/")[0] + "/" for key in listed} == folders and len(listed) == len(folders) + 2
