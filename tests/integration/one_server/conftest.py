"""One real vLLM server for all tests of this folder: it takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltasync import Publisher
from deltasync.channel import signing
from deltasync.serve import heartbeat
from tests.integration.vllm_server import NO_COMPACTIONS, Server, save_model, serving


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the model, the channel, the signing key and the server's log."""
    folder = tmp_path_factory.mktemp("vllm")
    save_model(folder)
    return folder


@pytest.fixture(scope="package")
def started(folder: Path) -> Iterator[Server]:
    """A server that wants a token and signatures, before anything is published."""
    signing.new_key(folder / "key", "this test")
    environ = {
        "DELTASYNC_HTTP_TOKEN": "token-of-this-test",
        "DELTASYNC_TRUSTED_KEYS": str(folder / "key.pub"),
    }
    with (
        serving(
            folder / "model", "--enable-scale-out", token=environ["DELTASYNC_HTTP_TOKEN"], **environ
        ) as server,
        Publisher(server.channel, signing_key=folder / "key", retention=NO_COMPACTIONS) as server.publisher,
    ):
        yield server
    assert server.publisher is not None and server.publisher.run_id is not None
    (beat,) = heartbeat.read_all(server.store, server.publisher.run_id)
    assert (beat.state, beat.error) == ("stopped", None), "it ended in order"


@pytest.fixture(scope="package")
def server(started: Server) -> Server:
    """The server once it serves a version."""
    started.assert_serves(started.publish())
    return started
