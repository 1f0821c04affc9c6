"""What the processes of a world do: each function is the main thread of one, and ends when the world's steps
are used up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from deltasync import Publisher, Replica, follow
from deltasync.channel import keys
from deltasync.errors import ConfigError, DeltaSyncError, FencedError, PublishError, StoreError
from deltasync.kernels import native
from deltasync.ops import gc
from deltasync.ops.checks import check
from deltasync.ops.relay import Relay
from deltasync.ops.repairs import repair, source_of
from deltasync.ops.retention import KeepPolicy
from deltasync.serve import heartbeat
from deltasync.trainer.stream import TensorRange
from tests.simulator.forgeries import forged
from tests.simulator.group import Group, KeyStore
from tests.simulator.scheduler import Process, Thread
from tests.simulator.store import NO_FAULTS, NO_SPACE, Faults, Line

if TYPE_CHECKING:
    from tests.simulator.world import World

PEERS_S = 120.0
FULL = Faults(refused=1.0)  # the disk


class Violation(AssertionError):
    """Something that must hold does not."""


@dataclasses.dataclass
class Attempt:
    """A publisher that opens the channel, or has: whether another one did so since, or meanwhile."""

    is_challenged: bool
    opens: bool = True


def begin(world: World) -> Attempt:
    """Somebody opens the channel: whoever has it open may be fenced from now on."""
    is_new = keys.CHANNEL not in world.disk.objects  # then the first to create it wins
    attempt = Attempt(any(other.opens or is_new for other in world.attempts))
    for other in world.attempts:
        other.is_challenged = True
    world.attempts.append(attempt)
    return attempt


def trainer(world: World, process: Process) -> None:
    """Open a publisher again and again, and publish."""
    while world.steps > 0:
        world.pause(5.0)
        attempt = begin(world)
        opened = world.call("open", lambda: world.publisher(process))
        attempt.opens = False
        if isinstance(opened, DeltaSyncError):
            world.step()
            world.pause(30.0)
            continue
        world.counts["opened"] += 1
        publisher: Publisher = opened
        mine: dict[int, str | None] = {}
        receipts: list[Any] = []
        beats = heartbeat.FleetHeartbeats(Line(world.disk, process), publisher.run_id, decides=True)
        interrupted, leaves = False, world.random.choice((0.02, 0.3))
        while world.step():
            other = another_call(world, process, publisher, mine, receipts)
            bits: str | None = None
            world.train()
            try:
                if world.writes and world.random.random() < 0.5:
                    receipt = beside_a_writer(world, publisher)
                else:
                    bits = world.note()
                    stream = nesting(world, publisher)
                    receipt = world.call("publish", lambda: publisher.publish(stream), True)  # noqa: B023
            except KeyboardInterrupt:
                interrupted = True
                continue
            if isinstance(receipt, FencedError):
                # Where listings decide who may write, one that is behind hides an opening of before.
                is_behind = world.kind.lag_s or world.disk.met["stale"]
                if not attempt.is_challenged and (world.kind.creates or not is_behind):
                    raise Violation(f"the only publisher is fenced: {receipt}")
                break
            if not isinstance(receipt, DeltaSyncError):
                mine[receipt.version] = bits
                receipts.append((receipt, bits))
            if other is not None:
                other.join()
            is_published = not isinstance(receipt, DeltaSyncError)
            if (
                is_published
                and world.random.random() < 0.5
                and waited(world, receipt, bits, mine, interrupted)
            ):
                acknowledged(world, beats, publisher, receipt)
            world.pause(world.random.choice((0.2, 2.0, 30.0)))
            if world.random.random() < leaves:
                break
        try:
            world.call("close", publisher.close, True)
        except KeyboardInterrupt:
            world.call("close again", publisher.close)
        for receipt, bits in receipts:
            if receipt.done:
                waited(world, receipt, bits, mine, interrupted)


def beside_a_writer(world: World, publisher: Publisher) -> Any:
    """Publish while somebody changes the weights, a few elements after each look of the product at them."""
    weights, before = {name: tensor.clone() for name, tensor in world.weights.items()}, world.bits()
    world.train()
    after, later = world.bits(), {name: tensor.flatten().tolist() for name, tensor in world.weights.items()}

    def write() -> None:
        for name, tensor in weights.items():
            for at in world.random.sample(range(tensor.numel()), 5):
                tensor.view(-1)[at] = later[name][at]

    world.mix(before, after)
    with looking(write):
        return world.call("publish beside a writer", lambda: publisher.publish(weights.items()))


@contextlib.contextmanager
def looking(write: Callable[[], None]) -> Iterator[None]:
    """Call something after each look of the product at the weights."""
    compare = native.compare

    def looked(*arguments: Any) -> Any:
        try:
            return compare(*arguments)
        finally:
            write()

    native.compare = looked
    try:
        yield
    finally:
        native.compare = compare


def another_call(
    world: World, process: Process, publisher: Publisher, mine: dict[int, str | None], receipts: list[Any]
) -> Thread | None:
    """Publish other weights in another thread of the process: it is refused, or comes before or after."""
    if not world.calls or world.random.random() < 0.5:
        return None
    weights = {name: tensor.clone() for name, tensor in world.weights.items()}
    held, world.weights = world.weights, weights
    world.train()
    bits, world.weights = world.note(), held

    def run() -> None:
        world.scheduler.sleep(world.random.choice((0.0, 0.0, 0.05)))
        receipt = world.call("publish in another thread", lambda: publisher.publish(weights.items()))
        world.counts["refused"] += isinstance(receipt, ConfigError)
        if not isinstance(receipt, DeltaSyncError):
            mine[receipt.version] = bits
            receipts.append((receipt, bits))

    thread = Thread(target=run, name="other", process=process)
    thread.start()
    return thread


def nesting(world: World, publisher: Publisher) -> Iterator[tuple[str, torch.Tensor]] | Any:
    """Return the weights as a stream, which may publish them by itself: that must be refused."""
    if not world.calls or world.random.random() < 0.5:
        return world.weights.items()
    weights = {name: tensor.clone() for name, tensor in world.weights.items()}

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for at, item in enumerate(weights.items()):
            found = (
                world.call("publish in a stream", lambda: publisher.publish(weights.items()))
                if at == 1
                else None
            )
            if at == 1 and not isinstance(found, ConfigError):
                world.said.append("a publish inside of another one is not refused")
            yield item

    return stream()


def waited(
    world: World, receipt: Any, bits: str | None, mine: dict[int, str | None], interrupted: bool
) -> bool:
    """Wait for the receipt of these bits; what it calls visible has the bits that were published last under
    its number.
    """
    found = world.call("wait", lambda: receipt.wait(world.random.choice((1.0, 60.0, 400.0))))
    if isinstance(found, DeltaSyncError):
        if type(found) is PublishError:  # given up, neither pending nor fenced
            world.counts["lost"] += 1
            if not isinstance(found.__cause__, StoreError | FencedError) and "builds on" not in str(found):
                raise Violation(f"a version is lost, and not because of the store: {found}")
            if not interrupted and bits is not None:
                world.lost.add(bits)
        return False
    world.counts["versions"] += 1
    if not interrupted:  # an interrupted publish may have joined the version
        given = mine[receipt.version]
        if given is not None:
            world.agree(world.visible, (receipt.version, receipt.digest), given, "published")
        if world.writes or world.calls or "receipts" in world.wanted or world.random.random() < 0.1:
            world.check_receipt(receipt, given)
    return True


def acknowledged(world: World, beats: heartbeat.FleetHeartbeats, publisher: Publisher, receipt: Any) -> None:
    """Wait, now and then, until a replica serves a version: it must be one of ours, and a follower that had
    it.
    """
    if world.random.random() > 0.5 and "acks" not in world.wanted:
        return
    line: Any = beats._store
    timeout_s, disk, began_s = world.random.choice((0.0, 10.0, 60.0)), world.disk, world.scheduler.now_s
    found = world.call(
        "ack",
        lambda: heartbeat.wait_for(
            line, publisher.run_id, receipt.version, publisher.published, timeout_s, known=beats
        ),
    )
    if isinstance(found, DeltaSyncError):
        return
    world.counts["acks"] += 1
    for beat in found:
        served = (beat.version, beat.sha256)
        if not beat.replica_id.startswith("follower") or beat.version < receipt.version:
            raise Violation(f"version {receipt.version} is acknowledged by {beat.replica_id} at {served}")
        if publisher.published.get(beat.version) != beat.sha256:
            raise Violation(f"a replica acknowledges {served}, which this publisher has not published")
    if not (disk.kind.lag_s or world.harm):
        listed_s = min(began_s, line.listed_s)
        problem = disk.lives.overlooked(found, receipt.version, listed_s, publisher.run_id)
        if problem is not None:
            raise Violation(problem)


def job(world: World, process: Process) -> None:
    """Start a sharded trainer's ranks again and again; if one is lost, the others say so and end."""
    while world.steps > 0:
        world.pause(5.0)
        attempt, size = begin(world), world.random.choice((2, 3))
        script = []
        for _ in range(world.random.choice((1, 3, 8))):
            world.train()
            script.append(
                (
                    next(world.trained),
                    {name: tensor.clone() for name, tensor in world.weights.items()},
                    world.note(),
                )
            )
        owner = Process("rank0")
        store = KeyStore(owner)
        runs = [Rank(world, script, attempt, store, rank, size, owner) for rank in range(size)]
        for run in runs:
            world.live.append(run.process)
            run.thread.start()
        for run in runs:
            run.thread.join(4 * 3600.0)
            if not run.thread.ended:
                raise Violation(f"{run.process.name} of {size} hangs")
        attempt.opens = False
        calm = not any(run.process.killed or run.process.held_s for run in runs)
        if calm and len({len(run.digests) for run in runs}) > 1:
            raise Violation(f"ranks have published {[len(run.digests) for run in runs]} versions")
        for run in runs:
            run.process.killed = True  # exits
            if run.process in world.live:
                world.live.remove(run.process)
        if calm and any(
            len({digest for digest in found if digest}) > 1
            for found in zip(*(r.digests for r in runs), strict=False)
        ):
            raise Violation("ranks have different receipts of one version")
        world.counts["jobs"] += 1
        if not any(run.digests for run in runs):
            world.step()
            world.pause(30.0)


class Rank:
    """One rank of a job.

    Attributes:
        digests: Of the versions that it published, "" where it does not know yet.
    """

    def __init__(
        self,
        world: World,
        script: list[Any],
        attempt: Attempt,
        store: KeyStore,
        rank: int,
        size: int,
        owner: Process,
    ) -> None:
        self.process = owner if rank == 0 else Process(f"rank{rank}")
        self.process.store = store  # type: ignore[attr-defined]
        self.thread = Thread(
            target=lambda: self._run(Group(store, rank, size)), name="main", process=self.process
        )
        self.digests: list[str] = []
        self._world, self._script, self._attempt = world, script, attempt

    def _run(self, group: Group) -> None:
        world, mine, receipts = self._world, dict[int, str](), list[Any]()
        publisher = world.call(
            "open", lambda: world.publisher(self.process, group=group, peer_timeout_s=PEERS_S)
        )
        self._attempt.opens = False
        if isinstance(publisher, DeltaSyncError):
            return
        world.counts["opened"] += group.rank == 0
        for step, weights, bits in self._script:
            if group.rank == 0:
                world.step()
            mapping = _shards(weights, group.rank, group.size)
            receipt = world.call("publish", functools.partial(publisher.publish, mapping, step))
            if isinstance(receipt, DeltaSyncError):
                return
            mine[receipt.version] = bits
            receipts.append((receipt, bits))
            self.digests.append("")
            world.pause(2.0)
        world.call("close", publisher.close)
        for at, (receipt, bits) in enumerate(receipts):
            if receipt.done and group.rank == 0:
                waited(world, receipt, bits, mine, False)
                continue
            found = world.call("wait", functools.partial(receipt.wait, 1.0)) if receipt.done else None
            if found is not None and not isinstance(found, DeltaSyncError):
                self.digests[at] = found.digest
                world.agree(
                    world.visible, (receipt.version, found.digest), mine[receipt.version], "published"
                )


def _shards(weights: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, Any]:
    """What a rank holds: a range of each tensor but the smallest, which all ranks hold whole."""
    found: dict[str, Any] = {}
    for name, tensor in weights.items():
        flat = tensor.flatten()
        chunk = -(-flat.numel() // size)
        part = flat[rank * chunk : (rank + 1) * chunk]
        whole = name == "b"
        found[name] = (
            tensor if whole else TensorRange(part, min(rank * chunk, flat.numel()), tuple(tensor.shape))
        )
    return found


def replica(world: World, process: Process) -> None:
    """Join, follow, be pinned, audit, and restart."""
    while world.steps > 0:
        world.pause(10.0)
        store = world.reading_store(process)
        joined = world.call("join", lambda store=store: Replica(store, trusted_keys=world.trusted))
        if isinstance(joined, DeltaSyncError):
            continue
        world.counts["joins"] += 1
        world.replicas = [*world.replicas[-3:], (process, joined)]
        while world.step():
            follow_once(world, joined)
            world.pause(world.random.choice((0.1, 1.0, 20.0)))
            if world.random.random() < 0.05:
                break


def follow_once(world: World, joined: Replica) -> None:
    """One call of a replica. It never goes back but where it is told to."""
    kind, before, found = world.random.random(), joined.identity, None
    if kind < 0.5:
        found = world.call("poll", joined.poll)
    elif kind < 0.8:
        found = world.call("sync", lambda: joined.sync(timeout_s=world.random.choice((0.0, 5.0))))
    elif kind < 0.9 and joined.version is not None:
        pin = world.random.randrange(1, joined.version + 2)
        found = world.call(f"sync({pin})", lambda: joined.sync(pin))
        world.counts["pins"] += not isinstance(found, DeltaSyncError)
        if not isinstance(found, DeltaSyncError) and joined.version != pin:
            raise Violation(f"sync({pin}) is at {joined.version}")
        before = None
    elif joined.version is not None:
        if world.random.random() < 0.1:  # the audit finds it
            bits_N = next(iter(joined.state_dict().values())).view(torch.int16).flatten()
            bits_N[world.random.randrange(bits_N.numel())] ^= 1 << world.random.randrange(16)
            if world.call("audit", joined.audit) is not False or joined.version is not None:
                raise Violation("an audit overlooks a bit that has flipped")
            world.memory_rots = True
        elif (found := world.call("audit", joined.audit)) is False:
            raise Violation("an audit found wrong bits")
    world.counts["syncs"] += not isinstance(found, DeltaSyncError)
    world.compare(joined)
    after = joined.identity
    # then the store may have lost the version
    may_go_back = world.harm in ("restore", "rot") and not world.signed
    if (
        before is not None
        and after is not None
        and after.slot.newness < before.slot.newness
        and not may_go_back
    ):
        raise Violation(f"a replica went back from {before} to {after}")


class Model(torch.nn.Module):
    """A module with the channel's tensors."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False))


def follower(world: World, process: Process) -> None:
    """A module whose weights a thread of its own replaces, and which says so in heartbeats."""
    settings = {"poll_interval_s": 2.0, "replica_id": process.name, "trusted_keys": world.trusted}
    while world.steps > 0:
        world.pause(10.0)
        model = Model(world.weights)
        following = world.call("follow", lambda: follow(model, Line(world.disk, process), **settings))  # noqa: B023
        if isinstance(following, DeltaSyncError):
            world.step()
            continue
        world.disk.lives.begin(process)
        while world.step():
            world.pause(world.random.choice((1.0, 20.0)))
            if world.is_slow and world.disk.lives.age_s(process) > heartbeat.LIVE_S:
                raise Violation(
                    f"{process.name} has written no heartbeat for {world.disk.lives.age_s(process):.0f} s"
                )
            with contextlib.suppress(DeltaSyncError), following.hold(1.0) as version:
                if version is not None and following.digest is not None:
                    world.compare_bits((version, following.digest), dict(model.named_parameters()))
                    world.counts["followed"] += 1
            if world.random.random() < 0.2 and following.version is not None:
                pin = world.random.choice(
                    (f"{following.version}" if world.pins else "newest", f"{following.version}")
                )
                world.call("pin", lambda: setattr(following, "pin", pin))  # noqa: B023
            if world.random.random() < 0.05 and not world.pins:
                break
        world.call("stop", following.close)


def relay(world: World, process: Process) -> None:
    """Copy the channel to another store."""
    relaying = None
    while world.step():
        if relaying is None:
            source, target = world.reader(process), Line(world.copy, process)
            relaying = world.call("relay", lambda: Relay(source, [target]))  # noqa: B023
        copied = world.call("copy", relaying.step)
        world.counts["copied"] += not isinstance(copied, DeltaSyncError)
        world.pause(10.0)
        if world.random.random() < 0.1:
            relaying = None


def keeper(world: World, process: Process) -> None:
    """Check, repair, and forget old versions."""
    while world.step():
        world.pause(60.0)
        reader = world.reader(process)
        found = world.call("check", lambda: check(reader, read_data=world.random.random() < 0.3))  # noqa: B023
        world.counts["checked"] += not isinstance(found, DeltaSyncError)
        if world.forgets:
            found = world.call("gc", lambda: gc(reader, KeepPolicy(last=3), grace_s=world.retention.grace_s))  # noqa: B023
            if NO_SPACE in str(found):
                raise Violation(f"gc cannot free a full store: {found}")
        elif world.harm is not None and world.random.random() < 0.3:
            mended(world, process)


def mended(world: World, process: Process) -> None:
    """Repair the channel."""
    found = world.call(
        "repair",
        lambda: repair(world.reader(process), source=source_of(str(world.cache)), signer=world.signer),
    )
    world.counts["repaired"] += not isinstance(found, DeltaSyncError)


def outsider(world: World, process: Process) -> None:
    """Write what the product reads, without the keys."""
    while world.step():
        world.pause(20.0)
        disk = world.disk
        if keys.CHANNEL not in disk.objects:  # where records are, but no channel, none is begun
            continue
        objects = {key: held.data for key, held in disk.objects.items()}
        key, data = forged(
            world.random, objects, world.theirs if world.harm == "forged" else None, world.run_id
        )
        if key in objects and world.harm != "forged" and not key.startswith((keys.HEAD, keys.REPLICAS)):
            continue
        disk.harm(key, data)
        world.counts["forged"] += 1
        # In an unsigned channel it may be a publisher's, and a record of ours under the next slot ends the
        # log.
        if (not world.signed and key.startswith(keys.EPOCHS)) or key.startswith(keys.VERSIONS):
            for attempt in world.attempts:
                attempt.is_challenged = True


EVENTS = {
    "full": 0.05,
    "copy": 0.05,
    "kill": 0.15,
    "suspend": 0.1,
    "clock": 0.1,
    "interrupt": 0.07,
    "expired": 0.05,
    "harm": 0.13,
}
"""What fate does in one of its turns, and how often."""


def fate(world: World, process: Process) -> None:
    """Change the weather; suspend, kill and interrupt processes; move clocks; let objects rot."""
    saved, random, now = None, world.random, world.scheduler
    chances = [
        0.5
        if name in world.wanted or (name == "harm" and world.harm in world.wanted)
        else (0.0 if world.is_mild else EVENTS[name])
        for name in EVENTS
    ]
    while world.steps > 0:
        world.pause(12.0)
        weather(world)
        event = random.choices([*EVENTS, ""], [*chances, 0.4])[0]
        able = [each for each in world.live if each.name != "fate" and not each.killed]
        victim = random.choice(able)
        if event == "kill" and victim.name != "job":
            kill(world, victim)
        elif event == "suspend":
            victim.suspend(now.now_s, random.choice((1.0, 45.0, 7200.0)), random.random() < 0.5)
            now.say(f"{victim.name} is suspended until {victim.suspended_until_s:.0f}")
        elif event == "clock":
            victim.ahead_s = random.choice((random.uniform(-400.0, 400.0), -86400.0, 86400.0))
        elif event == "interrupt" and victim.name in ("trainer", "rival"):
            interrupt(world, victim)
        elif event == "expired":
            victim.refused_until_s = now.now_s + random.choice((3.0, 60.0))
        elif event == "full" and world.fills:
            world.disk.room_bytes = world.disk.bytes if world.disk.room_bytes == math.inf else math.inf
            now.say(f"the store has room for {world.disk.room_bytes} bytes")
        elif event == "copy" and world.copies and victim.name.startswith("follower") and victim.drawn:
            copy(world, victim)
        elif event == "harm":
            saved = harm(world, saved)
    world.disk.room_bytes = math.inf
    world.disk.faults = world.copy.faults = NO_FAULTS
    for each in world.live:
        each.resume(now.now_s)
        each.refused_until_s = 0.0


def harm(world: World, saved: Any) -> Any:
    """Do to the store what no request does. Return a backup."""
    disk, random = world.disk, world.random
    held = sorted(key for key in disk.objects if key != keys.CHANNEL)
    if world.harm is None or not held or keys.CHANNEL not in disk.objects:
        return saved
    world.counts["harms"] += 1
    for attempt in world.attempts:
        attempt.is_challenged = True
    if world.harm == "rot":
        newest = [key for key in held if key.startswith(keys.VERSIONS)][-4:]
        key = random.choice(newest if newest and random.random() < 0.4 else held)
        data = disk.objects[key].data
        at = random.randrange(len(data) or 1)
        disk.harm(
            key,
            None
            if random.random() < 0.2
            else data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            if data
            else b"x",
        )
        cached = sorted(world.cache.iterdir())
        if cached and (path := random.choice(cached)).is_file() and path.stat().st_size:
            path.write_bytes(bytes([path.read_bytes()[0] ^ 4]) + path.read_bytes()[1:])
    elif world.harm == "expire":  # a rule that spares what is new, and small documents
        records = [key for key in held if key.startswith(keys.VERSIONS)]
        age_s = random.choice((60.0, 600.0))
        for key in held:
            is_old = disk.objects[key].stored_s < world.scheduler.now_s - age_s
            if is_old and key not in records[-3:] and key != keys.HEAD and not key.startswith(keys.EPOCHS):
                disk.harm(key, None)
    elif world.harm == "restore":
        if saved is None or random.random() < 0.5:
            return dict(disk.objects)
        disk.restore(saved)
        return None
    return saved


def weather(world: World) -> None:
    """Choose what requests meet."""

    def chance(most: float) -> float:
        return world.random.choice((0.0, 0.0, world.random.uniform(0.0, most)))

    likely = {name: chance(0.2) for name in ("before", "after", "late", "doubled", "stale", "forgotten")}
    rare = {"hung": chance(0.02), "damaged": chance(0.05), "refused": chance(0.02), "stalled": chance(0.01)}
    if world.harm == "swallow":
        rare["swallowed"] = chance(0.1)
    if world.is_slow:
        world.disk.faults = world.copy.faults = Faults(slow=0.5)
        return
    wanted = {name: 0.02 if name == "stalled" else 0.1 for name in (*likely, *rare) if name in world.wanted}
    if world.is_mild:
        world.disk.faults = world.copy.faults = Faults(**wanted)
        return
    kind = 1.0 if wanted else world.random.random()
    found = NO_FAULTS if kind < 0.3 else FULL if kind < 0.35 else Faults(**(likely | rare | wanted))
    world.disk.faults = world.copy.faults = found


def kill(world: World, victim: Process) -> None:
    """End a process at once; another one goes on under its name. The ranks of a job are started again by
    it.
    """
    world.counts["kills"] += 1
    world.scheduler.say(f"{victim.name} is killed")
    victim.killed = True
    world.live.remove(victim)
    if victim.name in world.actions:
        world.actor(victim.name, world.actions[victim.name])


def copy(world: World, original: Process) -> None:
    """Run another process that was restored from a snapshot of this one, with its name and what it drew by
    chance.
    """
    thread = world.actor(original.name, world.actions[original.name])
    thread.process.copied.append(original.drawn[-1])
    world.scheduler.say(f"{original.name} is copied")


def interrupt(world: World, victim: Process) -> None:
    """Ctrl-C."""
    for thread in world.scheduler.threads:
        if thread.process is victim and thread.name == "main":
            thread.interrupted = True
