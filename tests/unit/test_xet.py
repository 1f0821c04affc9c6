"""The Hub's storage is a host of its own, which may hang while the Hub answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from deltasync.clouds import xet
from deltasync.clouds.xet import Xet
from deltasync.errors import TransientStoreError
from deltasync.stores import ObjectInfo


@pytest.mark.parametrize(
    ("scope", "transfer"),
    [
        ("write", lambda store: store.upload(b"x" * 100)),
        ("read", lambda store: store.download(ObjectInfo("a", 9, content="0" * 64), 0, 9)),
    ],
)
def test_a_storage_host_that_never_answers_is_named_and_given_up(
    scope: str,
    transfer: Callable[[Xet], object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(xet, "PATIENCE_S", 0.05)
    monkeypatch.setattr(xet, "_WITHIN_S", 1.0)
    # takes connections into its backlog, and answers none
    with socket.create_server(("127.0.0.1", 0)) as hole:
        host = f"127.0.0.1:{hole.getsockname()[1]}"
        token = xet.Token(f"http://{host}", "token", int(time.time()) + 3600)
        store = Xet("hf://buckets/me/run", "http://127.0.0.1:9", lambda scope: token)
        with pytest.raises(
            TransientStoreError, match=rf"its storage at {host} has not finished a transfer \({scope}\)"
        ):
            transfer(store)
    assert f"its storage at {host} has had no answer for 0.05 s; waiting on." in caplog.messages[0]
