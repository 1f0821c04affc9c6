"""Every world of format 2 that can be reached, and from each: whether replicas and publishers can go on."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import others, writer
from tests.model.state import (
    Node,
    Reader,
    Record,
    Rules,
    Step,
    World,
    Writer,
    get,
    newest,
    readable,
    records,
    slot,
    start,
)
from tests.statespace import Result, search

_LONGEST = 100  # steps of a replica or publisher that is alone


def successors(rules: Rules, world: World) -> Iterator[Step]:
    for number in range(len(world.writers)):
        yield from writer.steps(rules, world, number)
    yield from writer.lands(rules, world)
    if rules.reader:
        yield from others.reader_steps(rules, world)
    yield from others.forget_steps(rules, world)
    yield from others.prune_steps(rules, world)
    yield from others.compaction_steps(rules, world)
    yield from others.misfortunes(rules, world)


def explore(rules: Rules) -> Result:
    """Visit every state; stop at the first that is wrong, or that leads nowhere."""
    alone = rules._replace(writers=1, faults=0, late=False)
    checked: set[object] = set()

    def problem(world: World) -> str:
        wrong = others.false_ack(rules, world)
        if wrong:
            return wrong
        stored = (world.objects, world.head)
        if (stored, world.reader) not in checked:
            checked.add((stored, world.reader))
            wrong = _follows(alone, world)
            if wrong:
                return f"everybody else stops, and {wrong}"
        if stored in checked:
            return ""
        checked.add(stored)
        return _goes_on(alone, world)

    return search(start(rules), lambda world: successors(rules, world), problem)


def _follows(rules: Rules, world: World) -> str:
    """Why a replica that is connected does not get to the newest version, to which intact objects lead; empty if it does."""
    last = newest(world)
    have = world.reader.have
    if not isinstance(get(world.objects, slot(rules, last.version, last.epoch)), Record):
        return ""  # the newest record is the damaged one: the next version tells its digest
    if not readable(world, last.node, have):
        whole = world.damages == rules.damages and not world.restored
        return f"nothing leads to {last.digest}" if whole else ""
    if world.restored and not readable(world, _told(world), have):
        return ""  # the log goes on from what was lost: the next version has full weights
    been = set()
    for _ in range(_LONGEST):
        have = world.reader.have
        if have == last.node:
            return ""
        if world.restored and (have == _told(world) or not readable(world, last.node, have)):
            return ""
        if world.reader in been:
            return f"a replica goes round in circles and never gets to {last.digest}"
        been.add(world.reader)
        steps = others.reader_steps(rules, world)
        after = next((after for _, after in steps if after.wrong or after.reader != world.reader), None)
        if after is None:
            return f"a replica that has {world.reader.have} waits for ever, and {last.digest} is there"
        if after.wrong:
            return after.wrong
        world = after
    return f"a replica takes more than {_LONGEST} steps to {last.digest}"


def _told(world: World) -> Node:
    """The version that the newest name of the log tells of."""
    last = max(records(world), key=lambda record: (record.epoch, record.version))
    return last.node if last.seal is None else last.base


def _goes_on(rules: Rules, world: World) -> str:
    """What keeps a channel that everybody left from going on: one opens it, publishes, and a new replica reads that."""
    left = world._replace(
        writers=(Writer("Z", calls=rules.calls - 1, opens=rules.opens - 1),), late=None, faults=0, crashes=0, reader=Reader()
    )
    for _ in range(_LONGEST):
        step = next(writer.steps(rules, left, 0), None)
        if step is None:
            break
        left = step[1]
    if left.wrong:
        return f"everybody left, and when somebody opens the channel, {left.wrong}"
    last = newest(left)
    if not last.digest.startswith("Z"):
        return f"everybody left, and whoever opens the channel cannot publish: {left.writers[0].at}"
    wrong = _follows(rules, left)
    return f"everybody left, and after the next version {wrong}" if wrong else ""
