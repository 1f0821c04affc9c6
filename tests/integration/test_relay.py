"""A relay keeps a copy of a channel up to date: bits at the far replica, restarts, faults, strangers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltasync import Replica, ops
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError, ObjectExistsError, RunMismatchError, StoreError
from deltasync.ops import Relay
from deltasync.stores import Store, open_store
from tests.channels import Made, filled, states_of
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

STATES = states_of(12)


def _assert_served(target: Store, made: Made) -> None:
    replica = Replica(ChannelReader(target))
    replica.sync()
    assert made.tip is not None and replica.identity == made.tip
    assert_same_bits(replica.state_dict(), made.bits[made.tip.sha256])


def _caught_up(relay: Relay, made: Made) -> None:
    for _ in range(4):
        relay.step()
    assert relay.version == made.tip


def test_every_version_arrives_by_one_record_and_its_parts(memory_url: str, channel_url: str) -> None:
    source, target = FaultyStore(open_store(memory_url)), open_store(channel_url)
    made, _ = filled(source, STATES[:3])
    relay = Relay(ChannelReader(source), [target, second := open_store(f"{memory_url}-2")])
    relay.step()
    _assert_served(target, made)
    for number, state in enumerate(STATES[3:8]):
        stored = made.delta(state, parts=2 * (number % 2))
        made.head()
        copied = relay.step()
        assert copied is not None and copied.version == stored.version and copied.problems == []
        assert copied.objects == 1 + len(stored.record.files)
        assert copied.bytes == 2 * (stored.size + sum(file.bytes for file in stored.record.files))
    for each in (target, second):
        _assert_served(each, made)
        assert {info.key: info.bytes for info in each.list("")} == {
            info.key: info.bytes for info in source.list("")
        }
        assert each.read(keys.HEAD, 1 << 12) == source.read(keys.HEAD, 1 << 12)
    assert relay.step() is None


def test_a_new_epoch_passes_through(memory_url: str) -> None:
    source, target = open_store(memory_url), open_store(f"{memory_url}-far")
    made, _ = filled(source, STATES[:3])
    relay = Relay(ChannelReader(source), [target])
    relay.step()
    far = Replica(ChannelReader(target))
    far.sync()
    made.seal(keys.new_epoch(2))
    made.delta(STATES[3])
    _caught_up(relay, made)
    far.sync()
    assert far.identity == made.tip
    _assert_served(target, made)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("verb", "key"), [("create", "parts/"), ("create", "versions/"), ("put", "head")])
def test_a_failed_write_leaves_a_target_that_can_be_read_and_goes_on(
    memory_url: str, verb: str, key: str, after: bool
) -> None:
    source, target = open_store(memory_url), FaultyStore(open_store(f"{memory_url}-far"))
    made, _ = filled(source, STATES[:3])
    relay = Relay(ChannelReader(source), [target])
    relay.step()
    made.delta(STATES[3], parts=2)
    made.head()
    target.fail_at(verb, key, after=after, error=StoreError)
    with pytest.raises(StoreError):
        relay.step()
    assert (Replica(ChannelReader(target.inner)).sync() or 0) >= 3
    _caught_up(relay, made)
    _assert_served(target, made)


def test_two_relays_to_one_target_do_not_harm_each_other(memory_url: str) -> None:
    source, target = open_store(memory_url), open_store(f"{memory_url}-far")
    made, _ = filled(source, STATES[:3])
    relays = [Relay(ChannelReader(source), [target]) for _ in range(2)]
    for state in STATES[3:6]:
        for relay in relays:
            relay.step()
        made.delta(state)
    for relay in relays:
        _caught_up(relay, made)
    _assert_served(target, made)


def test_a_target_that_holds_something_else_is_refused(memory_url: str) -> None:
    source, target = open_store(memory_url), open_store(f"{memory_url}-far")
    made, _ = filled(source, STATES[:2])
    Made(target, run_id="other").create(STATES[0])
    with pytest.raises(RunMismatchError, match="holds run other"):
        Relay(ChannelReader(source), [target]).step()
    with pytest.raises(ConfigError, match="different URLs"):
        Relay(ChannelReader(source), [source])
    relay = Relay(ChannelReader(source), [third := open_store(f"{memory_url}-3")])
    relay.step()
    stored = made.delta(STATES[2])
    third.put(stored.key, b"somebody else's")
    with pytest.raises(ObjectExistsError, match="other bytes"):
        relay.step()
    assert third.read(stored.key, 100) == b"somebody else's"


def test_killed_while_it_follows_it_goes_on_and_copies_nothing_again(tmp_path: Path) -> None:
    source, target = open_store(f"file://{tmp_path}/near"), open_store(f"file://{tmp_path}/far")
    made, _ = filled(source, STATES[:3])
    command = [sys.executable, "-m", "deltasync", "relay", source.url, target.url, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["version"]["version"] == 3
        made.delta(STATES[3], parts=2)
        assert json.loads(process.stdout.readline())["version"]["version"] == 4
        process.kill()
    before = {info.key for info in target.list("")}
    made.delta(STATES[4])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        assert found["version"]["version"] == 5
        assert found["objects"] == len({info.key for info in target.list("")} - before)
        process.terminate()
        assert process.wait(30) == 130
    _assert_served(target, made)
    assert ops.check(ChannelReader(target)).unreachable == []
