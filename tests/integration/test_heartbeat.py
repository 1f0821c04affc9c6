from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.utils import get_session

from deltasync import Publisher
from deltasync.channel import keys
from deltasync.channel.documents import sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.errors import AckTimeoutError, ConfigError, StoreError, TransientStoreError
from deltasync.following import Follow, MemoryTarget
from deltasync.following.status import Status
from deltasync.serve import heartbeat, life
from deltasync.serve.heartbeat import Heartbeat
from deltasync.serve.heartbeats import HeartbeatWriter
from deltasync.serve.life import Life
from deltasync.stores import Store, open_store
from tests.answers import Answers, Asked
from tests.faults import FaultyStore, truncated
from tests.waiting import wait_until

RUN = "run-1"
LONG_AGO_S = 2 * heartbeat.LIVE_S
EPOCH = "000001-00000000"
PUBLISHED = {version: sha256_hex(b"version %d" % version) for version in range(1, 5)}


@pytest.fixture
def store(channel_url: str) -> Store:
    return FaultyStore(open_store(channel_url))


def beat(
    store: Store,
    replica_id: str,
    version: int | None,
    state: str = "serving",
    *,
    error: str | None = None,
    age_s: float = 0.0,
    run_id: str = RUN,
    epoch: str | None = EPOCH,
    sha256: str | None = None,
) -> None:
    sha256 = PUBLISHED.get(version or 0) if sha256 is None else sha256
    told = Heartbeat(
        replica_id=replica_id,
        run_id=run_id,
        version=version,
        epoch=epoch,
        sha256=sha256,
        state=state,
        error=error,
        time_s=0.0,  # by its own clock, which does not matter
    )
    heartbeat.write(store, told)
    if age_s:
        assert isinstance(store, FaultyStore)
        store.age(age_s, f"replicas/{replica_id}.json")


def wait(store: Store, version: int, timeout_s: float = 0.0, urls: Sequence[str] = ()) -> list[str]:
    return [found.replica_id for found in heartbeat.wait_for(store, RUN, version, PUBLISHED, timeout_s, urls)]


def test_a_replica_whose_heartbeat_arrives_damaged_once_is_waited_for(store: Store) -> None:
    beat(store, "ahead", 4)
    beat(store, "behind", 3)
    left = [1]

    def cut_once(data: bytes) -> bytes:
        return truncated(data) if left and left.pop() else data

    assert isinstance(store, FaultyStore)
    store.tamper("replicas/behind", cut_once)
    with pytest.raises(AckTimeoutError, match="behind"):
        wait(store, 4)


OTHER = sha256_hex(b"version 3 of a backup that was restored")


@pytest.mark.parametrize("version", [3, 4])
def test_another_version_of_the_same_number_does_not_count(store: Store, version: int) -> None:
    beat(store, "elsewhere", version, sha256=OTHER)
    with pytest.raises(AckTimeoutError, match=rf"elsewhere \(serves version .*{OTHER[:8]}"):
        wait(store, 3)
    beat(store, "elsewhere", version, epoch=None)  # says a number, and not which version of it
    with pytest.raises(AckTimeoutError, match="elsewhere"):
        wait(store, 3)
    beat(store, "elsewhere", version)
    assert wait(store, 3) == ["elsewhere"]


def test_a_later_version_that_we_did_not_publish_does_not_count(store: Store) -> None:
    beat(store, "ahead", 9, sha256=OTHER)
    with pytest.raises(AckTimeoutError, match="ahead"):
        wait(store, 3)


def test_every_live_replica_is_waited_for(store: Store) -> None:
    beat(store, "ahead", 4)
    beat(store, "late", 1, "staging")
    with pytest.raises(AckTimeoutError) as failure:
        wait(store, 3)
    assert "late" in str(failure.value)
    assert "ahead" not in str(failure.value)
    beat(store, "late", 3, "staging")  # already on its way to the next one
    assert wait(store, 3) == ["ahead", "late"]


def test_a_dead_replica_is_passed_over_but_a_live_one_is_needed(store: Store) -> None:
    beat(store, "alive", 3)
    beat(store, "dead", 1, age_s=LONG_AGO_S)
    assert wait(store, 3) == ["alive"]
    beat(store, "alive", 3, age_s=LONG_AGO_S)
    with pytest.raises(AckTimeoutError, match="no replica is live") as failure:
        wait(store, 3)
    assert "alive" in str(failure.value)
    assert "dead" in str(failure.value)


def test_nobody_waits_for_a_replica_that_has_stopped(store: Store) -> None:
    beat(store, "gone", 1, "stopped")
    beat(store, "alive", 3)
    assert wait(store, 3) == ["alive"]


def test_a_replica_that_has_stopped_serves_nothing(store: Store) -> None:
    beat(store, "gone", 3, "stopped")
    with pytest.raises(AckTimeoutError, match=r"gone \(stopped 0 s ago\)"):
        wait(store, 3)


def test_a_server_that_is_named_is_waited_for_though_it_stops() -> None:
    served = {"version": 3, "epoch": EPOCH, "sha256": PUBLISHED[3]}
    answer = json.dumps({"state": "stopped", "run_id": RUN} | served).encode()
    found = heartbeat.heartbeat_of("http://a", answer, RUN)
    assert heartbeat.is_live(found) and not heartbeat._serves(found, 3, PUBLISHED)
    assert found.error == "http://a is stopping"


def test_heartbeats_expire_from_acks_and_listings(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    beat(store, "new", 3)
    beat(store, "gone", 1)
    # Written an hour ago by the store's clock; by its own clock, which is wrong, it is live.
    expired_s = time.time() - heartbeat.EXPIRED_S - 1
    os.utime(tmp_path / "replicas" / "gone.json", (expired_s, expired_s))
    assert [found.replica_id for found in heartbeat.read_all(store, RUN)] == ["new"]
    assert wait(store, 3) == ["new"]


def test_a_heartbeat_that_is_not_read_in_time_serves_nothing(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    store.hold_at("read")
    beat(store.inner, "hangs", 2)
    with pytest.raises(
        AckTimeoutError, match=r"hangs \(serves no version, unread, .* could not be read in time"
    ):
        wait(store, 2, timeout_s=0.1)
    store.heal()


def test_a_replica_whose_clock_is_wrong_is_waited_for(store: Store) -> None:
    run = {"run_id": RUN, "epoch": EPOCH, "state": "serving"}
    for replica_id, version, skew_s in [
        ("good", 3, 0.0),
        ("behind", 1, -2 * heartbeat.LIVE_S),
        ("ahead", 2, 3600.0),
    ]:
        time_s = time.time() + skew_s
        heartbeat.write(
            store,
            Heartbeat(
                replica_id=replica_id, version=version, sha256=PUBLISHED[version], time_s=time_s, **run
            ),
        )
    with pytest.raises(AckTimeoutError, match=r"lag: ahead .*; behind "):
        wait(store, 3)


def test_a_replica_that_goes_on_is_live_whatever_time_the_store_has(store: Store) -> None:
    known = heartbeat.FleetHeartbeats(store, RUN)
    beat(store, "replica", 1, age_s=LONG_AGO_S)
    assert not heartbeat.is_live(known.refresh()[0])
    beat(store, "replica", 1, age_s=LONG_AGO_S - 1)  # the store's clock is behind ours
    assert heartbeat.is_live(known.refresh()[0])


def test_a_look_reads_only_what_has_changed_and_who_does_not_serve(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FaultyStore(open_store(memory_url))
    for number in range(20):
        beat(store, f"replica-{number:02d}", 2)
    beat(store, "straggler", 1)
    known = heartbeat.FleetHeartbeats(store, RUN)
    serves = lambda found: found.version == 2  # noqa: E731
    known.refresh(enough=serves)
    store.bytes_read.clear()
    assert len(known.refresh(enough=serves)) == 21
    assert [key for _, key, _ in store.bytes_read] == ["replicas/straggler.json"]
    monkeypatch.setattr(heartbeat, "_COARSE_S", -1.0)  # as if it had not changed for a while
    known.refresh(enough=serves)
    store.bytes_read.clear()
    assert len(known.refresh()) == 21
    assert "replicas/straggler.json" not in [key for _, key, _ in store.bytes_read]
    beat(store, "straggler", 22)
    store.bytes_read.clear()
    known.refresh(enough=serves)
    assert [key for _, key, _ in store.bytes_read] == ["replicas/straggler.json"]


def test_every_replica_counts_however_many_there_are(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    served = {"run_id": RUN, "epoch": EPOCH, "state": "serving", "time_s": 0.0}
    ready = json.dumps(served | {"replica_id": "ready", "version": 2, "sha256": PUBLISHED[2]}).encode()
    late = json.dumps(served | {"replica_id": "straggler", "version": 1, "sha256": PUBLISHED[1]}).encode()
    for number in range(10_000):
        store.inner.put(f"replicas/{number:05d}.json", ready.replace(b"ready", b"r%05d" % number))
    store.inner.put("replicas/straggler.json", late)
    store.age(20.0, "replicas/straggler.json")  # it was heard of before all others
    known = heartbeat.FleetHeartbeats(store, RUN, decides=True)
    with pytest.raises(AckTimeoutError, match=r"these replicas lag: straggler \(serves version 1[^;]*\)\.$"):
        heartbeat.wait_for(store, RUN, 2, PUBLISHED, 0.0, known=known)
    store.bytes_read.clear()
    store.inner.put(
        "replicas/straggler.json",
        late.replace(b'"version": 1', b'"version": 2').replace(PUBLISHED[1].encode(), PUBLISHED[2].encode()),
    )
    assert len(heartbeat.wait_for(store, RUN, 2, PUBLISHED, 60.0, known=known)) == 10_001
    # the others served it already
    assert {key for _, key, _ in store.bytes_read} == {"replicas/straggler.json"}


def test_a_look_ends_with_one_that_lags_and_reads_a_few_others(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    for number in range(100):
        beat(store, f"replica-{number:02d}", 1)
    known = heartbeat.FleetHeartbeats(store, RUN)
    serves, lags = (lambda found: found.version == 2), (lambda found: found.version == 1)
    looked: list[int] = []

    def look() -> list[Heartbeat]:
        store.bytes_read.clear()
        found = known.refresh(enough=serves, ends=lags)
        looked.append(len(store.bytes_read))
        return found

    states = Counter(found.state for found in look())
    assert states == {"serving": 20, "unread": 80}
    for number in range(100):
        if number != 70:
            beat(store, f"replica-{number:02d}", 2)
    found = {found.replica_id: found.version for found in look()}
    assert looked == [20, 80] and found.pop("replica-70") == 1  # the fourth twenty have it
    assert sorted(Counter(found.values()).items(), key=str) == [(2, 79), (None, 20)]
    look()
    beat(store, "replica-70", 2)
    assert {found.version for found in look()} == {2} and max(looked[2:]) <= 20


def test_an_error_names_some_of_many(store: Store) -> None:
    for number in range(50):
        beat(store, f"late-{number:02d}", 1)
    with pytest.raises(AckTimeoutError, match=r"late-00 .*; late-19 [^;]*; and 30 more\.$"):
        wait(store, 2)


@pytest.mark.parametrize("ahead_s", [-7200.0, 0.0, 7200.0])
def test_ages_are_by_the_stores_clock(memory_url: str, ahead_s: float) -> None:
    store = FaultyStore(open_store(memory_url), ahead_s=ahead_s)
    beat(store, "straggler", 1)
    beat(store, "dead", 1, age_s=LONG_AGO_S)
    beat(store, "ready", 2)
    store.age(20.0, "replicas/straggler.json")
    with pytest.raises(
        AckTimeoutError, match=r"lag: straggler \(serves version 1 [^;]*serving, 2[0-9] s ago\)\.$"
    ):
        wait(store, 2)
    # only to be shown
    seen = {found.replica_id: heartbeat.is_live(found) for found in heartbeat.read_all(store, RUN)}
    assert seen == {"dead": False, "ready": True, "straggler": True}


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
@pytest.mark.parametrize("decides", [True, False])
def test_a_dead_fleet_is_dead_by_any_clock(memory_url: str, ahead_s: float, decides: bool) -> None:
    store = FaultyStore(open_store(memory_url), ahead_s=ahead_s)
    beat(store, "dead", 1, age_s=LONG_AGO_S)
    (found,) = heartbeat.FleetHeartbeats(store, RUN, decides=decides).refresh()
    # nothing looks old to who only shows it, for a minute
    assert heartbeat.is_live(found) == (not decides and ahead_s > 0)


def test_where_nothing_may_be_written_the_newest_heartbeat_tells_the_time(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url), ahead_s=-7200.0)
    beat(store, "dead", 1, age_s=LONG_AGO_S)
    beat(store, "ready", 2)
    store.fail_at("put", "probe/", times=1 << 30, error=StoreError)
    assert wait(store, 2) == ["ready"]


def test_a_replica_that_a_listing_leaves_out_is_waited_for(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    beat(store, "straggler", 1)
    beat(store, "ready", 2)
    known = heartbeat.FleetHeartbeats(store, RUN, decides=True)
    assert len(known.refresh()) == 2
    store.hide(lambda key: "straggler" in key)
    with pytest.raises(AckTimeoutError, match="lag: straggler"):
        heartbeat.wait_for(store, RUN, 2, PUBLISHED, 0.0, known=known)


def test_a_failed_replica_lags_whatever_it_serves_and_is_named_with_its_error(store: Store) -> None:
    beat(store, "broken", 3, "failed", error="disk full")
    with pytest.raises(AckTimeoutError) as failure:
        wait(store, 3)
    assert "broken" in str(failure.value)
    assert "disk full" in str(failure.value)


def test_replicas_of_another_run_do_not_count(store: Store) -> None:
    beat(store, "stranger", 9, run_id="run-2")
    with pytest.raises(AckTimeoutError, match="no replica has ever reported"):
        wait(store, 3)


def test_a_replica_that_has_no_version_yet_lags(store: Store) -> None:
    beat(store, "new", None, "waiting")
    with pytest.raises(AckTimeoutError, match="new"):
        wait(store, 1)


def test_waits_until_the_version_is_served(store: Store) -> None:
    beat(store, "replica", 1)
    later = threading.Timer(0.3, beat, (store, "replica", 2))
    later.start()
    before = time.monotonic()
    assert wait(store, 2, timeout_s=3600) == ["replica"]
    assert time.monotonic() - before > 0.25
    later.join()


def test_a_transient_error_is_tried_again(store: Store) -> None:
    faulty = FaultyStore(store)
    beat(store, "replica", 2)
    fault = faulty.fail_at("read", "replicas/", times=2, error=TransientStoreError)
    assert wait(faulty, 2, timeout_s=60) == ["replica"]
    assert fault.hits == 2


def test_a_lasting_error_is_raised(store: Store) -> None:
    faulty = FaultyStore(store)
    beat(store, "replica", 2)
    faulty.fail_at("read", "replicas/", error=StoreError)
    with pytest.raises(StoreError):
        wait(faulty, 2, timeout_s=20)


# --- servers that are asked
# --------------------------------------------------------------------------------------------


class StatusServer(Answers):
    """Answers as a replica's routes do; the real ones are asked in the tests with vLLM."""

    def __init__(self) -> None:
        self.status = {
            "run_id": RUN,
            "state": "serving",
            "version": 2,
            "epoch": EPOCH,
            "sha256": PUBLISHED[2],
        }
        self.token: str | None = None
        self.found = True  # whether it has deltasync's routes
        self.asked_for: list[int] = []
        super().__init__(self._answer)

    def _answer(self, asked: Asked) -> tuple[int, object]:
        if asked.body:
            self.asked_for.append(json.loads(asked.body)["version"])
            return 504, {"error": "not yet"}
        status = self.status
        if self.token is not None and "authorization" not in asked.headers:
            status = {name: status[name] for name in ("state", "run_id", "version", "epoch", "sha256")}
        elif self.token is not None and asked.headers["authorization"] != f"Bearer {self.token}":
            return 401, {"error": "no"}
        return 200 if self.found else 404, status


@pytest.fixture
def server() -> Iterator[StatusServer]:
    with StatusServer() as server:
        yield server


def test_servers_are_asked_instead_of_heartbeats(store: Store, server: StatusServer) -> None:
    beat(store, "elsewhere", 9)
    assert wait(store, 2, urls=[server.url]) == [server.url]
    with pytest.raises(AckTimeoutError, match=rf"{server.url} .serves version 2"):
        wait(store, 3, urls=[server.url])
    heartbeat.wake([server.url], 3)
    assert server.asked_for == [3]


def test_every_server_on_the_list_is_waited_for(store: Store, server: StatusServer) -> None:
    nobody = "http://127.0.0.1:9"
    with pytest.raises(AckTimeoutError, match=rf"lag: {nobody} .serves no version, unreachable"):
        wait(store, 2, urls=[server.url, nobody])
    heartbeat.wake([nobody], 2)  # nothing to wake, nothing raised


def test_a_required_server_that_does_not_follow_is_not_waited_for(store: Store, server: StatusServer) -> None:
    server.found = False
    began = time.monotonic()
    with pytest.raises(
        ConfigError, match=rf"^The vLLM server at {server.url} does not follow a channel, .* Version 3 is"
    ):
        heartbeat.wait_for(store, RUN, 3, PUBLISHED, 3600.0, [server.url], required=True)
    assert time.monotonic() - began > 3.0
    # one of many servers, which may be a proxy that starts
    with pytest.raises(AckTimeoutError, match="answered 404"):
        heartbeat.wait_for(store, RUN, 3, PUBLISHED, 4.0, [server.url])
    back = threading.Timer(1.5, setattr, (server, "found", True))
    back.start()
    assert heartbeat.wait_for(store, RUN, 2, PUBLISHED, 60.0, [server.url], required=True)


def test_a_server_that_follows_another_run_lags(store: Store, server: StatusServer) -> None:
    server.status["run_id"] = "run-2"
    with pytest.raises(AckTimeoutError, match="it follows run run-2"):
        wait(store, 2, urls=[server.url])


def test_a_server_with_another_version_of_the_same_number_lags(store: Store, server: StatusServer) -> None:
    server.status["sha256"] = OTHER
    with pytest.raises(AckTimeoutError, match=rf"{server.url} \(serves version 2"):
        wait(store, 2, urls=[server.url])


def test_a_server_with_a_token_wants_it_or_none(
    store: Store, server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "secret"
    assert wait(store, 2, urls=[server.url]) == [server.url]
    monkeypatch.setenv("DELTASYNC_HTTP_TOKEN", "secret")
    assert wait(store, 2, urls=[server.url]) == [server.url]
    monkeypatch.setenv("DELTASYNC_HTTP_TOKEN", "other")
    with pytest.raises(AckTimeoutError, match="answered 401: set DELTASYNC_HTTP_TOKEN to the server's"):
        wait(store, 2, urls=[server.url])


def test_no_token_goes_where_a_redirect_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASYNC_HTTP_TOKEN", "secret")
    stolen, seen = list[Asked](), list[Asked]()
    with Answers(lambda asked: stolen.append(asked) or (200, b"")) as thief:

        def redirect(asked: Asked) -> tuple[int, bytes, dict[str, str]]:
            seen.append(asked)
            return 302, b"", {"location": thief.url}

        with Answers(redirect, "localhost") as server:  # another host than the thief's
            (found,) = heartbeat.ask([server.url], RUN)
            assert found.state == "unreachable"
            assert found.error is not None and "302, a redirect, which is not followed" in found.error
            heartbeat.wake([server.url], 3)
    assert [asked.headers["authorization"] for asked in seen] == ["Bearer secret"] * 2
    assert seen[1].headers["content-type"] == "application/json" and not stolen


def test_the_hubs_token_does_not_go_where_a_redirect_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    stolen, seen = list[Asked](), list[Asked]()
    with Answers(lambda asked: (stolen.append(asked), (200, b""))[1]) as thief:
        redirect = 302, b"", {"location": thief.url}
        with Answers(lambda asked: (seen.append(asked), redirect)[1], "localhost") as server:
            get_session().request(
                "GET", server.url, headers={"authorization": "Bearer secret"}, follow_redirects=True
            )
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert len(stolen) == 1 and "authorization" not in stolen[0].headers


def test_a_server_that_hangs_is_not_waited_for(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes the connection, and says nothing
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(AckTimeoutError, match="does not answer in time"):
            wait(store, 2, timeout_s=0.2, urls=[url])


def told(store: Store, boot: str, version: int, state: str = "serving", pin: str | None = None) -> Status:
    """The status of a replica in a container, where each has the same name."""
    identity: dict[str, Any] = {"version": version, "epoch": EPOCH, "sha256": PUBLISHED[version]}
    return Status(
        replica_id="localhost-1", channel=store.url, run_id=RUN, state=state, boot=boot, pin=pin, **identity
    )


def test_two_replicas_of_one_name_are_two_and_both_say_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deltasync.serve.heartbeats._LOOK_S", 0.0)
    store.put("channel.json", b"{}")
    writers = {boot: HeartbeatWriter(store, 10.0, Life(boot)) for boot in ("0000000a", "0000000b")}
    names = {boot: f"localhost-1 (boot {boot})" for boot in writers}

    def write(boot: str, version: int, **options: Any) -> None:
        writers[boot].update(told(store, boot, version, **options))
        wait_until(
            lambda: any(
                (beat.boot, beat.version) == (boot, version) for beat in heartbeat.read_all(store, RUN)
            )
        )

    write("0000000a", 1)
    assert wait(store, 1) == ["localhost-1"]
    write("0000000b", 2)
    assert {beat.replica_id: beat.version for beat in heartbeat.read_all(store, RUN)} == {
        names["0000000a"]: 1,
        names["0000000b"]: 2,
    }
    with pytest.raises(AckTimeoutError, match=r"these replicas lag: localhost-1 \(boot 0000000a\)"):
        wait(store, 2)
    write("0000000b", 3, pin="3")  # which nobody waits for, and hides no other
    with pytest.raises(AckTimeoutError, match=r"these replicas lag: localhost-1 \(boot 0000000a\)"):
        wait(store, 2)
    write("0000000a", 2)
    assert wait(store, 2) == [names["0000000a"]]
    write("0000000b", 4)
    assert {*wait(store, 2)} == {*names.values()}
    write("0000000a", 3)
    wait_until(
        lambda: (
            len([each for each in caplog.messages if "another replica is named localhost-1 too" in each]) == 2
        )
    )
    for boot in writers:
        writers[boot].stop(told(store, boot, 4, heartbeat.STOPPED))
        assert f"this one's (boot {boot})" in caplog.text
    assert len(heartbeat.read_all(store, RUN)) == 1


def test_looks_for_others_of_a_name_become_rare(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, store = 0.0, FaultyStore(open_store(memory_url))
    monkeypatch.setattr("deltasync.serve.heartbeats.time.monotonic", lambda: now_s)
    store.put("channel.json", b"{}")
    writer = HeartbeatWriter(store, 10.0, Life("0000000a"))
    looked_s = []
    for now_s in range(0, 4 * 3600, 10):
        writer._write(Heartbeat(replica_id="localhost-1", run_id=RUN, version=1, state="serving"))
        if store.calls.count(("list", "replicas/localhost-1/")) > len(looked_s):
            looked_s.append(now_s)
    assert looked_s == [0, 60, 180, 420, 900, 1860, 3780, 7380, 10980]


def test_a_look_for_others_lists_one_names_heartbeats_however_many_there_are(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    for number in range(1_000):
        store.inner.put(keys.replica(f"localhost-{number}", "0000000a"), b"")
        store.inner.put(f"replicas/localhost-{number}.0000000a.json", b"")  # as builds of before did
    assert heartbeat.others(store, "localhost-1", "0000000a") == {}
    assert [*heartbeat.others(store, "localhost-1", "0000000b")] == ["0000000a"]
    for verb, prefix, *_ in store.calls:
        assert verb == "list" and prefix.endswith(
            "/"
        )  # stores list a folder, whatever follows it in a prefix
        assert [info.key for info in store.inner.list(prefix)] == [keys.replica("localhost-1", "0000000a")]


def test_replicas_of_before_and_of_now_are_one_fleet(store: Store) -> None:
    heartbeat.write(store, Heartbeat(replica_id="r", run_id=RUN, version=1, state="serving", boot="0000000a"))
    data = store.read(keys.replica("r", "0000000a"), 1 << 20)
    store.put("replicas/r.0000000b.json", data.replace(b"0000000a", b"0000000b"))  # where they were written
    beat(store, "without", 1)
    assert sorted(beat.replica_id for beat in heartbeat.read_all(store, RUN)) == [
        "r (boot 0000000a)",
        "r (boot 0000000b)",
        "without",
    ]


def test_a_replica_that_starts_again_is_one_and_does_not_warn(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deltasync.serve.heartbeats._LOOK_S", 0.0)
    assert isinstance(store, FaultyStore)
    store.put("channel.json", b"{}")
    for start, boot in enumerate(("0000000a", "0000000b", "0000000c")):
        writer = HeartbeatWriter(store, 10.0, Life(boot))
        for version in (1, 2):
            writer.update(told(store, boot, version))
            written = (boot, version)
            wait_until(lambda: written in [(b.boot, b.version) for b in heartbeat.read_all(store, RUN)])  # noqa: B023
        (found,) = heartbeat.read_all(store, RUN)
        assert (found.replica_id, found.boot) == ("localhost-1", boot)
        if start:  # killed, a while ago
            store.age(LONG_AGO_S, f"replicas/localhost-1/{boot}.json")
        else:
            writer.stop(told(store, boot, 2, heartbeat.STOPPED))
    assert "another replica" not in caplog.text


def test_replicas_that_were_restored_from_one_snapshot_are_two(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "deadbeef")  # as if that were in the snapshot, too
    store.put("channel.json", b"{}")
    hangs, goes_on = (HeartbeatWriter(store, 0.0, Life()) for _ in range(2))

    def write(writer: HeartbeatWriter, version: int, number: int) -> None:
        writer.update(told(store, "deadbeef", version))
        wait_until(lambda: sum(call[0] == "put" and "replicas" in call[1] for call in store.calls) == number)  # type: ignore[attr-defined]
        wait_until(lambda: not writer._workers.busy)  # the store notes a call before it takes effect

    for number, (writer, version) in enumerate(
        [(hangs, 1), (goes_on, 1), (hangs, 1), (goes_on, 2), (goes_on, 2), (hangs, 1)]
    ):
        write(writer, version, number + 1)
    assert "another process writes replicas/localhost-1/deadbeef.json" in caplog.text
    assert sorted((beat.version, beat.boot == "deadbeef") for beat in heartbeat.read_all(store, RUN)) == [
        (1, True),
        (2, False),
    ]
    with pytest.raises(
        AckTimeoutError, match=r"lag: localhost-1 \(boot deadbeef\) \(serves version 1 [^;]*\)\.$"
    ):
        wait(store, 2)
    write(hangs, 2, 7)
    assert len(wait(store, 2)) == 2


def test_copies_that_wrote_at_once_are_two_at_the_next_heartbeat(store: Store) -> None:
    store.put("channel.json", b"{}")
    assert isinstance(store, FaultyStore)
    gate = store.hold_at("put", "replicas/")  # both have looked, and found nobody
    writers = [HeartbeatWriter(store, 0.0, Life("0000000a")) for _ in range(2)]
    for writer in writers:
        writer.update(told(store, "0000000a", 1))
    wait_until(lambda: [call[0] for call in store.calls if call[1] == "channel.json"].count("read") == 2)
    gate.opened.set()
    wait_until(lambda: not any(writer._workers.busy for writer in writers))
    assert len(heartbeat.read_all(store, RUN)) == 1
    for writer in writers:
        writer.update(told(store, "0000000a", 1))
        wait_until(lambda: not writer._workers.busy)  # noqa: B023
    assert len({beat.boot for beat in heartbeat.read_all(store, RUN)}) == 2


def test_a_put_of_its_own_that_takes_effect_late_is_no_copy(store: Store) -> None:
    store.put("channel.json", b"{}")
    writer, life = HeartbeatWriter(store, 0.0, life := Life("0000000a")), life
    bodies = []
    for version in (1, 2):
        writer.update(told(store, "0000000a", version))
        wait_until(lambda: not writer._workers.busy)
        bodies.append(store.read("replicas/localhost-1/0000000a.json", 1 << 20))
    store.put("replicas/localhost-1/0000000a.json", bodies[0])
    writer.update(told(store, "0000000a", 3))
    wait_until(lambda: not writer._workers.busy)
    assert life.boot == "0000000a" and not life.past


@pytest.mark.parametrize(
    ("place", "clocks", "is_new"),
    [
        ((1, "a", "boot", 7), (0.0, 1e9), False),
        ((1, "a", "boot", 7), (0.2, 1e9 + 1), False),  # a clock that is set right
        ((1, "a", "boot", 7), (30.0, 1e9 + 30), True),  # the machine was suspended
        ((1, "a", "boot", 7), (0.0, 1e9 + 3600), True),  # restored, with the clocks of the snapshot
        ((1, "a", "boot", 7), (-500.0, 1e9), True),  # restored on a machine that started later
        ((2, "a", "boot", 7), (0.0, 1e9), True),  # forked
        ((1, "b", "boot", 7), (0.0, 1e9), True),  # in another container
        ((1, "a", "other", 7), (0.0, 1e9), True),
        ((1, "a", "boot", 8), (0.0, 1e9), True),
    ],
)
def test_a_life_ends_where_a_process_is_copied_suspended_or_restored(
    monkeypatch: pytest.MonkeyPatch, place: tuple[object, ...], clocks: tuple[float, float], is_new: bool
) -> None:
    monkeypatch.setattr("deltasync.serve.life._place", lambda: (1, "a", "boot", 7))
    monkeypatch.setattr("deltasync.serve.life._clocks", lambda: (0.0, 1e9))
    life = Life()
    first = life.boot
    monkeypatch.setattr("deltasync.serve.life._place", lambda: place)
    monkeypatch.setattr("deltasync.serve.life._clocks", lambda: clocks)
    assert life.check() is is_new and (life.boot != first) is is_new
    assert not life.check()  # until it happens again


@pytest.mark.parametrize("harmed", [False, True])
def test_a_replica_that_was_restored_is_ready_once_its_bits_were_audited(
    harmed: bool, channel_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ChannelReader(open_store(channel_url))
    target, writer = MemoryTarget(reader), HeartbeatWriter(reader.store)
    follow = Follow(reader, target, ReplicaSettings(poll_interval_s=60), heartbeats=writer)
    with Publisher(channel_url) as publisher:
        publisher.publish([("w", torch.ones(64))]).wait(60)
        follow.start()
        try:
            wait_until(lambda: follow.not_ready is None)
            before = follow.status().boot
            with follow.between_steps():
                if harmed:
                    target.tensors["w"].view(torch.int16)[5] ^= 1
                monkeypatch.setattr("deltasync.serve.life._place", lambda: ("another machine",))
                assert "restored from a snapshot" in (follow.not_ready or "")
                renewed = follow.status().boot
            wait_until(lambda: follow.not_ready is None)
            assert renewed == follow.status().boot != before
            assert follow.version == 1 and torch.equal(target.tensors["w"], torch.ones(64).bfloat16())
            wait_until(
                lambda: renewed in [beat.boot for beat in heartbeat.read_all(reader.store, publisher.run_id)]
            )
        finally:
            follow.stop()


def test_a_reading_of_the_clocks_that_was_interrupted_is_no_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 13.0, 13.0, 13.1])
    clocks = SimpleNamespace(
        monotonic=lambda: next(readings), CLOCK_BOOTTIME=7, clock_gettime=lambda _: 13.0, time=lambda: 1013.0
    )
    monkeypatch.setattr("deltasync.serve.life.time", clocks)
    assert life._clocks() == (0.0, 1000.0)


def test_a_life_of_this_machine_goes_on() -> None:
    life = Life()
    assert not any(life.check() for _ in range(3)) and not life.past
