"""Following by the worker extension alone: DELTASYNC_CHANNEL is set, and VLLM_PLUGINS names no driver.

The first worker runs the driver (`vllm_plugin.driver`) in a thread of its own. What that does by RPCs of the engine
elsewhere goes to a thread of each other worker here, over a connection made at start; and instead of pausing generation, all
workers are held between the same two steps (`vllm_plugin.gate`). A worker does what it is told in the order in which it is
told, and starts no step before it is released. So if one is late or fails, the others undo and go on, and it has undone too
before it takes part in a step again.

Without the API server vLLM's weight version is not set and its prefix cache is not reset; there are no routes, no metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, ConfigError
from vllm_plugin.driver import Driver
from vllm_plugin.gate import Count, Gate, meet
from vllm_plugin.metrics import Metrics
from vllm_plugin.worker import Reply, describe, reply

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

ANSWER_S = 60.0
"""How long the first worker waits for what another does while generation is held."""

_HELD_S = 4 * ANSWER_S  # to meet, commit, and undo, with one to spare; vLLM gives a step 300 s
_LOOK_S = 0.02
_READS = ("digest", "digest_segments", "read")
_WRITES = ("prove", "commit", "confirm", "undo")


def wanted() -> bool:
    """Whether there is a channel to follow, and no driver to do it."""
    plugins = os.environ.get("VLLM_PLUGINS", "").split(",")
    return bool(os.environ.get("DELTASYNC_CHANNEL")) and "deltasync" not in plugins


def attach(worker: Any) -> None:
    """Have a worker that is being created follow, from the moment when it is ready to serve.

    That is the end of `compile_or_warm_up_model`, which vLLM calls on all workers at once: what it runs by itself before
    is no step of a request, and every request comes after it.
    """
    from vllm_plugin.cpu import keep_weights_addressable

    keep_weights_addressable()
    warm_up, shut_down = worker.compile_or_warm_up_model, worker.shutdown

    def compile_or_warm_up_model() -> Any:
        times = warm_up()
        worker._deltasync_alone = start(worker)
        return times

    def shutdown() -> None:
        if hasattr(worker, "_deltasync_alone"):
            worker._deltasync_alone.stop()
        shut_down()

    worker.compile_or_warm_up_model, worker.shutdown = compile_or_warm_up_model, shutdown


def start(worker: Any) -> Member:
    """Begin to follow, with all other workers of the engine, which must call this too.

    Raises:
        ConfigError: this server cannot be followed with in this way.
    """
    from vllm.distributed.parallel_state import get_node_count, get_world_group
    from vllm.utils.network_utils import get_ip

    settings = ReplicaSettings.from_env()
    world = get_world_group()
    _check(worker.vllm_config, settings, world.world_size)
    member = Member(worker.model_runner)
    connections = _connect(world, "127.0.0.1" if get_node_count() == 1 else get_ip())
    if world.is_first_rank:
        member.lead(connections, settings)
    else:
        member.obey(*connections)
    return member


def _check(config: Any, settings: ReplicaSettings, world_size: int) -> None:
    def refuse(what: str) -> None:
        raise ConfigError(f"Without the driver {what}. Start vLLM with VLLM_PLUGINS=deltasync, or `deltasync serve`.")

    if settings.kv_cache == "recompute":
        refuse("the KV cache of running requests can only be kept, not recomputed")
    if world_size != config.parallel_config.world_size:
        refuse("data-parallel engines that share layers cannot be followed with")
    if config.model_config.enable_sleep_mode:
        refuse("a server that sleeps cannot be followed with")
    if config.cache_config.enable_prefix_caching:
        logger.warning(
            "deltasync follows without the driver, so vLLM's prefix cache is not reset at a commit: new requests may reuse "
            "prefixes of older weights. Start vLLM with --no-enable-prefix-caching."
        )


def _connect(world: Any, host: str) -> list[Connection]:
    """Connect the first worker with each other one: its connections in the order of their ranks, or this one's to it.

    Args:
        world: vLLM's group of all workers, which tells the others a port and a key; only who has the key gets in.
        host: Where the others reach the first worker, if this is it.
    """
    if world.world_size == 1:
        return []
    if not world.is_first_rank:
        address, key = world.broadcast_object()
        client = socket.create_connection(address, ANSWER_S)
        client.settimeout(None)
        connection = Connection(client.detach())
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send(world.rank_in_group)
        return [connection]
    key = secrets.token_bytes(32)
    found: dict[int, Connection] = {}
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        server.settimeout(ANSWER_S)
        world.broadcast_object((server.getsockname()[:2], key))
        while len(found) < world.world_size - 1:
            connection = Connection(server.accept()[0].detach())
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            found[connection.recv()] = connection
    return [found[rank] for rank in sorted(found)]


class Member:
    """One worker that follows with the others: its gate, and its share of the replica.

    Args:
        runner: vLLM's model runner. Its steps go through the gate from now on: vLLM calls `execute_model`, and
            `sample_tokens` if that returned None, on every worker, whichever executor it runs them by.
    """

    def __init__(self, runner: Any) -> None:
        from vllm_plugin.extension import DeltaSyncWorkerExtension

        self.gate = Gate(_HELD_S)
        self._extension = DeltaSyncWorkerExtension()
        self._extension.model_runner = runner
        self._device: torch.device = runner.device
        self._leading: Future[None] | None = None
        execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

        @functools.wraps(execute_model)
        def gated_execute_model(*args: Any, **kwargs: Any) -> Any:
            self.gate.begin()
            try:
                output = execute_model(*args, **kwargs)
            except BaseException:
                self.gate.end()
                raise
            if output is not None:
                self.gate.end()
            return output

        @functools.wraps(sample_tokens)
        def gated_sample_tokens(*args: Any, **kwargs: Any) -> Any:
            try:
                return sample_tokens(*args, **kwargs)
            finally:
                self.gate.end()

        runner.execute_model, runner.sample_tokens = gated_execute_model, gated_sample_tokens

    def answer(self, method: str, *arguments: Any) -> Reply:
        """Do what the first worker asks for."""
        if method == "hold":
            return {"count": self.gate.hold(*arguments)}
        if method == "release":
            self.gate.release()
            return {}
        call: Callable[..., Reply] = getattr(self._extension, method)
        if method == "deltasync_call" and arguments[0] in _WRITES:
            return reply(lambda: self._write(call, *arguments))
        return call(*arguments)

    def _write(self, call: Callable[..., Reply], *arguments: Any) -> Reply:
        self.gate.write()
        self._synchronize()  # steps are launched by another thread, so only the device tells when they have ended
        try:
            return call(*arguments)
        finally:
            self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def read(self, method: str, *arguments: Any) -> Reply:
        """What a caller from outside may ask for, while no commit is going on."""
        if method not in _READS:
            return {"error": describe(ConfigError(f"{method!r} cannot be asked of workers that follow by themselves."))}
        with self.gate.step():
            return self._extension.deltasync_call(method, *arguments)

    def obey(self, first: Connection) -> None:
        """Answer the first worker in a thread, for as long as it lives."""

        def run() -> None:
            while True:
                try:
                    number, method, arguments = first.recv()
                    first.send((number, self.answer(method, *arguments)))
                except (EOFError, OSError):
                    return

        threading.Thread(target=run, name="deltasync-alone", daemon=True).start()

    def lead(self, others: Sequence[Connection], settings: ReplicaSettings) -> None:
        """Run the driver in a thread, with this worker and the others."""
        loop = asyncio.new_event_loop()
        driver = Driver(Members(self, others), settings, Metrics(CollectorRegistry()))
        threading.Thread(target=loop.run_forever, name="deltasync-alone", daemon=True).start()
        self._leading = asyncio.run_coroutine_threadsafe(driver.run(), loop)
        self._leading.add_done_callback(_tell_end)

    def stop(self) -> None:
        """End following, if this is the worker that leads."""
        if self._leading is not None:
            self._leading.cancel()


def _tell_end(leading: Future[None]) -> None:
    if not leading.cancelled():
        logger.error("deltasync no longer follows", exc_info=leading.exception())


class Members:
    """All workers, as the driver of the first one sees an engine client.

    Args:
        first: The worker in this process.
        others: Connections to the others, in the order of their ranks.
        answer_s: How long to wait for an answer.
    """

    def __init__(self, first: Member, others: Sequence[Connection], answer_s: float = ANSWER_S) -> None:
        self._first = first
        self._others = others
        self._answer_s = answer_s
        self._asked = 0

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Reply]:
        """Call a method of the extension on every worker; what changes the model for a moment, between two steps.

        Raises:
            ApplyError: they cannot be held; nothing was called.
        """
        if method != "deltasync_open" and args[0] != "prove":
            return self._ask(method, *args)
        await self.pause_generation()
        try:
            return self._ask(method, *args)
        finally:
            await self.resume_generation()

    async def pause_generation(self, **_: object) -> None:
        """Hold all workers between the same two steps.

        Raises:
            ApplyError: one does not answer, or they do not get there in time.
        """
        meet(self._hold, self._answer_s)

    async def resume_generation(self) -> None:
        """Let all workers go on."""
        self._ask("release")

    async def update_weight_version(self, version: str) -> None:
        """Nothing: vLLM keeps it in the API server."""

    def _hold(self, limit: int | None) -> list[Count]:
        replies = self._ask("hold", limit, _LOOK_S)
        for found in replies:
            if "error" in found:
                raise ApplyError(found["error"])
        return [found["count"] for found in replies]

    def _ask(self, method: str, *arguments: Any) -> list[Reply]:
        """What all workers answer; `{"error": text}` of one that does not."""
        self._asked += 1
        deadline = time.monotonic() + self._answer_s
        for connection in self._others:
            with contextlib.suppress(OSError):  # told by `_answer`
                connection.send((self._asked, method, arguments))
        first = self._first.answer(method, *arguments)
        return [first, *(self._answer(rank, connection, deadline) for rank, connection in enumerate(self._others, 1))]

    def _answer(self, rank: int, connection: Connection, deadline: float) -> Reply:
        try:
            while connection.poll(max(0.0, deadline - time.monotonic())):
                number, answer = connection.recv()
                if number == self._asked:  # and not a late answer to an earlier question
                    return answer
        except (EOFError, OSError):
            return {"error": f"Worker {rank} has ended."}
        return {"error": f"Worker {rank} has not answered for {self._answer_s:g} s."}
