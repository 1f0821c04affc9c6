"""A channel of format 2 and all who work on it, as one immutable value; and the rules, each of which can be dropped.

A publish call is a name like `A2v3`: the second thing that writer A was asked to publish, as version 3. The name stands for
the bits that it was given and for the digest of its record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Epoch = tuple[int, str]  # number, token
Key = tuple[Any, ...]  # folder, then numbers and an epoch
Node = tuple[int, Epoch, str]  # version, epoch of its record, digest of its record
Bits = tuple[str, str]  # the bits that a payload leads from ("" for full weights) and to
Payload = tuple[Key | None, Bits]  # None: within the record
Objects = tuple[tuple[Key, Any], ...]


class Rules(NamedTuple):
    """What a world starts with, then the rules of the protocol that may be dropped to see that they matter.

    Attributes:
        store: `decides` who creates an object; is `plain`: a put overwrites; or `lies`: says that it decides and overwrites.
        writers: How many publishers know of the channel; the first has it open.
        calls, opens: Publish calls, and openings, for each writer.
        crashes: Publishers that die, in all. One that is suspended takes no step, for any time.
        faults: Store operations of publishers that fail or whose reply is lost, in all.
        late: Whether an operation that failed may be carried out at any later time, or never.
        parts: Whether payloads lie in parts; otherwise in the record.
        anchor_every: Versions from an anchor to the next.
        reader: Whether a replica follows.
        joins: How many times a new replica starts in its place.
        sticky: Whether an edge remembers for ever that a key was missing. Listings and reads of listed objects pass it.
        forgets, prunes, compactions: How often each runs, in all. No time of grace: they run at the worst moment.
        damages: Objects that turn bad for ever.
        backup: The moment of a backup that may be restored once, at any later one: `start`, `any`, or "" for none.
        cut: Whether a listing of records may end anywhere when a channel is opened.
        timely: Whether, on a store that does not decide, what rests on a look lands before who came later has settled.
        linear: Whether a fork counts as wrong.
        forks_after_restore: Whether it does not once a backup was restored, which nothing can prevent.
    """

    store: str = "decides"
    writers: int = 2
    calls: int = 2
    opens: int = 1
    crashes: int = 0
    faults: int = 0
    late: bool = False
    parts: bool = False
    anchor_every: int = 2
    reader: bool = True
    joins: int = 0
    sticky: bool = False
    forgets: int = 0
    prunes: int = 0
    compactions: int = 0
    damages: int = 0
    backup: str = ""
    cut: bool = False
    timely: bool = True
    linear: bool = True
    forks_after_restore: bool = True

    seal: bool = True
    list_after_seal: bool = True
    read_on: bool = True
    count_sealed: bool = True
    probe: bool = True
    epoch_in_key: bool = True
    token: bool = True
    parts_first: bool = True
    same_bytes: bool = True
    attempt: bool = True
    full_after_loss: bool = True
    settle: bool = True
    look: bool = True
    suspend_counts: bool = True
    poll_base: bool = True
    plan_by_digest: bool = True
    never_back: bool = True
    lost_anew: bool = True
    list_when_lost: bool = True
    detour: bool = True
    ack_by_digest: bool = True
    keep_seals: bool = True
    newest_first: bool = True
    objects_first: bool = True
    spare_under_way: bool = True
    ends_by_version: bool = True
    grace: bool = True

    @property
    def seals(self) -> bool:
        """Whether writers fence by sealing; otherwise by a lease."""
        return self.store == "decides" or (self.store == "lies" and not self.probe)


class Record(NamedTuple):
    """What lies at a slot of the log. A seal names the epoch that goes on; it has no digest."""

    digest: str
    version: int
    epoch: Epoch
    base: Node
    delta: Payload | None = None
    anchor: Payload | None = None
    seal: Epoch | None = None

    @property
    def node(self) -> Node:
        return (self.version, self.epoch, self.digest)


class Compaction(NamedTuple):
    """Another way to a version: from an older one, or from nothing (`base` None), which is an anchor."""

    base: Node | None
    version: int
    digest: str
    payload: Payload


class Damaged(NamedTuple):
    """An object that turned bad; `was` is for the invariants only."""

    was: Any


class Job(NamedTuple):
    """One version on its way. `start` is the bits that its delta starts from, "" if it has full weights."""

    call: str
    version: int
    start: str


class Writer(NamedTuple):
    """A publisher.

    Attributes:
        at: Its next operation on the store.
        epoch: Its own, while it has one.
        log: The epoch whose log it is about to seal.
        tip: What its next version follows.
        shadow: The bits that it published last, "" if they are not known to be the tip's.
        published: Digests that it was told are stored.
        looked: Whether its look at the epochs still counts.
        head: What it has not yet written to head.
    """

    name: str
    at: str = "closed"
    calls: int = 0
    opens: int = 0
    epoch: Epoch = (0, "")
    log: Epoch = (0, "")
    tip: Node = (0, (0, ""), "")
    shadow: str = ""
    job: Job | None = None
    attempt: int = 0
    published: tuple[str, ...] = ()
    looked: bool = False
    head: Node | None = None


class Edge(NamedTuple):
    """A step that a replica has planned: to `node`, by `payload`. `named` is the object that told of it."""

    node: Node
    payload: Payload
    named: Key


class Reader(NamedTuple):
    """A replica.

    Attributes:
        have: What is live.
        epoch: The epoch that it polls, the greatest it knows to be in force.
        target: What it is planning to get to, while it is lost. The digest is "" where only a key was listed.
        todo: The version that it needs a way to, back to what it has.
        path: Planned steps, newest first.
        staged: What it has staged of the plan; nobody sees it.
        full: Whether it plans from full weights, because no deltas lead on from what it has.
        back: Whether that leads to a lesser epoch, because the store does not know what it has any more.
        avoid: Objects that failed it while it plans.
        missed: The key that an edge remembers as missing.
        tried: What led nowhere since it last got on: 0 nothing; 1 polling, so it looks at head; 2 head, so it lists.
    """

    have: Node | None = None
    epoch: Epoch = (0, "")
    target: Node | None = None
    todo: Node | None = None
    path: tuple[Edge, ...] = ()
    staged: Node | None = None
    full: bool = False
    back: bool = False
    avoid: frozenset[Key] = frozenset()
    missed: Key | None = None
    tried: int = 0


class Sweep(NamedTuple):
    """`forget` under way: what it is to delete; `prune`: what it has listed."""

    forget: tuple[Key, ...] | None = None
    seen: Objects | None = None
    forgets: int = 0
    prunes: int = 0
    compactions: int = 0


class World(NamedTuple):
    """Everything. `history` has every record that was ever stored, in order; `wrong` says which invariant broke."""

    objects: Objects
    head: Node | None
    writers: tuple[Writer, ...]
    history: tuple[Record, ...]
    reader: Reader = Reader()
    sweep: Sweep = Sweep()
    late: tuple[Key, Any] | None = None
    crashes: int = 0
    faults: int = 0
    damages: int = 0
    joins: int = 0
    backup: tuple[Any, ...] | None = None
    restored: bool = False
    wrong: str = ""


Step = tuple[str, World]


def start(rules: Rules) -> World:
    """A channel with version 1, which the first writer published and the reader has not read."""
    epoch, call = (1, "A0" if rules.token else ""), "A1v1"
    weights = ("anchors", 1, epoch, 0)
    first = Record(call, 1, epoch, (0, epoch, ""), anchor=(weights, ("", call)))
    writers = tuple(Writer(name) for name in "AB"[: rules.writers])
    opened = Writer("A", "idle", 1, 1, epoch, tip=first.node, shadow=call, published=(call,))
    objects = {("epochs", epoch): (0, epoch, ""), weights: ("", call), slot(rules, 1, epoch): first}
    return World(
        objects=tuple(sorted(objects.items())),
        head=first.node,
        writers=(opened, *writers[1:]),
        history=(first,),
        crashes=rules.crashes,
        faults=rules.faults,
        damages=rules.damages,
        joins=rules.joins,
        backup=(tuple(sorted(objects.items())), first.node) if rules.backup == "start" else None,
    )


def slot(rules: Rules, version: int, epoch: Epoch) -> Key:
    """Key of a record."""
    return ("versions", version, epoch if rules.epoch_in_key else (0, ""))


def get(pairs: Iterable[tuple[Any, Any]], key: Any) -> Any:
    return next((value for found, value in pairs if found == key), None)


def put(pairs: tuple[tuple[Any, Any], ...], key: Any, value: Any) -> tuple[tuple[Any, Any], ...]:
    return tuple(sorted([*(pair for pair in pairs if pair[0] != key), (key, value)], key=lambda pair: pair[0]))


def without(pairs: tuple[tuple[Any, Any], ...], keys: Any) -> tuple[tuple[Any, Any], ...]:
    return tuple(pair for pair in pairs if pair[0] not in keys)


def shown(key: Key) -> str:
    """A key as in the store."""
    return "/".join(
        [key[0], ".".join("".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in key[1:])]
    )


def records(world: World, damaged: bool = True) -> Iterator[Record]:
    """What lies at the slots, seals too."""
    for key, content in world.objects:
        if key[0] == "versions":
            if isinstance(content, Record):
                yield content
            elif damaged:
                yield content.was


def newest(world: World) -> Record:
    """The channel's newest version: of the greatest epoch that has one the last one."""
    return max((r for r in records(world) if r.seal is None), key=lambda r: (r.epoch, r.version))


def readable(world: World, node: Node, have: Node | None = None) -> bool:
    """Whether intact objects lead to a version from nothing, or from `have`."""
    if have is not None and (have[0], have[2]) == (node[0], node[2]):
        return True

    def stored(payload: Payload | None) -> bool:
        return payload is not None and (payload[0] is None or get(world.objects, payload[0]) == payload[1])

    for _, content in world.objects:
        if (
            isinstance(content, Compaction)
            and (content.version, content.digest) == (node[0], node[2])
            and stored(content.payload)
        ):
            if content.base is None:
                return True
            if readable(world, content.base, have):
                return True
        if isinstance(content, Record) and content.node == node:
            if stored(content.anchor):
                return True
            if stored(content.delta) and readable(world, content.base, have):
                return True
    return False


def store(rules: Rules, world: World, key: Key, content: Any) -> World:
    """Carry out a put, and what must hold then."""
    before = get(world.objects, key)
    if before not in (None, content):
        return world._replace(wrong=f"{shown(key)} is written over")
    after = world._replace(objects=put(world.objects, key, content))
    if not isinstance(content, Record) or content in world.history:
        return after
    after = after._replace(history=(*world.history, content))
    guessed = any(record.base[2] == "damaged" for record in after.history)  # went on from what it could not read
    if not rules.linear or (world.restored and rules.forks_after_restore) or content.seal is not None or guessed:
        return after
    last = next(r for r in reversed(world.history) if r.seal is None)
    if content.epoch < last.epoch:
        return after._replace(wrong=f"a fenced writer becomes visible: {content.digest} after {last.digest}")
    if content.base != last.node:
        return after._replace(wrong=f"a fork: {content.digest} follows {content.base[2]}, and {last.digest} was there")
    return after
