"""Who a replica's routes listen to besides who has the token: pages of other sites, rebound names, floods."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tests import driving
from tests.driving import PLAIN, Engine, serving

engine, trainer = driving.engine, driving.trainer  # fixtures

LOOPBACK = Namespace(**vars(PLAIN), host="127.0.0.1", uds=None)
SYNC = {"content-type": "application/json", "host": "127.0.0.1:8000"}


@pytest.mark.parametrize("token", [None, "s3cret"], ids=["open", "with a token"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://elsewhere.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    ],
    ids=str,
)
def test_pages_of_other_sites_are_refused(
    engine: Engine,
    memory_url: str,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    token: str | None,
) -> None:
    given = {} if token is None else {"HTTP_TOKEN": token}
    sent = {**SYNC, "authorization": f"Bearer {token}", **headers}
    with serving(engine, monkeypatch, LOOPBACK, CHANNEL=memory_url, **given) as client:
        for method, path in (("GET", "status"), ("GET", "digest"), ("POST", "sync")):
            reply = client.request(
                method, f"/deltasync/{path}", headers=sent, content=b"{}" if method == "POST" else None
            )
            assert (reply.status_code, reply.json()["error"]) == (
                403,
                "Pages of other sites may not send requests here.",
            )
        assert client.post("/request_weight_update", headers=sent).status_code == 403
        own = {**sent, "origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}
        assert client.get("/deltasync/status", headers=own).status_code == 200
        link = {**sent, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert client.get("/deltasync/", headers=link).status_code == 200
        assert client.post("/deltasync/sync", headers=link).status_code == 403  # a form


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "attacker.example:8000",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example",
        "",
    ],
)
def test_an_open_server_on_loopback_answers_to_no_other_name(
    engine: Engine, memory_url: str, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    with serving(engine, monkeypatch, LOOPBACK, CHANNEL=memory_url) as client:
        for path in ("/deltasync/status", "/deltasync/"):
            assert client.get(path, headers={"host": host}).status_code == 403
        # routers ask by any name
        assert client.get("/deltasync/ready", headers={"host": host}).status_code == 503
        # the last is TRL's
        for own in ("127.0.0.1:8000", "localhost", "localhost:8000", "[::1]:8000", "0.0.0.0:8000"):
            assert client.get("/deltasync/status", headers={"host": own}).status_code == 200


def test_a_server_with_a_token_or_on_all_addresses_answers_to_any_name(
    engine: Engine, memory_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named = {"host": "replica-7.example", "authorization": "Bearer s3cret"}
    with serving(engine, monkeypatch, LOOPBACK, CHANNEL=memory_url, HTTP_TOKEN="s3cret") as client:
        assert client.get("/deltasync/status", headers=named).status_code == 200
    assert "without DELTASYNC_HTTP_TOKEN" not in caplog.text
    monkeypatch.delenv("DELTASYNC_HTTP_TOKEN")
    with serving(engine, monkeypatch, PLAIN, CHANNEL=memory_url) as client:
        assert client.get("/deltasync/status", headers=named).status_code == 200
    assert caplog.text.count("listens on all addresses without DELTASYNC_HTTP_TOKEN") == 1


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_body_must_say_that_it_is_json(
    engine: Engine, memory_url: str, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        for path in ("/deltasync/sync", "/request_weight_update"):
            reply = client.post(
                path, content=b'{"version": 1}', headers={} if kind is None else {"content-type": kind}
            )
            assert (reply.status_code, reply.json()["error"]) == (
                415,
                "Send the body as content-type: application/json.",
            )
