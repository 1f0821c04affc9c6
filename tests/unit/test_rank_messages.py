"""Messages between ranks of which some are lost: three in one process, over torch's store of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from deltasync.errors import PublishError, StoreError
from deltasync.opening.adapter_base import AdapterBase
from deltasync.publish.agreement import attempt
from deltasync.tensors import fingerprint
from deltasync.trainer import ranks
from deltasync.trainer.ranks import ENDED, Ranks
from tests.waiting import wait_until

SIZE = 3


@dataclasses.dataclass
class Group:
    """A rank's process group."""

    rank: int
    store: Any

    def get_group_store(self) -> Any:
        return self.store


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ranks]]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    shown = {
        "get_rank": lambda group: group.rank,
        "get_world_size": lambda group: SIZE,
        "get_global_rank": lambda group, rank: rank,
    }
    for name, value in shown.items():
        monkeypatch.setattr(dist, name, value)
    monkeypatch.setattr(ranks, "_world_store", lambda: store)
    with ThreadPoolExecutor(SIZE) as pool:
        made = [*pool.map(lambda rank: Ranks(Group(rank, store), 60.0), range(SIZE))]  # type: ignore[arg-type]
    yield made
    for each in made:
        each.close()


@pytest.fixture
def looks(three: list[Ranks], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Whom the ranks looked at for signs of life, and how those were lost."""
    found: list[tuple[int, str]] = []
    end_of = Ranks._end_of

    def noted(self: Ranks, rank: int, *arguments: Any) -> str:
        how = end_of(self, rank, *arguments)
        found.append((rank, how))
        return how

    monkeypatch.setattr(Ranks, "_end_of", noted)
    return found


def say_end(first: Ranks, error: tuple[str, str] | None = None) -> None:
    first.say(serial=2, error=error, digest="", payload_bytes=0)


def test_a_lost_rank_leaves_none_of_the_others_without_the_end_of_a_version(
    three: list[Ranks], looks: list[tuple[int, str]]
) -> None:
    first, lost, slow = three
    say_end(first)
    lost.end(ENDED)
    seen = threading.Thread(target=first.wait_until_seen)
    seen.start()
    wait_until(lambda: looks.count((1, ENDED)) >= 2)  # it goes on
    assert seen.is_alive() and slow.next_line()["error"] is None
    slow.answer("seen", 2, None)
    seen.join(60)
    assert not seen.is_alive()


def gave_up(*found: Ranks) -> None:
    """Have ranks call for one that has died."""
    for each in found:
        with pytest.raises(PublishError, match="Rank 2 has ended its process"):
            each.agree(None)


def test_ranks_that_gave_up_still_learn_what_became_of_a_version(
    three: list[Ranks], looks: list[tuple[int, str]]
) -> None:
    first, other, lost = three
    lost.end(ENDED)
    gave_up(first)
    with pytest.raises(PublishError, match=r"Rank 0 has given up\. Rank 2 has ended its process"):
        other.agree(None)  # another publish is refused at once
    looks.clear()
    with ThreadPoolExecutor(2) as pool:
        line = pool.submit(other.next_line)
        wait_until(lambda: looks.count((0, "")) >= 2)
        say_end(first)
        assert line.result(60)["error"] is None
        looks.clear()
        seen = pool.submit(first.wait_until_seen)
        wait_until(lambda: looks.count((1, "")) >= 2)
        assert not seen.done()
        other.answer("seen", 2, None)
        seen.result(60)


def test_nobody_waits_for_a_rank_that_gave_up_without_its_part(three: list[Ranks]) -> None:
    first, other, lost = three
    lost.end(ENDED)
    gave_up(first)
    with contextlib.suppress(PublishError):
        other.agree(None)
    with pytest.raises(Exception, match=r"Rank 1 did not store its part: Rank 1 has given up"):
        first.answers("part", 2, None)
    say_end(first, ("StoreError", "Rank 1 did not store its part"))
    first.wait_until_seen()


def test_a_publisher_that_is_closed_says_why_it_gave_up(three: list[Ranks]) -> None:
    first, other, lost = three
    lost.end(ENDED)
    gave_up(first)
    first.close()
    with pytest.raises(PublishError, match=r"Rank 0 has given up\. Rank 2 has ended its process"):
        other.next_line()


def test_the_first_rank_holds_one_message_at_a_time(
    three: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def decompress(data: bytes) -> bytes:
        nonlocal read
        read += 1
        return zlib.decompress(data)

    def combine(said: Iterable[bytes]) -> bytes:
        for number, value in enumerate(said):
            assert read == number + 1 and value == b"%d" % number
        return b"all"

    shown = SimpleNamespace(compress=zlib.compress, decompress=decompress)
    monkeypatch.setattr(ranks, "zlib", shown)
    with ThreadPoolExecutor(SIZE) as pool:
        assert [*pool.map(lambda each: each._exchange(b"%d" % each.rank, combine), three)] == [b"all"] * SIZE


def test_the_base_of_an_adapter_is_summed_over_ranks(three: list[Ranks]) -> None:
    bases = [AdapterBase(name="base", tensors={"w": fingerprint.to_hex(each.rank)}) for each in three]
    with ThreadPoolExecutor(SIZE) as pool:
        found = [*pool.map(lambda each: bases[each.rank].summed(each.agree), three)]
    assert found == [AdapterBase(name="base", tensors={"w": fingerprint.to_hex(3)})] * SIZE


def test_sums_are_modulo_and_one_ranks_problem_is_raised_at_all(three: list[Ranks]) -> None:
    most = (1 << 64) - 1
    with ThreadPoolExecutor(SIZE) as pool:
        sums = [*pool.map(lambda each: each.agree(None, [most, each.rank, True]).tolist(), three)]
        assert sums == [[most - 2, 3, 3]] * SIZE
        problems = [None, StoreError("the disk is full"), None]
        found = [*pool.map(lambda each: attempt(lambda: each.agree(problems[each.rank], [1]))[1], three)]
    assert [type(each) for each in found] == [StoreError] * SIZE
    assert [str(each) for each in found][:2] == ["Rank 1 failed: the disk is full", "the disk is full"]
