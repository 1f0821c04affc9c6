"""Planted faults of the product that the simulator must find: python -m tests.simulator.mutants [--night]
[NAME ...].

Each replaces a text of a function. It is killed if one of its world's seeds fails, and survives if none of
the first `SEEDS` does: then an invariant is missing, or a second check stands behind the first. The seed that
found it lately is only where the search begins, so that a row holds however the product's schedule changes; a
row whose text is gone fails with a sentence.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

from tests.simulator.__main__ import prepare, run_apart, with_fixed_hashes

SEEDS, STEPS = 80, 120
"""The most seeds of a row, unless more are asked for, and the steps of each."""


class Mutant(NamedTuple):
    """A planted fault: `old` occurs once in the module, inside a function, and becomes `new`.

    `world` says what its worlds have, and that only (`World`). `at_night`: `make test` has no time for it.
    `lately` is a seed that found it, which is tried first.
    """

    module: str
    old: str
    new: str
    world: str
    at_night: bool = False
    lately: int = 0


MUTANTS = {
    # what is read
    "a record's body is not hashed": Mutant(
        "deltasync.channel.record",
        "if found.body_sha256 != digest.hexdigest():",
        "if False:",
        "signed damaged",
        at_night=True,
    ),
    "a file's digest is not checked": Mutant(
        "deltasync.channel.reading", "        _check_digest(data, key, sha256)\n", "", "signed damaged parts"
    ),
    "a document needs no signature": Mutant(
        "deltasync.channel.record", "        trusted.check(key, document)\n", "        pass\n", "forged"
    ),
    "any key is trusted": Mutant(
        "deltasync.channel.signing",
        "trusted = self._keys.get(name)",
        "trusted = _public_keys([name])[name]",
        "forged",
    ),
    "a damaged object ends the search": Mutant(
        "deltasync.channel.plan",
        "edges.remove(error.edge)",
        "raise MissingVersionError(str(error)) from None",
        "rot compacts",
        at_night=True,
    ),
    "shortcuts are not planned": Mutant(
        "deltasync.channel.plan", "if info.key not in self._avoid:", "if False:", "forgets keeper compacts"
    ),
    "channel.json is read once": Mutant(
        "deltasync.channel.reading",
        "if self.trusted is None and self._read_channel()[1]",
        "if False and self._read_channel()[1]",
        "rival damaged",
        lately=10,
    ),
    "a cached object is not checked": Mutant(
        "deltasync.stores.cache",
        "            check(data)\n            with contextlib",
        "            with contextlib",
        "rot signed parts cache",
    ),
    # replicas
    "head is believed": Mutant(
        "deltasync.following.search",
        "self._tip.note(named, self._reader.record(named))",
        "self._tip.note(named)",
        "signed outsider",
        lately=4,
    ),
    "a skip never ends": Mutant(
        "deltasync.following.search",
        "Skip(time.monotonic() + SKIP_S, str(why))",
        "Skip(math.inf, str(why))",
        "damaged parts",
        lately=11,
    ),
    "an error is remembered for ever": Mutant(
        "deltasync.following.cursor",
        "        self.failure, self._failures = None, 0\n",
        "",
        "damaged",
        lately=9,
    ),
    "a pin is not kept": Mutant(
        "deltasync.following.cursor", "number = self._pin or newest.version", "number = newest.version", ""
    ),
    "a version that the store lost is waited for": Mutant(
        "deltasync.following.search",
        "elif self._is_lost(newest, found):",
        "elif False:",
        "restore",
        at_night=True,
    ),
    "a signed channel may go back": Mutant(
        "deltasync.following.search",
        "if self._reader.trusted is not None:",
        "if False:",
        "restore signed",
        at_night=True,
    ),
    "a commit is labelled with the version before": Mutant(
        "deltasync.following.weights",
        "self.version, self._fingerprint = stored.version, stored.record.fingerprint",
        "self.version, self._fingerprint = stored.record.base, stored.record.fingerprint",
        "",
    ),
    "an audit passes": Mutant("deltasync.following.replica", "return is_right", "return True", ""),
    # publishers
    "a create that finds other bytes is taken for ours": Mutant(
        "deltasync.publish.log",
        'raise self.fence(f"Another publisher opened the channel in the place of {what}") from None',
        "pass",
        "s3 rival",
    ),
    "a create that finds our bytes is taken for another's": Mutant(
        "deltasync.stores.retries",
        "if not is_ours:",
        "if True:",
        "s3 after",
        lately=2,
    ),
    "records are put, not created": Mutant(
        "deltasync.publish.log",
        "self.store.create(key, data)",
        "self.store.put(key, data)",
        "s3 rival",
    ),
    "whether a store decides is not tried": Mutant(
        "deltasync.opening.acquire",
        "if decides(self._store, keys.probe(keys.new_author())):",
        "if self._store.can_create:",
        "ignores rival",
    ),
    "a lease does not settle": Mutant(
        "deltasync.stores.leased", "            time.sleep(left_s)", "            pass", "hub rival late"
    ),
    "a greater claim fences nobody": Mutant(
        "deltasync.stores.leased",
        "if newest > (number if is_gone else self._claim):",
        "if False:",
        "hub rival",
        lately=47,
    ),
    "a claim is believed before it is read back": Mutant(
        "deltasync.stores.leased",
        "looked_s = self._look()\n        if not is_free:",
        "looked_s = boot_s()\n        if not is_free:",
        "hub rival",
        lately=63,
    ),
    "an opening continues a log that it cannot read": Mutant(
        "deltasync.opening.acquire",
        "        if found is None:\n            return None\n        if (following",
        "        if not isinstance(found, StoredRecord):\n            return None\n        if (following",
        "s3 rival rot",
        lately=4,
    ),
    "a log is not sealed": Mutant(
        "deltasync.opening.acquire",
        "self._store.create(slot.key, data)",
        "pass",
        "s3 rival",
    ),
    "the digest of one read is believed": Mutant(
        "deltasync.opening.acquire",
        "or found.sha256 in seen:",
        "or found.sha256:",
        "s3 rival damaged",
        lately=11,
    ),
    "two epochs have one number": Mutant(
        "deltasync.opening.acquire", "keys.new_epoch(1 + max(", "keys.new_epoch(1 + 0 * max(", "s3 rival"
    ),
    "a pending version is forgotten": Mutant(
        "deltasync.publish.log",
        "        assert stored.data is not None\n        self._create(stored.key",
        "        self.pending = None\n        self._create(stored.key",
        "after",
        lately=26,
    ),
    "a part is not waited for": Mutant(
        "deltasync.publish.append", "[future.result() for future in stored] + others", "others", "parts"
    ),
    "a lost version is built on": Mutant(
        "deltasync.publish.append",
        "queue.full, queue.running = True, None",
        "queue.full, queue.running = False, None",
        "refused parts",
    ),
    "folders of a lost version are used again": Mutant(
        "deltasync.publish.log",
        "self._attempts[version] = self.attempt(version) + 1",
        "pass",
        "after parts once",
    ),
    "a compaction names a base that its steps do not start from": Mutant(
        "deltasync.ops.compactor",
        "or point.base.record.version != frozen.base:",
        ":",
        "s3 compacts anchors stale",
        at_night=True,
    ),
    "steps since an anchor are left out of compactions": Mutant(
        "deltasync.ops.steps",
        "                self._marked[1].append(delta)\n",
        "                pass\n",
        "compacts anchors",
        at_night=True,
    ),
    "the shadow does not move": Mutant(
        "deltasync.publish.shadow", "            self._memory.apply(difference)\n", "", ""
    ),
    "fingerprints do not move": Mutant(
        "deltasync.publish.shadow", "before.with_gains(difference.gains)", "before", ""
    ),
    "what waits is merged with nothing": Mutant(
        "deltasync.publish.pending",
        "merge([self.delta, joined(found.pieces, self.shadow.layout)])",
        "joined(found.pieces, self.shadow.layout)",
        "hung",
    ),
    "the shadow moves before the ranks agree": Mutant(
        "deltasync.publish.publisher",
        "        decision = uploader.finisher.decide(",
        "        if shadow is not None and found is not None and found.pieces:\n"
        "            before = shadow.fingerprints\n"
        "            shadow.apply(found)\n"
        "            shadow.fingerprints = before\n"
        "            found = type(found)(found.pieces, found.gains, found.new_nan_counts)\n"
        "        decision = uploader.finisher.decide(",
        "job parts",
    ),
    "a version is submitted before the shadow moves": Mutant(
        "deltasync.publish.publisher",
        "            shadow.apply(found)  # before weights are collected, which are the new ones\n",
        "            held = vars(self._uploader)\n"
        "            held['submit'] = lambda *jobs: (held.pop('submit'), "
        "self._uploader.submit(*jobs), shadow.apply(found))\n",
        "",
        lately=3,
    ),
    # ranks
    "a rank that is lost is waited for": Mutant(
        "deltasync.trainer.ranks",
        "(silent_s := time.monotonic() - seen[rank][1]) > min(",
        "(silent_s := 0.0) > min(",
        "job kill",
        at_night=True,
    ),
    "other ranks' parts are left out": Mutant(
        "deltasync.publish.append",
        "others = [file for files in answers for file in files]",
        "others = list[File]()",
        "job parts",
    ),
    "fingerprints of one rank count": Mutant(
        "deltasync.trainer.ranks",
        "for each in said:\n                total +=",
        "for each in [*said][:1]:\n                total +=",
        "job",
    ),
    # maintenance
    "bases are forgotten": Mutant(
        "deltasync.ops.retention",
        "            if self.has_anchor(at):\n                return",
        "            return",
        "forgets keeper",
    ),
    "files that records name are deleted": Mutant(
        "deltasync.ops.retention", "if info.key not in references]", "]", "forgets keeper parts"
    ),
    "a relay copies records without files": Mutant(
        "deltasync.ops.relay",
        "return None if any([self._copier.copy(stored.record.files) for stored in chain]) else chain",
        "return chain",
        "relay damaged parts",
    ),
    "a relay stores channel.json as it arrived": Mutant(
        "deltasync.ops.copies",
        "        source.read_channel_again()\n        return source.channel_data\n",
        "        return source.store.read(item.key, limits.CHANNEL_BYTES)\n",
        "relay signed damaged",
        at_night=True,
    ),
    "gc ignores heartbeats": Mutant(
        "deltasync.ops.retention",
        "served = _served(reader, held, clock, max(grace_s, heartbeat.LIVE_S))",
        "served = set[Slot]()",
        "mild long brief forgets keeper follower0 pinned",
        at_night=True,
    ),
    "a pin that a heartbeat names is not kept": Mutant(
        "deltasync.ops.retention",
        "for number in (pinned, beat.version) if number in numbered)\n"
        "            found.update(() if beat.serving is None else {beat.serving.slot})",
        "for number in ())",
        "mild long brief forgets keeper follower0 pinned",
        at_night=True,
    ),
    "gc measures ages with its machine's clock": Mutant(
        "deltasync.ops.retention",
        "since_s = math.inf if grace_s <= 0 else clock.now_s - grace_s",
        "since_s = math.inf if grace_s <= 0 else heartbeat.time.time() - grace_s",
        "mild long brief forgets keeper follower0 clocks",
        at_night=True,
    ),
    "gc writes before it frees": Mutant(
        "deltasync.ops.retention",
        "        clock.measure()\n",
        "        clock.measure()\n    store.put(keys.probe(keys.new_author()), b'a plan')\n",
        "full forgets keeper",
    ),
    "seals are forgotten": Mutant(
        "deltasync.ops.retention",
        "(record.is_version if record is not None else last[slot.epoch] != slot)",
        "True",
        "long brief forgets keeper rival s3",
        at_night=True,
    ),
    "a second caller is let in": Mutant(
        "deltasync.threads",
        "running = next(call for call in [*self._calls] if call is mine or call.runs)",
        "running = mine",
        "callers",
    ),
    "a nested call is let in": Mutant(
        "deltasync.threads",
        "if running is mine:\n            self._remove",
        "if running is mine or running.thread is mine.thread:\n            self._remove",
        "callers",
    ),
    "gains are those of a second read": Mutant(
        "deltasync.publish.detect",
        "        if steps.at_K.size:\n            self._pieces.append(Delta(",
        "        _, gain_T, above_T = native.compare(row_RF, self._layout.vectors[width], "
        "self._bound_T2[width], expected)\n"
        "        if steps.at_K.size:\n            self._pieces.append(Delta(",
        "writer receipts",
    ),
    "a replica that does not move is not waited for": Mutant(
        "deltasync.serve.heartbeat",
        "if live and not lagging:",
        "if live and len(lagging) < len(live):",
        "mild acks follower0 follower1",
        at_night=True,
    ),
    "one replica is heard": Mutant(
        "deltasync.serve.heartbeat",
        "recent = {key: known for key, known in sorted(self._known.items()) if self._age_s(known) <= "
        "within_s}",
        "recent = {key: known for key, known in sorted(self._known.items())[:1] if self._age_s(known) <= "
        "within_s}",
        "mild acks follower0 follower1",
        at_night=True,
    ),
    "heartbeats are aged by the trainer's clock": Mutant(
        "deltasync.serve.heartbeat",
        "return max(now_s - known.since_s, min(age_s, now_s - known.until_s))",
        "return time.time() - modified_s",
        "mild long acks follower0 clocks forgets",
        at_night=True,
    ),
    "a replica that a listing leaves out is forgotten": Mutant(
        "deltasync.serve.heartbeat",
        "if self._age_s(self._known[key]) > LIVE_S:",
        "if True:",
        "mild acks follower0 follower1 stale",
        at_night=True,
    ),
    "a copy writes over its original's heartbeat": Mutant(
        "deltasync.serve.heartbeats",
        "if there in self._own:",
        "if True:",
        "mild acks follower0 copies copy",
        at_night=True,
    ),
    "a copied boot is not renewed": Mutant(
        "deltasync.serve.life",
        "self.boot = secrets.token_hex(4)\n        while self.boot in self.past:",
        "while False:",
        "slow follower0 copies copy",
        at_night=True,
    ),
    "a replica goes with a restored channel if its epoch's digits are greater": Mutant(
        "deltasync.following.search",
        "is_proven = found.epoch != newest.epoch and",
        "is_proven = False and",
        "restore",
    ),
    "a publisher stops after a restore if the epoch's digits are greater": Mutant(
        "deltasync.publish.log",
        "return opening not in [",
        "return epoch > log.epoch or log.epoch in [",
        "restore",
    ),
    "heartbeats stop while a version is staged": Mutant(
        "deltasync.serve.heartbeats",
        "while not ended.wait(_TICK_S):",
        "while False:",
        "slow follower0",
        at_night=True,
    ),
    "records are forgotten oldest first": Mutant(
        "deltasync.ops.retention",
        "keys=[key for *_, key in sorted(order, reverse=True)],",
        "keys=[key for *_, key in sorted(order)],",
        "long brief forgets keeper kill",
        at_night=True,
    ),
    "there is no grace": Mutant(
        "deltasync.ops.retention",
        "since_s = math.inf if grace_s <= 0 else clock.now_s - grace_s",
        "since_s = math.inf",
        "mild long brief forgets keeper",
        at_night=True,
    ),
    "versions are acknowledged by number": Mutant(
        "deltasync.serve.heartbeat",
        "published.get(serving.version) == serving.sha256",
        "True",
        "outsider acks",
    ),
}
"""Planted faults by name."""

QUICK = [name for name, mutant in MUTANTS.items() if not mutant.at_night]
"""Those that `make test` looks for."""


def planted(name: str) -> tuple[Path, str]:
    """Return the file of a row's module, and its source with the fault."""
    mutant = MUTANTS[name]
    path = Path(__file__).parents[2] / f"{mutant.module.replace('.', '/')}.py"
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    if (count := source.count(mutant.old)) != 1:
        raise AssertionError(
            f"The planted fault {name!r} needs one {mutant.old.strip()!r} in {mutant.module}, which has "
            f"{count}: "
            "plant it in the code as it is now, or drop the row with what it was about."
        )
    return path, source.replace(mutant.old, mutant.new)


def plant(name: str) -> None:
    """Give this process's functions of the module the code with the fault."""
    path, source = planted(name)
    found: dict[str, CodeType] = {}

    def collect(code: CodeType) -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                found[inner.co_qualname] = inner
                collect(inner)

    collect(compile(source, str(path), "exec", dont_inherit=True))
    changed = 0
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename == str(path):
            new, old = found.get(each.__code__.co_qualname), each.__code__
            if new is not None and new.co_freevars == old.co_freevars and new != old:
                each.__code__, changed = new, changed + 1
    assert changed, f"the planted fault {name!r} is in no function"


class Found(NamedTuple):
    """What became of a mutant: the seed that fails and how, or None; after how many seconds, and of how much
    CPU.
    """

    seed: int | None
    problem: str
    seconds: float
    cpu_s: float


def world_of(name: str) -> list[str]:
    """Return what the worlds of a row have."""
    return ["only", *MUTANTS[name].world.split()]


def hunt(name: str, seeds: int) -> Found:
    """Run seeds with a mutant, each in a process of its own, until one fails."""
    began_s, before = time.monotonic(), os.times()
    receiver, sender = os.pipe()
    child = os.fork()
    if child:
        os.close(sender)
        with os.fdopen(receiver) as file:
            said = file.read()
        os.waitpid(child, 0)
        after, (seed, _, problem) = os.times(), said.partition(" ")
        cpu_s = sum(after[2:4]) - sum(before[2:4])
        return Found(int(seed) if seed else None, problem, time.monotonic() - began_s, cpu_s)
    try:
        os.close(receiver)
        plant(name)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # tracebacks of threads
        for seed in (MUTANTS[name].lately, *range(seeds)):
            problem = run_apart(seed, STEPS, world_of(name))
            if problem is not None:
                os.write(sender, f"{seed} {problem}".encode())
                break
    finally:
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="mutants to plant; by default those of make test"
    )
    parser.add_argument(
        "--night", action="store_true", help="plant all, and run the seeds that fail without the fault, too"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="the most of a mutant")
    given = parser.parse_args()
    with_fixed_hashes("tests.simulator.mutants")
    prepare()
    survived, cpu_s = [], 0.0
    for name in given.names or (MUTANTS if given.night else QUICK):
        found = hunt(name, given.seeds)
        outcome, cpu_s = "SURVIVED" if found.seed is None else f"killed by {found.seed}", cpu_s + found.cpu_s
        if (
            given.night
            and found.seed is not None
            and run_apart(found.seed, STEPS, world_of(name)) is not None
        ):
            outcome = "FAILS ANYWAY"
        survived += [] if outcome.startswith("killed") else [name]
        print(f"{outcome:16} {found.cpu_s:5.1f} s  {name}: {found.problem[:100]}", flush=True)
    print(f"{len(survived)} survived, {cpu_s:.0f} s of CPU: {survived}")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
