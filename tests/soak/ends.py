"""The processes at both ends of a channel."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from deltasync import Publisher, Replica, open_store
from deltasync.channel import heartbeat
from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.heartbeat import Heartbeat
from deltasync.errors import AckTimeoutError, DeltaSyncError, FencedError, PublishError, StoreError, TransientStoreError
from deltasync.kernels import native
from deltasync.stores import Store
from deltasync.stores.cache import CachedStore
from deltasync.tensors.bits import bits_of, cast
from tests.faults import FlakyStore
from tests.processes import end_with_parent
from tests.soak import clock
from tests.soak.settings import CACHE_BYTES, ELEMENTS, FAULT_RATE, RETENTION, Soak, note, tell, told

Weights = dict[str, torch.Tensor]

_STARTS = 10_000_000  # steps of one start of the publisher, at most
_ACK_EVERY = 5  # steps


class _Unreliable(FlakyStore):
    """Fails at random, and whenever the store is away."""

    def __init__(self, inner: Store, soak: Soak, number: int) -> None:
        super().__init__(inner, FAULT_RATE, soak.seed * 1000 + number)
        self._away = soak.away

    def ask(self, verb: str, key: str, action: Callable[[], Any]) -> Any:
        if self._away.exists():
            raise TransientStoreError(f"{verb} {key}: the store is away")
        return super().ask(verb, key, action)


def digests(weights: Weights) -> dict[str, str]:
    """sha256 of the bits of each tensor, as published."""
    return {name: sha256_hex(bits_of(cast(tensor, "bfloat16")).data) for name, tensor in weights.items()}


class Ledger:
    """What the publisher wrote down of each step, read as it grows; the newest ones only."""

    def __init__(self, path: Path, remembered: int = 2000) -> None:
        self._path = path
        self._remembered = remembered
        self._at = 0
        self._known: OrderedDict[int, dict[str, str]] = OrderedDict()

    def of(self, step: int) -> dict[str, str]:
        """Digests of a step's tensors."""
        if step not in self._known:
            with self._path.open() as file:
                file.seek(self._at)
                for line in iter(file.readline, ""):
                    if not line.endswith("\n"):
                        break
                    entry = json.loads(line)
                    self._known[entry["step"]] = entry["sha256"]
                    self._at += len(line)
            while len(self._known) > self._remembered:
                self._known.popitem(last=False)
        return self._known[step]


def _begin(soak: Soak, name: str) -> None:
    end_with_parent()
    clock.follow(soak.clock(name))
    logging.getLogger("deltasync").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    native.limit_threads(1)


def random_walk(seed: int, start: int = 0) -> Iterator[Weights]:
    """A model, and again after each step: one bf16 value in a hundred goes up or down by one bit pattern.

    It holds the number of its step, counted from that of the `start`.
    """
    source = torch.Generator().manual_seed(seed)
    weights = {
        "large": torch.randn(ELEMENTS // 100, 100, generator=source).to(torch.bfloat16),
        "small": torch.randn(100, generator=source).to(torch.bfloat16),
        "step": torch.tensor(start * _STARTS),
    }
    source.manual_seed(1000 * seed + start)
    while True:
        yield weights
        for tensor in (weights["large"], weights["small"]):
            flat = tensor.view(-1).view(torch.int16)
            at = torch.randint(0, flat.numel(), (1 + flat.numel() // 100,), generator=source)
            flat[at] += (2 * torch.randint(0, 2, at.shape, generator=source) - 1).to(torch.int16)
        weights["step"] += 1


def noise(checkpoint: Path, seed: int, start: int = 0) -> Iterator[Weights]:
    """A checkpoint's weights, and again after each step of an optimizer with a small learning rate."""
    source = torch.Generator().manual_seed(1000 * seed + start)
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    while True:
        yield weights
        for tensor in weights.values():
            tensor += 2e-5 * torch.randn(tensor.shape, generator=source)


def publish(soak: Soak, channel: str, states: Callable[[], Iterator[Weights]], flaky: bool, start: int = 0) -> None:
    """The trainer: writes down what it is about to publish, then publishes, until the file `end` is there.

    It ends, too, when another one has opened the channel. Killed at any time, it can be started anew, with another `start`.
    """
    _begin(soak, "publisher")
    inner = open_store(channel)
    store = _Unreliable(inner, soak, start) if flaky else inner
    with contextlib.suppress(FencedError):
        _publish(soak, store, states, start)


def _opened(store: Store) -> Publisher:
    while True:
        try:
            return Publisher(store, anchor_every=50, retries=8, retry_delay_s=0.02, retention=RETENTION, resume=True)
        except StoreError:
            time.sleep(0.1)


def _publish(soak: Soak, store: Store, states: Callable[[], Iterator[Weights]], start: int) -> None:
    publisher, lost, acks, started = _opened(store), 0, 0, time.monotonic()
    said = {"start": start, "lost": 0, "acks": 0}
    for number, weights in enumerate(states()):
        step = start * _STARTS + number
        note(soak.folder / "ledger", {"step": step, "sha256": digests(weights)})
        if (soak.folder / "end").exists():
            break
        try:
            publisher.publish(weights.items(), step=step)
        except FencedError:
            raise
        except PublishError:
            lost += 1
        if number % _ACK_EVERY == _ACK_EVERY - 1:
            acks += _acknowledged(soak, store, publisher)
        said |= {"version": publisher.version, "steps": number + 1, "lost": lost, "acks": acks}
        tell(soak.folder / "publisher", said)
        time.sleep(max(0.0, started + (number + 1) / soak.rate - time.monotonic()))
    last = None
    while last is None:  # to be reached by all
        try:
            last = publisher.publish(weights.items(), step=step).wait(60)
        except FencedError:
            raise
        except PublishError:
            time.sleep(0.1)
    publisher.close()
    tell(soak.folder / "publisher", said | {"version": last.version, "digest": last.digest, "ended": True})


def _acknowledged(soak: Soak, store: Store, publisher: Publisher) -> int:
    """Wait a moment for any replica to serve the newest version, and note by whom it is said to be served."""
    newest = max(publisher.published, default=None)
    if newest is None:
        return 0
    try:
        beats = heartbeat.wait_for(store, str(publisher.run_id), newest, publisher.published, 2.0)
    except (AckTimeoutError, StoreError):
        return 0
    for beat in beats:
        note(soak.folder / "acks", [beat.replica_id, beat.sha256])
    return 1


def follow(soak: Soak, channel: str, number: int) -> None:
    """A replica: compares every version that it gets with what the publisher wrote down."""
    _begin(soak, f"replica {number}")
    inner = _Unreliable(open_store(channel), soak, number)
    replica, ledger = Replica(CachedStore(inner, soak.folder / "cache", CACHE_BYTES)), Ledger(soak.folder / "ledger")
    said = {"checked": 0, "wrong": 0, "refused": 0} | told(soak.folder / f"replica-{number}")
    last: VersionId | None = None
    while True:
        ending = (soak.folder / "end").exists()
        try:
            replica.sync() if ending else replica.poll()
        except DeltaSyncError:
            said["refused"] += 1
        found = replica.identity
        if found not in (None, last):
            last = found
            assert found is not None
            right = digests(replica.state_dict()) == ledger.of(int(replica.state_dict()["step"]))
            said["checked"] += 1
            said["wrong"] += not right
            if right:
                note(soak.folder / f"served-{number}", found.sha256)
            _beat(inner, replica, number, found)
        elif ending and last is not None and _ended(soak.folder) == last.sha256:
            return
        else:
            time.sleep(0.5 / soak.rate)
        tell(soak.folder / f"replica-{number}", said | {"version": 0 if last is None else last.version})


def _beat(store: Store, replica: Replica, number: int, version: VersionId) -> None:
    beat = Heartbeat(
        replica_id=str(number),
        run_id=replica._follow.reader.channel().run_id,
        state="serving",
        version=version.version,
        epoch=version.epoch,
        sha256=version.sha256,
    )
    with contextlib.suppress(StoreError):
        heartbeat.write(store, beat)


def _ended(folder: Path) -> str | None:
    """Digest of the last version, once the publisher has ended."""
    found = told(folder / "publisher")
    return found["digest"] if "ended" in found else None
