"""Breadth-first search of a state space, so that what goes wrong is told by one of its shortest stories."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple, Protocol, TypeVar


class State(Hashable, Protocol):
    """An immutable state. `wrong` says which invariant the step into it broke; empty if none."""

    @property
    def wrong(self) -> str: ...


S = TypeVar("S", bound=State)


class Result(NamedTuple):
    """`wrong` is empty if every invariant held in all states; otherwise `trace` leads to where it did not."""

    states: int
    steps: int
    depth: int
    wrong: str
    trace: list[str]

    def __str__(self) -> str:
        lines = [f"{number:3d}  {what}" for number, what in enumerate(self.trace, 1)]
        return "\n".join([*lines, f"     => {self.wrong}"])


def search(
    first: S, successors: Callable[[S], Iterator[tuple[str, S]]], problem: Callable[[S], str], most: int = 10_000_000
) -> Result:
    """Visit every state that can be reached from `first`; stop at the first that is wrong.

    Args:
        first: Where it starts.
        successors: The steps out of a state: what happens, and the state after it.
        problem: What is wrong in a state as a whole; empty if nothing is. Called once for each state.
        most: Give up beyond so many states.

    Raises:
        AssertionError: there are more than `most` states.
    """
    came: dict[S, tuple[S, str] | None] = {first: None}
    level, depth, count = [first], 0, 0
    while level:
        reached: list[S] = []
        for state in level:
            wrong = problem(state)
            if wrong:
                return Result(len(came), count, depth, wrong, _trace(came, state))
            for what, after in successors(state):
                count += 1
                if after not in came:
                    came[after] = (state, what)
                    if after.wrong:
                        return Result(len(came), count, depth + 1, after.wrong, _trace(came, after))
                    reached.append(after)
        assert len(came) <= most, f"more than {most} states"
        level, depth = reached, depth + bool(reached)
    return Result(len(came), count, depth, "", [])


def _trace(came: dict[S, tuple[S, str] | None], state: S) -> list[str]:
    trace = []
    before = came[state]
    while before is not None:
        trace.append(before[1])
        before = came[before[0]]
    return trace[::-1]
