"""What a replica, `forget` and `prune` may do next, one store operation a step."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.state import Forget, Key, Manifest, Prune, Reader, Rules, Step, World, get, put, readable, shown, without


def reader_steps(rules: Rules, world: World) -> Iterator[Step]:
    """`Follower.advance`: head, then manifests back to what it has or to an anchor, then payloads."""
    r = world.reader
    if r.todo is not None:
        yield from _read_manifest(rules, world)
    elif r.steps:
        yield from _fetch(rules, world)
    else:
        if r.have is not None:
            yield "a new replica starts", world._replace(reader=Reader())
        old = world.forget.left is not None
        version = world.head[0]
        if r.have is None or r.have[0] < version:  # else HeadRewindError, or nothing to do
            yield f"reader: reads head {world.head}", world._replace(reader=Reader(r.have, world.head, old=old))
        if rules.explicit:
            for before in range(1, version):
                if r.have is None or before != r.have[0]:
                    asked = Reader(r.have, (before, None), old=old, named=False)
                    yield f"reader: is asked for version {before}", world._replace(reader=asked)


def _read_manifest(rules: Rules, world: World) -> Iterator[Step]:
    """`ChannelReader.manifest` and `_steps_back`."""
    r = world.reader
    assert r.todo is not None
    version, digest = r.todo
    document: Manifest | None = get(world.manifests, version)
    kept = world._replace(reader=Reader(r.have))
    if document is None:
        yield f"reader: manifests/{version} is missing", kept
        return
    if rules.check_digests and digest not in (None, document.call):
        yield f"reader: manifests/{version} is not the named one", kept
        return
    have = 0 if r.have is None else r.have[0]
    if document.base is not None and document.base[0] == have:
        after = r._replace(todo=None, steps=(*r.steps, (document, False)))
    elif document.anchor is not None:
        after = r._replace(todo=None, steps=(*r.steps, (document, True)))
    else:
        after = r._replace(todo=document.base, steps=(*r.steps, (document, False)))
    yield f"reader: reads manifests/{version} of {document.call}", world._replace(reader=after)


def _fetch(rules: Rules, world: World) -> Iterator[Step]:
    """`ChannelReader.fetch`, then commit and confirm: the fingerprint holds every version to its manifest."""
    r = world.reader
    document, use_anchor = r.steps[-1]
    file = document.anchor if use_anchor else document.delta
    assert file is not None
    key, digest = file
    kept = world._replace(reader=Reader(r.have))
    found = get(world.objects, key)
    if found is None:
        # Where the store does not decide, prune may take what a version has whose manifest was written over.
        wrong = f"{shown(key)} is gone while a reader that was led to it needs it"
        wrong = wrong if r.named and rules.conditional else ""
        yield f"reader: {shown(key)} is missing", kept._replace(wrong=wrong)
        return
    if rules.check_digests and found != digest:
        yield f"reader: {shown(key)} is not the named one", kept
        return
    before = "" if use_anchor or r.have is None else r.have[1]
    bits = found[1] if found[0] == before else f"{found[1]} on {before}"
    what = f"reader: applies {shown(key)}, has {bits} at version {document.version}"
    if found[0] != before and rules.conditional:
        yield what, kept._replace(wrong=f"a delta from {found[0]} met {before}, which only the fingerprint can tell")
        return
    if rules.check_digests and bits != document.call:
        yield f"reader: the fingerprint of version {document.version} differs, rolls back", kept
        return
    have = (document.version, bits)
    after = world._replace(reader=Reader(have) if len(r.steps) == 1 else r._replace(have=have, steps=r.steps[:-1]))
    yield what, _seen(after, *have)


def _seen(world: World, version: int, bits: str) -> World:
    """The invariant that all this is for."""
    if not bits.endswith(f"v{version}"):
        return world._replace(wrong=f"a reader has {bits} as version {version}, which nobody published as that")
    before = get(world.seen, version)
    if before not in (None, bits):
        return world._replace(wrong=f"version {version} was {before} to one reader and is {bits} to another")
    return world._replace(seen=put(world.seen, version, bits))


def forget_steps(rules: Rules, world: World) -> Iterator[Step]:
    """`housekeeping.forget` with `Keep(last=1)`. Reading head and manifests is one step, up to head these do not change."""
    left = world.forget.left
    runs = world.forget.runs
    if left is None:
        if runs < rules.forgets:
            head = world.head[0]
            kept, at = set(), get(world.manifests, head)
            while at is not None:
                kept.add(at.version)
                at = None if at.anchor is not None else get(world.manifests, at.base[0])
            versions = sorted((v for v, _ in world.manifests if v <= head and v not in kept), reverse=rules.newest_first)
            if versions:
                yield (
                    f"forget: lists {versions} as forgotten",
                    world._replace(
                        forget=Forget(tuple(versions), runs + 1),
                        forgotten=world.forgotten.union(versions),
                        reader=world.reader._replace(old=world.reader.todo is not None or bool(world.reader.steps)),
                    ),
                )
        return
    if not left:
        yield "forget: is done", world._replace(forget=Forget(None, runs))
        return
    yield "forget: dies", world._replace(forget=Forget(None, runs))
    after = world._replace(manifests=without(world.manifests, {left[0]}), forget=Forget(left[1:], runs))
    for version, _ in after.manifests if rules.conditional else ():
        if version <= after.head[0] and readable(world, version, None) and not readable(after, version, None):
            after = after._replace(wrong=f"version {version} is left and cannot be read")
    yield f"forget: deletes manifests/{left[0]}", after


def prune_steps(rules: Rules, world: World) -> Iterator[Step]:
    """`housekeeping.prune`: objects, head, manifests, in this order; then it deletes."""
    p = world.prune
    if p.objects is None and p.referred is None and p.runs >= rules.prunes:
        return
    objects_now = p.objects is None and (rules.objects_before_manifests or p.referred is not None)
    if objects_now:
        listed = p._replace(objects=_old_enough(rules, world), forgotten=world.forgotten, runs=p.runs + 1)
        yield "prune: lists objects", world._replace(prune=listed)
    elif p.head is None and p.objects is not None:
        yield "prune: reads head", world._replace(prune=p._replace(head=world.head[0]))
    elif p.referred is None:
        referred = frozenset(key for _, document in world.manifests for key, _ in document.files)
        yield "prune: reads manifests", world._replace(prune=p._replace(referred=referred))
    if p.objects is not None and p.head is not None and p.referred is not None:
        keys = {key for key in p.objects - p.referred if key[1] <= p.head or not rules.spare_after_head}
        if rules.grace and rules.forgotten_after_manifests:
            keys = {key for key in keys if key[1] not in world.forgotten - p.forgotten}
        after = world._replace(prune=Prune(runs=p.runs), objects=without(world.objects, keys))
        yield f"prune: deletes {', '.join(map(shown, sorted(keys))) or 'nothing'}", after


def _old_enough(rules: Rules, world: World) -> frozenset[Key]:
    """Objects that nothing happened to for the time of grace, which is longer than any reading. Uploads may take longer."""
    keys = frozenset(key for key, _ in world.objects)
    if not rules.grace:
        return keys
    if world.reader.old or world.forget.left is not None:
        return frozenset(key for key in keys if key[1] not in world.forgotten)
    return keys
