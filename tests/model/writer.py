"""What a publisher may do next, one store operation a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.model.state import (
    Compaction,
    Damaged,
    Epoch,
    Job,
    Key,
    Node,
    Payload,
    Record,
    Rules,
    Step,
    World,
    Writer,
    get,
    readable,
    shown,
    slot,
    store,
)

Change = Callable[[Writer], Writer]


def steps(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """Everything that writer `number` can do now, what goes well first."""
    w = world.writers[number]
    act = {
        "closed": _open,
        "seal": _seal,
        "sealed": _sealed,
        "claim": _claim,
        "settle": _settle,
        "settled": _settled,
        "announce": _announce,
        "idle": _publish,
        "payload": _payload,
        "look": _look,
        "record": _record,
        "anchor": _anchor,
        "compaction": _compaction,
        "stopped": _nothing,
    }[w.at]
    for what, after in act(rules, world, number):
        yield f"{w.name}: {what}", after
    if w.head is not None:
        head_moved = _with(world, number, w._replace(head=None))
        yield f"{w.name}: replaces head with {w.head[2]}", head_moved._replace(head=w.head)
    if world.crashes and w.at not in ("closed", "stopped"):
        dead = Writer(w.name, "closed", w.calls, w.opens)
        yield f"{w.name}: dies", _with(world, number, dead)._replace(crashes=world.crashes - 1)


def lands(rules: Rules, world: World) -> Iterator[Step]:
    """An operation that timed out is carried out after all, or never."""
    if world.late is None:
        return
    key, content = world.late
    done = world._replace(late=None)
    yield f"the put of {shown(key)} is lost", done
    if key[0] == "versions" and rules.store == "decides" and get(world.objects, key) is not None:
        return
    yield f"the put of {shown(key)} arrives late", store(rules, done, key, content)


def _with(world: World, number: int, w: Writer) -> World:
    return world._replace(writers=(*world.writers[:number], w, *world.writers[number + 1 :]))


def _nothing(rules: Rules, world: World, number: int) -> Iterator[Step]:
    return iter(())


# --- opening ----------------------------------------------------------------------------------------------------------


def _names(world: World) -> list[Epoch]:
    """The epochs that listings show."""
    return [key[-1] for key, _ in world.objects if key[0] in ("epochs", "versions")]


def _end(rules: Rules, world: World, below: Epoch | None = None) -> tuple[Node, Epoch]:
    """The newest version, and the epoch whose log goes on from it. Damaged bytes name what cannot be read."""
    for epoch in sorted(set(_names(world)), reverse=True):
        if below is not None and epoch >= below:
            continue
        log = slot(rules, 0, epoch)[2]
        last = max((key[1] for key, _ in world.objects if key[0] == "versions" and key[2] == log), default=None)
        if last is None:
            continues = get(world.objects, ("epochs", epoch))
            if continues is None or isinstance(continues, Damaged):
                continue
            return continues, epoch
        found = get(world.objects, slot(rules, last, epoch))
        if isinstance(found, Damaged):
            return (last, epoch, "damaged"), epoch
        return (found.node, epoch) if found.seal is None else (found.base, found.seal)
    raise AssertionError("a channel has an epoch")


def _ends(rules: Rules, world: World, below: Epoch | None = None) -> Iterator[tuple[Node, Epoch]]:
    """`_end` by each listing that there may be: the whole one, or one that is cut, from whose end the keys are read on."""
    yield _end(rules, world, below)
    records = sorted((key for key, _ in world.objects if key[0] == "versions"), key=lambda key: (key[2], key[1]))
    for first in range(len(records) if rules.cut else 0):
        hidden = set(records[first:])
        listed = world._replace(objects=tuple(pair for pair in world.objects if pair[0] not in hidden))
        tip, log = _end(rules, listed, below)
        epochs = sorted({epoch for epoch in _names(world) if below is None or epoch < below})
        while rules.read_on:
            after = [slot(rules, tip[0] + 1, epoch) for epoch in (log, *(epoch for epoch in epochs if epoch > log))]
            key = next((key for key in after if get(world.objects, key) is not None), None)
            if key is None:
                break
            found = get(world.objects, key)
            if isinstance(found, Damaged):
                tip, log = (tip[0] + 1, key[2], "damaged"), key[2]
            else:
                tip, log = (found.node, key[2]) if found.seal is None else (found.base, found.seal)
        yield tip, log


def _open(rules: Rules, world: World, number: int) -> Iterator[Step]:
    for tip, log in dict.fromkeys(_ends(rules, world)):
        yield from _open_at(rules, world, number, tip, log)


def _open_at(rules: Rules, world: World, number: int, tip: Node, log: Epoch) -> Iterator[Step]:
    w = world.writers[number]
    if w.opens >= rules.opens or w.calls >= rules.calls:
        return
    # The number is from what is there now: two that open at once may take the same one, and the token tells them apart.
    known = [*_names(world), log] if rules.count_sealed else _names(world)
    epoch = (max(known)[0] + 1, f"{w.name}{w.opens + 1}" if rules.token else "")
    opened = w._replace(opens=w.opens + 1, epoch=epoch)
    if not rules.seals:
        yield f"opens, will claim {epoch}", _with(world, number, opened._replace(at="claim"))
        return
    at = "seal" if rules.seal else "announce"
    yield f"opens, reads the log to {tip[2] or tip[0]}", _with(world, number, opened._replace(at=at, tip=tip, log=log))


def _seal(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """Create the seal at the old log's next number. If a version is there, the log went on: read on."""
    w = world.writers[number]
    version = w.tip[0] + 1
    seal = Record("", version, w.log, w.tip, seal=w.epoch)

    def taken(world: World, w: Writer) -> Writer:
        found = get(world.objects, slot(rules, version, w.log))
        if isinstance(found, Record) and found.seal is not None:
            return Writer(w.name, "stopped", w.calls, w.opens)  # another one opened the channel
        return w._replace(at="closed", opens=w.opens - 1)

    key = slot(rules, version, w.log)
    sealed = "sealed" if rules.list_after_seal else "announce"
    yield from _create(rules, world, number, key, seal, lambda w: w._replace(at=sealed), taken)


def _sealed(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """The seal counts if nothing lies after it: it may have taken the place of a version that was forgotten."""
    w = world.writers[number]
    after = [key for key, _ in world.objects if key[0] == "versions" and key[2] == w.log and key[1] > w.tip[0] + 1]
    if after:
        again = w._replace(at="closed", opens=w.opens - 1)
        yield f"its seal does not count: {shown(after[0])} is there", _with(world, number, again)
    else:
        yield "its seal counts", _with(world, number, w._replace(at="announce"))


def _announce(rules: Rules, world: World, number: int) -> Iterator[Step]:
    w = world.writers[number]
    after = store(rules, world, ("epochs", w.epoch), w.tip)
    yield f"stores {shown(('epochs', w.epoch))}", _with(after, number, _adopted(world, w))


def _adopted(world: World, w: Writer) -> Writer:
    """Ready to go on from the tip; by full weights if it cannot be read."""
    return w._replace(at="idle", shadow=w.tip[2] if readable(world, w.tip) else "", log=(0, ""))


def _claim(rules: Rules, world: World, number: int) -> Iterator[Step]:
    def claimed(w: Writer) -> Writer:
        return w._replace(at="settle" if rules.settle else "settled")

    w = world.writers[number]
    yield from _create(rules, world, number, ("epochs", w.epoch), None, claimed, lambda world, w: w)


def _settle(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """Wait longer than a look counts and a request lives."""
    w = world.writers[number]
    if rules.timely and world.late is not None and world.late[0][0] in ("versions", "epochs"):
        return
    others = world.writers
    if rules.timely and rules.suspend_counts:
        others = tuple(o._replace(looked=False) for o in world.writers)
    yield "has settled", _with(world._replace(writers=others), number, w._replace(at="settled"))


def _settled(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """Read the log. Whether somebody claimed a greater epoch meanwhile shows in the look before the first record."""
    w = world.writers[number]
    for tip in dict.fromkeys(tip for tip, _ in _ends(rules, world, below=w.epoch)):
        yield f"reads the log to {tip[2]}", _with(world, number, _adopted(world, w._replace(tip=tip)))


# --- publishing -------------------------------------------------------------------------------------------------------


def _publish(rules: Rules, world: World, number: int) -> Iterator[Step]:
    w = world.writers[number]
    if w.calls >= rules.calls:
        return
    version = w.tip[0] + 1
    call = f"{w.name}{w.calls + 1}v{version}"
    job = Job(call, version, w.shadow)
    at = "payload" if (rules.parts or not w.shadow) and rules.parts_first else _before_record(rules)
    yield f"publish {call}", _with(world, number, w._replace(at=at, calls=w.calls + 1, shadow=call, job=job))


def _before_record(rules: Rules) -> str:
    return "record" if rules.seals else "look"


def _payload_of(rules: Rules, w: Writer) -> tuple[Payload | None, Payload | None]:
    """Delta and anchor of the job."""
    assert w.job is not None
    version, start, end = w.job.version, w.job.start, w.job.call
    if not start:
        return None, (("anchors", version, w.epoch, w.attempt), ("", end))
    return (("parts", version, w.epoch, w.attempt) if rules.parts else None, (start, end)), None


def _payload(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """Parts, or full weights: at keys of its own, the same bytes each time."""
    w = world.writers[number]
    key, bits = next(payload for payload in _payload_of(rules, w) if payload is not None)
    assert key is not None

    def stored(w: Writer) -> Writer:
        return w._replace(at=_before_record(rules)) if rules.parts_first else _done(rules, w)

    yield from _create(rules, world, number, key, bits, stored, lambda world, w: w)
    if world.faults:
        # Given up: the number is free again, and what it was called is not.
        full = "" if rules.full_after_loss else w.shadow
        lost = w._replace(at="idle", job=None, shadow=full, attempt=w.attempt + rules.attempt)
        yield "gives the version up", _with(world, number, lost)._replace(faults=world.faults - 1)


def _look(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """On a store that does not decide: is there a greater epoch?"""
    w = world.writers[number]
    if max(_names(world)) > w.epoch and rules.look:
        yield "sees a greater epoch", _stopped(rules, world, number)
        return
    yield "looks at the epochs", _with(world, number, w._replace(at="record", looked=True))


def _record(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """The one object that makes the version exist."""
    w = world.writers[number]
    assert w.job is not None
    if not rules.seals and not w.looked:
        yield "its look is too old", _with(world, number, w._replace(at="look"))
        return
    delta, anchor = _payload_of(rules, w)
    record = Record(w.job.call, w.job.version, w.epoch, w.tip, delta, anchor)

    def stored(w: Writer) -> Writer:
        w = w._replace(tip=record.node, head=record.node, published=(*w.published, record.digest), looked=False, attempt=0)
        if not rules.parts_first and (rules.parts or delta is None):
            return w._replace(at="payload")
        return _done(rules, w)

    def taken(world: World, w: Writer) -> Writer:
        return _stopped(rules, world, number).writers[number]

    yield from _create(rules, world, number, slot(rules, record.version, w.epoch), record, stored, taken)
    if world.faults and not rules.same_bytes:
        for what, after in (
            ("done, reply lost", store(rules, world, slot(rules, record.version, w.epoch), record)),
            ("", world),
        ):
            lost = w._replace(at="idle", job=None, shadow="", attempt=w.attempt + 1)
            yield f"gives the record up {what}", _with(after, number, lost)._replace(faults=world.faults - 1)


def _done(rules: Rules, w: Writer) -> Writer:
    assert w.job is not None
    due = w.job.start and w.job.version % rules.anchor_every == 0
    w = w._replace(job=None)
    if due:
        return w._replace(at="anchor")
    return w._replace(at="idle")


def _anchor(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """Full weights of a version that is visible already; nobody waits for them."""
    w = world.writers[number]
    after = store(rules, world, ("anchors", w.tip[0], w.epoch, 0), ("", w.tip[2]))
    yield f"stores anchors/{w.tip[0]}", _with(after, number, w._replace(at="compaction"))


def _compaction(rules: Rules, world: World, number: int) -> Iterator[Step]:
    w = world.writers[number]
    version, epoch, digest = w.tip
    compaction = Compaction(None, version, digest, (("anchors", version, epoch, 0), ("", digest)))
    after = store(rules, world, ("compactions", 0, version, epoch), compaction)
    yield f"stores compactions/0-{version}", _with(after, number, w._replace(at="idle"))


def _stopped(rules: Rules, world: World, number: int) -> World:
    """Fenced, for good."""
    w = world.writers[number]
    stopped = _with(world, number, Writer(w.name, "stopped", w.calls, w.opens))
    if len(world.writers) == 1 and not world.restored:
        return stopped._replace(wrong=f"{w.name} is alone and was told of another writer")
    return stopped


def _create(
    rules: Rules,
    world: World,
    number: int,
    key: Key,
    content: Any,
    stored: Change,
    taken: Callable[[World, Writer], Writer],
) -> Iterator[Step]:
    """A put of the same bytes, again and again until there is an answer. Where the store decides, only one content wins."""
    w = world.writers[number]
    what = f"stores {shown(key)}"
    found = get(world.objects, key)
    if rules.store == "decides" and found is not None and found != content:
        after = taken(world, w)
        alone = after.at == "stopped" and key[0] == "versions" and len(world.writers) == 1 and not world.restored
        wrong = f"{w.name} is alone and was told of another writer" if alone else ""
        yield f"{what}: taken", _with(world, number, after)._replace(wrong=wrong)
        return
    done = store(rules, world, key, content)
    yield what, _with(done, number, stored(w))
    if not world.faults:
        return
    outcomes = [("done, reply lost", done), ("fails", world)]
    if rules.late and world.late is None:
        outcomes.append(("times out, is still on its way", world._replace(late=(key, content))))
    for outcome, reached in outcomes:
        yield f"{what}: {outcome}", reached._replace(faults=world.faults - 1)
