"""`docs/operations/alerts.md`: each row starts from its symptom; state, error and alerts are those of the
page.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from deltasync import errors, open_store
from deltasync.channel import keys, signing
from deltasync.channel.documents import DeltaFiles
from deltasync.config import ReplicaSettings
from deltasync.errors import StoreError, TransientStoreError
from deltasync.serve.metrics import Metrics
from tests import driving
from tests.docs.pages import ROOT
from tests.driving import PATIENCE_S, Driver, Engine, Trainer, until, value
from tests.faults import FaultyStore, flipped

engine = driving.engine  # a fixture

PAGE = (ROOT / "docs/operations/alerts.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", PAGE, re.M)
][2:]


@dataclasses.dataclass
class Scene:
    """A replica that serves version 2, and what may happen to its channel."""

    store: FaultyStore
    trainer: Trainer
    driver: Driver
    folder: Path

    def of(self, number: int) -> str:
        (key,) = (info.key for info in self.store.inner.list(keys.VERSIONS) if f"{number:010d}." in info.key)
        return key

    def untrusted(self) -> None:
        self.trainer.channel.signer = signing.Signer(self.folder / "theirs")
        self.trainer.publish()

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """No record is read meanwhile."""
        gate = self.store.hold_at("read", keys.VERSIONS)
        yield
        gate.opened.set()

    def damaged(self) -> None:
        with self.unread():
            self.trainer.publish()
            self.store.tamper(self.of(3), flipped)

    def missing(self) -> None:
        with self.unread():
            for _ in range(2):
                self.trainer.publish()
            self.store.delete(self.of(3))

    def newer(self) -> None:
        channel, base = self.trainer.channel, self.trainer.channel.tip
        assert base is not None
        self.trainer.weights["w"].view(torch.int16)[:3] += 1
        encoded, changed = channel.encode(channel.bits[base.sha256], self.trainer.weights, 3, 2, 1)[0]
        record = channel.record(
            "delta", 3, self.trainer.weights, delta=DeltaFiles(codec="packed", changed=changed)
        )
        channel.append(dataclasses.replace(record, requires=["teleport"]), encoded, self.trainer.weights)
        channel.head()

    def deleted(self) -> None:
        self.store.delete(*[info.key for info in self.store.inner.list("")])

    def foreign(self) -> None:
        self.deleted()
        another = Trainer(self.store)
        another.channel.run_id = "another"
        another.publish()

    def refuses(self) -> None:
        for verb in ("read", "list"):
            self.store.fail_at(verb, "", times=1000, error=StoreError)

    def away(self) -> None:
        for verb in ("read", "list"):
            self.store.fail_at(verb, "", times=1000, error=TransientStoreError)

    def hangs(self) -> None:
        self.store.hold_at("read")

    def undone(self) -> None:
        self.trainer.publish_lies()

    def pinned(self) -> None:
        self.driver.set_pin(2)
        for _ in range(3):
            self.trainer.publish()

    def quiet(self) -> None:
        self.driver.cursor._max_age_s = 0.0  # DELTASYNC_MAX_AGE_S, which has passed


CASES: dict[str, Callable[[Scene], None]] = {
    "the trainer signs with a key that the server does not trust": Scene.untrusted,
    "a record is damaged": Scene.damaged,
    "a record is missing": Scene.missing,
    "a newer deltasync writes the channel": Scene.newer,
    "the channel was deleted": Scene.deleted,
    "another run is at the URL": Scene.foreign,
    "the store refuses: credentials, a bucket that is gone": Scene.refuses,
    "the store is away": Scene.away,
    "the store hangs, also while workers stage": Scene.hangs,
    "every commit is undone": Scene.undone,
    "no error, an old version": Scene.pinned,
    "no error, nothing new for long": Scene.quiet,
}


def test_each_row_has_a_symptom_here() -> None:
    assert [row[0] for row in ROWS] == [*CASES]


@pytest.mark.parametrize("symptom", CASES)
def test_what_a_stuck_replica_shows(
    symptom: str, engine: Engine, memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = (row for row in ROWS if row[0] == symptom)
    shown, alerts = row[1], ROWS[0][2] if row[2] == "the same" else row[2]
    state = re.findall("`([a-z]+)`", shown)[0]
    named = next((name for name in re.findall(r"\w+Error", shown) if hasattr(errors, name)), None)
    store, registry = FaultyStore(open_store(memory_url)), CollectorRegistry()
    monkeypatch.setattr("deltasync.serve.engine.open_failover", lambda _: store)
    settings: dict[str, Any] = {"channel": memory_url, "replica_id": "unit", "poll_interval_s": 0.02}
    signer = None
    if symptom.startswith("the trainer signs"):
        for name in ("ours", "theirs"):
            signing.new_key(tmp_path / name, name)
        signer, settings["trusted_keys"] = signing.Signer(tmp_path / "ours"), tmp_path / "ours.pub"
    trainer = Trainer(store, signer)

    def errors_of(kind: str | None) -> float:
        """Failures by class, of this one or of those that are one."""
        found = 0.0
        for metric in registry.collect():
            for sample in metric.samples:
                if sample.name == "deltasync_errors_total":
                    failed = getattr(errors, sample.labels["class"])
                    found += sample.value if kind is None or issubclass(failed, getattr(errors, kind)) else 0
        return found

    async def body() -> None:
        metrics = Metrics(registry)
        driver = engine.driver = Driver(engine, ReplicaSettings(**settings), metrics)
        driver.start()
        try:
            for version in (1, 2):
                trainer.publish()
                assert await driver.reach(version) == version
            assert errors_of(None) == 0 and driver.not_ready is None
            CASES[symptom](Scene(store, trainer, driver, tmp_path))
            driver.poke()
            if state == "failed":
                await until(lambda: driver.state == "failed")
                assert named is not None and issubclass(
                    getattr(errors, (driver.error or "").partition(":")[0]), getattr(errors, named)
                )
                for _ in range(20):  # it stays so, whatever is polled meanwhile
                    assert driver.state == "failed" and driver.error is not None
                    await asyncio.sleep(0.005)
            if "errors" in alerts:
                assert errors_of(named) >= 1
                before = errors_of(None)
                driver.poke()
                await until(lambda: errors_of(None) > before)  # as long as it lasts
            if "rollbacks" in alerts:
                assert value(registry, "deltasync_rollbacks_total")
            if "behind" in alerts:
                await until(lambda: driver.newest == 5)
                await until(lambda: value(registry, "deltasync_newest_version") == 5)
                assert value(registry, "deltasync_served_version") == 2
                await until(lambda: (driver.state, driver.error) == ("serving", None))
                assert driver.status(0).pin == "2"
            if "seconds since followed" in alerts:
                monkeypatch.setattr("deltasync.following.state.STALE_S", 0.3)
                monkeypatch.setattr("deltasync.following.state.STALE_POLLS", 0)
                await until(lambda: "could last be followed" in (driver.error or ""))
                # What is refused is no answer of the store, but one of the version's.
                is_refused = named is not None and not issubclass(getattr(errors, named), errors.StoreError)
                await until(lambda: driver.state == "stale" or is_refused)
                assert not is_refused or (driver.state != "stale" and named in (driver.error or ""))
                metrics.followed(driver)  # as a server does each second
                assert (value(registry, "deltasync_seconds_since_followed") or 0) > 0.3
                assert driver.not_ready == (driver.error if "not ready" in alerts else None)
            assert driver.version == 2
        finally:
            store.heal()
            await asyncio.to_thread(driver.stop)

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))
