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

import numba
import torch
from safetensors.torch import load_file

from deltasync import Publisher, Replica, open_store
from deltasync.bits import bits_of, cast
from deltasync.errors import DeltaSyncError, PublishError, TransientStoreError
from deltasync.manifest import sha256_hex
from deltasync.stores import Store
from deltasync.stores.cache import CachedStore
from tests.faults import FlakyStore
from tests.processes import end_with_parent
from tests.soak.settings import CACHE_BYTES, ELEMENTS, FAULT_RATE, RETENTION, Soak, tell, told

Weights = dict[str, torch.Tensor]

_REMEMBERED = 2000  # steps of the ledger


class _Unreliable(FlakyStore):
    """Fails at random, and whenever the store is away."""

    def __init__(self, inner: Store, soak: Soak, number: int) -> None:
        super().__init__(inner, FAULT_RATE, soak.seed * 1000 + number)
        self._away = soak.away

    def _perform(self, operation: str, key: str, action: Callable[[], Any]) -> Any:
        if self._away.exists():
            raise TransientStoreError(f"{operation} {key}: the store is away")
        return super()._perform(operation, key, action)


def digests(weights: Weights) -> dict[str, str]:
    """sha256 of the bits of each tensor, as published."""
    return {name: sha256_hex(bits_of(cast(tensor, "bfloat16")).data) for name, tensor in weights.items()}


class Ledger:
    """What the publisher wrote down of each step, read as it grows; the newest ones only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._known: OrderedDict[int, dict[str, str]] = OrderedDict()

    def of(self, step: int) -> dict[str, str]:
        """Digests of a step's tensors."""
        if step not in self._known:
            with self._path.open() as file:
                file.seek(self._at)
                for line in iter(file.readline, ""):
                    entry = json.loads(line)
                    self._known[entry["step"]] = entry["sha256"]
                self._at = file.tell()
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return self._known[step]


def _begin() -> None:
    end_with_parent()
    logging.getLogger("deltasync").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    numba.set_num_threads(1)


def random_walk(seed: int) -> Iterator[Weights]:
    """A model, and again after each step: one bf16 value in a hundred goes up or down by one bit pattern."""
    source = torch.Generator().manual_seed(seed)
    weights = {
        "large": torch.randn(ELEMENTS // 100, 100, generator=source).to(torch.bfloat16),
        "small": torch.randn(100, generator=source).to(torch.bfloat16),
    }
    while True:
        yield weights
        for tensor in weights.values():
            flat = tensor.view(-1).view(torch.int16)
            at = torch.randint(0, flat.numel(), (1 + flat.numel() // 100,), generator=source)
            flat[at] += (2 * torch.randint(0, 2, at.shape, generator=source) - 1).to(torch.int16)


def noise(checkpoint: Path, seed: int) -> Iterator[Weights]:
    """A checkpoint's weights, and again after each step of an optimizer with a small learning rate."""
    source = torch.Generator().manual_seed(seed)
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    while True:
        yield weights
        for tensor in weights.values():
            tensor += 2e-5 * torch.randn(tensor.shape, generator=source)


def publish(soak: Soak, channel: str, states: Callable[[], Iterator[Weights]], flaky: bool) -> None:
    """The trainer: writes down what it is about to publish, then publishes, until the file `end` is there."""
    _begin()
    store = open_store(channel)
    publisher = Publisher(
        _Unreliable(store, soak, 0) if flaky else store,
        anchor_every=50,
        retries=8,
        retry_delay_s=0.02,
        retention=RETENTION,
    )
    lost, started = 0, time.monotonic()
    with (soak.folder / "ledger").open("w", buffering=1) as ledger:
        for step, weights in enumerate(states()):
            ledger.write(json.dumps({"step": step, "sha256": digests(weights)}) + "\n")
            if (soak.folder / "end").exists():
                break
            try:
                publisher.publish(weights.items(), step=step)
            except PublishError:
                lost += 1
            tell(soak.folder / "publisher", {"version": publisher.version, "steps": step + 1, "lost": lost})
            time.sleep(max(0.0, started + (step + 1) / soak.rate - time.monotonic()))
        last = None
        while last is None:  # to be reached by all
            with contextlib.suppress(PublishError):
                last = publisher.publish(weights.items(), step=step).wait(60).version
    publisher.close()
    tell(soak.folder / "publisher", {"version": last, "steps": step + 1, "lost": lost, "ended": True})


def follow(soak: Soak, channel: str, number: int) -> None:
    """A replica: compares every version that it gets with what the publisher wrote down."""
    _begin()
    inner = _Unreliable(open_store(channel), soak, number)
    replica, ledger = Replica(CachedStore(inner, soak.folder / "cache", CACHE_BYTES)), Ledger(soak.folder / "ledger")
    checked, wrong, refused, last = 0, 0, 0, 0
    while True:
        ending = (soak.folder / "end").exists()
        before = replica.version
        try:
            replica.sync()
        except DeltaSyncError:
            refused += 1
        if replica.version not in (None, before):
            last = replica.version or 0
            step = replica._reader.manifest(last).step
            checked += 1
            wrong += step is None or digests(replica.state_dict()) != ledger.of(step)
        elif ending and _ended(soak.folder) == last:
            return
        numbers = {"version": last, "checked": checked, "wrong": wrong, "refused": refused, "faults": inner.faults}
        tell(soak.folder / f"replica-{number}", numbers)
        if replica.version in (None, before):
            time.sleep(0.5 / soak.rate)


def _ended(folder: Path) -> int | None:
    """The last version, once the publisher has ended."""
    found = told(folder / "publisher")
    return found["version"] if "ended" in found else None
