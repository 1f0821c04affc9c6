"""What a notebook shows of the objects that users hold: the channel, and the version."""

from __future__ import annotations

import pytest
import torch

import deltasync
from deltasync.errors import ModelMismatchError


def test_objects_show_their_channel_and_version(memory_url: str) -> None:
    module = torch.nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
    with deltasync.Publisher(memory_url) as publisher:
        assert repr(publisher) == f"Publisher({memory_url!r}, version=0)"
        publisher.publish(module).wait(60)
        assert repr(publisher) == f"Publisher({memory_url!r}, version=1)"
    replica = deltasync.Replica(memory_url)
    assert repr(replica) == f"Replica({memory_url!r}, version=None)"
    replica.sync()
    assert repr(replica) == f"Replica({memory_url!r}, version=1)"
    with deltasync.follow(module, memory_url, background=False) as following:
        assert repr(following) == f"ModuleReplica({memory_url!r}, version=1, state='serving')"


def test_a_module_of_another_dtype_is_told_the_cure(memory_url: str) -> None:
    module = torch.nn.Linear(2, 2).requires_grad_(False)
    with deltasync.Publisher(memory_url) as publisher:
        publisher.publish(module).wait(60)
    with pytest.raises(
        ModelMismatchError, match=r"Convert it first, such as by module\.to\(torch\.bfloat16\)"
    ):
        deltasync.follow(module, memory_url, background=False)
    with deltasync.follow(module.to(torch.bfloat16), memory_url, background=False) as following:
        assert following.version == 1
