"""Where SGLang's scheduler calls us: its requests, its caches, its sleep, and other updates of its weights."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from deltasync.config import ReplicaSettings
from deltasync.errors import redacted
from deltasync.following import Follow, Pin
from sglang_plugin import logger
from sglang_plugin.rank import Rank
from sglang_plugin.target import MARK, SchedulersTarget, serve_beside


class SchedulerHooks(Rank):
    """What one scheduler of SGLang's does beside its own work."""

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_parallel, get_serving

        settings = ReplicaSettings.from_env()
        super().__init__(scheduler, settings, self._announce)
        self.target: SchedulersTarget | None = None
        self.follow: Follow | None = None
        self._paused_by_another = False
        self._salts = 0
        self._asked: dict[str, Any] = {}
        self.channel = redacted(settings.channel or "")
        self._recompute = settings.kv_cache == "recompute"
        if self.number:
            serve_beside(self)
            return
        self.target = SchedulersTarget(self, self._waker())
        settings = settings.at_port(get_serving().port, get_parallel().dp_rank if get_parallel().dp_size > 1 else None)
        self.follow = Follow(self._reader, self.target, settings, prefetch=self.size == 1, log=logger)
        self.follow.start()
        logger.info("deltasync follows %s as %s", self.channel, settings.replica_id)

    def _waker(self) -> Callable[[], object]:
        sleeper = self.scheduler.idle_sleeper
        if sleeper is None:
            return int
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._woken = reader
        sleeper.poller.register(reader, 1)
        return lambda: os.write(writer, b"x")

    # Requests

    def take_calls(self) -> list[Any]:
        """Return what the follow loop wants to run between two steps, as one more request."""
        if self.target is None:
            return []
        if hasattr(self, "_woken"):
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 64)
        return [self.target.calls.popleft() for _ in range(len(self.target.calls))]

    def run(self, call: Any) -> None:
        """Run such a call, in the scheduler's thread of each rank."""
        if self.target is not None:
            self.target.run(call)
            return
        with contextlib.suppress(Exception):  # the first rank reports it
            getattr(self, call[1])(*call[2])

    # A version

    def paused_commit(self) -> tuple[float, int, int, float, float]:
        """Commit with SGLang's own pause: in place, or retracting requests whose keys are to be recomputed."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        scheduler, began = self.scheduler, time.perf_counter()
        was_paused = scheduler._engine_paused and not self.held
        running = len(scheduler.running_batch.reqs)
        type(scheduler).pause_generation.__wrapped__(
            scheduler, PauseGenerationReqInput(mode="retract" if self._recompute else "in_place")
        )
        try:
            done = self.commit()
        finally:
            if not was_paused and not self.held:
                type(scheduler).continue_generation.__wrapped__(
                    scheduler, ContinueGenerationReqInput(torch_empty_cache=False)
                )
        return (time.perf_counter() - began, running, *done)

    def _announce(self, name: str) -> None:
        from sglang.srt.managers import mm_schedule
        from sglang.srt.runtime_context import get_serving

        old, scheduler = get_serving().weight_version, self.scheduler
        if name == old:
            return
        pending = [
            request
            for batch, _ in getattr(scheduler, "result_queue", ())
            for request in batch.reqs
            if not request.finished() and request.inflight_middle_chunks <= 0
        ]
        scheduler.record_weight_version_change(name)
        for request in pending:  # the step that runs beside us has sampled one more of its tokens with the old weights
            _move_event(request, old)
        self._salts += 1
        self.salt = f"deltasync {self._salts}"
        if mm_schedule.embedding_cache is not None:
            mm_schedule.embedding_cache.clear()

    def settled(self) -> Any:
        """As `Rank.settled`; generation goes on, unless another client has paused it."""
        was_held, version = self.held, super().settled()
        if was_held and not self._paused_by_another:
            self.scheduler._engine_paused = False
        return version

    def keep_apart(self, request: Any) -> None:
        """Give a request that has computed nothing the salt of the version that is live."""
        own = vars(request).setdefault("deltasync_own", request.extra_key)
        request.extra_key = f"{own or ''}|{self.salt}"

    def hold(self) -> None:
        """Let nothing be computed while it is not known what the weights are."""
        if self.held:
            self.scheduler._engine_paused = True

    # Routes

    def ask(self, key: str, value: dict[str, Any]) -> None:
        """Begin what a route asks for; `state` has what became of it."""
        if self.follow is not None:
            self._asked = dict(list(self._asked.items())[-63:]) | {value["id"]: {}}
            threading.Thread(target=self._do, args=(self.follow, value), daemon=True).start()

    def _do(self, follow: Follow, value: dict[str, Any]) -> None:
        try:
            if value.get("pin") is not None:
                follow.set_pin(Pin.parse(value["pin"]))
            if value.get("digest"):
                with follow.between_steps():
                    assert self.target is not None
                    result: Any = {"version": follow.version, "sha256": self.target.digest()}
            else:
                reached, deadline = (
                    follow.request(value.get("version"), value.get("step")),
                    time.monotonic() + value["timeout_s"],
                )
                while (served := reached()) is None and time.monotonic() < deadline:
                    time.sleep(0.005)
                result = {"version": served, "error": None if served else f"Not served in time. {follow.error or ''}"}
        except Exception as error:  # noqa: BLE001 - the route replies with it
            result = {"error": f"{type(error).__name__}: {error}"}
        self._asked[value["id"]] = result

    def state(self) -> dict[str, Any]:
        """Return what the HTTP server's process shows."""
        assert self.follow is not None
        reason = "This server does not generate now: its weights are not known." if self.held else self.follow.not_ready
        status = msgspec.to_builtins(self.follow.status())
        return {"status": status, "not_ready": reason, "asked": self._asked}


def _move_event(request: Any, old: str) -> None:
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    events, count = request.weight_version_events, len(request.output_ids)
    if events and events[-1].old_version == old and events[-1].num_output_tokens == count:
        events.pop()
    events.append(WeightVersionEvent(old_version=old, num_output_tokens=count + 1))


_hooks: SchedulerHooks | None = None  # of the scheduler in this process


def install() -> None:
    """Add the hooks to SGLang's classes in this process. A second call does nothing."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components import internal_state, request_receiver, weight_updater
    from sglang.srt.mem_cache import common

    if hasattr(Scheduler, "deltasync"):
        return
    Scheduler.deltasync = True

    def around(owner: Any, name: str, hook: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if _hooks is None and name != "__init__":
                return original(*args, **kwargs)
            return hook(original, _hooks, *args, **kwargs)

        setattr(owner, name, hooked)

    def initialize(original: Any, _: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        global _hooks
        original(self, *args, **kwargs)
        _hooks = SchedulerHooks(self)

    def pull(original: Any, hooks: SchedulerHooks, self: Any) -> Any:
        found = original(self)
        return None if found is None else [*found, *hooks.take_calls()]

    def process(original: Any, hooks: SchedulerHooks, self: Any, requests: Any) -> Any:
        calls = [each for each in requests if isinstance(each, tuple) and each[:1] == (MARK,)]
        done = original(self, [each for each in requests if not any(each is call for call in calls)])
        for call in calls:
            hooks.run(call)
        return done

    def step(original: Any, hooks: SchedulerHooks, *args: Any, **kwargs: Any) -> Any:
        hooks.check_places()
        return original(*args, **kwargs)

    def key(original: Any, hooks: SchedulerHooks, tree: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not request.kv.holds_kv:
            hooks.keep_apart(request)
        return original(tree, request, *args, **kwargs)

    def pause(original: Any, hooks: SchedulerHooks, self: Any, request: Any) -> Any:
        hooks._paused_by_another = True
        return original(self, request)

    def resume(original: Any, hooks: SchedulerHooks, self: Any, request: Any) -> Any:
        hooks._paused_by_another = False
        original(self, request)
        hooks.hold()

    def release(original: Any, hooks: SchedulerHooks, self: Any, request: Any) -> Any:
        if not request.tags or "weights" in request.tags:
            hooks.fall_asleep()
        return original(self, request)

    def wake(original: Any, hooks: SchedulerHooks, self: Any, request: Any) -> Any:
        done = original(self, request)
        if not request.tags or "weights" in request.tags:
            hooks.wake_up()
            hooks.hold()
        return done

    def refuse(reply: Any) -> Callable[..., Any]:
        def refused(original: Any, hooks: SchedulerHooks, self: Any, request: Any) -> Any:
            said = (
                f"This would change weights that are those of {hooks.channel}, which this server follows. Nothing was done."
            )
            logger.error("deltasync: %s", said)
            return reply(success=False, message=said)

        return refused

    def check(original: Any, hooks: SchedulerHooks, self: Any, request: Any) -> Any:
        return (refused_check if request.action == "reset_tensors" else original)(self, request)

    def get_state(original: Any, hooks: SchedulerHooks, self: Any, request: Any) -> Any:
        reply = original(self, request)
        if hooks.follow is not None:
            reply.internal_state["deltasync"] = hooks.state()
        return reply

    def handlers(original: Any, hooks: SchedulerHooks, self: Any) -> Any:
        return original(self) | {MARK: internal_state._UpdateHandler(lambda key, value: None, hooks.ask)}

    updater, state = weight_updater.SchedulerWeightUpdaterManager, internal_state.SchedulerInternalStateController
    refused_check = functools.partial(refuse(weight_updater.CheckWeightsReqOutput), None, None)
    around(Scheduler, "__init__", initialize)
    around(request_receiver.SchedulerRequestReceiver, "_pull_raw_reqs", pull)
    around(Scheduler, "process_input_requests", process)
    around(Scheduler, "run_batch", step)
    around(common, "_req_radix_key", key)
    around(Scheduler, "pause_generation", pause)
    around(Scheduler, "continue_generation", resume)
    around(updater, "release_memory_occupation", release)
    around(updater, "resume_memory_occupation", wake)
    around(updater, "check_weights", check)
    around(state, "get_internal_state", get_state)
    around(state, "_update_handlers", handlers)
    for name, output in (
        ("update_weights_from_disk", weight_updater.UpdateWeightFromDiskReqOutput),
        ("update_weights_from_distributed", weight_updater.UpdateWeightsFromDistributedReqOutput),
        ("update_weights_from_tensor", weight_updater.UpdateWeightsFromTensorReqOutput),
        ("update_weights_from_ipc", weight_updater.UpdateWeightsFromIPCReqOutput),
        ("begin_weight_update", weight_updater.BeginWeightUpdateReqOutput),
        ("end_weight_update", weight_updater.EndWeightUpdateReqOutput),
    ):
        around(updater, name, refuse(output))
