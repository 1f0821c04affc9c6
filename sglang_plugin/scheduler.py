"""A scheduler of SGLang's as one rank of a replica: its model, its group, and what becomes of a new version.

The follow loop runs in a thread of the first rank. Calls between two steps are queued with SGLang's own requests, so that
all ranks run them in the same iteration.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from deltasync.config import ReplicaSettings
from deltasync.errors import redacted
from deltasync.following import Follow
from deltasync.following.engine import limit_threads, open_reader
from deltasync.following.requests import Requests
from deltasync.following.shard import Done
from deltasync.following.shards import RankedShards, Ranks, ShardsTarget, serve_background
from sglang_plugin import logger
from sglang_plugin.model import ModelEngine

MARK = "deltasync"
"""The first item of our requests, and the key of our part of SGLang's internal state."""


class DeltaSyncScheduler(ModelEngine):
    """One scheduler's process as a rank that follows.

    Attributes:
        shards: The shards of all schedulers, of which it has one.
        remote: Requests of the routes, which are in another process, to the follow loop; in the first rank only.
        salt: The key of everything that is cached under the live version.
        paused: Whether another client has paused generation.
    """

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_parallel, get_serving

        super().__init__(scheduler.tp_worker.model_runner)
        settings, parallel = ReplicaSettings.from_env(), get_parallel()
        self.channel = redacted(settings.channel or "")
        self.salt, self.paused = "deltasync 0", False
        self.remote: Requests | None = None
        self._metrics: Any = None
        self._scheduler, self._settings, self._salts = scheduler, settings, 0
        self._waiting, self._answers = deque[tuple[Any, ...]](), deque[Future[Any]]()
        ranks = Ranks(parallel.tp_group.cpu_group)
        reader = open_reader(settings, ranks.size)
        limit_threads(os.environ.get("OMP_NUM_THREADS", ""), ranks.size)
        self.shards = RankedShards(reader, self, ranks)
        self._wake, self._woken = _waker(scheduler.idle_sleeper)
        if ranks.number:
            serve_background(self.shards)
            return
        settings = settings.at_port(get_serving().port, parallel.dp_rank if parallel.dp_size > 1 else None)
        from deltasync.following.metrics import Metrics  # in this process alone: SGLang sets up prometheus_client first

        target, self._metrics = ShardsTarget(self.shards, self._between_steps), Metrics()
        follow = Follow(reader, target, settings, observer=self._metrics, prefetch=ranks.size == 1, log=logger)
        self.remote = Requests(follow, settings.http_token)
        logger.info("deltasync follows %s (%s) as %s", self.channel, follow.pin, settings.replica_id)
        follow.start()

    def _between_steps(self, method: str, *arguments: Any) -> Any:
        answer: Future[Any] = Future()
        self._answers.append(answer)
        self._waiting.append((MARK, method, *arguments))
        self._wake()
        return answer.result()

    def requests(self) -> list[tuple[Any, ...]]:
        """Return what waits to be run between two steps, in the first rank; SGLang hands it to all ranks."""
        self._woken()
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def run(self, method: str, *arguments: Any) -> None:
        """Run a method between two steps; the first rank's follow loop gets what it returns or raises."""
        answer = self._answers.popleft() if self._answers else Future()
        try:
            answer.set_result(self._commit() if method == "commit" else getattr(self.shards, method)(*arguments))
        except BaseException as error:  # noqa: BLE001 - the follow loop raises it
            answer.set_exception(error)
        self.hold()

    def _commit(self) -> tuple[float, int, Done]:
        """Commit in a pause of SGLang's: in place, or one that has requests compute their keys again."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        scheduler, began, running = self._scheduler, time.perf_counter(), len(self._scheduler.running_batch.reqs)
        paused, mode = self.paused, "retract" if self._settings.kv_cache == "recompute" else "in_place"
        with contextlib.ExitStack() as stack:
            if self._metrics is not None:
                stack.enter_context(self._metrics.attempt(lambda: time.perf_counter() - began))
            scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
            if not paused:
                stack.callback(scheduler.continue_generation, ContinueGenerationReqInput(torch_empty_cache=False))
            done = self.shards.commit()
        return time.perf_counter() - began, running, done

    def hold(self) -> None:
        """Pause the engine while the weights are unverified; otherwise leave the pause to other clients."""
        self._scheduler._engine_paused = self.shards.held or self.paused

    def announce(self, name: str) -> None:
        """As `Engine.announce`."""
        from sglang.srt.managers import mm_schedule
        from sglang.srt.runtime_context import get_serving

        old, scheduler = get_serving().weight_version, self._scheduler
        if name == old:
            return
        results = getattr(scheduler, "result_queue", ())  # of steps that have run, and sampled with the old weights
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
