"""vLLM's weight-transfer routes choose no channel against the settings, over the real engine class without its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from deltasync.errors import ConfigError

backend = pytest.importorskip("vllm_plugin.backend", reason="needs vLLM")


@pytest.fixture
def engine() -> Iterator[object]:
    engine = object.__new__(backend.DeltaSyncEngine)
    engine._follow, engine._channel, engine._loop = None, None, asyncio.new_event_loop()
    yield engine
    engine._loop.close()


def test_the_configured_channel_wins_over_what_a_caller_sends(monkeypatch: pytest.MonkeyPatch, engine: object) -> None:
    monkeypatch.setenv("DELTASYNC_CHANNEL", "memory://configured")
    for asked in ("memory://other", "s3://bucket/run?endpoint=http://internal"):
        with pytest.raises(ConfigError, match=r"[Cc]aller"):
            engine._choose(asked)  # type: ignore[attr-defined]
        assert engine._follow is None  # type: ignore[attr-defined]
    engine._choose(None)  # type: ignore[attr-defined]
    assert engine._channel == "memory://configured"  # type: ignore[attr-defined]


def test_a_caller_names_a_channel_that_is_allowed(monkeypatch: pytest.MonkeyPatch, engine: object) -> None:
    monkeypatch.setenv("DELTASYNC_ALLOWED_CHANNELS", "memory://runs")
    engine._choose("memory://runs/7")  # type: ignore[attr-defined]
    assert engine._channel == "memory://runs/7"  # type: ignore[attr-defined]
