"""What a publisher may do next: `Publisher._open`, `publish` and `Uploader._store`, one store operation a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.model.state import Job, Manifest, Rules, Step, World, Writer, get, put, readable, shown

Change = Callable[[Writer], Writer]


def steps(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """Everything that writer `number` can do now, what goes well first."""
    w = world.writers[number]
    act = {
        "closed": _open,
        "opening": _roll_forward,
        "rolling": _rolled,
        "idle": _publish,
        "delta": _payload,
        "anchor": _payload,
        "lease": _lease,
        "manifest": _manifest,
        "head": _head,
        "stopped": _nothing,
    }[w.at]
    for what, after in act(rules, world, number):
        yield f"{w.name}: {what}", after
    if world.crashes and w.at != "closed":
        dead = Writer(w.name, calls=w.calls)
        yield (
            f"{w.name}: dies" if w.at != "stopped" else f"{w.name}: ends",
            _with(world, number, dead)._replace(crashes=world.crashes - 1),
        )


def _with(world: World, number: int, w: Writer) -> World:
    return world._replace(writers=(*world.writers[:number], w, *world.writers[number + 1 :]))


def _nothing(rules: Rules, world: World, number: int) -> Iterator[Step]:
    return iter(())


# --- Publisher._open --------------------------------------------------------------------------------------------------


def _open(rules: Rules, world: World, number: int) -> Iterator[Step]:
    w = world.writers[number]
    if w.calls >= rules.calls:
        return
    if not rules.roll_forward:
        yield "opens, reads head", _adopt(world, number, world.head)
    elif rules.list_before_head:
        newest = max((version for version, _ in world.manifests), default=0)
        yield f"opens, lists manifests up to {newest}", _with(world, number, w._replace(at="opening", found=newest))
    else:
        yield f"opens, reads head {world.head}", _with(world, number, w._replace(at="opening", head=world.head))


def _roll_forward(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """`Publisher._roll_forward`. The read of the version that follows is one step with what comes before it."""
    w = world.writers[number]
    head, newest = world.head, w.found
    if not rules.list_before_head:
        assert w.head is not None
        head, newest = w.head, max((version for version, _ in world.manifests), default=0)
    if newest <= head[0]:
        yield f"reads head {head}", _adopt(world, number, head)
        return
    document = get(world.manifests, newest)
    if document is None:
        yield f"manifests/{newest} is gone, tries later", _with(world, number, Writer(w.name, calls=w.calls))
        return
    rolling = w._replace(at="rolling", head=(newest, document.call))
    if rules.timely and rules.list_before_head:
        yield f"rolls head forward to {rolling.head}", _rolled_to(rules, world, number, rolling)
    else:
        yield f"head {head} is behind manifests/{newest}", _with(world, number, rolling)


def _rolled(rules: Rules, world: World, number: int) -> Iterator[Step]:
    w = world.writers[number]
    yield f"rolls head forward to {w.head}", _rolled_to(rules, world, number, w)


def _rolled_to(rules: Rules, world: World, number: int, w: Writer) -> World:
    assert w.head is not None
    return _adopt(_name(rules, world, w.head), number, w.head)


def _adopt(world: World, number: int, head: tuple[int, str]) -> World:
    """Go on from head, or by full weights if it cannot be read."""
    w = world.writers[number]
    opened = Writer(w.name, "idle", w.calls, tip=head[0], head=head)
    if readable(world, *head):
        at = get(world.manifests, head[0])
        while at.anchor is None:
            at = get(world.manifests, at.base[0])
        opened = opened._replace(anchor=at.version, shadow=head[1], newest=head)
    return _with(world, number, opened)


# --- Publisher.publish ------------------------------------------------------------------------------------------------


def _publish(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """`Publisher._next_job`, which takes no store operation."""
    w = world.writers[number]
    if w.calls >= rules.calls:
        return
    version = w.tip + 1
    call = f"{w.name}{w.calls + 1}v{version}"
    full = w.anchor == 0
    job = Job(call, version, None if full else w.newest, w.shadow, full or version - w.anchor >= rules.anchor_every)
    if full and not rules.anchor_after_loss and w.newest is not None:
        job = job._replace(base=w.newest, anchored=False)
    begun = w._replace(
        at="delta" if job.base is not None else "anchor",
        calls=w.calls + 1,
        tip=version,
        anchor=version if job.anchored else w.anchor,
        shadow=call,
        job=job,
        delta=None,
        full=None,
    )
    if not rules.payload_first:
        begun = _with_files(begun)._replace(at=_after_payload(rules))
    yield f"publish {call}", _with(world, number, begun)


def _with_files(w: Writer) -> Writer:
    """The files that a manifest would name if it were written before them."""
    job = w.job
    assert job is not None
    delta = None if job.base is None else (("deltas", job.version, 0), (job.start, job.call))
    full = (("anchors", job.version, 0), ("", job.call)) if job.anchored else None
    return w._replace(delta=delta, full=full)


def _after_payload(rules: Rules) -> str:
    if not rules.manifest_first:
        return "head"
    return "manifest" if rules.conditional else "lease"


# --- Uploader._store --------------------------------------------------------------------------------------------------


def _payload(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """`deltasync.writer.Writer.put_files` of the delta, then of the anchor: in the next folder if this one is taken."""
    w = world.writers[number]
    job = w.job
    assert job is not None
    folder, content = ("deltas", (job.start, job.call)) if w.at == "delta" else ("anchors", ("", job.call))
    key = (folder, job.version, w.attempt)

    def stored(w: Writer) -> Writer:
        w = w._replace(attempt=0, **{"delta" if folder == "deltas" else "full": (key, content)})
        if folder == "deltas" and job.anchored:
            return w._replace(at="anchor")
        if not rules.payload_first:
            return _done(rules, w)
        return w._replace(at=_after_payload(rules))

    yield from _create(rules, world, number, key, content, stored, lambda w: w._replace(attempt=w.attempt + 1))


def _lease(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """Before the manifest, where the store does not decide. As one step: what it finds good was good when it began."""
    w = world.writers[number]
    problem = _conflict(rules, world, w) if rules.lease else ""
    yield (
        "checks the lease",
        _stop(rules, world, number, problem) if problem else _with(world, number, w._replace(at="manifest")),
    )


def _manifest(rules: Rules, world: World, number: int) -> Iterator[Step]:
    w = world.writers[number]
    job = w.job
    assert job is not None
    if rules.conditional and rules.timely and rules.lease and rules.lease_before_manifest:
        problem = _conflict(rules, world, w)
        if problem:
            yield "checks the lease", _stop(rules, world, number, problem)
            return
    document = Manifest(job.version, job.call, job.base, w.delta, w.full)

    def stored(w: Writer) -> Writer:
        w = w._replace(newest=(job.version, job.call))
        return w._replace(at="head") if rules.manifest_first else _done(rules, w)

    def taken(w: Writer) -> Writer:
        return Writer(w.name, "stopped", w.calls)

    yield from _create(rules, world, number, job.version, document, stored, taken)


def _head(rules: Rules, world: World, number: int) -> Iterator[Step]:
    """`_check_lease`, where it is due, and the replace of head; a time out in between makes it due again."""
    w = world.writers[number]
    job = w.job
    assert job is not None
    new = (job.version, job.call)
    # Where others may get in between, it does not matter whether a store that decides was asked before.
    if rules.lease and not w.checked and (rules.timely or not rules.conditional):
        problem = _conflict(rules, world, w)
        if problem:
            yield "checks the lease", _stop(rules, world, number, problem)
            return
        if not rules.timely:
            yield "checks the lease", _with(world, number, w._replace(checked=True))
            return
    w = w._replace(head=new)
    moved = _name(rules, world, new)
    done = _done(rules, w)
    if not rules.manifest_first:
        done = w._replace(at="manifest")
    elif not rules.payload_first:
        done = w._replace(at="delta" if job.base is not None else "anchor")
    yield f"replace head with {new}", _with(moved, number, done)
    if world.faults:
        again = w._replace(checked=not rules.lease_on_retry)
        yield from _faults(rules, world, moved, number, ("head", None, new), f"replace head with {new}", again)


def _done(rules: Rules, w: Writer) -> Writer:
    """The receipt is good. After its last call a publisher is closed."""
    return _unloaded(w) if w.calls < rules.calls else Writer(w.name, calls=w.calls)


def _unloaded(w: Writer) -> Writer:
    return w._replace(at="idle", job=None, delta=None, full=None, attempt=0, checked=False)


def _conflict(rules: Rules, world: World, w: Writer) -> str:
    """`Uploader._check_lease`: what shows another publisher."""
    head, ours = world.head, w.head
    if ours is None or head[0] > ours[0] or (head != ours and head[0] == ours[0]):
        return f"head is {head}"
    if w.newest is not None and not rules.conditional:
        document = get(world.manifests, w.newest[0])
        if document is None or document.call != w.newest[1]:
            return f"manifests/{w.newest[0]} is not its own"
    return ""


def _stop(rules: Rules, world: World, number: int, problem: str) -> World:
    """HeadConflictError, for good."""
    w = world.writers[number]
    stopped = _with(world, number, Writer(w.name, "stopped", w.calls))
    if len(world.writers) == 1 and not rules.late:
        return stopped._replace(wrong=f"{w.name} is alone and was told of another publisher: {problem}")
    return stopped


def _name(rules: Rules, world: World, new: tuple[int, str]) -> World:
    """The replace of head, and what must hold then."""
    moved = world._replace(head=new)
    if rules.timely and not rules.late and new[0] < world.head[0]:
        return moved._replace(wrong=f"head goes back from {world.head} to {new}")
    if rules.conditional and not readable(moved, *new):
        return moved._replace(wrong=f"head names {new}, which cannot be read")
    return moved


def _create(
    rules: Rules, world: World, number: int, key: Any, content: Any, stored: Change, taken: Change
) -> Iterator[Step]:
    """`deltasync.writer.Writer.create`: a create-only put that recognises its own earlier success."""
    w = world.writers[number]
    table = "manifests" if isinstance(key, int) else "objects"
    found = get(getattr(world, table), key)
    what = f"create {shown(key)}"
    if rules.create_only and (rules.conditional or not w.looked):
        if found is not None and found != content:
            after = _with(world, number, taken(w))
            if after.writers[number].at == "stopped":
                after = _stop(rules, world, number, f"{shown(key)} is taken")
            yield f"{what}: taken", after
            return
        if found is not None:
            yield f"{what}: there already", _with(world, number, stored(w))
            return
        if not rules.conditional:
            yield f"{what}: looks, nothing there", _with(world, number, w._replace(looked=True))
            return
    w = w._replace(looked=False)
    after = world._replace(**{table: put(getattr(world, table), key, content)})
    yield what, _with(after, number, stored(w))
    yield from _faults(rules, world, after, number, (table, key, content), what, w)


def _faults(
    rules: Rules, world: World, after: World, number: int, operation: tuple[str, Any, Any], what: str, again: Writer
) -> Iterator[Step]:
    """The operation was carried out but the reply is lost, or it was not, or it will be later; with a retry, or given up."""
    if not world.faults:
        return
    lost = _lost(rules, again)
    outcomes = [("done, reply lost", after), ("fails", world)]
    if rules.late and world.late is None:
        outcomes.append(("times out, is still on its way", world._replace(late=operation)))
    for outcome, reached in outcomes:
        reached = reached._replace(faults=world.faults - 1)
        if (reached.manifests, reached.objects, reached.head, reached.late) != (
            world.manifests,
            world.objects,
            world.head,
            world.late,
        ) or again != world.writers[number]:
            yield f"{what}: {outcome}, will retry", _with(reached, number, again)
        yield f"{what}: {outcome}, is given up", _with(reached, number, lost)


def _lost(rules: Rules, w: Writer) -> Writer:
    """`Publisher._recover`: full weights next, under a number that was never tried."""
    job = w.job
    assert job is not None
    attempted = w.at in ("manifest", "head") and rules.new_number_after_loss
    return _unloaded(w)._replace(tip=job.version if attempted else job.version - 1, anchor=0, looked=False)


def lands(rules: Rules, world: World) -> Iterator[Step]:
    """An operation that timed out is carried out after all."""
    if world.late is None:
        return
    table, key, content = world.late
    done = world._replace(late=None)
    if table == "head":
        yield f"the replace of head with {content} arrives late", _name(rules, done, content)
    elif not rules.conditional or get(getattr(world, table), key) is None:
        after = done._replace(**{table: put(getattr(world, table), key, content)})
        yield f"the create of {shown(key)} arrives late", after
    else:
        yield f"the create of {shown(key)} arrives late: taken", done
