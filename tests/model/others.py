"""What a replica, `forget`, `prune` and misfortune may do next, one store operation a step."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.state import (
    Compaction,
    Damaged,
    Edge,
    Key,
    Node,
    Objects,
    Payload,
    Reader,
    Record,
    Rules,
    Step,
    World,
    get,
    put,
    readable,
    records,
    shown,
    slot,
    store,
    without,
)


def reader_steps(rules: Rules, world: World) -> Iterator[Step]:
    """What a replica does. While it is idle it polls or looks; what it plans and fetches follows from what it finds.

    It may look at any time. After a way that led nowhere it must, so that it does not try that one for ever.
    """
    r = world.reader
    if r.path and r.todo is None:
        yield _fetch(rules, world)
    elif r.todo is not None:
        yield _plan(rules, world)
    else:
        if r.have is not None and r.tried < 1:
            yield _poll(rules, world)
        if r.tried < 2:
            yield _look_at_head(rules, world)
        if rules.list_when_lost:
            yield _list(rules, world)


def _read(world: World, r: Reader, **changes: object) -> World:
    return world._replace(reader=r._replace(**changes))


# --- following: one request -------------------------------------------------------------------------------------------


def _poll(rules: Rules, world: World) -> Step:
    """Ask for the next number of the epoch."""
    r = world.reader
    assert r.have is not None
    key = slot(rules, r.have[0] + 1, r.epoch)
    found = get(world.objects, key)
    if found is None or r.missed == key:
        return f"reader: {shown(key)} is not there yet", _read(world, r, missed=key if rules.sticky else None)
    if isinstance(found, Damaged):
        return f"reader: {shown(key)} is damaged", world
    if rules.poll_base and found.base != r.have:
        return f"reader: {shown(key)} follows another version than its own", world
    if found.seal is not None:
        return f"reader: the seal names {found.seal}", _read(world, r, epoch=found.seal)
    payload = found.delta if found.anchor is None else found.anchor
    assert payload is not None
    edge = Edge(found.node, payload, key)
    if payload[0] is None:
        return _apply(rules, _read(world, r, path=(edge,)))
    return f"reader: reads {found.digest}", _read(world, r, path=(edge,))


def _fetch(rules: Rules, world: World) -> Step:
    """Fetch the payload of the next planned step and apply it."""
    r = world.reader
    edge = r.path[-1]
    key, bits = edge.payload
    if key is None:
        return _apply(rules, world)
    if get(world.objects, key) == bits:
        return _apply(rules, world)
    avoid = r.avoid | {edge.named} if rules.detour else frozenset()
    again = r._replace(path=(), staged=None, avoid=avoid, todo=r.target, full=r.target is not None and r.full)
    if r.target is None:
        again = again._replace(tried=1)  # it polled: look
    return f"reader: {shown(key)} is missing or damaged", world._replace(reader=again)


def _apply(rules: Rules, world: World) -> Step:
    """Commit, and what must hold then. The fingerprint would notice most of it; the protocol must not need it."""
    r = world.reader
    edge, have = r.path[-1], r.have
    start, end = edge.payload[1]
    node, before = edge.node, r.have if r.staged is None else r.staged
    if start not in ("", "" if before is None else before[2]):
        return f"reader: applies {end}", world._replace(wrong=f"a delta from {start} meets {before and before[2]}")
    if len(r.path) > 1:
        return f"reader: stages {end}", _read(world, r, path=r.path[:-1], staged=node)
    what = f"reader: serves {end}"
    if end != node[2] or all(record.node != node for record in world.history):
        return what, world._replace(wrong=f"a reader has {end} as {node}, which nobody published as that")
    if have is not None and not r.back and (node[1], node[0]) <= (have[1], have[0]):
        return what, world._replace(wrong=f"a reader goes back from {have} to {node}")
    after = Reader(have=node, epoch=node[1] if r.back else max(r.epoch, node[1]))
    return what, world._replace(reader=after)


def false_ack(rules: Rules, world: World) -> str:
    """Which publisher takes the replica's heartbeat for an acknowledgement that it is not; empty if none does."""
    have = world.reader.have
    for w in world.writers:
        if have is None or not w.published or w.at in ("closed", "stopped"):
            continue
        counts = have[2] in w.published or not rules.ack_by_digest
        if counts and have[0] >= w.tip[0] and not _descends(world, have, w.tip):
            return f"{w.name} takes {have} for an acknowledgement of {w.tip}"
    return ""


def _descends(world: World, node: Node, from_: Node) -> bool:
    bases = {record.node: record.base for record in world.history if record.seal is None}
    at: Node | None = node
    while at is not None and at != from_:
        at = bases.get(at)
    return at is not None


# --- finding the way --------------------------------------------------------------------------------------------------


def _look_at_head(rules: Rules, world: World) -> Step:
    """Head names a version with its digest, right or wrong."""
    head = world.head
    if head is None:
        return "reader: head cannot be read", world
    return f"reader: head names {head[2]}", _go_to(rules, world, head, tried=1)


def _list(rules: Rules, world: World) -> Step:
    """The newest name of the newest epoch that has one. It may be a seal, which only reading it tells."""
    r = world.reader
    names = [key for key, _ in world.objects if key[0] == "versions"]
    if not names:
        return "reader: lists nothing", world
    key = max(names, key=lambda key: (key[2], key[1]))
    found = get(world.objects, key)
    if isinstance(found, Record) and found.seal is not None:
        known = _read(world, r, epoch=max(r.epoch, found.seal)) if r.have == found.base else world
        return f"reader: lists up to a seal after {found.base[2]}", _go_to_listed(rules, known, found.base)
    return f"reader: lists up to {shown(key)}", _go_to_listed(rules, world, (key[1], key[2], ""))


def _go_to_listed(rules: Rules, world: World, node: Node) -> World:
    """Where the store went back to before what the replica has, that is lost, and it plans from full weights."""
    r = world.reader
    if rules.lost_anew and r.have is not None and r.have != node and (node[1], node[0]) <= (r.have[1], r.have[0]):
        found = get(world.objects, slot(rules, r.have[0], r.have[1]))
        if found is None or (isinstance(found, Record) and found.node != r.have):
            return _read(world, r, target=node, todo=node, path=(), full=True, back=True, avoid=frozenset(), tried=2)
    return _go_to(rules, world, node)


def _go_to(rules: Rules, world: World, node: Node, tried: int = 2) -> World:
    r = world.reader
    forward = r.have is None or (node[1], node[0]) > (r.have[1], r.have[0])
    if r.have is not None and not forward and (rules.never_back or (node[0], node[2]) == (r.have[0], r.have[2])):
        return world
    full = r.have is None
    return _read(world, r, target=node, todo=node, path=(), full=full, back=False, avoid=frozenset(), tried=tried)


def _plan(rules: Rules, world: World) -> Step:
    """One more object read on the way back from the target, to what the replica has or, if `full`, to full weights."""
    r = world.reader
    todo = r.todo
    assert todo is not None
    if todo[2] and _is_there(rules, r, todo):
        return "reader: has a way", _read(world, r, todo=None)
    best = 0 if r.full or r.have is None else r.have[0]
    compactions = [key for key, _ in world.objects if key[0] == "compactions" and key[2] == todo[0] and key not in r.avoid]
    first = next((key for key in compactions if key[1] == best), None)
    key = slot(rules, todo[0], todo[1])
    if first is not None and todo[2]:
        return _plan_compaction(world, todo, first)
    found = None if key in r.avoid else get(world.objects, key)
    if not isinstance(found, Record) or todo[2] not in ("", found.digest) or found.seal is not None:
        other = next((key for key in compactions if key[1] > best), None)
        if other is not None and todo[2] and rules.detour:
            return _plan_compaction(world, todo, other)
        return _no_way(rules, world, f"{shown(key)} does not help")
    if not todo[2]:  # now its digest is known, and with it which compactions lead to it
        return f"reader: reads {found.digest}", _read(world, r, todo=found.node, target=found.node)
    if found.anchor is not None:
        path = (*r.path, Edge(found.node, found.anchor, key))
        return f"reader: reads {found.digest}, full weights", _read(world, r, path=path, todo=None)
    assert found.delta is not None
    if found.base[0] < best and rules.plan_by_digest:
        return _no_way(rules, world, "its version is not on the way")
    path = (*r.path, Edge(found.node, found.delta, key))
    return f"reader: reads {found.digest}", _read(world, r, path=path, todo=found.base)


def _is_there(rules: Rules, r: Reader, node: Node) -> bool:
    if r.have is None or r.full:
        return False
    return r.have == node if rules.plan_by_digest else r.have[0] == node[0]


def _plan_compaction(world: World, todo: Node, key: Key) -> Step:
    """By a compaction of the version, if it is of the same digest: from full weights, or from an older version."""
    r = world.reader
    compaction = get(world.objects, key)
    if not isinstance(compaction, Compaction) or (compaction.version, compaction.digest) != (todo[0], todo[2]):
        return f"reader: {shown(key)} does not help", _read(world, r, avoid=r.avoid | {key})
    path = (*r.path, Edge(todo, compaction.payload, key))
    return f"reader: reads {shown(key)}", _read(world, r, path=path, todo=compaction.base)


def _no_way(rules: Rules, world: World, why: str) -> Step:
    """Plan without the step that led here; then from full weights; then wait for what comes."""
    r = world.reader
    if r.path and rules.detour:
        return f"reader: {why}, plans anew", _read(world, r, todo=r.target, path=(), avoid=r.avoid | {r.path[-1].named})
    if not r.full and rules.detour:
        full = r._replace(todo=r.target, path=(), full=True, avoid=frozenset())
        return f"reader: {why}, plans from full weights", world._replace(reader=full)
    idle = Reader(r.have, r.epoch, missed=r.missed, tried=(r.tried + 1) % 3)
    return f"reader: {why}, waits", world._replace(reader=idle)


# --- maintenance -----------------------------------------------------------------------------------------------------


def _kept(world: World, node: Node) -> set[Key]:
    """Records and compactions that a reader without anything needs to get to the version."""
    at: Node | None = node
    kept: set[Key] = set()
    while at is not None:
        compactions = [(key, c) for key, c in world.objects if isinstance(c, Compaction) and c.base is None]
        anchor = next(
            (key for key, compaction in compactions if (compaction.version, compaction.digest) == (at[0], at[2])), None
        )
        found = next(((key, c) for key, c in world.objects if isinstance(c, Record) and c.node == at), None)
        if anchor is not None:
            kept.add(anchor)
            if at == node and found is not None:
                kept.add(found[0])
            return kept
        if found is None:
            return kept
        kept.add(found[0])
        at = None if found[1].anchor is not None else found[1].base
    return kept


def forget_steps(rules: Rules, world: World) -> Iterator[Step]:
    """Keep the newest version and what leads to it; delete the records and compactions of the others, the newest first."""
    s = world.sweep
    if s.forget is None:
        if s.forgets < rules.forgets:
            last = max((r for r in records(world) if r.seal is None), key=lambda r: (r.epoch, r.version))
            kept = _kept(world, last.node)
            keys = [
                key
                for key, content in world.objects
                if key not in kept
                and (
                    (isinstance(content, Compaction) and content.version <= last.version)
                    or (isinstance(content, Record) and (content.seal is None or not rules.keep_seals))
                )
            ]
            keys.sort(key=lambda key: key[2] if key[0] == "compactions" else key[1], reverse=rules.newest_first)
            if keys:
                yield "forget: lists", world._replace(sweep=s._replace(forget=tuple(keys), forgets=s.forgets + 1))
        return
    after = world._replace(objects=without(world.objects, s.forget[:1]), sweep=s._replace(forget=s.forget[1:] or None))
    if not rules.damages and not rules.late:  # a late put may bring a forgotten record back, which nobody needs
        for record in records(after):
            if record.seal is None and readable(world, record.node) and not readable(after, record.node):
                after = after._replace(wrong=f"{record.digest} is left and cannot be read")
    yield f"forget: deletes {shown(s.forget[0])}", after
    yield "forget: dies", world._replace(sweep=s._replace(forget=None))


def prune_steps(rules: Rules, world: World) -> Iterator[Step]:
    """List objects, then read what refers to them; delete the rest, unless it may be on its way."""
    s = world.sweep
    if s.seen is None:
        if s.prunes < rules.prunes:
            yield "prune: lists the channel", world._replace(sweep=s._replace(seen=world.objects, prunes=s.prunes + 1))
        return
    first, second = (s.seen, world.objects) if rules.objects_first else (world.objects, s.seen)
    data = [key for key, _ in first if key[0] in ("parts", "anchors")]
    gone = {key for key in data if not _referred(key, second) and not _spared(rules, world, key, second)}
    after = world._replace(objects=without(world.objects, gone), sweep=s._replace(seen=None))
    yield f"prune: deletes {', '.join(map(shown, sorted(gone))) or 'nothing'}", after


def _referred(key: Key, objects: Objects) -> bool:
    payloads: list[Payload | None] = []
    for _, content in objects:
        if isinstance(content, Record):
            payloads += [content.delta, content.anchor]
        elif isinstance(content, Compaction):
            payloads.append(content.payload)
    return any(payload is not None and payload[0] == key for payload in payloads)


def _spared(rules: Rules, world: World, key: Key, objects: Objects) -> bool:
    """While its epoch goes on, by what is listed; afterwards by age: what is in use is younger than the time of grace."""
    stored = [content.epoch for _, content in objects if isinstance(content, Record) and content.seal is None]
    later = stored if rules.ends_by_version else [k[-1] for k, _ in objects if k[0] in ("epochs", "versions")]
    if not any(epoch > key[2] for epoch in later):
        return rules.spare_under_way and _under_way(key, objects)
    return rules.grace and any(
        w.epoch == key[2] and w.at in ("anchor", "compaction", "look", "record") for w in world.writers
    )


def _under_way(key: Key, objects: Objects) -> bool:
    """Whether the writer of an object may still be about to refer to it."""
    folder, version, epoch = key[:3]
    stored = [content for _, content in objects if isinstance(content, Record) and content.seal is None]
    own = [record for record in stored if record.epoch == epoch]
    if folder == "anchors":
        last = [record.version for record in own if record.anchor is not None]
        last += [
            key[2]
            for key, content in objects
            if isinstance(content, Compaction) and content.base is None and key[3] == epoch
        ]
    else:
        last = [record.version for record in own]
    return bool(version > max(last, default=0))


def compaction_steps(rules: Rules, world: World) -> Iterator[Step]:
    """Somebody compactions the newest version's delta and the one before it."""
    if world.sweep.compactions >= rules.compactions:
        return
    by_node = {record.node: record for record in records(world, damaged=False) if record.delta is not None}
    for record in by_node.values():
        before = by_node.get(record.base)
        if before is not None:
            compaction = Compaction(before.base, record.version, record.digest, (None, (before.base[2], record.digest)))
            key = ("compactions", before.base[0], record.version, (0, "f"))
            swept = world._replace(sweep=world.sweep._replace(compactions=world.sweep.compactions + 1))
            yield f"stores {shown(key)}", store(rules, swept, key, compaction)


# --- misfortune -------------------------------------------------------------------------------------------------------


def misfortunes(rules: Rules, world: World) -> Iterator[Step]:
    """A replica is replaced by a new one; an object turns bad; a backup is taken, and restored."""
    if world.joins and world.reader.have is not None:
        yield "a new replica starts", world._replace(reader=Reader(), joins=world.joins - 1)
    if world.damages:
        hurt = world._replace(damages=world.damages - 1)
        if world.head is not None:
            yield "head is damaged", hurt._replace(head=None)
        for key, content in world.objects:
            yield f"{shown(key)} is damaged", hurt._replace(objects=put(world.objects, key, Damaged(content)))
    if rules.backup == "any" and world.backup is None:
        yield "a backup is taken", world._replace(backup=(world.objects, world.head))
    if world.backup and not world.restored and world.backup[0] != world.objects:
        objects, head = world.backup
        yield "the backup is restored", world._replace(objects=objects, head=head, backup=(), restored=True)
