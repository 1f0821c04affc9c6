"""The feed of changes to a bucket: what `HubStore.watch` tells, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from deltasync.clouds.hub import HubStore
from deltasync.stores import ObjectInfo
from tests.hub.fixtures import HubServer
from tests.hub.hub import EXPIRED
from tests.waiting import wait_until

HEAD = "head.json"


class Told:
    """A watch and how often it told."""

    def __init__(self, store: HubStore, key: str) -> None:
        self.stored: list[ObjectInfo | None] = []
        self.times_s: list[float] = []
        self.watch = store.watch(key, self._tell)

    @property
    def count(self) -> int:
        return len(self.stored)

    def _tell(self, stored: ObjectInfo | None) -> None:
        self.times_s.append(time.perf_counter())
        self.stored.append(stored)

    def after(self, count: int, timeout_s: float = 10.0) -> float:
        """Wait until it has told more often than `count`."""
        return wait_until(lambda: self.count > count, timeout_s)


@pytest.fixture
def store(hub_channel: HubStore) -> HubStore:
    """A store whose bucket exists."""
    hub_channel.put(HEAD, b"0")
    return hub_channel


@pytest.fixture
def told(store: HubStore) -> Iterator[Told]:
    """A live watch of head, which has told once."""
    told = Told(store, HEAD)
    wait_until(lambda: told.watch.live and told.count == 1)
    yield told
    told.watch.close()


def _bucket(store: HubStore) -> str:
    return "/".join(store.url.split("/")[3:5])


class TestWatch:
    def test_a_change_is_told_at_once_and_nothing_else_is(self, store: HubStore, told: Told) -> None:
        store.put("other.json", b"1")
        latencies = []
        for number in range(20):
            count = told.count
            store.put(HEAD, str(number).encode())
            stored = time.perf_counter()
            told.after(count)
            latencies.append(told.times_s[-1] - stored)
        print(
            f"told {1000 * sorted(latencies)[10]:.2f} ms after the write returned, at most "
            f"{1000 * max(latencies):.2f} ms"
        )
        assert max(latencies) < 1.0
        assert told.count == 21

    def test_what_is_told_is_read_by_its_content_without_asking_the_hub(
        self, store: HubStore, told: Told, hub: HubServer
    ) -> None:
        assert told.stored == [None]
        store.put("head.json.old", b"old")
        store.put(HEAD, b"new")
        told.after(2)
        assert told.stored[1:] == [ObjectInfo("head.json.old", 3), ObjectInfo(HEAD, 3)]
        reader = HubStore(store.url)
        for info, data in zip(told.stored[1:], (b"old", b"new"), strict=True):
            assert info is not None
            hub.reset()
            assert reader.read(info.key, 3, info) == data
            assert hub.requests() == {"reconstruction": 1, "data": 1} | (
                {"read_token": 1} if data == b"old" else {}
            )

    def test_deleting_is_not_told(self, store: HubStore, told: Told) -> None:
        store.delete(HEAD)
        store.put(HEAD, b"1")
        told.after(1)
        assert told.stored == [None, ObjectInfo(HEAD, 1)]

    @pytest.mark.parametrize("do", ["drop", "reconnect"])
    def test_a_broken_stream_is_taken_up_where_it_ended(
        self, store: HubStore, told: Told, hub: HubServer, do: str
    ) -> None:
        assert hub.tell_listeners(_bucket(store), do) == 1
        told.after(1)  # once connected again, for whatever may have been missed
        assert told.watch.live
        count = told.count
        store.put(HEAD, b"1")
        told.after(count)

    def test_while_there_is_no_connection_it_is_not_live(
        self, store: HubStore, told: Told, hub: HubServer
    ) -> None:
        hub.arm("events", times=2, status=503)
        hub.tell_listeners(_bucket(store), "drop")
        wait_until(lambda: not told.watch.live)
        store.put(HEAD, b"1")
        told.after(2)  # by the replay from the cursor, and because it is connected again
        assert told.watch.live
        assert told.count == 3
        assert hub.requests()["events"] == 4

    def test_a_cursor_that_is_too_old_or_wrong_means_that_anything_may_have_changed(
        self, store: HubStore, told: Told, hub: HubServer
    ) -> None:
        hub.tell_listeners(_bucket(store), "reset")
        told.after(1)
        assert told.watch.live
        told.watch._cursor = "not one of the server's"
        hub.tell_listeners(_bucket(store), "drop")
        told.after(2)
        assert told.watch.live

    @pytest.mark.parametrize(
        "text",
        [
            "event: stats\ndata: [1,2]\n\n",
            'event: changes\ndata: {"cursor":"99","changes":[{"path":"x","op":{"kind":"move"}}]}\n\n',
            'event: changes\ndata: {"cursor":\n\n',
            "event: ready\ndata: []\n\n",
            'event: changes\rdata: {"changes":[{"path":"run/a/x","op":"update"}]}\r\r',
            ": a comment\n\ndata\n\nretry: 5\n\n",
        ],
    )
    def test_any_event_is_survived(self, store: HubStore, told: Told, hub: HubServer, text: str) -> None:
        hub.reset()
        hub.ask("POST", f"/_raw/{_bucket(store)}", {"text": text})
        store.put(HEAD, b"1")
        wait_until(lambda: ObjectInfo(HEAD, 1) in told.stored)
        assert told.watch.live
        assert "events" not in hub.requests()

    @pytest.mark.parametrize("name", ["a\u2028b", "a\u0085b", "a\x0bb", "a\x1cb"])
    def test_a_name_anywhere_in_the_bucket_does_not_end_it(
        self, store: HubStore, told: Told, hub: HubServer, name: str
    ) -> None:
        hub.reset()
        hub.ask("POST", f"/_fill/{_bucket(store)}", {"paths": [f"other/{name}"], "like": f"run/a/{HEAD}"})
        store.put(HEAD, b"1")
        told.after(1)
        assert told.stored[-1] == ObjectInfo(HEAD, 1)
        assert "events" not in hub.requests()

    @pytest.mark.parametrize("status", [401, 403, 404, 501])
    def test_where_there_is_no_feed_it_is_never_live_and_rarely_asked_for(
        self, store: HubStore, hub: HubServer, status: int
    ) -> None:
        hub.arm("events", times=1000, status=status)
        told = Told(store, HEAD)
        wait_until(lambda: hub.requests().get("events"))
        time.sleep(0.5)
        assert hub.requests()["events"] == 1
        assert not told.watch.live
        assert told.count == 0
        told.watch.close()

    def test_closing_ends_the_thread_and_the_calls(self, store: HubStore, told: Told, hub: HubServer) -> None:
        running = set(threading.enumerate())
        told.watch.close()
        assert not told.watch.live
        ended = running.difference(threading.enumerate())
        assert "deltasync-watch" in {thread.name for thread in ended}  # that of another test may run on
        store.put(HEAD, b"1")
        time.sleep(0.1)
        assert told.count == 1
        wait_until(lambda: hub.tell_listeners(_bucket(store), "drop") == 0)
        told.watch.close()

    def test_a_callback_may_fail_or_close_the_watch(
        self, store: HubStore, told: Told, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls: list[int] = []

        def act(_: ObjectInfo | None) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("by the test")
            if len(calls) == 3:
                watch.close()

        watch = store.watch(HEAD, act)
        wait_until(lambda: watch.live and len(calls) == 1)
        for number in (1, 2, 3):
            store.put(HEAD, b"%d" % number)
            told.after(number)
        wait_until(lambda: len(calls) == 3)
        time.sleep(0.1)
        assert len(calls) == 3
        assert not watch.live
        assert "by the test" in caplog.text

    def test_an_expired_token_ends_in_polling(
        self, store: HubStore, told: Told, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", EXPIRED)
        hub.tell_listeners(_bucket(store), "drop")
        wait_until(lambda: not told.watch.live)
        time.sleep(0.5)
        assert not told.watch.live
