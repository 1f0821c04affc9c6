"""A replica's machine is short of memory: its weights stay those of the version before, and the next sync
moves them.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.errors import StageError
from tests.builders import trained, weights
from tests.conftest import assert_same_bits
from tests.kills import steps
from tests.processes import PATIENCE_S, in_a_process

LARGE = 16_000_000  # elements
MARGINS_MB = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


@pytest.mark.parametrize(
    "step", ["a tensor is decoded", "a tensor is translated", "half of the tensors are copied"]
)
def test_an_allocation_that_fails_changes_nothing(memory_url: str, step: str) -> None:
    copied = step == "half of the tensors are copied"  # which full weights are
    states = [weights()]
    with Publisher(memory_url, anchor_every=2 if copied else None) as publisher:
        for seed in (1, 2, 3):
            publisher.publish(states[-1].items()).wait(60)
            states.append(trained(states[-1], seed))
    replica = Replica(memory_url)
    replica.sync(1)
    if copied:
        store = open_store(memory_url)
        store.delete(*(info.key for slot, info in ChannelReader(store).slots() if slot.version == 2))

    def tell(reached: str) -> None:
        if reached == step:
            raise MemoryError("Unable to allocate 1.16 GiB for an array (by the test)")

    with steps.patched(tell), pytest.raises(StageError, match="Not enough memory for version"):
        replica.sync()
    assert replica.version == 1
    assert_same_bits(replica.state_dict(), states[0])
    assert replica.sync() == 3
    assert_same_bits(replica.state_dict(), states[2])


def large(seed: int) -> dict[str, torch.Tensor]:
    w = torch.zeros(LARGE, dtype=torch.bfloat16)
    w.view(torch.int16)[seed * 1000 : LARGE // (1 + seed)] += seed
    return {"w": w}


@contextlib.contextmanager
def at_most(margin_mb: int) -> Iterator[None]:
    """This process may take so much more address space than it has."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (margin_mb << 20), resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def short_of_memory(url: str, told: Connection) -> None:
    """Syncs with more and more memory to spare; tells how many failed."""
    torch.set_num_threads(1)
    replica, errors = Replica(url), 0
    for margin_mb in MARGINS_MB:
        replica.sync(1)
        try:
            with at_most(margin_mb):
                replica.sync()
        except StageError:
            errors += 1
            assert replica.version == 1
            assert_same_bits(replica.state_dict(), large(1))
        assert replica.sync() == 2
        assert_same_bits(replica.state_dict(), large(2))
    told.send(errors)


@pytest.mark.slow
def test_a_limit_of_address_space_changes_nothing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    with Publisher(url) as publisher:
        for seed in (1, 2):
            publisher.publish(large(seed).items()).wait(PATIENCE_S)
    exitcode, errors = in_a_process(short_of_memory, url)
    assert exitcode == 0 and errors
