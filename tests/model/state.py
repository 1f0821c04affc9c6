"""A channel and all who work on it, as one immutable value; and the rules of the protocol, each of which can be dropped.

A publish call is a name like `B1v3`: what writer B was first asked to publish, as version 3. The name stands for the bits
that it was given and for the digest of its manifest, because each call has its own `created_at`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Key = tuple[str, int, int]  # folder, version, attempt
Content = tuple[str, str]  # the bits a payload leads from ("" for an anchor) and to


class Rules(NamedTuple):
    """What a world starts with, then the rules of the protocol that may be dropped to see that they matter.

    Attributes:
        writers: How many publishers know of the channel; the first has it open.
        calls: Publish calls for each writer.
        crashes: Publishers that die, or are restarted after a conflict, in all.
        faults: Store operations of publishers that fail or whose reply is lost, in all.
        late: Whether an operation that failed may be carried out at any later time.
        conditional: Whether the store decides who creates an object; otherwise `create` looks, then writes.
        timely: Whether nobody else gets in between a look at head and the write that rests on it.
        anchor_every: Versions from an anchor to the next.
        reader: Whether a replica follows.
        explicit: Whether it also asks for versions before head by their number.
        forgets, prunes: How often each runs, in all.
    """

    writers: int = 2
    calls: int = 2
    crashes: int = 1
    faults: int = 0
    late: bool = False
    conditional: bool = True
    timely: bool = True
    anchor_every: int = 2
    reader: bool = True
    explicit: bool = False
    forgets: int = 0
    prunes: int = 0

    create_only: bool = True
    payload_first: bool = True
    manifest_first: bool = True
    new_number_after_loss: bool = True
    anchor_after_loss: bool = True
    roll_forward: bool = True
    list_before_head: bool = True
    lease: bool = True
    lease_before_manifest: bool = True
    lease_on_retry: bool = True
    check_digests: bool = True
    grace: bool = True
    objects_before_manifests: bool = True
    forgotten_after_manifests: bool = True
    spare_after_head: bool = True
    newest_first: bool = True


class Manifest(NamedTuple):
    """`deltasync.manifest.Manifest`. `base` is the version and digest it builds on; files are (key, digest)."""

    version: int
    call: str
    base: tuple[int, str] | None
    delta: tuple[Key, Content] | None
    anchor: tuple[Key, Content] | None

    @property
    def files(self) -> Iterator[tuple[Key, Content]]:
        return (file for file in (self.delta, self.anchor) if file is not None)


class Job(NamedTuple):
    """`upload.Job`: one version on its way. `start` is the bits that its delta starts from."""

    call: str
    version: int
    base: tuple[int, str] | None
    start: str
    anchored: bool


class Writer(NamedTuple):
    """`Publisher` and its `Uploader`.

    Attributes:
        at: The next operation on the store.
        calls: Publish calls so far.
        tip: `Tip.version`.
        anchor: `Tip.anchor_version`, 0 if the next version must be one.
        shadow: The bits published last.
        newest: `Uploader._chain[-1]`: the newest manifest that is stored.
        head: `Uploader._head`.
        attempt: Folder of the file that is being stored.
        looked: Whether `create` has looked, where the store does not decide.
        checked: Whether the lease was found good and head comes next, where others may get in between.
        found: While opening: the newest manifest by the listing.
    """

    name: str
    at: str = "closed"
    calls: int = 0
    tip: int = 0
    anchor: int = 0
    shadow: str = ""
    newest: tuple[int, str] | None = None
    head: tuple[int, str] | None = None
    job: Job | None = None
    delta: tuple[Key, Content] | None = None
    full: tuple[Key, Content] | None = None
    attempt: int = 0
    looked: bool = False
    checked: bool = False
    found: int = 0


class Reader(NamedTuple):
    """`Follower` with its `ChannelReader`.

    Attributes:
        have: Version and bits that are live.
        todo: Version and digest (None: not known) of the manifest to read next.
        steps: What to fetch and apply, newest first: (manifest, whether its anchor is used).
        old: Whether it began before something was forgotten, so that the time of grace is for it.
        named: Whether head or a manifest named what it is reading, rather than a person.
    """

    have: tuple[int, str] | None = None
    todo: tuple[int, str | None] | None = None
    steps: tuple[tuple[Manifest, bool], ...] = ()
    old: bool = False
    named: bool = True


class Forget(NamedTuple):
    """`housekeeping.forget`: what is left to delete, None while it does not run."""

    left: tuple[int, ...] | None = None
    runs: int = 0


class Prune(NamedTuple):
    """`housekeeping.prune`: what it has read so far, None while it does not run."""

    objects: frozenset[Key] | None = None
    forgotten: frozenset[int] = frozenset()
    referred: frozenset[Key] | None = None
    head: int | None = None
    runs: int = 0


class World(NamedTuple):
    """Everything. `seen` is what some reader had at each version; `wrong` says which invariant broke."""

    manifests: tuple[tuple[int, Manifest], ...]
    head: tuple[int, str]
    objects: tuple[tuple[Key, Content], ...]
    writers: tuple[Writer, ...]
    reader: Reader = Reader()
    forget: Forget = Forget()
    prune: Prune = Prune()
    forgotten: frozenset[int] = frozenset()
    late: tuple[str, Any, Any] | None = None
    crashes: int = 0
    faults: int = 0
    seen: tuple[tuple[int, str], ...] = ()
    wrong: str = ""


Step = tuple[str, World]


def start(rules: Rules) -> World:
    """A channel with version 1, which the first writer published and the reader has not read."""
    key, content = ("anchors", 1, 0), ("", "A1v1")
    first = Manifest(1, "A1v1", None, None, (key, content))
    at = (1, "A1v1")
    writers = tuple(Writer(name) for name in "AB"[: rules.writers])
    opened = writers[0]._replace(at="idle", calls=1, tip=1, anchor=1, shadow="A1v1", newest=at, head=at)
    return World(
        manifests=((1, first),),
        head=at,
        objects=((key, content),),
        writers=(opened, *writers[1:]),
        crashes=rules.crashes,
        faults=rules.faults,
    )


def get(pairs: Iterable[tuple[Any, Any]], key: Any) -> Any:
    return next((value for found, value in pairs if found == key), None)


def put(pairs: tuple[tuple[Any, Any], ...], key: Any, value: Any) -> tuple[tuple[Any, Any], ...]:
    return tuple(sorted([*(pair for pair in pairs if pair[0] != key), (key, value)], key=lambda pair: pair[0]))


def without(pairs: tuple[tuple[Any, Any], ...], keys: Any) -> tuple[tuple[Any, Any], ...]:
    return tuple(pair for pair in pairs if pair[0] not in keys)


def shown(key: Any) -> str:
    """A key as in the store: of a manifest (a version) or a data object."""
    if isinstance(key, int):
        return f"manifests/{key}"
    folder, version, attempt = key
    return f"{folder}/{version}" + (f".{attempt}" if attempt else "")


def readable(world: World, version: int, digest: str | None) -> bool:
    """Whether a replica without any version could go to this one, if nobody did anything meanwhile."""
    document = get(world.manifests, version)
    if document is None or digest not in (None, document.call):
        return False
    if document.anchor is not None:
        return get(world.objects, document.anchor[0]) == document.anchor[1]
    if get(world.objects, document.delta[0]) != document.delta[1]:
        return False
    return document.delta[1][0] == document.base[1] and readable(world, *document.base)
