"""A store with the semantics of a real one, a line to it with delays, and faults by the seed.

Disk    the objects, and everything that was ever stored
Line    a process's own view of it, which is the product's `Store`
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deltasync.channel import keys
from deltasync.errors import ObjectExistsError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo, check_key, check_size
from tests.simulator.lives import Lives
from tests.simulator.scheduler import EPOCH_S, Process, Scheduler, Thread

LATE_S = 18.0  # a request that was given up may still have its effect
SENT_S = 25.0  # a sender that stands still for longer finds that its connection is gone
HUNG_S = 60.0
NO_SPACE = "no space left"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What a store promises.

    Attributes:
        creates: Whether only one of two writers can create a key.
        lag_s: How long a listing may miss a new object.
        edge_s: How long a reader that asked for a missing key may be told so again.
        feeds: Whether it reports changes.
        folders: Whether it lists folders alone.
    """

    name: str
    creates: bool = True
    lag_s: float = 0.0
    edge_s: float = 0.0
    feeds: bool = False
    folders: bool = True


KINDS = (
    Kind(name="s3"),
    Kind(name="edge", edge_s=5.0),
    Kind(name="hub", creates=False, lag_s=4.0, edge_s=2.0, feeds=True, folders=False),
    Kind(name="ignores", creates=False),  # it claims to decide, and overwrites
)


@dataclasses.dataclass
class Faults:
    """How likely a request meets each fault; none by default."""

    before: float = 0.0  # refused for now, without an effect
    after: float = 0.0  # done, and the reply is lost
    late: float = 0.0  # given up, and done later
    doubled: float = 0.0  # done now, and once more later
    hung: float = 0.0  # neither answered nor done for a minute
    damaged: float = 0.0  # a body with another bit, or cut
    stale: float = 0.0  # a listing without the newest objects, or without a page
    refused: float = 0.0  # a lasting error, such as a full disk
    swallowed: float = 0.0  # answered as if it were done
    stalled: float = 0.0  # its sender stands still just before it is sent
    forgotten: float = 0.0  # a deletion that is answered, and not done
    slow: float = 0.0  # a reply with many bytes that takes a minute


NO_FAULTS = Faults()
MUTABLE = (keys.HEAD, keys.REPLICAS, "probe/")
"""Where one key may have several contents, one after the other."""


@dataclasses.dataclass
class _Object:
    data: bytes
    stored_s: float

    @property
    def content(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class Disk:
    """The objects of one store.

    Attributes:
        objects: Those that are there, by key.
        ever: All bytes that ever were at a key.
        ours: All bytes that the product put at a key.
        harmed: Keys that somebody else changed, or that time was turned back for.
        requests: How many were made, by verb.
        faults: What requests meet now.
        ahead_s: Seconds by which its clock is ahead.
        room_bytes: The most bytes of all objects.
        lives: Who writes heartbeats, if that is followed.
        problem: What the product did that it must not do.
    """

    def __init__(self, scheduler: Scheduler, kind: Kind, name: str = "bucket") -> None:
        self.scheduler, self.kind, self.name = scheduler, kind, name
        self.objects: dict[str, _Object] = {}
        self.ever: dict[str, set[bytes]] = {}
        self.ours: dict[str, set[bytes]] = {}
        self.harmed: set[str] = set()
        self.problem: str | None = None
        self.requests: Counter[str] = Counter()
        self.faults = NO_FAULTS
        self.met: Counter[str] = Counter()
        self.watches: list[_Watch] = []
        self.ahead_s, self.room_bytes, self.lives = 0.0, math.inf, Lives(self, 0.0)

    @property
    def bytes(self) -> int:
        """Bytes of all objects."""
        return sum(len(held.data) for held in self.objects.values())

    def still(self) -> Disk:
        """Return a store that holds the same objects, without faults."""
        found = Disk(self.scheduler, KINDS[0], f"{self.name}-still")
        found.objects = dict(self.objects)
        return found

    def put(self, key: str, data: bytes) -> None:
        """What the product stores: no key but the mutable ones gets two contents."""
        if (
            self.bytes + len(data) - len(self.objects[key].data if key in self.objects else b"")
            > self.room_bytes
        ):
            raise StoreError(f"{key}: {NO_SPACE}.")
        self.ours.setdefault(key, set()).add(data)
        if len(self.ours[key]) > 1 and key not in self.harmed and not key.startswith(MUTABLE):
            self.problem = self.problem or f"{key} got two contents"
        self.write(key, data)

    def harm(self, key: str, data: bytes | None) -> None:
        """Replace or delete an object behind the product's back."""
        self.harmed.add(key)
        if data is None:
            if self.objects.pop(key, None) is not None:
                self.scheduler.say(f"{self.name}: {key} is gone")
        else:
            self.write(key, data)

    def restore(self, saved: dict[str, _Object]) -> None:
        """Turn the store back to what it held."""
        self.scheduler.say(f"{self.name}: restored to {len(saved)} objects")
        self.harmed.update(key for key in self.ever if key not in saved)
        self.objects = dict(saved)

    def write(self, key: str, data: bytes) -> None:
        self.objects[key] = _Object(data, self.scheduler.now_s)
        self.ever.setdefault(key, set()).add(data)
        self.scheduler.say(
            f"{self.name}: {key} has {len(data)} bytes, {hashlib.sha256(data).hexdigest()[:8]}"
        )
        for watch in self.watches:
            watch.report(key)

    def info(self, key: str) -> ObjectInfo:
        held = self.objects[key]
        content = held.content if self.kind.feeds else None
        return ObjectInfo(key, len(held.data), EPOCH_S + held.stored_s + self.ahead_s, content)


class Line:
    """A process's line to a store. See `deltasync.stores.base.Store`.

    Attributes:
        requests: How many it made, by verb.
        listed_s: When it last listed the heartbeats, and all of them.
    """

    is_scarce = False

    def __init__(self, disk: Disk, process: Process, *, claims: bool | None = None) -> None:
        self.disk, self.process = disk, process
        self.url = f"s3://{disk.name}"
        self.can_create = disk.kind.creates if claims is None else claims
        self.requests: Counter[str] = Counter()
        self._missing: dict[str, float] = {}
        self.listed_s = -math.inf

    # --- what the product calls ---

    def create(self, key: str, data: bytes) -> None:
        check_key(key)

        def effect() -> None:
            if key in self.disk.objects and self.disk.kind.name != "ignores":
                raise ObjectExistsError(f"{key} exists.")
            self.disk.put(key, bytes(data))

        self._change("create", key, effect)

    def upload(self, data: bytes) -> None:
        self._pass("upload", "")

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        held = bytes(data)

        def effect() -> None:
            self.disk.put(key, held)
            if key.startswith(keys.REPLICAS):
                self.disk.lives.hear(self.process, key, held)

        self._change("put", key, effect)

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        held = self._read("read", key, known)
        check_size(key, len(held), most_bytes)
        return held

    def read_range(self, key: str, start: int, end: int) -> bytes:
        data = self._read("read_range", key, None, end - start)[start:end]
        if len(data) < end - start:
            raise StoreError(f"{key} ends before byte {end}.")
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._pass("list", prefix)
        if prefix == keys.REPLICAS:
            self.disk.lives.look(self.process)
        disk, now_s = self.disk, self.disk.scheduler.now_s
        listed = sorted(key for key in disk.objects if key.startswith(prefix))
        lag_s = disk.kind.lag_s and self._random.uniform(0.0, disk.kind.lag_s)
        listed = [key for key in listed if disk.objects[key].stored_s <= now_s - lag_s]
        if self._meets("stale", disk.faults.stale) and listed:
            cut = self._random.randrange(len(listed))
            listed = (
                listed[:cut]
                if self._random.random() < 0.5
                else [key for key in listed if disk.objects[key].stored_s < now_s - 10]
            )
        elif prefix == keys.REPLICAS:
            self.listed_s = now_s
        return iter([disk.info(key) for key in listed])

    def folders(self, prefix: str) -> Sequence[str] | None:
        if not self.disk.kind.folders:
            return None
        found = (info.key.removeprefix(prefix).partition("/") for info in self.list(prefix))
        return sorted({f"{prefix}{name}/" for name, slash, _ in found if slash})

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._change("delete", check_key(key), lambda key=key: self._drop(key))  # type: ignore[misc]

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> _Watch | None:
        return _Watch(self, prefix, on_change) if self.disk.kind.feeds else None

    # --- how it goes ---

    @property
    def _random(self) -> Any:
        return self.disk.scheduler.random

    def _drop(self, key: str) -> None:
        if self._meets("forgotten", self.disk.faults.forgotten):
            return
        self.disk.lives.drop(self.process, key)
        if self.disk.objects.pop(key, None) is not None:
            self.disk.scheduler.say(f"{self.disk.name}: {key} is deleted")

    def _meets(self, name: str, chance: float) -> bool:
        found = chance > 0 and self._random.random() < chance
        if found:
            self.disk.met[name] += 1
        return found

    def _pass(self, verb: str, key: str) -> None:
        """The way to the store: time passes, and the request may not come back."""
        disk = self.disk
        disk.requests[verb] += 1
        self.requests[verb] += 1
        disk.scheduler.sleep(self._random.uniform(0.001, 0.05))
        faults = disk.faults
        # between a look and what it permits
        is_claimed = verb == "put" and key.startswith(keys.VERSIONS)
        if self._meets("stalled", faults.stalled * (8 if is_claimed else 1)):
            seconds = self._random.choice((2.0, 40.0, 100.0, 2000.0))
            self.process.suspend(disk.scheduler.now_s, seconds, self._random.random() < 0.5)
            disk.scheduler.say(f"{verb} {key}: {self.process.name} stands still for {seconds:.0f} s")
            disk.scheduler.sleep(0.0)
        if disk.scheduler.now_s < self.process.refused_until_s:
            kind = StoreError if self._random.random() < 0.5 else TransientStoreError
            raise kind(f"{verb} {key}: the token has expired.")
        if self._meets("hung", faults.hung):
            disk.scheduler.say(f"{verb} {key} hangs")
            disk.scheduler.sleep(self._random.uniform(1.0, HUNG_S))
            raise TransientStoreError(f"{verb} {key}: no answer.")
        if self._meets("before", faults.before):
            raise TransientStoreError(f"{verb} {key}: refused for now.")

    def _change(self, verb: str, key: str, effect: Callable[[], None]) -> None:
        disk, faults, began_s = self.disk, self.disk.faults, self.disk.scheduler.now_s
        self._pass(verb, key)
        if not disk.kind.creates and disk.scheduler.now_s - began_s > SENT_S:
            raise TransientStoreError(f"{verb} {key}: the connection is gone.")
        if verb != "delete" and self._meets("refused", faults.refused):
            raise StoreError(f"{verb} {key}: {NO_SPACE}.")
        if self._meets("late", faults.late):
            self._later(effect)
            raise TransientStoreError(f"{verb} {key}: no answer yet.")
        self._missing.pop(key, None)
        if verb == "put" and key != keys.CHANNEL and self._meets("swallowed", faults.swallowed):
            disk.harmed.add(key)
            disk.scheduler.say(f"{key} is swallowed")
            return
        effect()
        if self._meets("doubled", faults.doubled) and verb != "delete":
            self._later(effect)
        disk.scheduler.sleep(self._random.uniform(0.001, 0.02))
        if self._meets("after", faults.after):
            raise TransientStoreError(f"{verb} {key}: the reply is lost.")

    def _later(self, effect: Callable[[], None]) -> None:
        """Have the effect later, whatever becomes of the process: the request is on its way."""
        delay_s = self._random.uniform(0.1, LATE_S)

        def arrive() -> None:
            self.disk.scheduler.sleep(delay_s)
            with contextlib.suppress(StoreError):
                effect()

        Thread(target=arrive, name="late", process=NETWORK).start()

    def _read(self, verb: str, key: str, known: ObjectInfo | None, most_bytes: float = math.inf) -> bytes:
        disk = self.disk
        self._pass(verb, check_key(key))
        now_s = disk.scheduler.now_s
        if known is not None and known.content is not None:
            for held in disk.ever.get(key, ()):
                if hashlib.sha256(held).hexdigest() == known.content:
                    return self._arrived(held)
        if disk.kind.edge_s and self._missing.get(key, -1e9) > now_s - disk.kind.edge_s:
            raise ObjectMissingError(f"{key} is not there.")
        if key not in disk.objects:
            self._missing[key] = now_s
            raise ObjectMissingError(f"{key} is not there.")
        self._missing.pop(key, None)
        if self._meets("slow", disk.faults.slow * (min(len(disk.objects[key].data), most_bytes) > 500)):
            disk.scheduler.sleep(self._random.uniform(40.0, 100.0))
        return self._arrived(disk.objects[key].data if key in disk.objects else b"")

    def _arrived(self, data: bytes) -> bytes:
        if data and self._meets("damaged", self.disk.faults.damaged):
            at = self._random.randrange(len(data))
            return (
                data[:at]
                if self._random.random() < 0.5
                else data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            )
        return data


NETWORK = Process("network")


class _Watch:
    """A feed of changes that may break off."""

    def __init__(self, line: Line, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> None:
        self._line, self._prefix, self._on_change = line, prefix, on_change
        self.live = True
        line.disk.watches.append(self)

    def report(self, key: str) -> None:
        if self.live and key.startswith(self._prefix) and not self._line.process.killed:
            info = self._line.disk.info(key)
            if self._line._meets("feed", self._line.disk.faults.before):
                self.live = False
                Thread(target=lambda: self._again(5.0), name="feed", process=self._line.process).start()
                return
            Thread(target=lambda: self._tell(info), name="feed", process=self._line.process).start()

    def _tell(self, info: ObjectInfo | None) -> None:
        self._line.disk.scheduler.sleep(self._line._random.uniform(0.0, 0.2))
        if self.live:
            self._on_change(info)

    def _again(self, after_s: float) -> None:
        self._line.disk.scheduler.sleep(after_s)
        if self in self._line.disk.watches:
            self.live = True
            self._on_change(None)

    def close(self) -> None:
        self.live = False
        if self in self._line.disk.watches:
            self._line.disk.watches.remove(self)
