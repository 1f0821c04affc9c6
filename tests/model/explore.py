"""Every world that can be reached, breadth first, so that what goes wrong is told by one of its shortest stories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.model import others, writer
from tests.model.state import Reader, Rules, Step, World, Writer, start


class Result(NamedTuple):
    """`wrong` is empty if every invariant held in all states; otherwise `trace` leads to where it did not."""

    states: int
    steps: int
    depth: int
    channels: int
    wrong: str
    trace: list[str]

    def __str__(self) -> str:
        lines = [f"{number:3d}  {what}" for number, what in enumerate(self.trace, 1)]
        return "\n".join([*lines, f"     => {self.wrong}"])


def successors(rules: Rules, world: World) -> Iterator[Step]:
    for number in range(len(world.writers)):
        yield from writer.steps(rules, world, number)
    yield from writer.lands(rules, world)
    if rules.reader:
        yield from others.reader_steps(rules, world)
    yield from others.forget_steps(rules, world)
    yield from others.prune_steps(rules, world)


def explore(rules: Rules, most: int = 10_000_000) -> Result:
    """Visit every state; stop at the first that is wrong.

    Raises:
        AssertionError: there are more than `most` states.
    """
    first = start(rules)
    came: dict[World, tuple[World, str] | None] = {first: None}
    level, depth, count = [first], 0, 0
    channels: set[object] = set()
    while level:
        reached = []
        for world in level:
            stored = (world.manifests, world.head, world.objects)
            if stored not in channels:
                channels.add(stored)
                problem = _stuck(rules, world)
                if problem:
                    return Result(len(came), count, depth, len(channels), problem, _trace(came, world))
            for what, after in successors(rules, world):
                count += 1
                if after not in came:
                    came[after] = (world, what)
                    if after.wrong:
                        return Result(len(came), count, depth + 1, len(channels), after.wrong, _trace(came, after))
                    reached.append(after)
        assert len(came) <= most, f"more than {most} states"
        level, depth = reached, depth + bool(reached)
    return Result(len(came), count, depth, len(channels), "", [])


def _trace(came: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    trace = []
    before = came[world]
    while before is not None:
        trace.append(before[1])
        before = came[before[0]]
    return trace[::-1]


def _stuck(rules: Rules, world: World) -> str:
    """What keeps a channel that everybody left from going on: one opens it, publishes, and a new replica reads that."""
    alone = Rules(
        calls=1, conditional=rules.conditional, anchor_every=rules.anchor_every, crashes=0, roll_forward=rules.roll_forward
    )
    highest = max([world.head[0], *(version for version, _ in world.manifests)])
    left = World(world.manifests, world.head, world.objects, (Writer("Z"), Writer("nobody", "stopped")))
    for _ in range(40):
        step = next(writer.steps(alone, left, 0), None)
        if step is None:
            break
        left = step[1]
    if left.wrong:
        return f"everybody left, and when somebody opens the channel, {left.wrong}"
    version, call = left.head
    if not call.startswith("Z") or version <= highest:
        return f"everybody left, and whoever opens the channel cannot publish: {left.writers[0].at}, head {left.head}"
    while not left.wrong and left.reader.have != left.head:
        step = next(others.reader_steps(alone, left), None)
        if step is None or step[1].reader == Reader():
            return f"everybody left, {call} was published after that, and a new replica cannot read it"
        left = step[1]
    return left.wrong
