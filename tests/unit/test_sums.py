"""Numbers that ranks add up, of which zeros cost a bit."""

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
from deltasync.tensors.fingerprint import MASK

SIZE = 3


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


def test_numbers_of_all_ranks_add_up() -> None:
    random.seed(0)
    together = Together()
    ranks = [together.of(rank) for rank in range(SIZE)]
    for count in (0, 1, 9, 300):
        numbers = [[random.choice((0, random.getrandbits(64))) for _ in range(count)] for _ in range(SIZE)]
        with ThreadPoolExecutor(SIZE) as pool:
            found = [*pool.map(lambda of: of[0].agree(None, *of[1]), zip(ranks, numbers, strict=True))]
        assert found == [[sum(each) & MASK for each in zip(*numbers, strict=True)]] * SIZE
    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(lambda rank: rank.agree(None, *[0] * 300), ranks))
    assert together.bytes < 40


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
