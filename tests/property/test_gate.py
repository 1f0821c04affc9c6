"""Workers that run the same steps, held between the same two of them, whatever the timing."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Sequence

import pytest

from deltasync.errors import ApplyError, CommitError
from vllm_plugin.gate import Count, Gate, meet

PATIENCE_S = 60.0


class Engine:
    """Workers in threads, each with a version as its weights, who need each other in every step.

    Args:
        workers: How many.
        pipeline: Each waits for what the one before it made in this step, instead of all for each other.
        seed: Of all delays.
    """

    def __init__(self, workers: int, pipeline: bool, seed: int) -> None:
        self.gates = [Gate(PATIENCE_S) for _ in range(workers)]
        self.versions = [0] * workers
        self.seen: list[list[tuple[int, ...]]] = [[] for _ in range(workers)]
        self._stages: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in range(workers)] if pipeline else []
        self._barrier = threading.Barrier(workers)
        self._steps: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in range(workers)]
        self._seed = seed
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(rank,)) for rank in range(workers)]
        self._threads.append(threading.Thread(target=self._schedule))

    def __enter__(self) -> Engine:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _schedule(self) -> None:
        """Bursts of steps, some ahead of those that run, and pauses without any."""
        rng, step = random.Random(self._seed), 0
        while not self._ending.is_set():
            for _ in range(rng.choice((1, 5, 40))):
                step += 1
                for steps in self._steps:
                    steps.put(step)
                while len(self.seen[0]) < step - rng.choice((0, 2)) and not self._ending.is_set():
                    time.sleep(0.0001)
            time.sleep(rng.choice((0, 0, 0.001, 0.05)))
        for steps in self._steps:
            steps.put(None)

    def _work(self, rank: int) -> None:
        rng = random.Random(f"{self._seed} {rank}")
        while (step := self._steps[rank].get()) is not None:
            self.gates[rank].begin()
            before = self.versions[rank]
            if not self._stages:
                self._barrier.wait(PATIENCE_S)
            elif rank > 0:
                assert self._stages[rank].get(timeout=PATIENCE_S) == step
            time.sleep(rng.choice((0, 0, 0.0005)))
            if self._stages and rank + 1 < len(self._stages):
                self._stages[rank + 1].put(step)
            self.seen[rank].append((before, self.versions[rank]))
            self.gates[rank].end()

    def hold(self, limit: int | None) -> list[Count]:
        """Ask all workers at once, as over connections."""
        found: dict[int, Count] = {}

        def ask(rank: int) -> None:
            found[rank] = self.gates[rank].hold(limit, 0.02)

        asking = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(self.gates))]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        return [found[rank] for rank in range(len(self.gates))]

    def exchange(self, version: int, fails_on: int | None, rng: random.Random) -> None:
        """A version on all workers, or on none, with time in between for whatever should not run then."""
        try:
            done = meet(self.hold, PATIENCE_S)
            assert {len(seen) for seen in self.seen} == {done}
            before = list(self.versions)
            for rank in rng.sample(range(len(self.gates)), len(self.gates)):
                self.gates[rank].write()
                if rank == fails_on:
                    break
                self.versions[rank] = version
                time.sleep(rng.choice((0, 0.001)))
            if fails_on is not None:
                self.versions[:] = before
            assert {len(seen) for seen in self.seen} == {done}
        finally:
            for rank in rng.sample(range(len(self.gates)), len(self.gates)):
                self.gates[rank].release()


@pytest.mark.parametrize("pipeline", [False, True], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_runs_on_one_version_on_all_workers(workers: int, pipeline: bool, seed: int) -> None:
    rng = random.Random(seed)
    version = served = 0
    with Engine(workers, pipeline, seed) as engine:
        while len(engine.seen[0]) < 200 or version < 20:
            version += 1
            fails_on = rng.randrange(workers) if rng.random() < 0.25 else None
            engine.exchange(version, fails_on, rng)
            served = version if fails_on is None else served
            assert engine.versions == [served] * workers
            time.sleep(rng.choice((0, 0.003, 0.01)))
    steps = list(zip(*engine.seen, strict=True))
    for of_step in steps:
        assert len({version for pair in of_step for version in pair}) == 1, of_step
    in_order = [of_step[0][0] for of_step in steps]
    assert in_order == sorted(in_order)
    assert len(set(in_order)) >= 5


def replay(replies: Sequence[Sequence[Count]]) -> tuple[int, list[int | None]]:
    """`meet` with these replies: where, and the limits that it asked for."""
    limits: list[int | None] = []

    def ask(limit: int | None) -> Sequence[Count]:
        limits.append(limit)
        return replies[len(limits) - 1]

    return meet(ask, PATIENCE_S), limits


def test_an_idle_engine_is_held_where_it_is() -> None:
    assert replay([[(7, False), (7, False)]] * 2) == (7, [None, 7])


def test_the_place_to_meet_moves_ahead_of_steps_that_are_faster_further_each_time() -> None:
    replies: list[list[Count]] = [[(7, True), (8, True)], [(8, False), (9, True)], [(11, True), (11, True)]]
    replies += [[(13, True), (12, True)], [(13, False), (13, False)]]
    assert replay(replies) == (13, [None, 8, 10, 13, 13])


def test_the_place_to_meet_moves_back_when_no_steps_are_left_to_get_there() -> None:
    replies: list[list[Count]] = [[(7, True), (7, True)], [(8, True), (8, True)], [(8, False), (8, True)]]
    replies += [[(8, False), (8, False)]] * 3
    assert replay(replies) == (8, [None, 7, 9, 9, 9, 8])


@pytest.mark.parametrize("counts", [[(1, False), (0, False)], [(1, False), (1, True)]], ids=["one behind", "one running"])
def test_workers_that_do_not_come_to_rest_are_given_up(counts: list[Count]) -> None:
    with pytest.raises(ApplyError, match=r"within 0\.05 s"):
        meet(lambda _: counts, 0.05)


def test_a_hold_without_a_release_ends_and_nothing_may_be_written_then() -> None:
    gate = Gate(0.01)
    gate.begin()
    gate.end()
    assert gate.hold(1, 0.0) == (1, False)
    gate.begin()
    gate.end()
    with pytest.raises(ApplyError, match="not held"):
        gate.write()


def test_a_worker_that_wrote_and_hears_nothing_runs_no_step_on_uncertain_weights() -> None:
    gate = Gate(0.01)
    gate.hold(0, 0.0)
    gate.write()
    with pytest.raises(CommitError, match="uncertain"):
        gate.begin()
    gate.release()
    gate.begin()


def test_nothing_may_be_written_during_a_step_or_without_a_hold() -> None:
    gate = Gate(0.01)
    with pytest.raises(ApplyError, match="not held"):
        gate.write()
    with gate.step():
        assert gate.hold(1, 0.0) == (1, True)
        with pytest.raises(ApplyError, match="not held"):
            gate.write()
        with gate.step():  # a part of the same one, which it must not wait for
            pass
    gate.write()
