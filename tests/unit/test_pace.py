from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from deltasync.errors import AckTimeoutError
from tests.waiting import wait_until
from trl_callback.fleet import Pace


class Receipt:
    def __init__(self, version: int) -> None:
        self.version = version


class Fleet:
    """Serves what the test lets it."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._changed = threading.Condition()
        self._served = 0
        self.timeout_s = 20.0

    def serve(self, version: int) -> None:
        with self._changed:
            self._served = version
            self._changed.notify_all()

    def wait_for(self, receipt: Any) -> None:
        self.asked.append(receipt.version)
        with self._changed:
            if not self._changed.wait_for(lambda: self._served >= receipt.version, self.timeout_s):
                raise AckTimeoutError(f"version {receipt.version} is not served")


def keep(pace: Pace, version: int) -> float:
    return pace.keep(Receipt(version))  # type: ignore[arg-type]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_the_first_version_is_always_waited_for(fleet: Fleet) -> None:
    pace = Pace(fleet.wait_for, max_behind=2)
    threading.Timer(0.2, fleet.serve, (1,)).start()
    assert keep(pace, 1) > 0.1
    assert pace.served == 1


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_training_goes_on_within_the_bound_and_waits_beyond_it(fleet: Fleet, behind: int) -> None:
    pace = Pace(fleet.wait_for, behind)
    fleet.serve(1)
    for version in range(1, behind + 2):
        assert keep(pace, version) < 0.15
    assert pace.served == 1
    threading.Timer(0.3, fleet.serve, (2,)).start()
    assert keep(pace, behind + 2) > 0.2
    assert pace.served == 2
    fleet.serve(99)  # ends the threads


def test_without_a_bound_each_is_waited_for_and_asked_about_once(fleet: Fleet) -> None:
    pace = Pace(fleet.wait_for, 0)
    fleet.serve(3)
    for version in (1, 2, 3):
        keep(pace, version)
        assert pace.served == version
    assert fleet.asked == [1, 2, 3]


def test_what_was_served_meanwhile_costs_training_no_look(fleet: Fleet) -> None:
    pace = Pace(fleet.wait_for, 1)
    fleet.serve(1)
    keep(pace, 1)
    keep(pace, 2)
    fleet.serve(2)
    wait_until(lambda: pace.served == 2)
    keep(pace, 3)
    wait_until(lambda: 3 in fleet.asked)
    assert fleet.asked == [1, 2, 3]  # 2 by the thread alone
    fleet.serve(3)


def test_a_fleet_that_stays_behind_fails_training_when_it_has_to_wait_and_not_before(fleet: Fleet) -> None:
    pace = Pace(fleet.wait_for, 1)
    fleet.serve(1)
    keep(pace, 1)
    fleet.timeout_s = 0.05
    keep(pace, 2)
    wait_until(lambda: fleet.asked == [1, 2])
    time.sleep(0.1)  # the thread has given up, which nobody minds
    with pytest.raises(AckTimeoutError, match="version 2 is not served"):
        keep(pace, 3)


def test_rollouts_are_told_what_is_served_and_at_once_when_that_changes(fleet: Fleet) -> None:
    pace = Pace(fleet.wait_for, 1)
    told: list[int] = []
    fleet.serve(1)
    keep(pace, 1)
    pace.report(11, told.append)  # TRL counts on from the checkpoint that it resumed from
    assert told == [11]
    keep(pace, 2)
    pace.report(12, told.append)
    assert told == [11, 11]
    fleet.serve(2)
    wait_until(lambda: told == [11, 11, 12])
    keep(pace, 3)
    fleet.serve(3)
    wait_until(lambda: pace.served == 3)  # before TRL says how it counts it
    assert told == [11, 11, 12]
    pace.report(13, told.append)
    assert told == [11, 11, 12, 13]


def test_a_version_that_two_publishes_share_is_counted_as_the_first_until_both_are_served(
    fleet: Fleet,
) -> None:
    pace = Pace(fleet.wait_for, 2)
    told: list[int] = []
    fleet.serve(1)
    for count, version in ((1, 1), (2, 2), (3, 2)):
        keep(pace, version)
        pace.report(count, told.append)
    fleet.serve(2)
    wait_until(lambda: told[-1] == 3)
    assert told == sorted(told)
