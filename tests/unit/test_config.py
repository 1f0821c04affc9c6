from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasync import Publisher, Replica
from deltasync.config import PublisherSettings, ReaderSettings, ReplicaSettings, Retention, TrainerSettings
from deltasync.errors import ConfigError


def test_explicit_beats_environment_beats_default() -> None:
    environ = {"DELTASYNC_ANCHOR_EVERY": "7", "DELTASYNC_CODEC": "raw"}
    settings = PublisherSettings.from_env(environ, anchor_every=3)
    assert settings.anchor_every == 3
    assert settings.codec == "raw"
    assert settings.dtype == "auto"


def test_explicit_zero_is_not_lost() -> None:
    settings = PublisherSettings.from_env(
        {"DELTASYNC_RETRIES": "5", "DELTASYNC_RETRY_DELAY_S": "2"}, retries=0, retry_delay_s=0.0
    )
    assert settings.retries == 0
    assert settings.retry_delay_s == 0.0


def test_none_means_not_given() -> None:
    assert PublisherSettings.from_env({"DELTASYNC_ANCHOR_EVERY": "7"}, anchor_every=None).anchor_every == 7


def test_empty_variable_means_not_set() -> None:
    assert PublisherSettings.from_env({"DELTASYNC_CODEC": ""}).codec == "context"


def test_values_are_parsed_to_the_fields_type() -> None:
    settings = ReplicaSettings.from_env(
        {"DELTASYNC_POLL_INTERVAL_S": "0.5", "DELTASYNC_CHANNEL": "memory://x"}
    )
    assert settings.poll_interval_s == 0.5
    assert settings.channel == "memory://x"


def test_reads_the_process_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASYNC_ANCHOR_EVERY", "13")
    assert PublisherSettings.from_env().anchor_every == 13


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="anchor_evry"):
        PublisherSettings.from_env({}, anchor_evry=3)


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("DELTASYNC_TRUSTED_KEY", "DELTASYNC_TRUSTED_KEYS"),
        ("DELTASYNC_POLL_INTERVALS", "DELTASYNC_POLL_INTERVAL_S"),
        ("DELTASYNC_CHANEL", "DELTASYNC_CHANNEL"),
        ("deltasync_trusted_keys", "DELTASYNC_TRUSTED_KEYS"),
    ],
)
@pytest.mark.parametrize(
    "kind", [ReaderSettings, PublisherSettings, ReplicaSettings, Retention, TrainerSettings]
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(kind: Any, variable: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{variable} is not a setting of deltasync; the nearest is {nearest}\\."
    ):
        kind.from_env({variable: "1", "PATH": "/bin"})
    kind.from_env({variable: ""})  # as good as unset


def test_a_misspelt_variable_does_not_switch_signatures_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(f"file://{tmp_path}/run") as publisher:
        publisher.publish([("w", torch.zeros(2))]).wait(60)
    monkeypatch.setenv("DELTASYNC_TRUSTED_KEY", str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="DELTASYNC_TRUSTED_KEYS"):
        Replica(f"file://{tmp_path}/run").sync()


def test_variables_of_others_are_left_alone() -> None:
    names = [
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP",
        "PORT",
        "PORT_8000_TCP",
        "PORT_8000_TCP_ADDR",
    ]
    environ = {f"DELTASYNC_{middle}{name}": "10.0.0.1" for name in names for middle in ("", "ROUTER_")}
    PublisherSettings.from_env(environ | {"DELTASYNC_ENVIRONMENT_TOKEN": "x", "DELTASYNCHRONY": "x"})


@pytest.mark.parametrize(
    ("kind", "variable", "value", "message"),
    [
        (
            PublisherSettings,
            "DELTASYNC_CODEC",
            "zip",
            "DELTASYNC_CODEC must be one of packed, context, raw, not 'zip'",
        ),
        (PublisherSettings, "DELTASYNC_RETRIES", "-1", "DELTASYNC_RETRIES must be at least 0, not -1"),
        (PublisherSettings, "DELTASYNC_RETRIES", "many", "DELTASYNC_RETRIES='many' is not a valid int"),
        (PublisherSettings, "DELTASYNC_ANCHOR_EVERY", "0", "DELTASYNC_ANCHOR_EVERY must be at least 1"),
        (PublisherSettings, "DELTASYNC_RETRY_DELAY_S", "nan", "DELTASYNC_RETRY_DELAY_S must be"),
        (PublisherSettings, "DELTASYNC_DTYPE", "float8_e4m3fn", "DELTASYNC_DTYPE must be one of"),
        (Retention, "DELTASYNC_KEEP_LAST", "yes", "DELTASYNC_KEEP_LAST='yes' is not a valid int"),
        (ReplicaSettings, "DELTASYNC_KV_CACHE", "drop", "DELTASYNC_KV_CACHE must be one of"),
        (ReplicaSettings, "DELTASYNC_POLL_INTERVAL_S", "0", "DELTASYNC_POLL_INTERVAL_S must be more than 0"),
        (ReplicaSettings, "DELTASYNC_REPLICA_ID", "a/b", "DELTASYNC_REPLICA_ID must be 1 to 100 letters"),
        (ReplicaSettings, "DELTASYNC_REPLICA_ID", "...", "DELTASYNC_REPLICA_ID must be 1 to 100 letters"),
        (ReplicaSettings, "DELTASYNC_REPLICA_ID", "a" * 101, "DELTASYNC_REPLICA_ID must be 1 to 100 letters"),
        (
            ReplicaSettings,
            "DELTASYNC_CACHE_DIR",
            "tmp",
            "DELTASYNC_CACHE_DIR must be an absolute path, not 'tmp'",
        ),
        (
            ReplicaSettings,
            "DELTASYNC_HTTP_TOKEN",
            "a b",
            r"DELTASYNC_HTTP_TOKEN must be .*, and this one \(not shown\) is not",
        ),
    ],
)
def test_a_value_is_refused_by_the_name_under_which_it_was_given(
    kind: Any, variable: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind.from_env({variable: value})


def test_default_replica_id_is_valid_whatever_the_host_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "ho st.exämple/" + "x" * 200)
    assert ReplicaSettings.from_env({}).replica_id


def test_a_servers_replica_id_is_that_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-7.example")
    first, again = (ReplicaSettings.from_env({}).at_port(8000).replica_id for _ in range(2))
    assert first == again == "node-7-example-8000"
    assert ReplicaSettings.from_env({}).at_port(8000, 3).replica_id == "node-7-example-8000-3"
    assert ReplicaSettings.from_env({"DELTASYNC_REPLICA_ID": "mine"}).at_port(8000).replica_id == "mine"
    # the end of a pod's name is what differs
    monkeypatch.setattr("socket.gethostname", lambda: "p" * 60 + "-" + "xyz")
    assert ReplicaSettings.from_env({}).at_port(8000).replica_id.endswith("-xyz-8000")


CONFIGURED = "s3://weights/run?endpoint=http://minio:9000"
ALLOWED = "s3://weights/runs, file:///data/runs/"


@pytest.mark.parametrize(
    ("environ", "asked", "followed"),
    [
        ({"DELTASYNC_CHANNEL": CONFIGURED}, None, CONFIGURED),
        ({"DELTASYNC_CHANNEL": CONFIGURED}, CONFIGURED, CONFIGURED),
        (
            {"DELTASYNC_CHANNEL": CONFIGURED, "DELTASYNC_ALLOWED_CHANNELS": ALLOWED},
            "s3://weights/runs/7",
            "s3://weights/runs/7",
        ),
        ({"DELTASYNC_ALLOWED_CHANNELS": ALLOWED}, "file:///data/runs/a/b", "file:///data/runs/a/b"),
        ({"DELTASYNC_ALLOWED_CHANNELS": ALLOWED}, "s3://weights/runs", "s3://weights/runs"),
        ({}, None, None),
    ],
)
def test_callers_may_name_channels_that_are_allowed(
    environ: dict[str, str], asked: str | None, followed: str | None
) -> None:
    assert ReplicaSettings.from_env(environ).with_called_channel(asked).channel == followed


@pytest.mark.parametrize(
    "environ", [{}, {"DELTASYNC_CHANNEL": CONFIGURED}, {"DELTASYNC_CHANNEL": "s3://weights/run"}]
)
@pytest.mark.parametrize("allowed", [None, ALLOWED])
@pytest.mark.parametrize(
    "asked",
    [
        "s3://weights/other",
        "s3://weights/runs-evil/7",
        "s3://weights.evil/runs/7",
        "s3://weights/runs/7?endpoint=http://169.254.169.254",
        "s3://weights/runs?endpoint=http://internal",
        "s3://weights/run?endpoint=http://internal",
        "file:///data/runs/../../etc",
        "file:///data/runs/%2e%2e/%2e%2e/etc",
        "file:///data/runs/./x",
        "file:///data/runs/x#y",
        "file:///etc",
        "memory://x",
        "",
        7,
    ],
)
def test_callers_may_name_no_other_channel(environ: dict[str, str], allowed: str | None, asked: Any) -> None:
    given = environ if allowed is None else {**environ, "DELTASYNC_ALLOWED_CHANNELS": allowed}
    with pytest.raises(ConfigError, match=r"Callers may not name|A caller's channel URL must not contain"):
        ReplicaSettings.from_env(given).with_called_channel(asked)


@pytest.mark.parametrize(
    "allowed", ["bucket/runs", "s3://bucket/runs?endpoint=x", "s3://bucket/runs/..", "s3://a, b"]
)
def test_bad_lists_of_allowed_channels_are_refused(allowed: str) -> None:
    with pytest.raises(ConfigError, match="DELTASYNC_ALLOWED_CHANNELS must be prefixes"):
        ReplicaSettings.from_env({"DELTASYNC_ALLOWED_CHANNELS": allowed})


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PublisherSettings().codec = "raw"  # type: ignore[misc]


@pytest.mark.parametrize("token", ["", "two words", "caf\u00e9-secret", "line\nsecret"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReplicaSettings.from_env({}, http_token=token)
    assert "http_token" in str(caught.value)
    assert not token or token not in str(caught.value)


def test_the_token_is_not_shown() -> None:
    settings = ReplicaSettings.from_env({"DELTASYNC_HTTP_TOKEN": "secret-123"})
    assert settings.http_token == "secret-123"
    assert "secret-123" not in repr(settings)
