"""Processes with the product's code in them, and what must hold: after each call of theirs, and when all is
well again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from deltasync import Publisher, Replica, Retention, ending, limits
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Signer
from deltasync.errors import DeltaSyncError, FencedError, FormatError
from deltasync.following import loop
from deltasync.ops import compactor, gc
from deltasync.ops import steps as summed
from deltasync.ops.checks import check
from deltasync.ops.retention import KeepPolicy
from deltasync.publish import encode
from deltasync.stores import Store
from deltasync.stores.cache import CachedStore
from deltasync.tensors.bits import bits_of
from tests.simulator import actors, group
from tests.simulator.actors import Attempt, Violation
from tests.simulator.lives import Lives
from tests.simulator.scheduler import Killed, Process, Scheduler, Stuck, Thread
from tests.simulator.shown import shown
from tests.simulator.store import KINDS, Disk, Line

CLOCK_S = 7200.0  # by so much clocks are wrong
SHAPES = {"w": (24, 20), "b": (130,), "head": (9, 31)}
STEPS = 60
CALL_S = 900.0  # no call of the product takes longer without an answer
POLLS_S = 150.0  # a replica that only polls is there so long after the last fault
BACK_S = 18.0  # a replica goes with a store that was turned back so long after the next version
CALM_S = 600.0  # all are at the newest version so long after the last fault
MOST_THREADS = 90
MOST_LEFT = 24  # threads, of the pools of living replicas
MOST_REQUESTS = 60  # of a step, of all processes together, without those that only wait
REACHES = 400  # requests until a replica has the newest version, without a fault
_UNPROVEN = re.compile(
    r"Payload |Not a safetensors|safetensors metadata|anchor's weight file|contradict|not its model|the published bits"
)
HARMS = (None, None, None, None, "rot", "expire", "restore", "swallow", "forged")


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
    counts: dict[str, Any]
    trace: list[str] | None


class World:
    """A store, the processes around it, and all that was published to it.

    Attributes:
        harm: What happens to the store beside requests: objects rot or expire, it is restored from a backup,
            it swallows what it confirms, or somebody writes forgeries. Then a version that was visible may be
            lost, but no bit is wrong.
        snapshots: Bits that were published, by their digest.
        visible: What a receipt called visible: (version, digest) to bits.
        served: What a replica served.
        lost: Bits of which a receipt said that they are lost.
        unsure: Bits that were published more than once, or perhaps.
        mixed: Bits before and after a write beside a publish: what is published has one of both at each
            element.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        steps: int = STEPS,
        keep_trace: bool = False,
        wanted: Collection[str] = (),
    ) -> None:
        self.scheduler = Scheduler(seed, keep_trace)
        self.random = random = self.scheduler.random
        self.wanted = frozenset(wanted)
        self.kind = self._chosen(KINDS, [kind.name for kind in KINDS])
        self.disk = Disk(self.scheduler, self.kind)
        self.copy = Disk(self.scheduler, KINDS[0], "copy")
        self.first_steps = self.steps = steps
        names = "versions lost syncs pins joins kills opened copied checked acks followed jobs repaired harms forged"
        self.counts = dict.fromkeys([*names.split(), "mixed", "refused"], 0)
        self.trained = itertools.count(1)
        self.snapshots: dict[str, dict[str, bytes]] = {}
        self.visible: dict[tuple[int, str], str] = {}
        self.served: dict[tuple[int, str], str] = {}
        self.lost: set[str] = set()
        self.unsure: set[str] = set()
        self.replicas: list[tuple[Process, Replica]] = []
        self.attempts: list[Attempt] = []
        self.said: list[str] = []
        self.live: list[Process] = []
        self.running: list[Thread] = []
        self.actions: dict[str, Callable[[World, Process], None]] = {}
        self.weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
        self.harm = self._chosen(HARMS, HARMS)
        if "only" in wanted and self.harm not in wanted:
            self.harm = None
        self.signed = self._has("signed", 0.3) or self.harm == "forged"
        self.forgets = self._has("forgets", 0.4) and self.harm is None
        self.writes, self.calls, self.copies = (
            self._has("writer", 0.15),
            self._has("callers", 0.15),
            self._has("copies", 0.1),
        )
        self.fills = self._has("full", 0.1)
        self.has_clocks, self.is_slow = self._has("clocks", 0.3), self._has("slow", 0.0)
        self.is_mild, self.pins = "mild" in wanted, "pinned" in wanted
        if self.has_clocks:
            self.disk.ahead_s = random.uniform(-CLOCK_S, CLOCK_S)
        self.mixed: list[tuple[dict[str, bytes], dict[str, bytes]]] = []
        self.memory_rots = self.is_calm = False
        self.retention = Retention(
            compact_every=self._chosen((0, 2, 4, 8), (None, "compacts", None, None)),
            keep_last=3 if self.forgets and random.random() < 0.5 else 1000,
            grace_s=self._chosen((120.0, 600.0), ("brief", None)),
        )
        self.disk.lives = Lives(self.disk, self.retention.grace_s)
        compactor._LEAST_BETWEEN, loop.AUDIT_S = 2, 600.0
        self.codec = self._chosen(("packed", "context"), ("packed", "context"))
        self.anchor_every = self._chosen((3, 8, 1 << 30), ("anchors", None, None))
        self.retries = self._chosen((0, 1, 6), ("once", None, None))
        self.folder, self.cache = folder, folder / "cache"
        self.cache.mkdir(mode=0o700)
        for module in (encode, summed):  # so that some versions have parts
            module.INLINE_BYTES = self._chosen((1 << 20, 300), (None, "parts"))
        encode.GROUP_CHANGED = 150
        self.signer, self.theirs = (self._key(name) for name in ("key", "theirs"))
        self.trusted = folder / "key.pub" if self.signed else None
        if not self.signed:
            self.signer = None
        self.run_id = "unknown"

    def _has(self, name: str, share: float) -> bool:
        """Whether the world has something: by chance, or because it is wanted."""
        found = self.random.random() < share
        return name in self.wanted or (found and "only" not in self.wanted)

    def _chosen(self, choices: Sequence[Any], names: Sequence[str | None]) -> Any:
        """One by chance, or that whose name is wanted."""
        at = self.random.randrange(len(choices))
        return next(
            (one for one, name in zip(choices, names, strict=True) if name in self.wanted), choices[at]
        )

    def _key(self, name: str) -> Signer | None:
        key = ed25519.Ed25519PrivateKey.from_private_bytes(self.random.randbytes(32))
        (self.folder / name).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (self.folder / name).chmod(0o600)
        (self.folder / f"{name}.pub").write_text(f"{key.public_key().public_bytes_raw().hex()} {name}\n")
        return Signer(self.folder / name)

    # --- the run ---

    def run(self) -> None:
        """Run to the end. Raises Violation."""
        self.actor(*(("job", actors.job) if self._has("job", 0.25) else ("trainer", actors.trainer)))
        for n in range(2):
            self.actor(f"replica{n}", actors.replica)
        for name, action, share in (
            ("rival", actors.trainer, 0.4),
            ("follower0", actors.follower, 0.3),
            ("follower1", actors.follower, 0.1),
            ("relay", actors.relay, 0.3 if self.harm is None else 0.0),
            ("keeper", actors.keeper, 0.4),
            ("outsider", actors.outsider, 0.2),
        ):
            if self._has(name, share) or (name == "outsider" and self.harm == "forged"):
                self.actor(name, action)
        self.actor("fate", actors.fate)
        until_s = self.scheduler.now_s + 40 * 3600.0
        for actor in self.running:  # and who came in the place of one that was killed
            actor.join(max(1.0, until_s - self.scheduler.now_s))
            if not actor.ended:
                raise Violation(f"{actor.process.name} does not end")
        self.check_failed()
        self.settle()
        self.check_failed()

    def actor(self, name: str, action: Callable[[World, Process], None]) -> Thread:
        """Start a process, on a machine with a clock of its own."""
        process, self.actions[name] = self.machine(Process(name)), action
        self.live.append(process)
        thread = Thread(target=lambda: action(self, process), name="main", process=process)
        self.running.append(thread)
        thread.start()
        return thread

    def machine(self, process: Process) -> Process:
        """Let the clock of a process's machine be wrong, where clocks are."""
        if self.has_clocks:
            process.ahead_s, process.drift = (
                self.random.uniform(-CLOCK_S, CLOCK_S),
                self.random.uniform(-1e-3, 1e-3),
            )
        return process

    def step(self) -> bool:
        """Take one of the run's steps; False once they are used up."""
        self.steps -= 1
        if len(self.scheduler.threads) > MOST_THREADS:
            raise Violation(f"{len(self.scheduler.threads)} threads run")
        self.check_said()
        self.check_kept()
        return self.steps > 0

    def pause(self, most_s: float) -> None:
        self.scheduler.sleep(self.random.uniform(0.0, most_s * (5.0 if "long" in self.wanted else 1.0)))

    def call(self, what: str, action: Callable[[], Any], interruptible: bool = False) -> Any:
        """Call the product: its own errors are returned, any other is a violation, as is a call that does not
        end.
        """
        before_s, me = self.scheduler.now_s, self.scheduler.running
        process, held_s = me.process, me.process.held_s
        try:
            me.interruptible = interruptible
            try:
                found = action()
            finally:
                me.interruptible = False
        except DeltaSyncError as error:
            found = error
            self.scheduler.say(f"{what}: {type(error).__name__} {error}")
            if self.is_unproven(str(error)):
                raise Violation(f"bytes that nobody signed were decoded: {error}") from error
            if not str(error).strip() or "\n" in str(error):
                raise Violation(
                    f"{what} raised {type(error).__name__} without one sentence: {error}"
                ) from error
        except (Killed, Stuck, Violation, KeyboardInterrupt):
            raise
        except Exception as error:
            raise Violation(f"{what} raised {type(error).__name__}: {error}") from error
        spent_s = self.scheduler.now_s - before_s - (process.held_s - held_s)
        if spent_s > CALL_S and not process.name.startswith("rank"):  # which wait for each other
            raise Violation(f"{what} took {spent_s:.0f} s without a word")
        return found

    # --- what a process has ---

    def publisher(self, process: Process, **options: Any) -> Publisher:
        found = Publisher(
            Line(self.disk, process, claims=True if self.kind.name == "ignores" else None),
            resume=True,
            codec=self.codec,
            anchor_every=self.anchor_every,
            retention=self.retention,
            retries=self.retries,
            signing_key=self.folder / "key" if self.signed else None,
            **options,
        )
        self.run_id = found.run_id or self.run_id
        return found

    def reader(self, process: Process) -> ChannelReader:
        return ChannelReader(Line(self.disk, process), self.trusted)

    def reading_store(self, process: Process) -> Store:
        """A replica's way to the store, behind the cache of the node or not."""
        line: Store = Line(self.disk, process)
        return (
            CachedStore(line, self.cache, 1 << 30)
            if self.random.random() < 0.4 or "cache" in self.wanted
            else line
        )

    def train(self) -> None:
        """Change the weights a little, or a lot, or not at all."""
        share = self.random.choice((0.0, 0.01, 0.05, 0.5, 1.0))
        for tensor in self.weights.values():
            bits_N = bits_of(tensor)
            for at in range(bits_N.size):
                if self.random.random() < share:
                    bits_N[at] = (int(bits_N[at]) + self.random.randrange(1, 40)) & 0x7F7F

    def bits(self) -> dict[str, bytes]:
        """Return the bits of the weights."""
        return {name: bits_of(tensor).tobytes() for name, tensor in self.weights.items()}

    def note(self) -> str:
        """Remember the weights; return their digest."""
        held = self.bits()
        digest = _digest(held)
        if digest in self.snapshots:
            self.unsure.add(digest)
        self.snapshots[digest] = held
        return digest

    def mix(self, before: dict[str, bytes], after: dict[str, bytes]) -> None:
        """Somebody writes while weights are published: each element may be one of two."""
        self.mixed.append((before, after))
        self.unsure |= {_digest(before), _digest(after)}
        self.counts["mixed"] += 1

    # --- what must hold ---

    def check_failed(self) -> None:
        """Raise what ended a thread, of the product or of an actor, and what the store or the log has
        seen.
        """
        for thread, error in self.scheduler.failed:
            if isinstance(error, Violation | Stuck):
                raise error
            raise Violation(
                f"{thread.process.name}/{thread.name} ended with {type(error).__name__}: {error}"
            ) from error
        self.check_said()

    def check_said(self) -> None:
        problem = self.disk.problem or self.copy.problem or next(iter(self.said), None)
        if problem is not None:
            raise Violation(problem)

    def is_unproven(self, text: str) -> bool:
        """Whether an error is of bytes that were decoded or applied, and are in a signed channel what was
        signed.
        """
        is_replica = self.scheduler.running.process.name.startswith(("replica", "follower"))
        return self.signed and is_replica and not self.memory_rots and _UNPROVEN.search(text) is not None

    def hear(self, record: logging.LogRecord) -> None:
        """What the product logs: no surprise; nothing at all when all is well; and no damaged byte reached
        live weights.
        """
        error = None if record.exc_info is None else record.exc_info[1]
        text = record.getMessage()
        if error is not None and not isinstance(error, DeltaSyncError | Killed):
            self.said.append(f"{text} {type(error).__name__}: {error}")
        elif self.is_unproven(text):
            self.said.append(f"bytes that nobody signed were applied: {text}")
        elif self.is_calm and record.levelno >= logging.WARNING and "All versions are kept" not in text:
            self.said.append(f"when all is well: {text}")

    def compare(self, replica: Replica) -> None:
        """The bits that a replica has are those that were published as the version that it names."""
        identity = replica.identity
        if identity is None:
            return
        self.compare_bits((identity.version, identity.sha256), replica.state_dict())
        ours = {hashlib.sha256(data).hexdigest() for data in self.disk.ours.get(identity.key, ())}
        if identity.sha256 not in ours and (
            self.signed or (self.harm is None and not self.disk.met["damaged"])
        ):
            raise Violation(f"a replica serves {identity}, which no publisher has stored")

    def compare_bits(self, version: tuple[int, str], tensors: Mapping[str, torch.Tensor]) -> None:
        held = {name: bits_of(tensor.detach()).tobytes() for name, tensor in tensors.items()}
        bits = _digest(held)
        if bits not in self.snapshots and any(_is_mixed(held, *pair) for pair in self.mixed):
            self.snapshots[bits] = held
        if bits not in self.snapshots:
            raise Violation(f"bits are served as version {version} that nobody published")
        self.agree(self.served, version, bits, "served")

    def agree(self, into: dict[tuple[int, str], str], version: tuple[int, str], bits: str, how: str) -> None:
        into.setdefault(version, bits)
        if any(of.get(version, bits) != bits for of in (self.visible, self.served)):
            raise Violation(f"version {version[0]} ({version[1][:12]}) is {how} with other bits than before")

    def still(self, version: int) -> Replica | DeltaSyncError:
        """Return a replica that takes a version from what the store holds now, without faults."""
        joined = Replica(Line(self.disk.still(), Process("still")), trusted_keys=self.trusted)
        try:
            joined.sync(version)
        except DeltaSyncError as error:
            return error
        return joined

    def check_kept(self) -> None:
        """What a live replica serves by its heartbeat was not deleted, nor what another one may serve."""
        if self.harm is None and self.disk.lives.early is not None:
            raise Violation(self.disk.lives.early)
        for beat in self.disk.lives.doubted():
            if self.harm is None and beat.version is not None:
                found = self.still(beat.version)
                if isinstance(found, DeltaSyncError) or found.digest != beat.sha256:
                    raise Violation(
                        f"{beat.replica_id} serves version {beat.version}, and it is deleted: {found}"
                    )

    def check_receipt(self, receipt: Any, bits: str | None) -> None:
        """A version that a receipt calls visible can be joined, and has the bits that were given."""
        if self.harm is not None or self.forgets or self.counts["forged"]:
            return
        found = self.still(receipt.version)
        if isinstance(found, DeltaSyncError):
            raise Violation(f"version {receipt.version} has a receipt, and cannot be joined: {found}")
        self.compare_bits((receipt.version, receipt.digest), found.state_dict())
        if found.digest == receipt.digest and bits is not None:
            self.agree(self.visible, (receipt.version, receipt.digest), bits, "joined")

    def settle(self) -> None:
        """Without faults a publisher can publish, everybody reaches its version, and nothing visible is
        lost.
        """
        process = Process("end")
        for each in self.live:
            each.resume(self.scheduler.now_s)
        self.scheduler.sleep(60.0)  # late requests arrive
        requests = sum(self.disk.requests.values())
        if requests > MOST_REQUESTS * self.first_steps + self.scheduler.now_s:
            raise Violation(f"{requests} requests in {self.first_steps} steps")
        thread = Thread(target=lambda: self._finish(process), name="main", process=process)
        thread.start()
        thread.join()
        if self.harm == "rot" and type(thread.error) is FormatError:
            # a byte of the format's name: nothing is written to a newer channel
            self.scheduler.failed.clear()
            return
        if isinstance(thread.error, DeltaSyncError):
            raise Violation(
                f"without faults: {type(thread.error).__name__}: {thread.error}"
            ) from thread.error

    def _finish(self, process: Process) -> None:
        before_s, saved = self.scheduler.now_s, dict(self.disk.objects)
        if self.harm is not None and self.random.random() < 0.5:
            actors.mended(self, process)
        publisher = self.publisher(process)
        replicas = [Replica(Line(self.disk, process), trusted_keys=self.trusted)]
        if self.harm != "restore" or not self.signed:  # a signed channel that goes back needs restarts
            replicas += [replica for owner, replica in self.replicas if not owner.killed]
        for number in range(4):
            self.train()
            bits = self.note()
            receipt = publisher.publish(self.weights.items()).wait(CALM_S)
            self.agree(self.visible, (receipt.version, receipt.digest), bits, "published")
            for replica in replicas:
                if number == 0 and replica is not replicas[0]:
                    self.poll(replica, receipt)
                self.reach(replica, receipt, REACHES if number == 0 or self.kind.edge_s else 80)
                self.compare(replica)
            if number and receipt.kind != "delta":
                raise Violation(f"version {receipt.version} is published whole, without a fault")
            self.is_calm = (
                number > 0
                and self.harm is None
                and not (self.counts["forged"] or self.forgets or self.kind.edge_s)
            )
        if self.harm == "restore" and not self.signed and keys.CHANNEL in saved:
            self._go_back(saved, publisher, replicas)
        else:
            publisher.close()
        is_proven = self.signed or self.harm != "rot"  # otherwise the copy has whatever record could be read
        if is_proven and self.copy.objects.get(keys.HEAD) is not None:
            copied = Replica(Line(self.copy, process), trusted_keys=self.trusted)
            if isinstance(
                found := self.call("sync with the copy", lambda: copied.sync(timeout_s=5.0)), DeltaSyncError
            ):
                raise Violation(f"the copy has a head and cannot be joined: {found}")
            self.compare(copied)
        spent_s = self.scheduler.now_s - before_s
        if spent_s > CALM_S:
            raise Violation(f"{spent_s:.0f} s passed until a joiner had a new version, without a fault")
        self.scheduler.sleep(10.0)  # listings
        ours = [thread.name for thread in self.scheduler.threads if thread.process is process]
        if len(ours) > MOST_LEFT:
            raise Violation(f"{len(ours)} threads are left: {ours}")
        self.check_visible(process)

    def _go_back(self, saved: dict[str, Any], earlier: Publisher, replicas: Sequence[Replica]) -> None:
        """The store is turned back to before a publisher opened the channel, and another one opens it: all go
        with that.
        """
        self.disk.restore(saved)
        publisher = self.publisher(Process("later"))
        for _ in range(2):
            self.train()
            self.note()
            receipt = publisher.publish(self.weights.items()).wait(CALM_S)
            for replica in replicas:
                self.reach(replica, receipt, REACHES, BACK_S)
                self.compare(replica)
        publisher.close()
        for _ in range(4):
            self.train()
            self.note()
            if isinstance(
                self.call("publish after a restore", lambda: earlier.publish(self.weights.items())),
                FencedError,
            ):
                self.call("close after a restore", earlier.close)
                return
            self.scheduler.sleep(10.0)
        raise Violation("a publisher goes on beside the one that opened the channel after a restore")

    def poll(self, replica: Replica, receipt: Any) -> None:
        """Poll until the replica is at a version: what it avoids for a while it tries again by itself."""
        until_s, found = self.scheduler.now_s + POLLS_S, None
        while replica.digest != receipt.digest:
            if self.scheduler.now_s > until_s:
                raise Violation(
                    f"without faults a replica that polls is at {replica.identity}, not {receipt.version}: "
                    f"{found}"
                )
            found = self.call("poll", replica.poll)
            self.pause(4.0)

    def reach(self, replica: Replica, receipt: Any, requests: int, within_s: float = 60.0) -> None:
        """Sync until the replica is at a version; a listing may lag."""
        version, until_s, refused = receipt.version, self.scheduler.now_s + within_s, 0
        line: Any = replica._follow.reader.store
        asked = line.inner.requests if isinstance(line, CachedStore) else line.requests
        before, is_prompt = asked.copy(), not self.kind.lag_s and not self.kind.edge_s
        while replica.digest != receipt.digest:
            found = self.call("sync", lambda: replica.sync(timeout_s=5.0))
            # A forged record that seems newer is said after the step, too.
            refused += isinstance(found, DeltaSyncError) and not (
                self.harm == "forged" and replica.digest == receipt.digest
            )
            if self.scheduler.now_s > until_s:
                raise Violation(
                    f"without faults a joiner is at {replica.identity} and not at {version} "
                    f"({receipt.digest[:12]}): {found}"
                )
            self.pause(1.0)
        spent = asked - before
        is_old = replica in [each for _, each in self.replicas]
        if is_prompt and refused > is_old:
            raise Violation(f"a replica reached version {version} after {refused} errors")
        lists = 4 + version // keys.FOLDER  # compactions, announcements, and each folder of records
        if is_prompt and not (self.forgets or is_old) and requests < REACHES and spent["list"] > lists:
            raise Violation(f"a replica lists {spent['list']} times for version {version}")
        if spent.total() > requests:
            raise Violation(f"a replica reached version {version} with {spent.total()} requests")

    def check_visible(self, process: Process) -> None:
        """What receipts called visible is in the channel, and what they called lost was not served."""
        wrong = self.lost.intersection(self.served.values()).difference(self.visible.values(), self.unsure)
        if wrong:
            raise Violation(f"bits that a receipt called lost were served: {sorted(wrong)[0][:12]}")
        if self.harm is not None:
            return
        reader = self.reader(process)
        listed = list(reader.versions())
        strays = 0 if self.signed else self.counts["forged"]
        if keys.epoch_number(listed[0].epoch) > len(self.attempts) + 1 + strays:
            raise Violation(f"epoch {listed[0].epoch} after {len(self.attempts)} openings")
        held = {version.version: version.sha256 for version in listed}
        if [*held] != list(range(max(held), max(held) - len(held), -1)):
            raise Violation(f"the channel has versions {[*held]}")
        for version, digest in sorted(self.visible):
            if version in held and held[version] != digest:
                raise Violation(
                    f"version {version} was visible as {digest[:12]}, and is {held[version][:12]} now"
                )
            if version not in held and not self.forgets and version <= max(held):
                raise Violation(f"version {version} was visible, and is not in the channel")
        if self.counts["forged"]:
            return
        self._check_data(process)
        self.scheduler.sleep(7 * 86400.0)
        if self.forgets:
            gc(self.reader(process), KeepPolicy(last=3), grace_s=0.0)
        for last in (False, True):
            found = gc(self.reader(process), grace_s=0.0, dry_run=last)
        if found.objects or found.waiting:
            raise Violation(f"nobody deletes {[info.key for info in (*found.objects, *found.waiting)][:3]}")
        self._check_data(process)
        joiner = Replica(Line(self.disk, process), trusted_keys=self.trusted)
        if joiner.sync() != max(held):
            raise Violation(f"after a collection of garbage a joiner is at {joiner.identity}")
        self.compare(joiner)

    def _check_data(self, process: Process) -> None:
        report = check(self.reader(process), read_data=True)
        # of who lost a race
        problems = [text for text in map(str, report.problems) if not text.startswith(keys.EPOCHS)]
        if problems or report.unproven:
            raise Violation(f"the channel is damaged: {problems[:3]}, {report.unproven}")


def _is_mixed(held: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]) -> bool:
    """Whether each element is one of two."""
    views = ([np.frombuffer(each[name], np.uint16) for each in (held, before, after)] for name in held)
    return all(
        bool(((held_N == before_N) | (held_N == after_N)).all()) for held_N, before_N, after_N in views
    )


def _digest(held: dict[str, bytes]) -> str:
    found = hashlib.sha256()
    for name in sorted(held):
        found.update(name.encode() + held[name])
    return found.hexdigest()


@contextlib.contextmanager
def _listening(world: World) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            world.hear(record)

    logger, handler = logging.getLogger("deltasync"), Handler(logging.WARNING)
    before = logger.level, logger.propagate
    # which tells of threads that are killed
    logging.getLogger("concurrent.futures").setLevel(logging.CRITICAL + 1)
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def simulate(
    seed: int, steps: int = STEPS, keep_trace: bool = False, wanted: Collection[str] = ()
) -> Outcome:
    """Run one seed. `wanted` are what its world has: a store, a harm, actors, faults, events; with "only", no
    others.
    """
    finishing = dict(ending._finishing)
    problem = None
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, Path(folder), steps, keep_trace, wanted)
        small = mock.patch.object(keys, "FOLDER", 4), mock.patch.object(limits, "DAMAGED_RECORDS", 8)
        installed = world.scheduler.installed(shown(world.scheduler)), group.simulated(), _listening(world)
        with contextlib.ExitStack() as stack:
            for context in (*small, *installed):
                stack.enter_context(context)
            try:
                world.run()
            except (Violation, Stuck) as error:
                problem = f"{type(error).__name__}: {error}"
    ending._finishing.clear()
    ending._finishing.update(finishing)
    counts = {
        "store": world.kind.name,
        "harm": world.harm,
        **world.counts,
        "requests": sum(world.disk.requests.values()),
        "faults": sum(world.disk.met.values()),
    }
    counts["objects"], counts["switches"] = len(world.disk.objects), world.scheduler.switches
    return Outcome(seed, world.scheduler.digest, problem, counts, world.scheduler.trace)
