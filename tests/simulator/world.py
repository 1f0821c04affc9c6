"""Processes with the product's code in them, what fate does to them, and what must hold."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from deltasync import Publisher, Replica, Retention, threads
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import DeltaSyncError, FencedError, PublishLostError
from deltasync.maintenance import gc
from deltasync.maintenance.checks import check
from deltasync.maintenance.relay import Relay
from deltasync.maintenance.retention import KeepPolicy
from deltasync.publish import compact, encode
from deltasync.tensors.bits import bits_of
from tests.simulator.scheduler import Killed, Process, Scheduler, Stuck, Thread
from tests.simulator.store import KINDS, NO_FAULTS, Disk, Faults, Line

SHAPES = {"w": (24, 20), "b": (130,), "head": (9, 31)}
STEPS = 60
_CALL_S = 900.0  # no call of the product takes longer without an answer
_CALM_S = 600.0  # all are at the newest version so long after the last fault
_MOST_THREADS = 60


class Violation(AssertionError):
    """Something that must hold does not."""


@dataclasses.dataclass
class Outcome:
    """What a run did.

    Attributes:
        digest: Of the trace; the same for the same seed.
        problem: The violation; None if there was none.
        counts: Versions published, syncs, requests, faults met, kills.
    """

    seed: int
    digest: str
    problem: str | None
    counts: dict[str, int]
    trace: list[str] | None


@dataclasses.dataclass
class _Attempt:
    """A publisher that opens the channel, or has: whether another one did so since, or meanwhile."""

    is_challenged: bool
    opens: bool = True


class World:
    """A store, the processes around it, and all that was published to it."""

    def __init__(self, seed: int, folder: Path, steps: int = STEPS, keep_trace: bool = False) -> None:
        self.scheduler = Scheduler(seed, keep_trace)
        self.random = self.scheduler.random
        self.kind = KINDS[self.random.randrange(len(KINDS))]
        self.disk = Disk(self.scheduler, self.kind)
        self.copy = Disk(self.scheduler, KINDS[0], "copy")
        self.steps = steps
        self.counts = dict.fromkeys(
            ("versions", "lost", "syncs", "pins", "joins", "kills", "opened", "copied", "checked"), 0
        )
        self.snapshots: dict[str, dict[str, bytes]] = {}  # bits that were published, by their digest
        self.visible: dict[tuple[int, str], str] = {}  # what a receipt called visible: (version, digest) to bits
        self.served: dict[tuple[int, str], str] = {}  # what a replica served
        self.lost: set[str] = set()  # bits of which a receipt said that they are lost
        self.unsure: set[str] = set()  # bits that were published more than once
        self.replicas: list[Replica] = []
        self.attempts: list[_Attempt] = []
        self.weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
        self.forgets = self.random.random() < 0.3
        self.live: list[Process] = []
        self.retention = Retention(compact_every=self.random.choice((0, 2, 4, 8)), keep_last=1000)
        self.codec = self.random.choice(("packed", "context"))
        self.anchor_every = self.random.choice((3, 8, 1 << 30))
        self.folder = folder
        for module in (encode, compact):  # so that some versions have parts
            module.INLINE_BYTES = self.random.choice((1 << 20, 300))
        encode.GROUP_CHANGED = 150
        self.signed = self.random.random() < 0.3
        if self.signed:
            key = ed25519.Ed25519PrivateKey.from_private_bytes(self.random.randbytes(32))
            (folder / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            (folder / "key").chmod(0o600)
            (folder / "trusted").write_text(f"{key.public_key().public_bytes_raw().hex()} trainer\n")

    # --- the run ---

    def run(self) -> None:
        """Run to the end. Raises Violation."""
        actors = [self.actor("trainer", self.trainer), *(self.actor(f"replica{n}", self.replica) for n in range(2))]
        if self.random.random() < 0.4:
            actors.append(self.actor("rival", self.trainer))
        if self.random.random() < 0.3:
            actors.append(self.actor("relay", self.relay))
        if self.random.random() < 0.3:
            actors.append(self.actor("keeper", self.keeper))
        if self.random.random() < 0.3:
            actors.append(self.actor("outsider", self.outsider))
        fate = self.actor("fate", self.fate)
        until_s = self.scheduler.now_s + 40 * 3600.0
        for actor in actors:
            actor.join(max(1.0, until_s - self.scheduler.now_s))
            if not actor.ended:
                raise Violation(f"{actor.name} does not end")
        fate.join(48 * 3600.0)
        self.check_failed()
        self.settle()
        self.check_failed()

    def actor(self, name: str, action: Callable[[Process], None]) -> Thread:
        """Start a process."""
        process = Process(name)
        self.live.append(process)
        thread = Thread(target=lambda: action(process), name="main", process=process)
        thread.start()
        return thread

    def step(self) -> bool:
        """Take one of the run's steps; False once they are used up."""
        self.steps -= 1
        if len(self.scheduler.threads) > _MOST_THREADS:
            raise Violation(f"{len(self.scheduler.threads)} threads run")
        return self.steps > 0

    def pause(self, most_s: float) -> None:
        self.scheduler.sleep(self.random.uniform(0.0, most_s))

    def call(self, what: str, action: Callable[[], Any], interruptible: bool = False) -> Any:
        """Call the product: its own errors are returned, any other is a violation, as is a call that does not end."""
        before_s, me = self.scheduler.now_s, self.scheduler.running
        process, held_s = me.process, me.process.suspended_until_s
        try:
            me.interruptible = interruptible
            try:
                found = action()
            finally:
                me.interruptible = False
        except DeltaSyncError as error:
            found = error
            self.scheduler.say(f"{what}: {type(error).__name__} {error}")
        except (Killed, Stuck, Violation, KeyboardInterrupt):
            raise
        except Exception as error:
            raise Violation(f"{what} raised {type(error).__name__}: {error}") from error
        spent_s = (
            self.scheduler.now_s
            - before_s
            - (max(0.0, process.suspended_until_s - before_s) if process.suspended_until_s != held_s else 0.0)
        )
        if spent_s > _CALL_S:
            raise Violation(f"{what} took {spent_s:.0f} s without a word")
        return found

    def check_failed(self) -> None:
        """Raise what ended a thread, of the product or of an actor."""
        for thread, error in self.scheduler.failed:
            if isinstance(error, Violation | Stuck):
                raise error
            raise Violation(f"{thread.process.name}/{thread.name} ended with {type(error).__name__}: {error}") from error

    # --- actors ---

    def trainer(self, process: Process) -> None:
        """Open a publisher again and again, and publish."""
        while self.steps > 0:
            self.pause(5.0)
            is_new = keys.CHANNEL not in self.disk.objects  # then the first to create it wins
            attempt = _Attempt(any(other.opens or is_new for other in self.attempts))
            for other in self.attempts:
                other.is_challenged = True
            self.attempts.append(attempt)
            opened = self.call("open", lambda: self.publisher(process))
            attempt.opens = False
            if isinstance(opened, DeltaSyncError):
                self.step()
                self.pause(30.0)
                continue
            self.counts["opened"] += 1
            publisher: Publisher = opened
            mine: dict[int, str] = {}
            receipts: list[Any] = []
            interrupted = False
            while self.step():
                self.train()
                bits = self.note()
                try:
                    receipt = self.call("publish", lambda: publisher.publish(self.weights.items()), True)  # noqa: B023
                except KeyboardInterrupt:
                    interrupted = True
                    continue
                if isinstance(receipt, FencedError):
                    if not attempt.is_challenged:
                        raise Violation(f"the only publisher is fenced: {receipt}")
                    break
                if not isinstance(receipt, DeltaSyncError):
                    mine[receipt.version] = bits
                    receipts.append(receipt)
                    if self.random.random() < 0.5:
                        self.waited(receipt, mine, interrupted)
                self.pause(self.random.choice((0.2, 2.0, 30.0)))
                if self.random.random() < 0.05:
                    break
            try:
                self.call("close", publisher.close, True)
            except KeyboardInterrupt:
                self.call("close again", publisher.close)
            for receipt in receipts:
                if receipt.done:
                    self.waited(receipt, mine, interrupted)

    def publisher(self, process: Process) -> Publisher:
        return Publisher(
            Line(self.disk, process, claims=True if self.kind.name == "ignores" else None),
            resume=True,
            codec=self.codec,
            anchor_every=self.anchor_every,
            retention=self.retention,
            signing_key=self.folder / "key" if self.signed else None,
        )

    @property
    def trusted(self) -> Path | None:
        return self.folder / "trusted" if self.signed else None

    def reader(self, process: Process) -> ChannelReader:
        return ChannelReader(Line(self.disk, process), self.trusted)

    def train(self) -> None:
        """Change the weights a little, or a lot, or not at all."""
        share = self.random.choice((0.0, 0.01, 0.05, 0.5, 1.0))
        for tensor in self.weights.values():
            bits_N = bits_of(tensor)
            for at in range(bits_N.size):
                if self.random.random() < share:
                    bits_N[at] = (int(bits_N[at]) + self.random.randrange(1, 40)) & 0x7F7F

    def note(self) -> str:
        """Remember the weights; return their digest."""
        held = {name: bits_of(tensor).tobytes() for name, tensor in self.weights.items()}
        digest = _digest(held)
        if digest in self.snapshots:
            self.unsure.add(digest)
        self.snapshots[digest] = held
        return digest

    def waited(self, receipt: Any, mine: dict[int, str], interrupted: bool) -> None:
        """Wait for a receipt; what it calls visible has the bits that were published last under its number."""
        found = self.call("wait", lambda: receipt.wait(self.random.choice((1.0, 60.0, 400.0))))
        if isinstance(found, DeltaSyncError):
            if isinstance(found, PublishLostError):
                self.counts["lost"] += 1
                if not interrupted:
                    self.lost.add(mine[receipt.version])
            return
        self.counts["versions"] += 1
        if not interrupted:  # an interrupted publish may have joined the version
            self.agree(self.visible, (receipt.version, receipt.digest), mine[receipt.version], "published")

    def replica(self, process: Process) -> None:
        """Join, follow, be pinned, audit, and restart."""
        while self.steps > 0:
            self.pause(10.0)
            line = Line(self.disk, process)
            replica = self.call("join", lambda line=line: Replica(line, trusted_keys=self.trusted))
            self.counts["joins"] += 1
            self.replicas = [*self.replicas[-3:], replica]
            while self.step():
                kind = self.random.random()
                if kind < 0.5:
                    found = self.call("poll", replica.poll)
                elif kind < 0.8:
                    found = self.call("sync", lambda: replica.sync(timeout_s=self.random.choice((0.0, 5.0))))  # noqa: B023
                elif kind < 0.9 and replica.version is not None:
                    pin = self.random.randrange(1, replica.version + 2)
                    found = self.call(f"sync({pin})", lambda: replica.sync(pin))  # noqa: B023
                    self.counts["pins"] += not isinstance(found, DeltaSyncError)
                    if not isinstance(found, DeltaSyncError) and replica.version != pin:
                        raise Violation(f"sync({pin}) is at {replica.version}")
                else:
                    found = None if replica.version is None else self.call("audit", replica.audit)
                    if found is False:
                        raise Violation("an audit found wrong bits")
                self.counts["syncs"] += not isinstance(found, DeltaSyncError)
                self.compare(replica)
                self.pause(self.random.choice((0.1, 1.0, 20.0)))
                if self.random.random() < 0.05:
                    break

    def relay(self, process: Process) -> None:
        """Copy the channel to another store."""
        relay = None
        while self.step():
            if relay is None:
                source, target = self.reader(process), Line(self.copy, process)
                relay = self.call("relay", lambda: Relay(source, [target]))  # noqa: B023
            copied = self.call("copy", relay.step)
            self.counts["copied"] += not isinstance(copied, DeltaSyncError)
            self.pause(10.0)
            if self.random.random() < 0.1:
                relay = None

    def keeper(self, process: Process) -> None:
        """Check, and forget old versions."""
        while self.step():
            self.pause(60.0)
            reader = self.reader(process)
            found = self.call("check", lambda: check(reader))  # noqa: B023
            self.counts["checked"] += not isinstance(found, DeltaSyncError)
            if self.forgets:
                self.call("gc", lambda: gc(reader, KeepPolicy(last=3), grace_s=600.0))  # noqa: B023

    def outsider(self, process: Process) -> None:
        """Write junk where the product looks, without the keys."""
        while self.step():
            self.pause(40.0)
            held = sorted(self.disk.objects)
            if keys.CHANNEL not in held:  # where records are, but no channel, none is begun
                continue
            data = self.random.randbytes(self.random.choice((0, 7, 300)))
            if held and self.random.random() < 0.4:
                data = self.disk.objects[self.random.choice(held)].data  # an old object at a key of another
            far = self.random.choice((1, 2, 50, 9_999_999_997))
            epoch = f"{self.random.choice((1, 2, 3, 999_999)):06d}-{self.random.randbytes(4).hex()}"
            # In an unsigned channel, what cannot be read at the key of a record may be a damaged one.
            slots = [keys.Slot(far, epoch).key] if self.signed else []
            places = [*slots, keys.HEAD, f"epochs/{epoch}.json", "replicas/odd.json"]
            places += ["versions/0000000/odd", "anchors/odd", "parts/odd/odd"]
            key = self.random.choice(places)
            if key == keys.HEAD or key not in self.disk.objects:
                self.disk.write(key, data)
                if not self.signed and key.startswith(keys.EPOCHS):  # in an unsigned channel it may be a publisher's
                    for attempt in self.attempts:
                        attempt.is_challenged = True

    def fate(self, process: Process) -> None:
        """Change the weather, suspend, kill and interrupt processes."""
        while self.steps > 0:
            self.pause(12.0)
            self.weather()
            kind = self.random.random()
            able = [each for each in self.live if each.name != "fate" and not each.killed]
            victim = self.random.choice(able)
            if kind < 0.15 and victim.name in ("trainer", "rival"):
                self.kill(victim)
            elif kind < 0.25:
                victim.suspended_until_s = self.scheduler.now_s + self.random.choice((1.0, 45.0, 7200.0))
                self.scheduler.say(f"{victim.name} is suspended until {victim.suspended_until_s:.0f}")
            elif kind < 0.35:
                victim.ahead_s = self.random.uniform(-400.0, 400.0)
            elif kind < 0.42 and victim.name in ("trainer", "rival"):
                self.interrupt(victim)
        self.disk.faults = self.copy.faults = NO_FAULTS
        for each in self.live:
            each.suspended_until_s = 0.0

    def weather(self) -> None:
        def chance(most: float) -> float:
            return self.random.choice((0.0, 0.0, self.random.uniform(0.0, most)))

        lossy = {name: chance(0.2) for name in ("before", "after", "late", "doubled")}
        rare = {"hung": chance(0.02), "damaged": chance(0.05), "stale": chance(0.2), "refused": chance(0.02)}
        self.disk.faults = self.copy.faults = NO_FAULTS if self.random.random() < 0.3 else Faults(**lossy, **rare)

    def kill(self, victim: Process) -> None:
        """End a trainer at once; another one goes on under its name."""
        self.counts["kills"] += 1
        self.scheduler.say(f"{victim.name} is killed")
        victim.killed = True
        self.live.remove(victim)
        self.actor(victim.name, self.trainer)

    def interrupt(self, victim: Process) -> None:
        for thread in self.scheduler.threads:
            if thread.process is victim and thread.name == "main":
                thread.interrupted = True

    # --- what must hold ---

    def compare(self, replica: Replica) -> None:
        """The bits that a replica has are those that were published as the version that it names."""
        identity = replica.identity
        if identity is None:
            return
        held = {name: bits_of(tensor).tobytes() for name, tensor in replica.state_dict().items()}
        bits = _digest(held)
        if bits not in self.snapshots:
            raise Violation(f"a replica serves bits as version {identity} that nobody published")
        self.agree(self.served, (identity.version, identity.sha256), bits, "served")

    def agree(self, into: dict[tuple[int, str], str], version: tuple[int, str], bits: str, how: str) -> None:
        into.setdefault(version, bits)
        if any(of.get(version, bits) != bits for of in (self.visible, self.served)):
            raise Violation(f"version {version[0]} ({version[1][:12]}) is {how} with other bits than before")

    def settle(self) -> None:
        """Without faults a publisher can publish, everybody reaches its version, and nothing visible is lost."""
        process = Process("end")
        self.disk.faults = self.copy.faults = NO_FAULTS
        self.scheduler.sleep(60.0)  # late requests arrive

        def finish() -> None:
            before_s = self.scheduler.now_s
            publisher = self.publisher(process)
            self.train()
            bits = self.note()
            receipt = publisher.publish(self.weights.items()).wait(_CALM_S)
            self.agree(self.visible, (receipt.version, receipt.digest), bits, "published")
            publisher.close()
            joiner = Replica(Line(self.disk, process), trusted_keys=self.trusted)
            for replica in (joiner, *self.replicas):
                self.reach(replica, receipt.version)
                if replica.digest != receipt.digest:
                    raise Violation(f"a replica is at {replica.identity}, not at {receipt.version} ({receipt.digest[:12]})")
                self.compare(replica)
            if self.copy.objects.get(keys.HEAD) is not None:
                copied = Replica(Line(self.copy, process), trusted_keys=self.trusted)
                if isinstance(found := self.call("sync with the copy", lambda: copied.sync(timeout_s=5.0)), DeltaSyncError):
                    raise Violation(f"the copy has a head and cannot be joined: {found}")
                self.compare(copied)
            spent_s = self.scheduler.now_s - before_s
            if spent_s > _CALM_S:
                raise Violation(f"{spent_s:.0f} s passed until a joiner had a new version, without a fault")
            self.check_visible(process)

        thread = Thread(target=finish, name="main", process=process)
        thread.start()
        thread.join()
        if isinstance(thread.error, DeltaSyncError):
            raise Violation(f"without faults: {type(thread.error).__name__}: {thread.error}") from thread.error

    def reach(self, replica: Replica, version: int) -> None:
        """Sync until the replica is at a version; a listing may lag."""
        until_s = self.scheduler.now_s + 60.0
        while replica.version != version:
            found = self.call("sync", lambda: replica.sync(timeout_s=5.0))
            if self.scheduler.now_s > until_s:
                raise Violation(f"without faults a joiner is at {replica.identity} and not at {version}: {found}")
            self.pause(1.0)

    def check_visible(self, process: Process) -> None:
        """What receipts called visible is in the channel, and what they called lost was not served."""
        wrong = self.lost.intersection(self.served.values()).difference(self.visible.values(), self.unsure)
        if wrong:
            raise Violation(f"bits that a receipt called lost were served: {sorted(wrong)[0][:12]}")
        reader = self.reader(process)
        held = {version.version: version.sha256 for version in reader.versions()}
        for version, digest in sorted(self.visible):
            if version in held and held[version] != digest:
                raise Violation(f"version {version} was visible as {digest[:12]}, and is {held[version][:12]} now")
            if version not in held and not self.forgets and version <= max(held):
                raise Violation(f"version {version} was visible, and is not in the channel")


def _digest(held: dict[str, bytes]) -> str:
    found = hashlib.sha256()
    for name in sorted(held):
        found.update(name.encode() + held[name])
    return found.hexdigest()


def simulate(seed: int, steps: int = STEPS, keep_trace: bool = False) -> Outcome:
    """Run one seed."""
    finishing = set(threads._finishing)
    logging.disable(logging.CRITICAL)
    problem = None
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, Path(folder), steps, keep_trace)
        with world.scheduler.installed():
            try:
                world.run()
            except (Violation, Stuck) as error:
                problem = f"{type(error).__name__}: {error}"
    logging.disable(logging.NOTSET)
    threads._finishing.clear()
    threads._finishing.update(finishing)
    counts = {**world.counts, "requests": sum(world.disk.requests.values()), "faults": sum(world.disk.met.values())}
    counts["objects"], counts["switches"] = len(world.disk.objects), world.scheduler.switches
    return Outcome(seed, world.scheduler.digest, problem, counts, world.scheduler.trace)
