"""Where SGLang's scheduler calls us: its requests, its caches, its sleep, and other updates of its
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltasync.serve.engine import around
from sglang_plugin import logger
from sglang_plugin.model import note_loads
from sglang_plugin.scheduler import MARK
from sglang_plugin.scheduler import DeltaSyncScheduler as _Ours

_ours: _Ours | None = None  # of the scheduler in this process


def install() -> None:
    """Add the hooks to SGLang's classes in this process. Until there is a scheduler they do nothing."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Updater,
    )
    from sglang.srt.mem_cache import common

    @around(Scheduler, "__init__")
    def initialized(initialize: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        global _ours
        initialize(self, *args, **kwargs)
        _ours = _Ours(self)

    note_loads()
    _around(SchedulerRequestReceiver, "_pull_raw_reqs", _pull)
    _around(Scheduler, "process_input_requests", _process)
    _around(Scheduler, "run_batch", _step)
    _around(common, "_req_radix_key", _key)
    _around(Scheduler, "pause_generation", _pause)
    _around(Scheduler, "continue_generation", _continue)
    _around(Scheduler, "handle_update_weight_version", _rename)
    _around(Updater, "release_memory_occupation", _release)
    _around(Updater, "resume_memory_occupation", _resume)
    _around(Updater, "check_weights", _check)
    sources = (f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))
    for name in (*sources, "begin_weight_update", "end_weight_update"):
        _around(Updater, name, _refuse)


def _around(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Have `hook` called instead of a function, with this function before its arguments."""

    @around(owner, name)
    def hooked(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _ours is None else hook(original, _ours, *args, **kwargs)


def _pull(pull: Any, ours: _Ours, self: Any) -> Any:
    requests = pull(self)
    return None if requests is None else [*requests, *ours.requests()]


def _process(process: Any, ours: _Ours, self: Any, requests: Any) -> Any:
    calls = [each for each in requests if isinstance(each, tuple) and each[0] == MARK]
    done = process(self, [each for each in requests if not isinstance(each, tuple)] if calls else requests)
    for _, method, *arguments in calls:
        ours.run(method, *arguments)
    return done


def _step(step: Any, ours: _Ours, *args: Any, **kwargs: Any) -> Any:
    ours.shard.put_back()
    return step(*args, **kwargs)


def _key(key: Any, ours: _Ours, tree: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    if not request.kv.holds_kv:
        ours.keep_apart(request)
    return key(tree, request, *args, **kwargs)


def _pause(pause: Any, ours: _Ours, self: Any, request: Any) -> Any:
    ours.paused = True
    return pause(self, request)


def _continue(resume: Any, ours: _Ours, self: Any, request: Any) -> Any:
    ours.paused = False
    resume(self, request)
    ours.hold()


def _release(release: Any, ours: _Ours, self: Any, request: Any) -> Any:
    if not request.tags or "weights" in request.tags:
        ours.shard.fall_asleep()
    return release(self, request)


def _resume(resume: Any, ours: _Ours, self: Any, request: Any) -> Any:
    done = resume(self, request)
    if not request.tags or "weights" in request.tags:
        ours.wake_up()
        ours.hold()
    return done


def _refuse(update: Any, ours: _Ours, self: Any, request: Any) -> Any:
    from sglang.srt.managers import io_struct

    said = f"This would change weights, which are those of {ours.channel}: this server follows it. Nothing was done."
    logger.error("deltasync: %s", said)
    reply = getattr(io_struct, type(request).__name__.removesuffix("Input") + "Output")
    return reply(success=False, message=said)


def _check(check: Any, ours: _Ours, self: Any, request: Any) -> Any:
    return _refuse(check, ours, self, request) if request.action == "reset_tensors" else check(self, request)


def _rename(rename: Any, ours: _Ours, self: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqOutput

    logger.error(
        "deltasync: the channel names the weights of this server; they are not %.40r", request.new_version
    )
    return UpdateWeightVersionReqOutput()
