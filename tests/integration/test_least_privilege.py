"""The policies of docs/security.md, as written there, are enough and no more; by moto, which evaluates
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from moto import settings

from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import StoreError
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from deltasync.stores import Store
from tests.servers import s3

PAGE = Path(__file__).parents[2] / "docs/security.md"


@pytest.fixture
def as_user(s3_server: s3.S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Store]]:
    """Opens the bucket's channel `run` with the rights of `trainer` or `replica`."""
    bucket = s3_server.new_bucket()
    iam: Any = boto3.client(
        "iam",
        endpoint_url=s3_server.endpoint,
        region_name=s3.REGION,
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    policies = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    keys = {}
    for name, policy in zip(("trainer", "replica"), policies, strict=True):
        iam.create_user(UserName=name)
        iam.put_user_policy(
            UserName=name, PolicyName=name, PolicyDocument=policy.replace(":::weights", f":::{bucket}")
        )
        assert json.loads(policy)["Version"] == "2012-10-17"
        keys[name] = iam.create_access_key(UserName=name)["AccessKey"]

    def open_as(name: str) -> Store:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys[name]["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys[name]["SecretAccessKey"])
        return open_store(s3_server.url(bucket))

    with monkeypatch.context() as patch:
        patch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)  # evaluate policies from now on
        yield open_as


def test_the_policies_allow_what_each_side_does_and_nothing_else(as_user: Callable[[str], Store]) -> None:
    trainer = as_user("trainer")
    weights = {"w": torch.randn(100).bfloat16()}
    for resume in (False, True):
        with Publisher(trainer, resume=resume) as publisher:
            for _ in range(2):
                weights["w"][:2] += 1
                publisher.publish(weights.items()).wait(60)
    replica = as_user("replica")
    assert Replica(replica).sync() == 4
    assert ChannelReader(replica).channel().fencing == "seal"  # the probe needs no right to delete
    heartbeat.write(replica, Heartbeat(replica_id="one", run_id=publisher.run_id, version=4, state="serving"))
    (beat,) = heartbeat.read_all(trainer, str(publisher.run_id))
    assert beat.replica_id == "one"
    newest = ChannelReader(trainer).numbered(4).key
    before = {info.key: info.modified_s for info in trainer.list("")}
    for refused in (
        lambda: replica.put(keys.HEAD, b"{}"),
        lambda: replica.create(keys.slot(5, "000002-00000000"), b"{}"),
        lambda: replica.delete(keys.HEAD),
        lambda: trainer.delete(newest),
    ):
        with pytest.raises(StoreError, match=r"(?i)access ?denied"):
            refused()
    assert {info.key: info.modified_s for info in trainer.list("")} == before
