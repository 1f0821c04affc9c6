"""What `watch` and its page see of a channel, and what they read for it."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from deltasync import Publisher, codec, open_store, ops
from deltasync.channel import keys, payloads
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import Retention
from deltasync.errors import ConfigError, NotPublishedError, TransientStoreError
from deltasync.ops import KeepPolicy
from deltasync.ops.cli import watch
from deltasync.ops.dashboard import ChannelObserver, PageServer, page
from deltasync.ops.heat import layer_of
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from tests.builders import finish_maintenance
from tests.channels import RUN, filled, states_of
from tests.faults import FOREVER, FaultyStore
from tests.waiting import wait_until

SHAPES = {
    "model.embed_tokens.weight": (50, 20),
    "model.layers.0.mlp.weight": (30, 20),
    "model.layers.0.norm.weight": (20,),
    "model.layers.1.mlp.weight": (30, 20),
    "lm_head.weight": (50, 20),
}
LAYERS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]


def ranges(store: FaultyStore) -> int:
    """Bytes of headers that were read. No payload or weights were read as a whole."""
    assert not any(
        key.startswith(("parts/", "anchors/"))
        for operation, key, _ in store.bytes_read
        if operation == "read"
    )
    return sum(size for operation, _, size in store.bytes_read if operation == "read_range")


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random).to(torch.bfloat16) for name, shape in SHAPES.items()}


@pytest.fixture
def publisher(memory_url: str) -> Iterator[Publisher]:
    with Publisher(memory_url, anchor_every=6, retention=Retention(compact_every=4)) as publisher:
        yield publisher


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


def publish(publisher: Publisher, weights: dict[str, torch.Tensor], count: int) -> None:
    random = torch.Generator().manual_seed(publisher.version)
    for _ in range(count):
        for position, tensor in enumerate(weights.values()):
            tensor.view(torch.int16)[torch.rand(tensor.shape, generator=random) < 0.02 * position] += 1
        publisher.publish(weights.items(), step=10 * (publisher.version + 1)).wait(60)
        finish_maintenance(publisher)


def beat(
    store: FaultyStore,
    run_id: str | None,
    name: str,
    version: int | None,
    state: str = "serving",
    *,
    stored_s: float | None = None,
    **more: object,
) -> None:
    """A heartbeat; `stored_s` is the store's time of it."""
    heartbeat.write(store, Heartbeat(replica_id=name, run_id=run_id, version=version, state=state, **more))  # type: ignore[arg-type]
    if stored_s is not None:
        (info,) = store.list(keys.replica(name))
        store.age(info.modified_s - stored_s, keys.replica(name))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
        ("transformer.h.11.attn.bias", "transformer.h.11"),
        ("0.weight", "0"),
        ("lm_head.weight", "lm_head"),
        ("model.conv1.weight", "model.conv1"),
        ("w", "w"),
    ],
)
def test_layer_of_a_tensor(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def records(store: FaultyStore) -> dict[int, StoredRecord]:
    reader = ChannelReader(store.inner)
    return {slot.version: reader.numbered(slot.version) for slot, _ in reader.slots()}


def test_versions_and_compactions_are_those_of_the_documents(
    publisher: Publisher, store: FaultyStore, weights: dict[str, torch.Tensor]
) -> None:
    publish(publisher, weights, 9)
    publisher.close()
    found = ChannelObserver(store).refresh()
    documents = records(store)
    assert (found.newest_version, found.forgotten, found.unread, found.run_id) == (9, 0, 0, publisher.run_id)
    assert (found.head_sha256, [row.version for row in found.versions]) == (
        documents[9].sha256,
        list(documents),
    )
    assert [row.version for row in found.versions if row.anchor_bytes is not None] == [1, 7]
    for row in found.versions:
        stored = documents[row.version]
        delta = stored.record.delta
        assert (row.sha256, row.epoch) == (stored.sha256, stored.record.epoch)
        assert row.delta_bytes == (None if delta is None else stored.record.payload_bytes)
        assert row.changed == (None if delta is None else delta.changed)
        assert row.step == 10 * row.version
    assert [(compaction.base_version, compaction.version) for compaction in found.compactions] == [(1, 5)]
    assert (
        found.full_bytes == 2 * found.element_count == 2 * sum(tensor.numel() for tensor in weights.values())
    )


@pytest.mark.parametrize("parts", [0, 2], ids=["in the record", "in parts"])
def test_heat_is_what_payloads_say_though_only_headers_are_read(
    store: FaultyStore, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    states = [weights]
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        states.append({name: tensor.clone() for name, tensor in states[-1].items()})
        for position, tensor in enumerate(states[-1].values()):
            tensor.view(torch.int16)[torch.rand(tensor.shape, generator=random) < 0.02 * position] += 1
    filled(store.inner, states, parts=range(parts, 7) if parts else ())
    expected = {}
    for version, stored in records(store).items():
        if stored.record.delta is not None:
            counts = dict.fromkeys(LAYERS, 0)
            for _, data in payloads.fetch(ChannelReader(store.inner), stored):
                delta, _ = codec.get("packed").decode(
                    codec.open_payload(data), ChannelReader(store.inner).layout
                )
                for name, changed in delta.counts().items():
                    counts[layer_of(name)] += changed
            expected[version] = list(counts.values())
    monkeypatch.setattr("deltasync.opening.ranges._HEADER_BYTES", 200)  # shorter than a header
    observer = ChannelObserver(store, heat=4)
    observer.refresh()
    assert ranges(store) == 0
    assert observer.read_headers(3) == 1
    assert set(observer.snapshot().heat) == {4, 5, 6}
    assert observer.read_headers(3) == 0
    found = observer.snapshot()
    assert found.layers == LAYERS
    assert set(found.heat) == {3, 4, 5, 6}
    elements = [
        sum(weights[name].numel() for name in weights if name.startswith(f"{one}.")) for one in LAYERS
    ]
    for version, fractions in found.heat.items():
        assert fractions == pytest.approx(
            [n / total for n, total in zip(expected[version], elements, strict=True)], rel=1e-3
        )
        assert fractions[0] == 0 < fractions[-1]
    sizes = [row.delta_bytes or 0 for row in found.versions[-4:]]
    assert 0 < ranges(store) < sum(sizes)
    read = ranges(store)
    observer.refresh()
    observer.read_headers(100)
    assert ranges(store) == read


def test_a_look_reads_what_is_new_only(
    publisher: Publisher, store: FaultyStore, weights: dict[str, torch.Tensor]
) -> None:
    publish(publisher, weights, 4)
    settle(publisher, store)
    observer = ChannelObserver(store, last=3)
    assert [row.version for row in observer.refresh().versions] == [2, 3, 4]
    assert observer.snapshot().unread == 1
    store.calls.clear()
    observer.refresh()
    assert store.calls == [("read", keys.HEAD), ("list", keys.REPLICAS)]
    publish(publisher, weights, 1)
    settle(publisher, store)
    store.calls.clear()
    assert [row.version for row in observer.refresh().versions] == [3, 4, 5]
    read = [key for operation, key in store.calls if operation == "read" and key.startswith(keys.VERSIONS)]
    assert [keys.slot_of(key).version for key in read] == [5]  # type: ignore[union-attr]


def settle(publisher: Publisher, store: FaultyStore) -> None:
    """Until head, which nobody waits for, names the newest version."""
    wait_until(lambda: (head := ChannelReader(store.inner).head()) and head.version == publisher.version)


def test_what_is_forgotten_meanwhile(
    publisher: Publisher,
    store: FaultyStore,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deltasync.ops.dashboard.observe._LIST_EVERY_S", 0.0)
    publish(publisher, weights, 9)
    publisher.close()
    observer = ChannelObserver(store)
    before = observer.refresh()
    ops.gc(ChannelReader(store.inner), KeepPolicy(last=2), grace_s=0)
    found = observer.refresh()
    assert (found.forgotten, [row.version for row in found.versions]) == (6, [7, 8, 9])
    assert found.stored_bytes < before.stored_bytes
    assert {"event": "forgotten", "count": 6, "left": 3} in list(watch.changes(before, found))


def test_replicas_by_their_heartbeats(
    publisher: Publisher, store: FaultyStore, weights: dict[str, torch.Tensor]
) -> None:
    publish(publisher, weights, 5)
    run = publisher.run_id
    beat(store, run, "ahead", 5)
    beat(store, run, "behind", 3)
    beat(store, run, "bad", 2, "failed", error="it broke")
    beat(store, run, "new", None, "waiting")
    beat(store, run, "silent", 1, stored_s=time.time() - 2 * heartbeat.LIVE_S)
    beat(store, run, "stopped", 2, "stopped")
    beat(store, run, "pinned", 1, pin="1")
    beat(store, "another", "elsewhere", 5)
    observer = ChannelObserver(store)
    rows = {row.replica_id: row for row in observer.refresh().replicas}
    assert {name: (row.behind, row.live) for name, row in rows.items()} == {
        "ahead": (0, True),
        "behind": (2, True),
        "bad": (3, True),
        "new": (None, True),
        "silent": (4, False),
        "stopped": (3, False),
        "pinned": (4, True),
    }
    assert (rows["pinned"].pin, rows["pinned"].lag_s) == ("1", None)
    assert rows["ahead"].lag_s == 0
    assert rows["silent"].lag_s is rows["stopped"].lag_s is rows["new"].lag_s is None
    created = {row.version: row.created_s for row in observer.snapshot().versions}
    assert rows["behind"].lag_s == pytest.approx(time.time() - created[4], abs=1)
    assert rows["bad"].lag_s == pytest.approx(rows["behind"].lag_s + created[4] - created[3], abs=0.1)  # type: ignore[operator]
    assert rows["bad"].error == "it broke"


def test_lag_is_known_for_what_happened_while_somebody_looked(
    publisher: Publisher, store: FaultyStore, weights: dict[str, torch.Tensor]
) -> None:
    publish(publisher, weights, 3)
    run = publisher.run_id
    observer = ChannelObserver(store)
    created = {row.version: row.created_s for row in observer.refresh().versions}
    beat(store, run, "a", 1, stored_s=created[3] + 0.001)
    assert observer.refresh().lags == []  # it may have served it for long
    beat(store, run, "a", 1, stored_s=time.time())
    assert observer.refresh().lags == []
    publish(publisher, weights, 1)
    settle(publisher, store)
    created = {row.version: row.created_s for row in observer.refresh().versions}
    beat(store, run, "a", 4, stored_s=created[4] + 3.5)
    (lag,) = observer.refresh().lags
    (info,) = [info for info in store.list(keys.VERSIONS) if "0000000004." in info.key]
    expected_s = created[4] + 3.5 - info.modified_s  # by the store's clock alone
    assert (lag.replica_id, lag.version, lag.lag_s) == ("a", 4, pytest.approx(expected_s, abs=2e-3))


def test_to_catch_up_and_to_go_back_are_no_lag(
    publisher: Publisher, store: FaultyStore, weights: dict[str, torch.Tensor]
) -> None:
    publish(publisher, weights, 4)
    settle(publisher, store)
    run, late_s = publisher.run_id, time.time() + 5810
    observer = ChannelObserver(store)
    for version, state in (
        (None, "waiting"),
        (2, "serving"),
        (4, "serving"),
        (3, "serving"),
        (4, "stopped"),
        (4, "serving"),
        (2, "serving"),
    ):
        beat(store, run, "a", version, state, stored_s=late_s)
        assert observer.refresh().lags == []
    for version in (1, 5):
        beat(store, run, "pinned", version, pin=str(version), stored_s=late_s)
        publish(publisher, weights, 1)
        settle(publisher, store)
        assert observer.refresh().lags == []


def test_damage_is_told_and_the_rest_shown(
    publisher: Publisher,
    store: FaultyStore,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(publisher, weights, 4)
    slots = {slot.version: slot.key for slot, _ in ChannelReader(store.inner).slots()}
    store.tamper(slots[2], lambda data: data[:-20])
    store.inner.put(keys.replica("odd"), b"{")
    observer = ChannelObserver(store, heat=9)
    assert [row.version for row in observer.refresh().versions] == [1, 3, 4]
    store.tamper(slots[3], lambda data: b"\xff" * len(data))
    store.tamper(slots[4], lambda data: data.replace(b".2.counts", b".2.chants"))
    observer.read_headers(9)
    found = observer.snapshot()
    assert found.heat == {}
    assert [slots[number] in problem for number, problem in zip((2, 3, 4), found.problems, strict=True)] == [
        True
    ] * 3
    assert [
        change["problem"] for change in watch.changes(None, found) if change["event"] == "problem"
    ] == found.problems
    store.heal()
    monkeypatch.setattr("deltasync.ops.dashboard.observe._LIST_EVERY_S", 0.0)
    healed = observer.refresh()
    assert [row.version for row in healed.versions] == [1, 2, 3, 4]
    assert healed.problems == found.problems[1:]
    assert next(watch.changes(found, healed))["version"] == 2


def test_an_anchor_that_is_announced_later_and_a_version_of_another_epoch(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.ops.dashboard.observe._LIST_EVERY_S", 0.0)
    channel, versions = filled(store.inner, states_of(50, 5))
    observer = ChannelObserver(store)
    before = observer.refresh()
    channel.announce(versions[3])
    channel.epoch, channel.tip = keys.new_epoch(2), versions[2]  # after a restored backup, say
    channel.delta(states_of(50, 6)[5])
    channel.head()
    beat(store, RUN, "lost", 4, epoch=versions[3].epoch, sha256=versions[3].sha256)
    beat(store, RUN, "right", 4, epoch=channel.tip.epoch, sha256=channel.tip.sha256)
    found = observer.refresh()
    assert (found.newest_version, found.head_sha256, len(found.versions)) == (4, channel.tip.sha256, 4)
    assert {row.replica_id: row.strange for row in found.replicas} == {"lost": True, "right": False}
    sentences = [watch.sentence(change) for change in watch.changes(before, found)]
    assert any("not the channel's version" in sentence for sentence in sentences)
    channel.announce(channel.tip)
    (told,) = watch.changes(found, observer.refresh())
    assert told["event"] == "anchor" and f"anchor of version 4 ({channel.tip.sha256[:12]})" in watch.sentence(
        told
    )


def test_nothing_is_published_and_the_store_is_away(
    memory_url: str, weights: dict[str, torch.Tensor]
) -> None:
    store = FaultyStore(open_store(memory_url))
    observer = ChannelObserver(store)
    assert observer.refresh().newest_version is None
    with Publisher(memory_url) as publisher:
        publish(publisher, weights, 2)
    assert observer.refresh().newest_version == 2
    store.fail_at("read", keys.HEAD, times=FOREVER)
    with pytest.raises(TransientStoreError):
        observer.refresh()
    found = observer.snapshot(error="away")
    assert (found.newest_version, len(found.versions), found.error) == (2, 2, "away")


def test_what_is_stored_counts_what_was_not_read_too(store: FaultyStore) -> None:
    filled(store.inner, states_of(50, 6), parts=(3, 6), anchors=(4,), compactions=((2, 5),))
    payload = ("versions/", "compactions/", "announcements/", "parts/", "anchors/")
    held = sum(info.bytes for info in store.inner.list("") if info.key.startswith(payload))
    found = ChannelObserver(store, last=2).refresh()
    assert found.unread == 4
    assert found.stored_bytes == held


def test_a_version_takes_three_requests(memory_url: str, weights: dict[str, torch.Tensor]) -> None:
    store = FaultyStore(open_store(memory_url))
    with Publisher(store) as publisher:
        for _ in range(2):
            publish(publisher, weights, 1)
            settle(publisher, store)
        store.calls.clear()
        publish(publisher, weights, 1)
        settle(publisher, store)
        assert len(store.calls) == 3  # the record; head is read and replaced behind it


def test_watch_prints_a_line_per_change(
    publisher: Publisher, store: FaultyStore, weights: dict[str, torch.Tensor]
) -> None:
    url = store.url
    waiting = CliRunner().invoke(watch.watch, [url, "--once", "--json"])
    assert waiting.exit_code == NotPublishedError.exit_code
    publish(publisher, weights, 5)
    publisher.close()
    beat(store, publisher.run_id, "a", 4)
    done = CliRunner().invoke(watch.watch, [url, "--once", "--json"])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["event"], line.get("version")) for line in lines] == [
        *(("version", version) for version in range(1, 6)),
        ("compaction", 5),
        ("replica", 4),
    ]
    assert lines[1]["changed_fraction"] == lines[1]["changed"] / sum(
        tensor.numel() for tensor in weights.values()
    )
    shown = CliRunner().invoke(watch.watch, [url, "--once", "--last", "2"])
    digests = {number: stored.sha256[:12] for number, stored in records(store).items()}
    assert [line.split("  ", 1)[1].partition(":")[0] for line in shown.stdout.splitlines()] == [
        f"version 4 ({digests[4]}, step 40)",
        f"version 5 ({digests[5]}, step 50)",
        "compaction 1-5",
        "replica a",
    ]


def test_watch_tells_only_what_is_new(
    publisher: Publisher, store: FaultyStore, weights: dict[str, torch.Tensor]
) -> None:
    publish(publisher, weights, 2)
    observer = ChannelObserver(store)
    first = observer.refresh()
    assert list(watch.changes(first, observer.refresh())) == []
    beat(store, publisher.run_id, "a", 2)
    publish(publisher, weights, 1)
    settle(publisher, store)
    second = observer.refresh()
    assert [change["event"] for change in watch.changes(first, second)] == ["version", "replica"]
    beat(store, publisher.run_id, "a", 2)  # a later heartbeat that says the same
    assert list(watch.changes(second, observer.refresh())) == []
    failed = observer.snapshot(error="away")
    assert list(watch.changes(second, failed)) == [{"event": "error", "error": "away"}]
    assert list(watch.changes(failed, failed)) == []


def test_the_terminal_shows_versions_and_replicas(
    publisher: Publisher, store: FaultyStore, weights: dict[str, torch.Tensor]
) -> None:
    publish(publisher, weights, 5)
    publisher.close()
    beat(store, publisher.run_id, "far", 2, "failed", error="[red]it broke")
    beat(store, publisher.run_id, "gone", 2, "stopped")
    beat(store, publisher.run_id, "held", 2, pin="2")
    beat(store, publisher.run_id, "lost", 2, stored_s=time.time() - 2 * heartbeat.LIVE_S)
    console = Console(width=120, file=io.StringIO())
    console.print(watch.screen(ChannelObserver(store).refresh()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"version 5 ({records(store)[5].sha256[:12]}, step 50)" in text
    assert "serving, pinned to 2" in text and "failed" in text and "[red]it broke" in text
    states = [line.split()[:2] for line in text.splitlines() if line.split()[:1] in (["gone"], ["lost"])]
    assert states == [["gone", "stopped"], ["lost", "silent"]]
    assert "5 versions, 1 with full weights, 1 compaction;" in text
    assert watch.sparkline([0, 50, 100]) == "▁▅█"
    assert watch.sparkline([0, 0]) == "▁▁"


def test_no_name_ends_the_script(
    publisher: Publisher, store: FaultyStore, weights: dict[str, torch.Tensor]
) -> None:
    publish(publisher, weights, 1)
    beat(store, publisher.run_id, "a", 1, error="</script><script>alert(1)</script>")
    document = page(ChannelObserver(store).refresh()).decode()
    assert document.count("</script>") == page().decode().count("</script>") == 2
    data = document.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["replicas"][0]["error"] == "</script><script>alert(1)</script>"
    assert "http" not in document.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_the_server_answers_this_machine_only(
    publisher: Publisher, store: FaultyStore, weights: dict[str, torch.Tensor]
) -> None:
    publish(publisher, weights, 3)
    with PageServer(ChannelObserver(store, heat=9), 0, 0.05) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        address = urlsplit(server.url).netloc

        def get(path: str, host: str = address) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection(address, timeout=30)
            connection.request("GET", path, headers={"Host": host})
            reply = connection.getresponse()
            found = reply.status, reply.read()
            connection.close()
            return found

        def data() -> dict[str, object]:
            return json.loads(get("/data.json")[1]) or {}

        try:
            assert get("/") == (200, page())
            assert get("/other")[0] == 404
            assert get("/data.json", "attacker.example:80")[0] == 403
            wait_until(lambda: (found := data()).get("heat_unread") == 0 and found["heat"])
            publish(publisher, weights, 1)
            wait_until(lambda: data()["newest_version"] == 4)
            store.fail_at("read", keys.HEAD, times=FOREVER)
            wait_until(lambda: data()["error"])
            store.heal()
            # a bug of ours: it goes on looking
            store.fail_at("read", keys.HEAD, times=FOREVER, error=ValueError)
            wait_until(lambda: str(data()["error"]).startswith("Unexpected ValueError: "))
            store.heal()
            wait_until(lambda: data()["error"] is None)
            with pytest.raises(ConfigError, match=r"Port \d+ on 127.0.0.1 cannot be used"):
                PageServer(ChannelObserver(store), int(address.partition(":")[2]), 1.0)
        finally:
            server._http.shutdown()
            thread.join()
