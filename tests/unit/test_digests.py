"""Fingerprints that ranks add up: right after every publish, though only what changed is exchanged."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.ranks import peers
from deltasync.ranks.digests import Digests
from deltasync.tensors.fingerprint import MASK

SIZE = 3
HELD = [  # `all` is split, `first` and `last` are of one rank, nobody holds an element of `none`
    {"all": (0, 4), "first": (0, 8), "last": (0, 0), "none": (0, 0)},
    {"all": (4, 8), "first": (0, 0), "last": (0, 0), "none": (0, 0)},
    {"all": (8, 9), "first": (0, 0), "last": (0, 3), "none": (0, 0)},
]


class Together:
    """Ranks in threads that agree through the messages of `Peers`."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE)
        self.said: list[bytes] = [b""] * SIZE
        self.bytes = 0

    def of(self, rank: int) -> peers.Peers:
        found = peers.Peers()
        found.rank, found.size = rank, SIZE

        def exchange(value: bytes, combine: Any) -> bytes:
            self.said[rank] = value
            self.barrier.wait(10)
            answer: bytes = combine([*self.said])
            self.bytes = len(value)
            self.barrier.wait(10)
            return answer

        found._exchange = exchange  # type: ignore[method-assign, assignment]
        return found


def test_what_changed_is_enough() -> None:
    random.seed(0)
    together = Together()
    ranks = [Digests(together.of(rank), HELD) for rank in range(SIZE)]
    shares = [{name: random.getrandbits(64) if first < last else 0 for name, (first, last) in held.items()} for held in HELD]

    def agree(everything: bool = False) -> list[Any]:
        with ThreadPoolExecutor(SIZE) as pool:
            asked = [pool.submit(ranks[r].agree, r, dict(shares[r]), everything=everything) for r in range(SIZE)]
            return [future.result() for future in asked]

    def check(found: list[Any], everything: bool = False) -> None:
        whole = {name: sum(share[name] for share in shares) & MASK for name in HELD[0]}
        for rank, (number, known, model) in enumerate(found):
            assert (number, model) == (3, sum(whole.values()) & MASK)
            wanted = [name for name, (first, last) in HELD[rank].items() if everything or first < last]
            assert {name: known[name] for name in wanted} == {name: whole[name] for name in wanted}

    check(agree(), everything=True)  # the first time all are learned
    for changed in (["all"], ["first"], ["last"], [], ["all", "last"]):
        for share in shares:
            share.update({name: random.getrandbits(64) for name in changed if share[name]})
        check(agree())
    assert together.bytes < 40
    check(agree(everything=True), everything=True)


@given(st.lists(st.sampled_from([0, 1, MASK]), max_size=40))
def test_numbers_come_back_from_messages(numbers: list[int]) -> None:
    values = np.array(numbers, np.uint64)
    message = peers._without_zeros(values)
    assert len(message) == 1 + -(-len(numbers) // 8) + 8 * sum(number != 0 for number in numbers)
    assert np.array_equal(peers._with_zeros(message, len(numbers)), values)
    assert np.array_equal(peers._with_zeros(peers._sum(len(numbers), [message, message]), len(numbers)), values + values)


def test_an_error_is_everybodys() -> None:
    assert peers._sum(1, [peers._without_zeros(np.ones(1, np.uint64)), b"-error"]) == b"-error"
    with pytest.raises(ValueError, match="no"):
        peers.Peers().agree(ValueError("no"), 1)
