"""A scheduler of SGLang's as one rank of a replica: its model, its group, and what becomes of a new version.

The follow loop runs in a thread of the first rank. Its calls are queued with SGLang's own requests, so that
all ranks run them in the same iteration, between two steps.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from deltasync.config import ReplicaSettings
from deltasync.errors import redacted
from deltasync.following import Follow
from deltasync.serve import calls
from deltasync.serve.engine import Answer, answer, is_safe, limit_threads, open_reader
from deltasync.serve.heartbeats import HeartbeatWriter
from deltasync.serve.routes import Routes
from deltasync.serve.shard import Shard
from deltasync.serve.shards import EngineClient, ShardsTarget
from sglang_plugin import SOCKET, logger
from sglang_plugin.model import ModelEngine

MARK = "deltasync"
"""The first item of our requests."""


class DeltaSyncScheduler(ModelEngine, EngineClient):
    """One scheduler's process as a rank that follows. In the first rank it is the target's `EngineClient`, too.

    Attributes:
        shard: The shard of this rank.
        held: As `EngineClient.held`. The same on all ranks.
        salt: The key of everything that is cached under the live version.
        paused: Whether another client has paused generation.
    """

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_parallel, get_serving

        super().__init__(scheduler.tp_worker.model_runner)
        settings, parallel = ReplicaSettings.from_env(), get_parallel()
        self.channel = redacted(settings.channel or "")
        self.salt, self.paused = "deltasync 0", False
        self._scheduler, self._settings, self._salts = scheduler, settings, 0
        self._began_s: float | None = None  # when the pause for a commit began
        self._waiting, self._answers = deque[tuple[Any, ...]](), deque[Future[Any]]()
        self._group = parallel.tp_group.cpu_group
        rank, self._size = self._group.rank(), self._group.size()
        reader = open_reader(settings, self._size)
        limit_threads(os.environ.get("OMP_NUM_THREADS", ""), self._size)
        self.shard = Shard(reader, self, rank)
        self._wake, self._woken = _waker(scheduler.idle_sleeper)
        if rank:
            return
        settings = settings.at_port(get_serving().port, None)
        # in this process alone: SGLang sets up prometheus_client first
        from deltasync.serve.metrics import Metrics

        metrics = Metrics()
        target = ShardsTarget(self, reader, settings, metrics, logger)
        beats = HeartbeatWriter(reader.store)
        follow = Follow(
            reader,
            target,
            settings,
            observer=metrics,
            prefetch=self._size == 1,
            heartbeats=beats,
            log=logger,
        )
        if SOCKET in os.environ:  # there is an HTTP server, whose process asks this one
            calls.listen_in_thread(os.environ[SOCKET], Routes(follow).answer)
        logger.info("deltasync follows %s (%s) as %s", self.channel, follow.pin, settings.replica_id)
        follow.start()

    # In the follow loop's thread

    def call(self, method: str, *args: Any) -> list[Answer]:
        """As `EngineClient.call`."""
        return self._between_steps(self._called, method, *args)

    def announce(self, name: str) -> None:
        """As `EngineClient.announce`."""
        self._between_steps(self._announced, name)

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """As `EngineClient.committing`: in a pause of SGLang's, in place, or one that has requests compute their
        keys again.
        """
        was_held = self.held
        try:
            yield
        except BaseException as error:
            self._between_steps(self._end, was_held or not is_safe(error))
            raise

    def exchange(self, call: Sequence[Any], name: str | None) -> list[Answer]:
        """As `EngineClient.exchange`."""
        return self._between_steps(self._exchanged, call, name)

    def release(self) -> None:
        """As `EngineClient.release`."""
        self._between_steps(self._end, False)

    def running_requests(self) -> int:
        """As `EngineClient.running_requests`."""
        return len(self._scheduler.running_batch.reqs)

    def _between_steps(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Run a method of this class on all ranks, in the same iteration of theirs, and return what it
        returns here.
        """
        done: Future[Any] = Future()
        self._answers.append(done)
        self._waiting.append((MARK, method.__name__, *arguments))
        self._wake()
        return done.result()

    # In the scheduler's thread

    def requests(self) -> list[tuple[Any, ...]]:
        """Return what waits to be run between two steps, in the first rank; SGLang hands it to all ranks."""
        self._woken()
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def run(self, method: str, *arguments: Any) -> None:
        """Run a method between two steps; the first rank's follow loop gets what it returns or raises."""
        done = self._answers.popleft() if self._answers else Future()
        try:
            done.set_result(getattr(self, method)(*arguments))
        except BaseException as error:  # noqa: BLE001 - the follow loop raises it
            done.set_exception(error)
        self.hold()

    def _called(self, method: str, *args: Any) -> list[Answer]:
        """Call this rank's shard, and return the answers of all."""
        mine = answer(self.shard.record if method == "deltasync_open" else lambda: self.shard.call(*args))
        if self._size == 1:
            return [mine]
        answers: list[Any] = [None] * self._size
        torch.distributed.all_gather_object(answers, mine, group=self._group)
        return answers

    def _exchanged(self, call: Sequence[Any], name: str | None) -> list[Answer]:
        """Pause, and call all shards. The last call of a commit has the version's name; if all succeed, go on
        with it.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if self._began_s is None:
            self._began_s, paused = time.perf_counter(), self.paused
            mode = "retract" if self._settings.kv_cache == "recompute" else "in_place"
            self._scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
            self.paused = paused
        answers = self._called("deltasync_call", *call)
        if name is not None and not any("error" in each for each in answers):
            self._announced(name)
            self._end(False)
        return answers

    def _end(self, held: bool) -> None:
        """End the pause for a commit, if there is one, and hold the engine or not."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        began_s, self._began_s, self.held = self._began_s, None, held
        if began_s is not None:
            if not self.paused:
                self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
            self.last_s = time.perf_counter() - began_s

    def wake_up(self) -> None:
        """Hold the engine, whose weights are in memory again, until an audit has found their version."""
        self.shard.wake_up()
        self.held = self.held or self.shard.is_open

    def hold(self) -> None:
        """Pause the engine in a commit and while the weights are unverified; otherwise leave it to other
        clients.
        """
        self._scheduler._engine_paused = self.held or self.paused or self._began_s is not None

    def _announced(self, name: str) -> None:
        """Label tokens with the name of a version from now on, and keep caches apart."""
        from sglang.srt.managers import mm_schedule
        from sglang.srt.runtime_context import get_serving

        old, scheduler = get_serving().weight_version, self._scheduler
        if name == old:
            return
        # of steps that have run, and sampled with the old weights
        results = getattr(scheduler, "result_queue", ())
        pending = [each for batch, _ in results for each in batch.reqs if each.inflight_middle_chunks <= 0]
        scheduler.record_weight_version_change(name)
        for request in pending:
            _count_pending(request, old)
        self._salts += 1
        self.salt = f"deltasync {self._salts}"
        if mm_schedule.embedding_cache is not None:
            mm_schedule.embedding_cache.clear()

    def keep_apart(self, request: Any) -> None:
        """Give a request that has no keys yet the salt of the version that is live."""
        own = vars(request).setdefault("deltasync_own", request.extra_key)
        request.extra_key = f"{own or ''}|{self.salt}"


def _count_pending(request: Any, old: str) -> None:
    """Note that one more token of a request, which is not in its outputs yet, is of the `old` version."""
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    events, count = request.weight_version_events, len(request.output_ids)
    if not request.finished():
        if events and (events[-1].old_version, events[-1].num_output_tokens) == (old, count):
            events.pop()
        events.append(WeightVersionEvent(old_version=old, num_output_tokens=count + 1))


def _waker(sleeper: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what wakes up an idle scheduler (`--sleep-on-idle`), and what it calls once it is awake."""
    if sleeper is None:
        return int, int
    event = os.eventfd(0, os.EFD_NONBLOCK)
    sleeper.poller.register(event, 1)

    def woken() -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(event)

    return lambda: os.eventfd_write(event, 1), woken
