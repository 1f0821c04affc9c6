"""Every world that can be reached, breadth first, so that what goes wrong is told by one of its shortest stories."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import others, writer
from tests.model.state import Reader, Rules, Step, World, Writer, start
from tests.statespace import Result, search


def successors(rules: Rules, world: World) -> Iterator[Step]:
    for number in range(len(world.writers)):
        yield from writer.steps(rules, world, number)
    yield from writer.lands(rules, world)
    if rules.reader:
        yield from others.reader_steps(rules, world)
    yield from others.forget_steps(rules, world)
    yield from others.prune_steps(rules, world)


def explore(rules: Rules) -> Result:
    """Visit every state; stop at the first that is wrong."""
    channels: set[object] = set()

    def problem(world: World) -> str:
        stored = (world.manifests, world.head, world.objects)
        if stored in channels:
            return ""
        channels.add(stored)
        return _stuck(rules, world)

    return search(start(rules), lambda world: successors(rules, world), problem)


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
