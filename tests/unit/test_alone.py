"""Workers that follow by themselves: two of them in this process, each with half of a weight and a copy of a bias."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltasync import Publisher, heartbeat
from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, ConfigError
from deltasync.heartbeat import Heartbeat
from deltasync.live import LiveMemory
from deltasync.stores import open_store
from vllm_plugin import alone
from vllm_plugin.alone import Member, Members
from vllm_plugin.extension import DeltaSyncWorkerExtension
from vllm_plugin.worker import WorkerReplica

PATIENCE_S = 60.0
ROWS = 20


def initial() -> dict[str, torch.Tensor]:
    weight = torch.randn(2 * ROWS, 30, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return {"w": weight, "b": torch.ones(30, dtype=torch.bfloat16)}


class Shard(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.w = torch.nn.Parameter(torch.empty(ROWS, 30, dtype=torch.bfloat16), requires_grad=False)
        self.b = torch.nn.Parameter(torch.empty(30, dtype=torch.bfloat16), requires_grad=False)
        self.load_weights(iter(initial().items()))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).copy_(tensor[self.rank * ROWS :][:ROWS] if name == "w" else tensor)


class Runner:
    """vLLM's model runner as far as the plugin goes: every step meets the other worker's and notes the weights it saw."""

    def __init__(self, rank: int, barrier: threading.Barrier) -> None:
        self.model = Shard(rank)
        self.model_config = SimpleNamespace(model="/no/checkpoint")
        self.device = torch.device("cpu")
        self.seen: list[list[float]] = []
        self._barrier = barrier

    def get_model(self) -> Shard:
        return self.model

    def execute_model(self, scheduler_output: int) -> str | None:
        self.seen.append([float(self.model.b[0])])
        self._barrier.wait(PATIENCE_S)
        if scheduler_output % 3 == 0:
            return "nothing to sample"
        return None

    def sample_tokens(self, grammar_output: None) -> str:
        self.seen[-1].append(float(self.model.b[0]))
        return "tokens"


class Server:
    """An engine with two workers that follow a channel, and the trainer that publishes to it."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url)
        barrier = threading.Barrier(2)
        self.runners = [Runner(rank, barrier) for rank in range(2)]
        self.members = [Member(runner) for runner in self.runners]
        first, second = Pipe()
        self.members[1].obey(second)
        settings = ReplicaSettings(channel=url, replica_id="unit", poll_interval_s=0.02)
        self.members[0].lead([first], settings)
        self.weights = initial()
        self.publisher = Publisher(url)

    def publish(self) -> int:
        """A version whose number the bias is, so that a step can see which it runs on."""
        self.weights["w"].view(torch.int16)[:, :3] += 1
        self.weights["b"].fill_(float((self.heartbeat() or 0) + 1))
        return self.publisher.publish(self.weights.items()).wait(PATIENCE_S).version

    def beat(self) -> Heartbeat | None:
        found = heartbeat.read_all(self.store, self.publisher.run_id or "")
        return found[0] if found else None

    def heartbeat(self) -> int | None:
        beat = self.beat()
        return None if beat is None else beat.version

    def wait(self, condition: Callable[[Heartbeat], bool]) -> Heartbeat:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            beat = self.beat()
            if beat is not None and condition(beat):
                return beat
            assert time.monotonic() < deadline, beat
            time.sleep(0.005)

    def live(self) -> dict[str, torch.Tensor]:
        """The weights of both workers together; their copies must be the same."""
        shards = [runner.model for runner in self.runners]
        assert torch.equal(shards[0].b, shards[1].b)
        return {"w": torch.cat([shard.w for shard in shards]), "b": shards[0].b}

    def assert_serves(self, version: int) -> None:
        self.wait(lambda beat: beat.version == version and beat.error is None)
        live = self.live()
        assert all(torch.equal(live[name].view(torch.int16), self.weights[name].view(torch.int16)) for name in live)


@pytest.fixture(params=[PATIENCE_S])
def server(memory_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Server]:
    """Its parameter is how long the first worker waits for an answer."""
    monkeypatch.setattr(alone, "Members", functools.partial(Members, answer_s=request.param))
    # There is no vLLM here to name the files that it loaded, so nothing is compared with them.
    monkeypatch.setattr("vllm_plugin.load_plan.checkpoint", lambda _: iter(()))
    server = Server(memory_url)
    yield server
    server.members[0].stop()
    server.publisher.close()


class Steps:
    """The engine's steps, on both workers, while this is open."""

    def __init__(self, server: Server) -> None:
        self._runners = server.runners
        self._last = 1 << 60
        self._threads = [threading.Thread(target=self._run, args=(runner,)) for runner in self._runners]

    def _run(self, runner: Runner) -> None:
        step = 0
        while step < self._last:
            step += 1
            if runner.execute_model(step) is None:
                runner.sample_tokens(None)
            time.sleep(0.0005)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._last = max(len(runner.seen) for runner in self._runners) + 100
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_two_workers_follow_by_themselves_while_idle_and_during_steps(server: Server) -> None:
    for _ in range(3):
        server.assert_serves(server.publish())
    with Steps(server):
        for _ in range(10):
            server.assert_serves(server.publish())
    first, second = (runner.seen for runner in server.runners)
    assert first == second
    assert all(len(set(step)) == 1 for step in first)
    assert len({step[0] for step in first}) >= 8


def test_the_load_plan_is_recorded_between_two_steps(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def open_and_note(runner: Runner, channel: str, trusted_keys: str | None) -> WorkerReplica:
        for _ in range(2):
            counts.append([member.gate.hold(None, 0.0) for member in server.members])
            time.sleep(0.05)  # many steps, if they went on
        return WorkerReplica(runner, channel, trusted_keys)

    monkeypatch.setattr("vllm_plugin.extension.WorkerReplica", open_and_note)
    with Steps(server):
        server.assert_serves(server.publish())
    assert len(counts) == 4
    assert counts == [[(counts[0][0][0], False)] * 2] * 4


def test_what_one_worker_cannot_commit_the_other_undoes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.assert_serves(server.publish())
    before = {name: tensor.clone() for name, tensor in server.live().items()}
    commit = LiveMemory.commit
    broken = server.runners[1].model.w.data_ptr()

    def fail_on_one(self: LiveMemory, staged: Any) -> Any:
        if self._segments["w"][0].live.data_ptr() == broken:
            raise ApplyError("This worker cannot.")
        return commit(self, staged)

    with Steps(server):
        with monkeypatch.context() as patch:
            patch.setattr(LiveMemory, "commit", fail_on_one)
            version = server.publish()
            beat = server.wait(lambda beat: beat.state == "failed")
            assert (beat.version, beat.head_version) == (version - 1, version)
            assert "This worker cannot." in (beat.error or "")
            assert all(torch.equal(server.live()[name], before[name]) for name in before)
        server.assert_serves(version)
    assert server.runners[0].seen == server.runners[1].seen


@pytest.mark.parametrize("server", [0.5], indirect=True)
def test_a_worker_that_commits_too_late_undoes_before_its_next_step(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.assert_serves(server.publish())
    commit = LiveMemory.commit
    slow, late = server.runners[1].model.w.data_ptr(), []

    def commit_late_once(self: LiveMemory, staged: Any) -> Any:
        report = commit(self, staged)
        if self._segments["w"][0].live.data_ptr() == slow and not late:
            late.append(float(server.runners[1].model.b[0]))
            time.sleep(1.2)
        return report

    monkeypatch.setattr(LiveMemory, "commit", commit_late_once)
    with Steps(server):
        version = server.publish()
        beat = server.wait(lambda beat: beat.state == "failed")
        assert (beat.version, beat.error) == (version - 1, "ApplyError: Worker 1 has not answered for 0.5 s.")
        server.assert_serves(version)
    assert late == [version]
    assert server.runners[0].seen == server.runners[1].seen
    assert {version - 1, version} == {value for step in server.runners[0].seen for value in step}


def test_bits_that_are_not_the_published_ones_are_rolled_back_by_both(server: Server) -> None:
    server.assert_serves(server.publish())
    before = {name: tensor.clone() for name, tensor in server.live().items()}
    server.publisher._fingerprints["no such tensor"] = 1
    version = server.publish()
    beat = server.wait(lambda beat: "did not give the published bits" in (beat.error or ""))
    assert beat.version == version - 1
    assert all(torch.equal(server.live()[name], before[name]) for name in before)


def test_callers_from_outside_may_read_but_not_take_over(server: Server) -> None:
    server.assert_serves(server.publish())
    member = server.members[1]
    assert len(member.read("digest_segments")["sha256"]["w"]) == 1
    assert "cannot be asked" in member.read("commit", False)["error"]
    worker = DeltaSyncWorkerExtension()
    worker._deltasync_alone = member
    assert "VLLM_PLUGINS=deltasync" in worker.deltasync_open("memory://other")["error"]
    assert worker.deltasync_call("read", "b") == {"bits": [server.weights["b"].view(torch.int16).numpy().tobytes()]}


def test_workers_connect_to_the_first_one_in_the_order_of_their_ranks() -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def world(rank: int) -> Any:
        def broadcast_object(thing: Any = None) -> Any:
            if thing is None:
                return told.get(timeout=PATIENCE_S)
            for _ in range(2):
                told.put(thing)
            return thing

        return SimpleNamespace(world_size=3, is_first_rank=rank == 0, rank_in_group=rank, broadcast_object=broadcast_object)

    def answer(rank: int) -> None:
        (connection,) = alone._connect(world(rank), "not needed")
        time.sleep(0.05)  # the other end waits for what comes later, too
        connection.send(f"I am {rank}, you are {connection.recv()}")

    others = [threading.Thread(target=answer, args=(rank,)) for rank in (2, 1)]
    for thread in others:
        thread.start()
    connections = alone._connect(world(0), "127.0.0.1")
    for number, connection in enumerate(connections):
        connection.send(number)
    assert [connection.recv() for connection in connections] == ["I am 1, you are 0", "I am 2, you are 1"]
    for thread in others:
        thread.join(PATIENCE_S)
    assert alone._connect(SimpleNamespace(world_size=1), "not needed") == []


def test_a_driver_that_ends_by_itself_is_told_of(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(alone.logger, "error", lambda text, exc_info: said.append(f"{text}: {exc_info}"))

    def fail(*_: object) -> None:
        raise RuntimeError("never foreseen")

    monkeypatch.setattr("vllm_plugin.driver.heartbeat.write", fail)
    server.publish()
    deadline = time.monotonic() + PATIENCE_S
    while not said:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert said == ["deltasync no longer follows: never foreseen"]
    server.members[0].stop()
    assert len(said) == 1


def members(answer_s: float) -> tuple[Members, Any]:
    """The first of two workers, and the other's end of the connection."""
    first, second = Pipe()
    runner: Any = Runner(0, threading.Barrier(1))
    return Members(Member(runner), [first], answer_s), second


def test_a_worker_that_does_not_answer_in_time_is_named_and_its_late_answer_is_no_answer_to_anything_else() -> None:
    both, other = members(0.05)
    assert both._ask("release") == [{}, {"error": "Worker 1 has not answered for 0.05 s."}]
    number, *_ = other.recv()
    other.send((number, {"late": True}))
    threading.Timer(0.01, lambda: other.send((number + 1, {"in": "time"}))).start()
    assert both._ask("release") == [{}, {"in": "time"}]


def test_a_worker_that_has_ended_is_named() -> None:
    both, other = members(PATIENCE_S)
    other.close()
    with pytest.raises(ApplyError, match="Worker 1 has ended"):
        both._hold(None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"DELTASYNC_CHANNEL": "file:///c"}, True),
        ({"DELTASYNC_CHANNEL": "file:///c", "VLLM_PLUGINS": "other"}, True),
        ({"DELTASYNC_CHANNEL": "file:///c", "VLLM_PLUGINS": "other,deltasync"}, False),
        ({"VLLM_PLUGINS": "other"}, False),
    ],
)
def test_workers_follow_by_themselves_where_no_driver_does(
    environ: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DELTASYNC_CHANNEL", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert alone.wanted() is expected


def config(**changes: Any) -> Any:
    values = {"workers": 2, "sleep": False, "prefix_caching": False, **changes}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=values["workers"]),
        model_config=SimpleNamespace(enable_sleep_mode=values["sleep"]),
        cache_config=SimpleNamespace(enable_prefix_caching=values["prefix_caching"]),
    )


@pytest.mark.parametrize(
    ("of_vllm", "kv_cache", "said"),
    [
        (config(workers=1), "keep", "data-parallel"),
        (config(sleep=True), "keep", "sleeps"),
        (config(), "recompute", "not recomputed"),
    ],
)
def test_what_takes_the_driver_is_refused_at_start(of_vllm: Any, kv_cache: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        alone._check(of_vllm, ReplicaSettings(kv_cache=kv_cache), 2)


def test_prefix_caching_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(alone.logger, "warning", said.append)
    alone._check(config(), ReplicaSettings(), 2)
    assert said == []
    alone._check(config(prefix_caching=True), ReplicaSettings(), 2)
    assert ["--no-enable-prefix-caching" in warning for warning in said] == [True]


def test_a_worker_starts_to_follow_when_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = []

    class Base:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def compile_or_warm_up_model(self) -> str:
            happened.append("warm")
            return "times"

        def shutdown(self) -> None:
            happened.append("shut down")

    class Worker(Base):
        pass

    # As vLLM does it: its own class first, the extension as a further base.
    Worker.__bases__ = (*Worker.__bases__, DeltaSyncWorkerExtension)
    monkeypatch.setattr("vllm_plugin.cpu.keep_weights_addressable", lambda: happened.append("addressable"))
    follower = SimpleNamespace(stop=lambda: happened.append("stopped"))
    monkeypatch.setattr(alone, "start", lambda worker: happened.append(f"worker {worker.rank} follows") or follower)
    monkeypatch.setenv("DELTASYNC_CHANNEL", "file:///c")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    worker = Worker(3)
    assert happened == ["addressable"]
    assert worker.compile_or_warm_up_model() == "times"
    worker.shutdown()
    assert happened[1:] == ["warm", "worker 3 follows", "stopped", "shut down"]
    monkeypatch.setenv("VLLM_PLUGINS", "deltasync")
    Worker(4).compile_or_warm_up_model()
    assert happened[5:] == ["warm"]
