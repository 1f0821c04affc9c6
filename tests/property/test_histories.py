"""Replicas over random histories of a channel: successive writers, zombies, damage, compactions, restored backups."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deltasync.channel import keys
from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.errors import DeltaSyncError, ObjectMissingError
from deltasync.following import Replica
from deltasync.stores import open_store
from deltasync.tensors.bits import bits_of
from tests.builders import trained
from tests.channels import Made, made
from tests.conftest import assert_same_bits

_LOG = (keys.VERSIONS, keys.PARTS, keys.COMPACTIONS, keys.ANNOUNCEMENTS, keys.ANCHORS)


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = open_store(f"memory://{uuid.uuid4().hex}")
        self.channel: Made = made(self.store, 2)
        self.replica = Replica(self.store)
        self.replica.sync()
        self.opened = 1
        self.seed = 1000
        self.written: list[VersionId] = []
        self.backup: tuple[dict[str, bytes], VersionId | None, str] | None = None
        self.zombie: tuple[VersionId, str] | None = None

    def _model(self) -> dict[str, object]:
        self.seed += 1
        return trained(self.channel.bits[self.channel.tip.sha256], self.seed)

    @rule(parts=st.integers(0, 2), head=st.booleans())
    def publish(self, parts: int, head: bool) -> None:
        self.channel.delta(self._model(), parts=parts)
        self.written.append(self.channel.tip)
        if head:
            self.channel.head()

    @rule(seals=st.booleans())
    def open(self, seals: bool) -> None:
        self.opened += 1
        epoch = f"{self.opened:06d}-{self.opened:08x}"
        self.zombie = (self.channel.tip, self.channel.epoch)
        if seals:
            self.channel.seal(epoch)
            self.zombie = None
        self.channel.epoch = epoch

    @precondition(lambda self: self.zombie is not None)
    @rule(head=st.booleans())
    def publish_late(self, head: bool) -> None:
        """A writer that was not sealed, on a store that does not decide."""
        tip, epoch = self.channel.tip, self.channel.epoch
        self.channel.tip, self.channel.epoch = self.zombie
        self.channel.delta(self._model())
        self.zombie = self.channel.tip, self.channel.epoch
        if head:
            self.channel.head()
        self.channel.tip, self.channel.epoch = tip, epoch

    @rule()
    def announce(self) -> None:
        self.channel.announce(self.channel.tip)

    @precondition(lambda self: len(self.written) > 1)
    @rule(data=st.data())
    def compaction(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(self.written) - 2))
        second = data.draw(st.integers(first + 1, len(self.written) - 1))
        if self.written[first].version < self.written[second].version:
            self.channel.compaction(self.written[first], self.written[second])

    @rule(data=st.data(), removes=st.booleans())
    def damage(self, data: st.DataObject, removes: bool) -> None:
        found = [info.key for info in self.store.list("") if info.key.startswith((*_LOG, keys.HEAD))]
        if not found:
            return
        key = data.draw(st.sampled_from(found))
        if removes:
            self.store.delete(key)
            return
        stored = bytearray(self.store.read(key, 1 << 24))
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        self.store.put(key, bytes(stored))

    @rule()
    def back_up(self) -> None:
        objects = {info.key: self.store.read(info.key, 1 << 24) for info in self.store.list("")}
        self.backup = objects, self.channel.tip, self.channel.epoch

    @precondition(lambda self: self.backup is not None)
    @rule()
    def restore(self) -> None:
        """Then another writer opens what there is."""
        objects, self.channel.tip, self.channel.epoch = self.backup
        for info in list(self.store.list("")):
            self.store.delete(info.key)
        for key, data in objects.items():
            self.store.put(key, data)
        self.open(seals=False)
        self.zombie = None

    @rule()
    def sync(self) -> None:
        before = self.replica.identity
        try:
            self.replica.sync()
        except DeltaSyncError:
            assert self.replica.identity == before or self.replica.identity is None or _after(self.replica.identity, before)
        else:
            found = self.replica.identity
            assert before is None or before == found or _after(found, before) or self._is_lost(before)

    def _is_lost(self, version: VersionId) -> bool:
        """Whether the store does not have the record of a version any more: a replica begins anew then."""
        try:
            return sha256_hex(self.store.read(version.slot.key, 1 << 24)) != version.sha256
        except ObjectMissingError:
            return True

    @rule(number=st.integers(1, 8))
    def sync_a_fresh_one(self, number: int) -> None:
        replica = Replica(self.store)
        with contextlib.suppress(DeltaSyncError):
            replica.sync(number if number < 8 else None)
        self._check_bits(replica)

    @invariant()
    def bits_are_those_of_the_digest(self) -> None:
        self._check_bits(self.replica)

    def _check_bits(self, replica: Replica) -> None:
        """They are those of the digest; those of some version if a flipped bit left a record that says the same of them."""
        if replica.digest is not None:
            known = self.channel.bits
            if replica.digest in known:
                assert_same_bits(replica.state_dict(), known[replica.digest])
            else:
                assert _bytes(replica.state_dict()) in map(_bytes, known.values())

    def teardown(self) -> None:
        """However it went: once there is a version in a new epoch with an anchor, everybody gets there."""
        self.open(seals=False)
        self.channel.delta(self._model())
        self.channel.announce(self.channel.tip)
        self.channel.head()
        for replica in (self.replica, Replica(self.store)):
            for _ in range(3):  # a hint that was followed may lead elsewhere first
                try:
                    replica.sync()
                except DeltaSyncError:
                    continue
            assert replica.identity == self.channel.tip
            self.bits_are_those_of_the_digest()


def _bytes(model: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bits_of(weight).tobytes() for name, weight in model.items()}


def _after(one: VersionId | None, other: VersionId | None) -> bool:
    return one is not None and (other is None or (one.epoch, one.version) > (other.epoch, other.version))


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
