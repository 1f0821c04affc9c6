"""vLLM's own engine loop, with a scheduler of one running request: a commit that resumes it wakes it up."""

from __future__ import annotations

import queue
import threading
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_plugin import engine


@pytest.fixture(scope="module")
def vllm_core() -> ModuleType:
    """vLLM's module of engines; importing it warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: ModuleType = pytest.importorskip("vllm.v1.engine.core")
    return found


class _Scheduler:
    def __init__(self, unpaused: Any) -> None:
        self.pause_state = self._unpaused = unpaused
        self.was_paused = False

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state
        self.was_paused = self.was_paused or state != self._unpaused

    def has_requests(self) -> bool:
        return bool(self.pause_state == self._unpaused)

    has_unfinished_requests = has_requests


def _core(vllm_core: ModuleType) -> Any:
    core: Any = vllm_core.EngineCoreProc.__new__(vllm_core.EngineCoreProc)
    core.input_queue, core.output_queue, core.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
    core.scheduler, core.batch_queue = _Scheduler(vllm_core.PauseState.UNPAUSED), []
    core.engines_running, core.process_input_queue_block = False, True
    core._idle_state_callbacks, core.shutdown_state = [], vllm_core.EngineShutdownState.RUNNING
    core.collective_rpc = lambda method, *arguments, **named: [{"result": None}]
    core.model_executor = SimpleNamespace(is_sleeping=False, collective_rpc=core.collective_rpc)
    core.set_weight_version = lambda version: None
    return core


@pytest.mark.parametrize("under_way", [0, 1, 2])
@pytest.mark.parametrize("wakes", [True, False])
def test_a_commit_ends_the_wait_of_vllms_loop(
    wakes: bool, under_way: int, vllm_core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wake-up, a loop with steps under way stands still until the next request comes."""
    engine.install()
    if not wakes:
        monkeypatch.setattr(engine, "_wake", lambda core: None)
    core, stop, goes_on = _core(vllm_core), threading.Event(), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            core._process_input_queue()
            if core.scheduler.has_requests():
                core.batch_queue.append(1)  # async scheduling: a step is always under way
                if core.scheduler.was_paused:
                    goes_on.set()
            if core.batch_queue and (len(core.batch_queue) > under_way or not core.scheduler.has_requests()):
                core.batch_queue.pop()
            stop.wait(0.001)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    exchange = [["commit", True], "7", False, None]
    core.input_queue.put((vllm_core.EngineCoreRequestType.UTILITY, (0, 1, "deltasync_exchange", exchange)))
    try:
        stands_still = not wakes and under_way > 0
        assert goes_on.wait(0.5 if stands_still else 60) is not stands_still
    finally:
        stop.set()
        core.input_queue.put((vllm_core.EngineCoreRequestType.WAKEUP, None))
        thread.join(60)
