"""Calls of vLLM's engines, past its engine client: `install` adds them in the engines' processes."""

from __future__ import annotations

import asyncio
import multiprocessing.util
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from deltasync.errors import ConfigError
from deltasync.serve.engine import around, number_of
from vllm_plugin import logger

MAX_LAG = "deltasync_max_lag"
"""Key of a request's `extra_args`: its oldest token may be this number of versions older than the live one."""


class Exchanged(NamedTuple):
    """The reply of engines to a call of their workers in a pause.

    Attributes:
        answers: The workers', in the order of engines and ranks.
        was_paused: Whether an engine was paused before.
        idle_s: When the last one had finished its last step, by `time.monotonic`.
        resumed_s: When it was resumed; None if it is paused still.
    """

    answers: list[Any]
    was_paused: bool
    idle_s: float
    resumed_s: float | None


def exchange_here(
    core: Any, call: Sequence[Any], name: str | None, recomputes: bool, resumes: bool | None
) -> Exchanged | Future[Exchanged]:
    """In an engine's process: pause, and once its last step has ended, make a call of all workers, announce,
    resume.

    Args:
        core: vLLM's `EngineCore`.
        call: The arguments of `deltasync_call`.
        name: The version's, if this is the last call of a commit. If all workers succeed, it is announced.
        recomputes: Whether requests drop what older weights have computed.
        resumes: Whether generation goes on after that; None to leave it as it was.
    """
    was_paused = core.is_scheduler_paused()
    core.deltasync_paused = core.deltasync_paused or not was_paused

    def finish() -> Exchanged:
        idle_s, resumed_s = time.monotonic(), None
        if recomputes:
            core.deltasync_recompute()
        answers = core.collective_rpc("deltasync_call", None, tuple(call), None)
        if name is not None and not any("error" in answer for answer in answers):
            core.set_weight_version(name)
            if resumes or (resumes is None and not was_paused):
                core.resume_scheduler()
                _wake(core)
                resumed_s = time.monotonic()
        return Exchanged(answers, was_paused, idle_s, resumed_s)

    pausing = core.pause_scheduler(mode="keep", clear_cache=False)
    if pausing is None:
        return finish()
    exchanged: Future[Exchanged] = Future()

    def finish_later(paused: Future[Any]) -> None:
        try:
            paused.result()
            exchanged.set_result(finish())
        except BaseException as error:  # noqa: BLE001 - whoever called raises it
            exchanged.set_exception(error)

    pausing.add_done_callback(finish_later)
    return exchanged


def _wake(core: Any) -> None:
    """Let the engine's loop look for work again.

    The loop waits for a request of a client once its idle callbacks have run, and one of them has just
    resumed it.
    """
    requests = getattr(core, "input_queue", None)  # an engine in the client's process has none
    if requests is not None:
        requests.put_nowait((core.deltasync_wakeup, None))


def end_old(core: Any, old: str, new: str) -> None:
    """In an engine's process, while no step runs: end the requests whose oldest token a new version makes too
    old.

    They finish as aborted requests do, with the tokens that they have.

    Args:
        core: vLLM's `EngineCore`.
        old: The name of the version that was live, which made the first tokens of requests that had none when
            it came.
        new: The name of the version that is live from now on.
    """
    ended = []
    for request in core.scheduler.requests.values():
        lag = (getattr(request.sampling_params, "extra_args", None) or {}).get(MAX_LAG)
        if lag is None or not request.num_output_tokens:
            continue
        oldest = vars(request).setdefault("deltasync_oldest", number_of(old) or 0)
        if (number_of(new) or oldest) - oldest > lag:
            ended.append(request.request_id)
    if ended:
        core._send_abort_outputs(core.scheduler.finish_requests(ended, _aborted()))


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def lead(core: Any, number: int | None = None, ended: int | None = None) -> tuple[str, int | None]:
    """In an engine's process: return the folder that its API servers share, and the number of the one that
    leads.

    A server that gives its `number` leads from now on if none does, or if the one that leads is known to have
    `ended`.
    """
    if not hasattr(core, "deltasync_folder"):
        core.deltasync_folder, core.deltasync_leader = tempfile.TemporaryDirectory(prefix="deltasync-"), None
        # The process ends as those of multiprocessing do: without the interpreter's own exit hooks.
        multiprocessing.util.Finalize(None, core.deltasync_folder.cleanup, exitpriority=0)
    if number is not None and core.deltasync_leader == ended:
        core.deltasync_leader = number
    return core.deltasync_folder.name, core.deltasync_leader


def install() -> None:
    """Add the calls below to engines of this process. Call before the first is made. A second call does
    nothing.
    """
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "deltasync_guard"):
        return

    def guard(self: Any) -> bool:
        """Stay paused after sleep from now on. Returns whether a commit that nobody has ended keeps this
        engine paused.
        """
        self.deltasync_guarded = True
        return bool(self.deltasync_paused)

    @around(EngineCore, "resume_scheduler")
    def resume(resume_scheduler: Any, self: Any) -> None:
        self.deltasync_paused = False
        resume_scheduler(self)

    @around(EngineCore, "wake_up")
    def wake_up_paused(wake_up: Any, self: Any, tags: list[str] | None = None) -> Any:
        """Stay paused once awake, if somebody is there to look at the weights and resume."""
        awake = wake_up(self, tags)
        if awake and getattr(self, "deltasync_guarded", False):
            self.pause_scheduler(mode="keep", clear_cache=False)
        return awake

    @around(EngineCore, "set_weight_version")
    def set_version(set_weight_version: Any, self: Any, weight_version: str) -> None:
        end_old(self, self.get_weight_version(), weight_version)
        set_weight_version(self, weight_version)

    def recompute(self: Any) -> None:
        """As vLLM does in a pause that clears its caches, but for that of inputs, which no weights have
        made.
        """
        if not self.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("vLLM could not drop the keys of running requests.")
        self.reset_encoder_cache()

    EngineCore.deltasync_exchange = exchange_here
    EngineCore.deltasync_wakeup = EngineCoreRequestType.WAKEUP
    EngineCore.deltasync_paused = False
    EngineCore.deltasync_guard = guard
    EngineCore.deltasync_lead = lead
    EngineCore.deltasync_recompute = recompute
    EngineCore.deltasync_asleep = lambda self: bool(self.model_executor.is_sleeping)


def is_pushed(engine: Any) -> bool:
    """Whether a trainer pushes versions to this engine, by vLLM's own weight-transfer routes."""
    transfer = getattr(getattr(engine, "vllm_config", None), "weight_transfer_config", None)
    return transfer is not None and transfer.backend == "deltasync"


def check_salted(llm: Any) -> None:
    """Check that an offline `LLM` keeps its caches apart by version, so that none has to be dropped
    (`vllm_plugin.salt`).

    Raises:
        ConfigError: it was made without deltasync.
    """
    core = llm.llm_engine.engine_core
    try:
        salted = (
            core.call_utility("deltasync_salts")
            if hasattr(core, "call_utility")
            else core.engine_core.deltasync_salts()
        )
    except Exception:  # noqa: BLE001 - vLLM's, of any class, for an engine that has no such method
        salted = False
    if not salted:
        raise ConfigError(
            "This LLM would mix versions in its caches, because it was made without deltasync: set "
            "DELTASYNC_CHANNEL in the "
            "environment before, and leave VLLM_PLUGINS unset or add deltasync to it."
        )


async def is_salted(engine: Any) -> bool:
    """Whether all engines keep their prefix cache apart by version, see `vllm_plugin.salt`."""
    try:
        salted = await call_engines(engine.engine_core, "deltasync_salts")
    except Exception:  # of any class: vLLM's for an engine that has no such method
        logger.exception("deltasync could not ask an engine about its prefix cache")
        return False
    return bool(salted) and all(salted)


async def call_engines(core: Any, method: str, *args: object) -> list[Any]:
    """Call a method of all engines behind a client of vLLM's, `AsyncMPClient`."""
    return await asyncio.gather(
        *(core._call_utility_async(method, *args, engine=each) for each in core.core_engines)
    )
