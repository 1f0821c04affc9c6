"""A fleet of two versions of deltasync: each row of the table in docs/operations/upgrade.md, and an upgrade
within a run.

A newer publisher is this one with more in its objects. An older reader is this one with fewer features.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltasync import Publisher, Replica, limits, open_store
from deltasync.channel import documents, keys
from deltasync.errors import FormatError
from tests.channels import Made
from tests.conftest import assert_same_bits

WEIGHTS = {"w": torch.arange(4096, dtype=torch.float32).to(torch.bfloat16)}


def _later() -> dict[str, torch.Tensor]:
    weights = {"w": WEIGHTS["w"].clone()}
    weights["w"][7] = 1000.0
    return weights


def _rewrite(url: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change channel.json as a newer publisher might write it."""
    store = open_store(url)
    document = json.loads(store.read(keys.CHANNEL, limits.CHANNEL_BYTES))
    change(document)
    store.put(keys.CHANNEL, json.dumps(document).encode() + b"\n")


def _publish(url: str, weights: dict[str, torch.Tensor], **options: Any) -> None:
    with Publisher(url, resume=any(open_store(url).list("")), **options) as publisher:
        publisher.publish(weights).wait(60)


def test_fields_that_a_reader_does_not_know_are_ignored(memory_url: str) -> None:
    _publish(memory_url, WEIGHTS)
    _rewrite(memory_url, lambda document: document.update(purpose="newer"))
    replica = Replica(memory_url)
    assert replica.sync() == 1
    _publish(memory_url, _later())
    assert replica.sync() == 2
    assert_same_bits(replica.state_dict(), _later())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("requires", ["teleport"], "requires teleport, unknown to this version. Upgrade"),
        ("format", "deltasync/3", "deltasync/3"),
    ],
)
def test_a_channel_that_a_reader_cannot_read_is_refused_by_name(
    memory_url: str, field: str, value: Any, said: str
) -> None:
    _publish(memory_url, WEIGHTS)
    _rewrite(memory_url, lambda document: document.update({field: value}))
    for reads in (Replica(memory_url).sync, lambda: Publisher(memory_url, resume=True)):
        with pytest.raises(FormatError) as caught:
            reads()
        assert said in str(caught.value)


def test_a_codec_that_a_reader_does_not_know_leaves_it_at_its_version(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _publish(memory_url, WEIGHTS, codec="context")
    replica = Replica(memory_url)
    assert replica.sync() == 1
    _publish(memory_url, _later(), codec="context")
    with monkeypatch.context() as older:
        older.setattr("deltasync.codec._codecs", lambda: {})
        with pytest.raises(FormatError, match=r"Unknown codec 'context'.*Upgrade deltasync"):
            replica.sync()
        assert replica.version == 1
        assert_same_bits(replica.state_dict(), WEIGHTS)
    assert replica.sync() == 2
    assert_same_bits(replica.state_dict(), _later())


def test_a_feature_that_a_reader_does_not_know_is_refused_until_it_is_upgraded(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer trainer came first, which the page advises against."""
    channel = Made(open_store(memory_url))
    channel.create(WEIGHTS)
    channel.append(
        channel.record("anchor", 1, WEIGHTS, anchor=channel.store_anchor(WEIGHTS, 1), requires=["new"]),
        None,
        WEIGHTS,
    )
    channel.head()
    replica = Replica(memory_url)
    with pytest.raises(FormatError, match=r"requires new, unknown to this version\. Upgrade deltasync"):
        replica.sync()
    assert replica.version is None
    monkeypatch.setattr(documents, "FEATURES", documents.FEATURES | {"new"})
    assert replica.sync() == 1
    assert_same_bits(replica.state_dict(), WEIGHTS)


def test_a_later_anchor_with_an_unknown_feature_keeps_no_replica_from_its_deltas(memory_url: str) -> None:
    channel = Made(open_store(memory_url))
    channel.create(WEIGHTS)
    channel.anchor(WEIGHTS)
    channel.head()
    replica = Replica(memory_url)
    assert replica.sync() == 1
    later = channel.delta(_later()).version
    channel.announce(later, requires=["new"])
    channel.head()
    assert replica.sync() == 2
    assert_same_bits(replica.state_dict(), _later())
