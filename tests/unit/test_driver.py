"""The driver and its routes over one real worker in this process; test_vllm_routes.py has a real vLLM."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
from prometheus_client import CollectorRegistry

from deltasync import Publisher, open_store
from deltasync.channel import signing
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    ApplyError,
    CommitError,
    FingerprintMismatchError,
    NotPublishedError,
    StoreError,
    TransientStoreError,
)
from deltasync.following import Commit, Follow
from deltasync.serve import heartbeat
from deltasync.serve.engine import Failure
from deltasync.serve.metrics import Metrics
from deltasync.serve.requests import token_matches
from tests import driving
from tests.driving import PATIENCE_S, Driver, Engine, Trainer, following, serving, until, value
from tests.faults import flipped
from tests.waiting import wait_until
from vllm_plugin import compat
from vllm_plugin.worker import DeltaSyncWorkerExtension

engine, registry, trainer = driving.engine, driving.registry, driving.trainer  # fixtures


def test_what_no_trusted_key_has_signed_reaches_no_worker(
    engine: Engine, memory_url: str, registry: CollectorRegistry, tmp_path: Path
) -> None:
    for name in ("ours", "theirs"):
        signing.new_key(tmp_path / name, name)
    store, ours = open_store(memory_url), tmp_path / "ours.pub"
    trainer = Trainer(store, signing.Signer(tmp_path / "ours"))

    async def body() -> None:
        async with following(engine, memory_url, registry, trusted_keys=ours) as driver:
            trainer.publish()
            assert await driver.reach(None) == 1
            assert driver.status().trusted_keys == [ours.read_text().split()[0]]
            live, before = engine.model.w.clone(), trainer.channel.tip
            trainer.channel.signer = signing.Signer(tmp_path / "theirs")
            trainer.publish()
            await until(lambda: driver.status(0).error is not None)
            assert "is signed with the key" in driver.status(0).error
            assert (driver.version, engine.model.w.equal(live)) == (1, True)
            trainer.channel.signer, trainer.channel.tip = signing.Signer(tmp_path / "ours"), before
            trainer.publish()
            assert await driver.reach(2) == 2

    asyncio.run(body())
    # A worker reads documents by itself, and holds them to the keys that the driver names.
    refused = Engine().worker.deltasync_open(memory_url, str(tmp_path / "theirs.pub"))
    assert refused["error"]["kind"] == "CorruptDataError"
    assert refused["error"]["message"].startswith("channel.json is signed with the key")
    assert Engine().worker.deltasync_open(memory_url, str(ours)) == {"result": None}


def test_weights_are_followed_in_one_way_only(engine: Engine, trainer: Trainer, memory_url: str) -> None:
    trainer.publish()
    assert engine.worker.deltasync_open(memory_url) == {"result": None}
    second = DeltaSyncWorkerExtension()
    second.model_runner = engine.worker.model_runner
    assert "choose one" in second.deltasync_open(memory_url)["error"]["message"]
    assert Engine().worker.deltasync_open(memory_url) == {"result": None}


def test_reach_makes_the_driver_look_at_once(
    engine: Engine,
    trainer: Trainer,
    memory_url: str,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deltasync.following.poll._FIRST_S", 1000.0)

    async def body() -> None:
        trainer.publish()
        driver = Driver(
            engine,
            ReplicaSettings(channel=memory_url, poll_interval_s=1000, replica_id="unit"),
            Metrics(registry),
        )
        driver.start()
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: driver.version is not None and driver.status().state == "serving")
            version = trainer.publish()
            await asyncio.sleep(0.1)
            assert driver.version != version
            assert await driver.reach(version) == version
        await asyncio.to_thread(driver.stop)

    asyncio.run(body())


def test_the_version_changes_only_while_generation_is_paused(
    engine: Engine, trainer: Trainer, memory_url: str, registry: CollectorRegistry
) -> None:
    async def body() -> None:
        async with following(engine, memory_url, registry) as driver:
            trainer.publish()
            await driver.reach(1)
            trainer.publish()
            await driver.reach(2)
            await until(lambda: driver.status().state == "serving")

    asyncio.run(body())
    # The first version has other weights than the model, so that it is loaded as well.
    assert engine.events == [("pause", None), ("resume", 1), ("pause", 1), ("resume", 2)]


def test_generation_stays_paused_until_vllm_was_told_the_version(
    engine: Engine,
    trainer: Trainer,
    memory_url: str,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its prefix cache would mix versions."""

    async def body() -> None:
        settings = ReplicaSettings(channel=memory_url, replica_id="unit")
        driver = engine.driver = Driver(engine, settings, Metrics(registry))
        while driver.version != 1:
            await driver.refresh()

        trainer.publish()
        with monkeypatch.context() as patch:
            patch.setattr(engine, "set_weight_version", Mock(side_effect=RuntimeError("no answer")))
            for _ in range(2):
                await driver.refresh()
                assert "no answer" in driver.status().error
                assert engine.events[-1] == ("pause", 1)
        await driver.refresh()
        assert (driver.version, engine.weight_version, engine.events[-1]) == (2, "2", ("resume", 2))
        await driver.refresh()
        assert driver.status().state == "serving"

    trainer.publish()
    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


def test_metrics_count_what_was_committed(
    engine: Engine, trainer: Trainer, memory_url: str, registry: CollectorRegistry
) -> None:
    async def body() -> list[Commit]:
        async with following(engine, memory_url, registry) as driver:
            for version in (1, 2, 3):
                trainer.publish()
                await driver.reach(version)
            await until(lambda: value(registry, "deltasync_served_version") == 3)
            commits = driver.status().commits
            assert driver.status(0).commits == []
            assert driver.status(2).commits == commits[-2:]
            return commits

    commits = asyncio.run(body())
    assert [commit.anchor for commit in commits] == [True, False, False]
    assert value(registry, "deltasync_newest_version") == 3
    assert value(registry, "deltasync_commits_total", kind="anchor") == 1
    assert value(registry, "deltasync_commits_total", kind="delta") == 2
    assert value(registry, "deltasync_commits_total", kind="compaction") == 0
    assert value(registry, "deltasync_payload_bytes_total") == sum(commit.payload_bytes for commit in commits)
    for name in ("lag", "stage", "pause"):
        assert value(registry, f"deltasync_{name}_seconds_count") == 3
        total = sum(getattr(commit, f"{name}_s") for commit in commits)
        assert value(registry, f"deltasync_{name}_seconds_sum") == pytest.approx(total)
    assert value(registry, "deltasync_rollbacks_total") == 0


def test_to_catch_up_is_no_lag(
    engine: Engine, trainer: Trainer, memory_url: str, registry: CollectorRegistry
) -> None:
    async def body() -> list[Commit]:
        trainer.publish()
        trainer.publish()
        time.sleep(0.01)
        async with following(engine, memory_url, registry) as driver:
            await driver.reach(2)
            assert trainer.publish() == await driver.reach(3)
            engine.worker._deltasync_shard.fall_asleep()
            trainer.publish()
            await driver.refresh()
            assert driver.status().state == "sleeping"
            time.sleep(0.01)
            await driver.refresh()
            engine.worker._deltasync_shard.wake_up()
            await driver.reach(4)
            return driver.status().commits

    commits = asyncio.run(body())
    lags_s = {commit.version: commit.lag_s for commit in commits}
    assert lags_s[2] is lags_s[4] is None and lags_s[3] is not None
    assert value(registry, "deltasync_lag_seconds_count") == 1
    assert value(registry, "deltasync_lag_seconds_sum") == pytest.approx(lags_s[3])
    assert value(registry, "deltasync_stage_seconds_count") == len(commits)


def test_workers_are_left_alone_as_long_as_nothing_happened(
    engine: Engine,
    trainer: Trainer,
    memory_url: str,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        calls: list[tuple[object, ...]] = []
        driver = Driver(engine, ReplicaSettings(channel=memory_url, replica_id="unit"), Metrics(registry))
        trainer.publish()
        await driver.catch_up_in_thread()
        rpc = engine.collective_rpc

        async def collective_rpc(method: str, *, args: tuple[object, ...]) -> list[Any]:
            calls.append(args)
            return await rpc(method, args=args)

        async def looks(*, asked: bool = False) -> list[tuple[object, ...]]:
            calls.clear()
            for _ in range(3):
                await driver.refresh(asked=asked)
            return calls

        monkeypatch.setattr(driver.pauses, "_call_first", collective_rpc)
        await driver.refresh()
        assert await looks() == []
        assert await looks(asked=True) == [("settled",)] * 3
        async with driver.pauses.other_caller():
            pass
        assert await looks() == [("settled",)]
        async with driver.pauses.other_caller():
            engine.worker._deltasync_shard.fall_asleep()
        assert await looks() == [("settled",)] * 3
        assert driver.status().state == "sleeping"
        engine.worker._deltasync_shard.wake_up()
        assert ("audit",) in await looks()
        assert await looks() == []
        trainer.publish()
        called = await looks()
        assert driver.version == 2 and ("settled",) not in called  # a commit has told
        with monkeypatch.context() as patch:
            patch.setattr(driver.cursor, "next", Mock(side_effect=StoreError("The store does not answer.")))
            assert await looks() == []
            assert driver.status().state == "failed"
        monkeypatch.setattr("deltasync.serve.shards._SURE_S", 0.0)
        assert await looks() == [("settled",)] * 3

    asyncio.run(body())


def test_to_go_back_and_to_be_pinned_is_no_lag(
    engine: Engine, trainer: Trainer, memory_url: str, registry: CollectorRegistry
) -> None:
    async def body() -> list[Commit]:
        driver = Driver(engine, ReplicaSettings(channel=memory_url, replica_id="unit"), Metrics(registry))
        for _ in range(3):
            trainer.publish()
            await driver.catch_up_in_thread()
        await driver.catch_up_in_thread(2)
        await driver.catch_up_in_thread()
        trainer.publish()
        await driver.catch_up_in_thread()
        trainer.publish()
        await driver.catch_up_in_thread(5)
        return driver.status().commits

    told = [(commit.version, commit.lag_s is None) for commit in asyncio.run(body())]
    assert told == [(1, False), (2, False), (3, False), (2, True), (3, True), (4, False), (5, True)]


def test_a_workers_error_keeps_its_class() -> None:
    for error in (FingerprintMismatchError("Version 2 ..."), NotPublishedError("ApplyError: told by itself")):
        told = Failure.of(error).error()
        assert (type(told), str(told)) == (type(error), str(error))
    for kind in ("KeyError", "UNREADABLE_JSON", "Number", "__doc__"):
        told = Failure(kind, "'x'").error()
        assert (type(told), str(told)) == (ApplyError, f"Unexpected {kind}: 'x'")


def test_metrics_reach_the_other_api_processes_of_a_server(tmp_path: Any) -> None:
    write = """
from deltasync.serve.metrics import Metrics
from types import SimpleNamespace
metrics = Metrics()
metrics.stepped(SimpleNamespace(version=5, newest=7, health=SimpleNamespace(stuck_s=0.5)))
metrics.pause.observe(0.02)
"""
    read = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for code in (write, read):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "deltasync_served_version 5.0" in done.stdout
    assert "deltasync_newest_version 7.0" in done.stdout
    assert "deltasync_pause_seconds_count 1.0" in done.stdout


def test_only_the_token_itself_is_taken() -> None:
    def basic(credentials: str) -> str:
        return "Basic " + base64.b64encode(credentials.encode()).decode()

    for good in ("Bearer s3cret", "bearer s3cret", basic("anyone:s3cret"), basic(":s3cret")):
        assert token_matches(good, "s3cret"), good
    bad = [
        None,
        "",
        "s3cret",
        "Bearer",
        "Bearer ",
        "Bearer s3cre",
        "Bearer s3crets",
        "Bearer S3CRET",
        "Digest s3cret",
    ]
    bad += ["Basic s3cret", "Basic !!!", basic("s3cret"), basic("s3cret:"), "Bearer \xe9", "Bearer \udcff"]
    for header in bad:
        assert not token_matches(header, "s3cret"), header


def test_a_step_that_is_published_again_is_waited_for_in_the_newest_epoch(
    engine: Engine, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer goes on from an older checkpoint, so its steps repeat."""
    weights = {"w": driving.Model().state_dict()["w"].clone()}

    def publish(publisher: Publisher, step: int) -> int:
        weights["w"].view(torch.int16)[:3] += 1
        return publisher.publish(weights.items(), step=step).wait(60).version

    with Publisher(memory_url) as publisher:
        publish(publisher, 50)
        publish(publisher, 100)
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        assert client.post("/receive_weight_update", json={"version": 100}).json()["version"] == 2
        with Publisher(memory_url, resume=True) as publisher:
            early = client.post("/receive_weight_update", json={"version": 60, "timeout_s": 0.5})
            assert early.status_code == 504, "version 2 is of step 100, but of the epoch before"
            version = publish(publisher, 60)
            assert client.post("/receive_weight_update", json={"version": 60}).json()["version"] == version
            assert torch.equal(engine.model.w, weights["w"])


def _refused(*_: object, **__: object) -> NoReturn:
    raise TransientStoreError("the store is away")


def test_a_pin_that_is_refused_or_overtaken_is_answered_409(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        trainer.publish()
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        assert client.post("/deltasync/sync").json()["version"] == 3
        monkeypatch.setattr("deltasync.limits.WAITING_REQUESTS", 0)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.Semaphore, "locked", lambda _: True)
            assert client.post("/deltasync/pin", json={"pin": "1"}).status_code == 429
        assert client.get("/deltasync/status").json()["pin"] is None, "nothing was changed"
        pin = Follow.set_pin

        def overtaken(self: Follow, wanted: int | None, *, checked: bool = False) -> None:
            pin(self, wanted, checked=checked)
            if wanted == 1:
                self.cursor.next = _refused  # type: ignore[method-assign]
                asyncio.get_running_loop().call_later(0.2, pin, self, 2)

        monkeypatch.setattr(Follow, "set_pin", overtaken)
        late = client.post("/deltasync/pin", json={"pin": "1", "timeout_s": 30})
        assert (
            late.status_code == 409
            and late.json()["error"] == "The pin of this replica was changed meanwhile to: 2."
        )


def test_a_trainer_that_counts_by_itself_waits_for_its_step(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        assert client.post("/init_process_group", json={"world_size": 2}).json()["status"] == "ok"
        trainer.publish()  # tells no step
        for route in ("/receive_weight_update", "/request_weight_update"):
            assert client.post(route).json()["version"] == 1
        request = {"kind": "weight_update_request", "version": 2048, "parameters_info": [], "timestamp": 0.5}
        early = client.post("/receive_weight_update", json=request | {"timeout_s": 0.2})
        assert early.status_code == 504 and early.json()["error"].startswith(
            "Step 2048 is not served after 0.2 s: this "
        )
        trainer.publish(step=1024)
        assert client.post("/receive_weight_update", json=request | {"timeout_s": 0.2}).status_code == 504
        trainer.publish(step=4096)
        assert client.post("/receive_weight_update", json=request).json()["version"] == 3


def test_with_a_token_only_the_state_and_the_versions_are_open(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = {"Authorization": "Bearer s3cret"}, {"Authorization": "Bearer secret"}
    with serving(engine, monkeypatch, CHANNEL=memory_url, HTTP_TOKEN="s3cret") as client:
        trainer.publish()
        guarded = [
            ("POST", "/deltasync/sync"),
            ("POST", "/receive_weight_update"),
            ("POST", "/request_weight_update"),
        ]
        guarded += [("POST", "/init_process_group")]
        guarded += [("GET", "/deltasync/"), ("GET", "/deltasync"), ("GET", "/deltasync/digest")]
        for method, path in guarded:
            for headers in ({}, bad):
                reply = client.request(method, path, headers=headers)
                assert reply.status_code == 401, path
                assert "Basic" in reply.headers["www-authenticate"]
                assert "s3cret" not in reply.text
            assert client.request(method, path, headers=good).status_code == 200, path
        assert client.get("/deltasync/status", headers=bad).status_code == 401
        short, whole = (client.get("/deltasync/status", headers=headers) for headers in ({}, good))
        told = {name: whole.json()[name] for name in ("run_id", "epoch", "sha256")}
        told |= {"state": "serving", "version": 1, "newest_version": 1, "logprobs_mode": "raw_logprobs"}
        assert short.json() == told and whole.json()["replica_id"]
        seen = heartbeat.heartbeat_of("http://router", short.content, whole.json()["run_id"])
        assert seen.serving == trainer.channel.tip, (
            "a trainer without the token can wait for its version behind a router"
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports to look for the cause
def test_a_server_with_another_model_has_no_digest_and_says_why(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish()
    engine.model.w = torch.nn.Parameter(torch.zeros(40, 31, dtype=torch.bfloat16), requires_grad=False)
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        wait_until(lambda: client.get("/deltasync/status").json()["state"] == "failed")
        why = client.get("/deltasync/status").json()["error"]
        reply = client.get("/deltasync/digest")
        assert (reply.status_code, reply.json()["error"].endswith(why)) == (503, True), reply.text
        assert "have no digest. ModelMismatchError: " in reply.json()["error"]


def test_a_server_that_follows_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(None, monkeypatch) as client:
        for reply in (client.get("/deltasync/status"), client.post("/deltasync/sync")):
            assert reply.status_code == 503
            assert "DELTASYNC_CHANNEL" in reply.json()["error"]
        assert "x-deltasync-versions" not in client.post("/v1/completions").headers


def test_who_asks_gets_a_version_as_soon_as_it_is_repaired(
    engine: Engine, memory_url: str, trainer: Trainer, registry: CollectorRegistry
) -> None:
    async def scene() -> None:
        driver = Driver(engine, ReplicaSettings(channel=memory_url, replica_id="unit"), Metrics(registry))
        trainer.publish()
        while driver.version != 1:
            await driver.refresh()
        trainer.publish()
        store = open_store(memory_url)
        (key,) = (info.key for info in store.list("versions/") if "0000000002." in info.key)
        honest = store.read(key, 1 << 30)
        store.put(key, flipped(honest))
        await driver.refresh(asked=True)
        assert key in (driver.status().error or "")
        store.put(key, honest)
        await driver.refresh()
        assert driver.version == 1
        await driver.refresh(asked=True)
        assert driver.version == 2

    asyncio.run(scene())


def test_an_audit_finds_a_flipped_bit_and_the_next_look_loads_full_weights(
    engine: Engine,
    memory_url: str,
    trainer: Trainer,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deltasync.following.loop.AUDIT_S", 0.0)

    async def scene() -> None:
        settings = ReplicaSettings(channel=memory_url, replica_id="unit")
        driver = Driver(engine, settings, Metrics(registry))
        version = trainer.publish()
        while driver.version != version:
            await driver.refresh()
        engine.model.w.view(torch.int16)[30, 5] ^= 1
        await driver.refresh()
        assert driver.version is None
        assert "not those of version 1 any more" in driver.status().error
        await driver.refresh()
        assert driver.version == version
        assert torch.equal(engine.model.w.view(torch.int16), trainer.weights["w"].view(torch.int16))
        await driver.refresh()
        assert driver.status().state == "serving"

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def configured(name: str, **fields: object) -> Callable[[Engine], None]:
    """Sets a part of vLLM's configuration."""
    return lambda engine: setattr(engine.vllm_config, name, SimpleNamespace(**fields))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: setattr(e.vllm_config.parallel_config, "enable_eplb", True), "--enable-eplb"),
        (lambda e: setattr(e.vllm_config.load_config, "load_format", "ipc_cache"), "ipc_cache"),
        (
            configured(
                "offload_config", offload_backend="auto", prefetch=SimpleNamespace(offload_group_size=2)
            ),
            "Prefetch offloading",
        ),
        (configured("weight_transfer_config", backend="deltasync"), "A trainer pushes versions here"),
        (
            configured("kv_transfer_config", kv_connector="LMCacheConnectorV1"),
            "LMCacheConnectorV1 may hand requests",
        ),
        (
            configured("parallel_config", is_moe_model=True, data_parallel_size=2, local_engines_only=True),
            "Servers that share experts would take a version at different times",
        ),
        (configured("ec_transfer_config", ec_connector="ECExampleConnector"), "ECExampleConnector may hand"),
        (
            configured("ec_manager_config", encoder_cache_manager_cls="my.Manager"),
            "my.Manager may hand requests",
        ),
        (configured("speculative_config", draft_lm_head_quantization="fp8"), "draft_lm_head_quantization"),
        (lambda e: setattr(e, "salted", False), "prefix cache would mix versions"),
        (lambda e: delattr(e, "engine_core"), "prefix cache would mix versions"),
        (lambda e: delattr(e, "vllm_config"), "deltasync could not start: AttributeError"),
        (
            lambda e: setattr(e.vllm_config.parallel_config, "worker_extension_cls", ""),
            "without --worker-extension-cls",
        ),
        (
            lambda e: setattr(e.vllm_config.parallel_config, "worker_extension_cls", "argparse.Namespace"),
            "with --worker-extension-cls argparse.Namespace, not with vllm_plugin.DeltaSyncWorkerExtension",
        ),
        (lambda e: setattr(e, "channel", "ftp://a/b"), "ftp"),
    ],
)
@pytest.mark.parametrize("waits", ["1", "0"])
def test_a_server_that_cannot_follow_says_why_and_answers_only_if_that_is_set(
    engine: Engine,
    trainer: Trainer,
    memory_url: str,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    said: str,
    waits: str,
) -> None:
    trainer.publish()
    change(engine)
    channel = getattr(engine, "channel", memory_url)
    with serving(engine, monkeypatch, CHANNEL=channel, WAIT_READY=waits) as client:
        pushed = (
            getattr(engine.vllm_config, "weight_transfer_config", None)
            if hasattr(engine, "vllm_config")
            else None
        )
        reply = client.post("/v1/completions")
        assert reply.status_code == (503 if waits == "1" and pushed is None else 200)
        assert reply.status_code == 200 or said in reply.json()["error"]["message"]
        status = client.get("/deltasync/status").json()
        assert (status["state"], status["version"], status["channel"]) == ("refused", None, channel)
        assert said in status["error"]
        assert client.get("/deltasync/ready").status_code == 503
        assert said in client.get("/deltasync/ready").json()["reason"]
        assert client.post("/deltasync/sync").status_code == 503
        assert value(client.app.state.registry, "deltasync_following") == 0  # type: ignore[attr-defined]
    assert engine.events == []


@pytest.mark.parametrize("fitting", ["copy", "uva", "explicit"])
def test_the_variants_that_can_be_followed_with_are_not_refused(engine: Engine, fitting: str) -> None:
    config = engine.vllm_config
    config.kv_transfer_config = SimpleNamespace(
        kv_connector="OffloadingConnector" if fitting == "uva" else None
    )
    config.ec_transfer_config = SimpleNamespace(ec_connector=None)
    if fitting == "copy":
        config.load_config.load_format, config.load_config.model_loader_extra_config = (
            "ipc_cache",
            {"mode": "copy"},
        )
    else:
        config.offload_config = SimpleNamespace(
            offload_backend=fitting if fitting == "uva" else "auto",
            prefetch=SimpleNamespace(offload_group_size=2 if fitting == "uva" else 0),
        )
    assert compat.refusal(config) is None


def test_another_version_of_vllm_is_refused_in_one_sentence() -> None:
    assert [compat.outside(version) for version in ("0.32.1+cpu", "0.33.0.dev5")] == [None] * 2
    for version in ("0.31.0", "0.34.0", "1.0.0", "dev"):
        assert f"not with {version}: install one of these" in (compat.outside(version) or "")


def test_ready_means_that_a_version_is_served_that_is_new_enough(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(engine, monkeypatch, CHANNEL=memory_url, READY_BEHIND="1", HTTP_TOKEN="s3cret") as client:
        reply = client.get("/deltasync/ready")
        assert reply.status_code == 503
        assert "serves no version" in reply.json()["reason"]
        trainer.publish()
        client.post("/deltasync/sync", headers={"Authorization": "Bearer s3cret"})
        assert (
            client.get("/deltasync/ready").status_code,
            client.get("/deltasync/ready").json()["ready"],
        ) == (200, True)


def test_ready_ends_where_the_server_falls_behind_or_sleeps(
    engine: Engine, trainer: Trainer, memory_url: str, registry: CollectorRegistry
) -> None:
    async def body() -> None:
        trainer.publish()
        async with following(engine, memory_url, registry, ready_behind=1) as driver:
            await until(lambda: driver.not_ready is None)
            newest = driver.cursor.newest
            assert newest is not None
            for behind, ready in ((1, True), (2, False)):
                driver.cursor.tip.version = dataclasses.replace(newest, version=newest.version + behind)
                assert (driver.not_ready is None) is ready
            assert "2 behind version 3" in (driver.not_ready or "")
            driver.cursor.tip.version = newest

    asyncio.run(body())


def test_no_request_is_answered_before_the_server_was_ready(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        reply = client.post("/v1/completions")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert "serves no version" in reply.json()["error"]["message"]
        assert client.get("/deltasync/status").status_code == 200
        trainer.publish()
        client.post("/deltasync/sync")
        assert client.post("/v1/completions").status_code == 200
        with monkeypatch.context() as patch:  # once ready, it answers on
            patch.setattr(Follow, "not_ready", "behind")
            assert client.post("/v1/completions").status_code == 200


def test_a_server_that_cannot_tell_whether_it_is_ready_does_not_answer(
    engine: Engine, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Follow, "not_ready", property(lambda _: 1 // 0))
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        assert client.post("/v1/completions").status_code == 503


@pytest.mark.parametrize("heals", ["audit", "anchor"])
def test_generation_stays_paused_after_a_commit_that_could_not_be_undone(
    engine: Engine,
    trainer: Trainer,
    memory_url: str,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    heals: str,
) -> None:
    async def body() -> None:
        settings = ReplicaSettings(channel=memory_url, replica_id="unit")
        driver = engine.driver = Driver(engine, settings, Metrics(registry))
        while driver.version != 1:
            await driver.refresh()
        trainer.publish()
        memory = engine.worker._deltasync_shard.weights.memory
        with monkeypatch.context() as patch:

            def fail(staged: Any) -> Any:
                if heals == "anchor":
                    engine.model.w.view(torch.int16)[:2] += 7  # bits that no version has
                raise CommitError("the weights are uncertain")

            patch.setattr(memory, "commit", fail)
            await driver.refresh()
        assert "CommitError" in driver.status().error
        assert engine.events[-1] == ("pause", 1), "not resumed"
        assert driver.pauses.held
        before = len(engine.events)
        while driver.version != 2:
            await driver.refresh()
        if heals == "audit":  # which finds that the old bits are there
            assert engine.events[before:] == [("resume", 1), ("pause", 1), ("resume", 2)]
        else:  # it finds bits of no version, and full weights come before the first token
            assert engine.events[before:] == [("pause", None), ("resume", 1), ("pause", 1), ("resume", 2)]
        assert torch.equal(engine.model.w, trainer.weights["w"])

    trainer.publish()
    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))
    assert value(registry, "deltasync_rollbacks_total") == 0
