"""vLLM's part of a shard in one worker: what it loads again, what it derives from weights, and calls that take long.

vLLM runs RPCs on the thread of the engine's steps. So long calls run in another thread while tokens are generated, and RPCs
only start and poll them.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, SleepingError
from deltasync.following import engine
from deltasync.following.shard import Engine, Shard
from deltasync.live import Segment, derived, plan
from deltasync.tensors import TensorSpec
from vllm_plugin import logger
from vllm_plugin.load import fallback, loader
from vllm_plugin.load.layers import LATER
from vllm_plugin.messages import Working

BACKGROUND = frozenset({"verify", "audit", "stage"})
"""Long methods of `Shard`, which run in the background."""

CALLS = BACKGROUND | {"poll", "prove", "settled", "settle", "identified", "complete", "commit", "confirm", "undo", "read"}
"""Methods of `Shard` that may be called, and `poll`."""

_followed: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()  # models, and their channels


class WorkerEngine(Engine):
    """The model that vLLM's model runner has loaded in this worker."""

    loader, log, later = loader.LOADER, logger, LATER

    def __init__(self, runner: Any) -> None:
        self._runner, self.model = runner, runner.get_model()
        derived.note_loaded(self.model)
        self.is_complete = derived.is_complete(self.model)
        self._mirror = fallback.Mirror(runner, {}, {})

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Engine.checkpoint`."""
        return loader.checkpoint(self._runner)

    def reloads(self, recorded: plan.LoadPlan, specs: Mapping[str, TensorSpec]) -> dict[str, list[Segment]]:
        """As `Engine.reloads`."""
        reasons = recorded.reasons
        tensors = fallback.mirrored(recorded, specs, self.checkpoint()) if reasons else {}
        self._mirror = fallback.Mirror(self._runner, {name: recorded.layers[name] for name in tensors}, tensors, reasons)
        return self._mirror.segments

    def prove(self, covered: Set[int], reloaded: Set[torch.nn.Module] = frozenset()) -> None:
        """As `Engine.prove`."""
        self._mirror.prove(covered)
        super().prove(covered, reloaded | self._mirror.modules)

    def refresh(self, changed: Iterable[str]) -> float:
        """As `Engine.refresh`."""
        return self._mirror.reload(changed) + super().refresh(changed)


class WorkerShard:
    """The shard of one worker, and a thread for its long calls.

    Raises:
        NotPublishedError: the channel has no version yet.
        ModelMismatchError: the model does not match the channel.
        ConfigError: something else changes this model's weights; or see `limit_threads`.
    """

    def __init__(self, runner: Any, channel: str, trusted_keys: str | None = None) -> None:
        model = runner.get_model()
        if model in _followed:
            raise ConfigError(
                f"Something else in this server follows {_followed[model]} with the same weights; choose one: "
                "the follow loop, the worker extension alone, or vLLM's weight-transfer routes."
            )
        settings, rank, count = ReplicaSettings.from_env(channel=channel, trusted_keys=trusted_keys), 0, None
        if torch.distributed.is_initialized():
            rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        engine.limit_threads(os.environ.get("OMP_NUM_THREADS", ""), count)
        reader: ChannelReader = engine.open_reader(settings, count or 1)
        before = time.perf_counter()
        self.shard = Shard(reader, WorkerEngine(runner), rank)
        self.shard.record()
        logger.info("deltasync load plan: tensors=%d record_s=%.3f", len(reader.specs), time.perf_counter() - before)
        self._thread = ThreadPoolExecutor(1, "deltasync", self.shard.use_device)
        self._work: Future[Any] | None = None
        self._begun_s = 0.0  # when the long call began
        _followed[model] = channel

    def call(self, method: str, *args: Any) -> Any:
        """Call one of `CALLS`. Returns `Working` while a long call goes on.

        Raises:
            ConfigError: the method is not in the list.
            SleepingError: vLLM sleeps; nothing was touched.
        """
        if method not in CALLS:
            raise ConfigError(f"deltasync_call takes {', '.join(sorted(CALLS))}, not {method!r}.")
        if self.shard.asleep and method not in ("undo", "settle", "identified"):
            raise SleepingError("vLLM sleeps. Its weights are left alone until it wakes up.")
        if method in BACKGROUND:
            self._begun_s = time.monotonic()
            self._work = self._thread.submit(getattr(self.shard, method), *args)
        elif method != "poll":
            return getattr(self.shard, method)(*args)
        return self._poll()

    def _poll(self) -> Any:
        """Return what the long call has returned, once; None if there is none."""
        work = self._work
        if work is not None and not work.done():
            return Working(time.monotonic() - max(self._begun_s, self.shard.progressed_s))
        self._work = None
        return None if work is None else work.result()

    def fall_asleep(self) -> None:
        """Touch the weights no more, once the long call has ended."""
        if self._work is not None:
            wait([self._work])
        self._work = None
        self.shard.fall_asleep()
