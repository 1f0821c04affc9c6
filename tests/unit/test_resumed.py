"""The first weights of a resumed run are those that the channel has of their step, or nothing is
published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ChannelInUseError, ConfigError
from deltasync.opening.resumed import versions_at
from deltasync.stores.base import WrappedStore
from tests import builders
from tests.builders import Weights
from tests.conftest import assert_same_bits


def states(count: int) -> list[Weights]:
    found = [builders.weights()]
    for seed in range(1, count):
        found.append(builders.trained(found[-1], seed))
    return found


def publish_all(url: str, found: Sequence[Weights], first_step: int = 0, resume: bool = False) -> None:
    with Publisher(url, resume=resume) as publisher:
        for step, weights in enumerate(found, start=first_step):
            builders.publish(publisher, weights, step=step)


def newest(url: str) -> Weights:
    replica = Replica(url)
    replica.sync()
    return dict(replica.state_dict())


@pytest.mark.parametrize("step", [1, 4])  # an older version, and the newest one
def test_the_same_weights_go_on(channel_url: str, step: int) -> None:
    found = states(5)
    publish_all(channel_url, found)
    with Publisher(channel_url, resume=True) as publisher:
        assert builders.publish(publisher, found[step], step=step).version == 6
    assert_same_bits(newest(channel_url), found[step])


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("is_stream", [False, True])
def test_other_weights_are_named_and_not_published(channel_url: str, step: int, is_stream: bool) -> None:
    found = states(5)
    publish_all(channel_url, found)
    name, tensor = next((name, tensor) for name, tensor in found[step].items() if tensor.numel() > 8)
    other = dict(found[step])
    other[name] = tensor.clone()
    other[name].view(-1)[:3] += 1
    total = sum(tensor.numel() for tensor in other.values())
    with Publisher(channel_url, resume=True) as publisher:
        for _ in range(2):  # again, too
            with pytest.raises(ChannelInUseError, match=f"step {step} as version {step + 1}") as caught:
                publisher.publish(iter(other.items()) if is_stream else other, step=step)
            assert caught.value.tensors == {name: 3}
            assert caught.value.changed_fraction == 3 / total
            assert name in str(caught.value)
        assert_same_bits(newest(channel_url), found[-1])
        assert builders.publish(publisher, found[step], step=step).version == 6  # once they are right
        builders.publish(publisher, other, step=step)  # the first publish alone is that of a resume
    assert_same_bits(newest(channel_url), other)
    with Publisher(channel_url, resume="overwrite") as publisher:
        builders.publish(publisher, found[0], step=step)
    assert_same_bits(newest(channel_url), found[0])


def test_a_step_may_have_several_versions(channel_url: str) -> None:
    found = states(6)
    publish_all(channel_url, found[:4])
    with Publisher(channel_url, resume="overwrite") as publisher:  # from step 2 on with other weights
        for step, weights in ((2, found[5]), (3, found[4])):
            builders.publish(publisher, weights, step=step)
    reader = ChannelReader(open_store(channel_url))
    assert [version.version for version, _ in versions_at(reader, reader.newest_version(), 2)] == [5, 3]
    assert versions_at(reader, reader.newest_version(), 9) == []
    for weights in (found[5], found[2]):
        with Publisher(channel_url, resume=True) as publisher:
            builders.publish(publisher, weights, step=2)
    with Publisher(channel_url, resume=True) as publisher, pytest.raises(ChannelInUseError):
        builders.publish(publisher, found[0], step=2)


class Counted(WrappedStore):
    """Counts the requests."""

    asked = 0

    def ask(self, verb: str, key: str, action: Callable[[], Any]) -> Any:
        self.asked += 1
        return super().ask(verb, key, action)


def test_a_step_of_before_an_earlier_resume_is_found_by_a_few_requests(memory_url: str) -> None:
    found = states(4)
    store = Counted(open_store(memory_url))
    for first in (0, 30, 10):
        with Publisher(store, resume="overwrite") if first else Publisher(store) as publisher:
            for step in range(first, first + 40):
                weights = found[step % 3] if first < 30 else found[3]
                publisher.publish(weights, step=None if step % 7 == 3 else step).wait(60)
    reader = ChannelReader(store)
    tip = reader.newest_version()
    store.asked = 0
    assert [version.version for version, _ in versions_at(reader, tip, 35)] == [106, 46, 36]
    assert [version.version for version, _ in versions_at(reader, tip, 5)] == [6]
    assert [version.version for version, _ in versions_at(reader, tip, 60)] == [71]
    assert versions_at(reader, tip, 10) == []  # it has none
    assert store.asked < 120
    with (
        Publisher(store, resume=True) as publisher,
        pytest.raises(ChannelInUseError, match="step 60 as version 71"),
    ):
        publisher.publish(found[0], step=60)


def test_a_step_that_the_channel_has_not_is_not_compared(channel_url: str) -> None:
    found = states(3)
    publish_all(channel_url, found[:2])
    for step in (7, None, -1):
        with Publisher(channel_url, resume=True) as publisher:
            builders.publish(publisher, found[2], step=step)
    assert_same_bits(newest(channel_url), found[2])


def test_where_that_version_cannot_be_read_the_tensors_are_unknown(channel_url: str) -> None:
    found = states(3)
    publish_all(channel_url, found)
    store = open_store(channel_url)
    first = ChannelReader(store).numbered(1)
    publish_all(channel_url, [found[2]], first_step=2, resume=True)
    assert first.record.anchor is not None
    with Publisher(channel_url, resume=True, anchor_every=1) as publisher:
        builders.publish(publisher, found[2], step=3).wait(60)
        builders.finish_maintenance(publisher)
    store.delete(*(file.key for file in first.record.anchor.files))
    with Publisher(channel_url, resume=True) as publisher:
        with pytest.raises(ChannelInUseError, match="which tensors differ is not known") as caught:
            publisher.publish(found[2], step=1)
        assert (caught.value.tensors, caught.value.changed_fraction) == ({}, None)


def test_resume_is_one_of_three(channel_url: str) -> None:
    for wrong in ("yes", None, 2, torch.zeros(1).dtype):
        with pytest.raises(ConfigError, match="resume must be True, False or 'overwrite'"):
            Publisher(channel_url, resume=wrong)  # type: ignore[arg-type]
