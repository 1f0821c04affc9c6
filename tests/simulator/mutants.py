# ruff: noqa: E501 (texts of the product)
"""Planted faults of the product that the simulator must find: python -m tests.simulator.mutants [NAME ...] [--seconds S].

Each is a text of a module and another one in its place, planted as the module is imported. A mutant is killed if a seed
fails. One that survives shows an invariant that is missing.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tests.simulator.__main__ import prepare, run_apart, with_fixed_hashes

SECONDS = 120.0  # of one mutant
STEPS = 60


class Mutant(NamedTuple):
    """A planted fault: `old` occurs once in the module, and becomes `new`. `world` says in what worlds
    (`simulate`) it is looked for, `seed` a seed that finds it; None
    if that takes longer than `make test` has."""

    module: str
    old: str
    new: str
    world: str = ""
    seed: int | None = None


MUTANTS = {
    # what is read
    "a record's body is not hashed": Mutant(
        "deltasync.channel.record",
        "    if found.body_sha256 != digest.hexdigest():",
        "    if False:",
        world="signed damaged",
    ),
    "a file's digest is not checked": Mutant(
        "deltasync.channel.reading",
        "        _check_digest(data, key, sha256)\n        return data",
        "        return data",
        world="signed damaged",
    ),
    "a document needs no signature": Mutant(
        "deltasync.channel.record", "        trusted.check(key, document)\n", "        pass\n", world="forged", seed=1
    ),
    "a damaged object ends the search": Mutant(
        "deltasync.channel.plan",
        "                edges.remove(error.edge)",
        "                raise MissingVersionError(str(error)) from None",
        world="rot",
    ),
    "only deltas are planned": Mutant(
        "deltasync.channel.plan",
        "                edges.append(Edge(span.base or 0, span.version, info.bytes + (0 if span.base else full_bytes), info.key))",
        "                pass",
        world="forgets keeper",
        seed=1,
    ),
    # replicas
    "a skip never ends": Mutant(
        "deltasync.following.cursor",
        "            self.skips[self._blamed] = Skip(time.monotonic() + SKIP_S, str(why))",
        "            self.skips[self._blamed] = Skip(math.inf, str(why))",
        world="damaged",
    ),
    "the rest of a chain is taken for another version": Mutant(
        "deltasync.following.cursor",
        "        elif self._rest and self._rest[0].base == have:",
        "        elif self._rest:",
        world="damaged",
    ),
    "an error is remembered for ever": Mutant(
        "deltasync.following.cursor", "        self.failure, self._failures = None, 0\n", "", world="damaged", seed=32
    ),
    "a pin is not kept": Mutant(
        "deltasync.following.cursor",
        "        number = self._pin or newest.version\n",
        "        number = newest.version\n",
        seed=0,
    ),
    "a commit is labelled with the version before": Mutant(
        "deltasync.following.weights",
        "        self.version, self._fingerprint = stored.version, stored.record.fingerprint\n        return self.version",
        "        self.version, self._fingerprint = stored.record.base, stored.record.fingerprint\n        return stored.version",
        seed=0,
    ),
    "old bits are those before the chain": Mutant(
        "deltasync.following.weights",
        "                for delta in done:\n                    delta.apply(name, bits_N)",
        "                pass",
        world="signed",
    ),
    "a load that failed keeps its label": Mutant(
        "deltasync.following.weights",
        "                        self.version, self.settled = None, False\n",
        "",
        world="damaged",
    ),
    "a loaded chain is not compared": Mutant(
        "deltasync.following.weights",
        '            if done and right and f"{model_fingerprint(found):016x}" == done[-1].record.fingerprint:',
        "            if done:",
        world="damaged",
    ),
    # publishers
    "a create that finds other bytes is taken for ours": Mutant(
        "deltasync.publish.writes", "        return is_ours\n    return True", "        return True\n    return True", seed=1
    ),
    "a create that finds our bytes is taken for another's": Mutant(
        "deltasync.publish.writes",
        "        return is_ours\n    return True",
        "        return False\n    return True",
        world="s3",
        seed=2,
    ),
    "records are put, not created": Mutant(
        "deltasync.publish.log",
        "                is_ours = self._retried(lambda: writes.create(self.store, key, data))",
        "                self._retried(lambda: self.store.put(key, data))",
        world="s3 rival",
        seed=0,
    ),
    "a lease is not looked at": Mutant(
        "deltasync.publish.log",
        "            looked_s = self._check_lease(look.result())",
        "            looked_s = boot_s()",
        world="hub rival",
    ),
    "a lease is believed for ever": Mutant(
        "deltasync.publish.log",
        "        if not 0 <= boot_s() - began_s <= self._lease.recheck_s:\n            began_s = self._read_epochs()\n        age_s",
        "        return began_s\n        age_s",
        world="hub rival",
    ),
    "a lease does not settle": Mutant(
        "deltasync.publish.acquire", "                self._lease.wait(claimed_s)\n", "", world="hub rival"
    ),
    "no epoch counts as newer": Mutant(
        "deltasync.publish.log",
        "            if newest > self.epoch and self._is_opening(newest):",
        "            if False:",
        world="hub rival",
    ),
    "a log is not sealed": Mutant(
        "deltasync.publish.acquire",
        "        if self._retried(lambda: writes.create(self._store, slot.key, data)):\n            return None",
        "        return None",
        world="s3 rival",
        seed=15,
    ),
    "a log ends where a listing does": Mutant(
        "deltasync.publish.acquire",
        "            if following is None:\n                return self._as_stored(end)\n            end = following",
        "            return self._as_stored(end)",
        world="s3 rival",
    ),
    "two epochs have one number": Mutant(
        "deltasync.publish.acquire",
        "    return keys.new_epoch(1 + max(map(keys.epoch_number, epochs), default=0))",
        "    return keys.new_epoch(1)",
        world="s3 rival",
        seed=0,
    ),
    "a pending version is forgotten": Mutant(
        "deltasync.publish.log",
        '        self._put(stored.key, stored.data, f"version {stored.record.version}")\n',
        '        self.pending = None\n        self._put(stored.key, stored.data, f"version {stored.record.version}")\n        self.pending = stored\n',
        seed=2,
    ),
    "a version counts before it is stored": Mutant(
        "deltasync.publish.log",
        '        self._put(stored.key, stored.data, f"version {stored.record.version}")\n',
        "        self.tip, self.pending = stored.version, None\n"
        '        self._put(stored.key, stored.data, f"version {stored.record.version}")\n',
    ),
    "a lost version is built on": Mutant(
        "deltasync.publish.upload",
        "                self.full, self._running = True, None",
        "                self.full, self._running = False, None",
    ),
    "what builds on a lost version is stored": Mutant(
        "deltasync.publish.upload",
        "            if job.version != self._log.next_version or (self.full and not job.full):",
        "            if False:",
    ),
    "the shadow does not move": Mutant("deltasync.publish.shadow", "            difference.apply()\n", "", seed=0),
    "fingerprints do not move": Mutant(
        "deltasync.publish.shadow",
        "            self.fingerprints = before.with_gains(difference.gains)\n",
        "            self.fingerprints = before\n",
        seed=0,
    ),
    "an interrupt in apply is forgotten": Mutant(
        "deltasync.publish.publisher",
        "            self._is_torn = True\n            shadow.apply(found)",
        "            shadow.apply(found)",
    ),
    "folders of a lost version are used again": Mutant(
        "deltasync.publish.log", "        self._attempts[version] = self.attempt(version) + 1", "        pass"
    ),
    # maintenance
    "bases are forgotten": Mutant(
        "deltasync.maintenance.retention",
        "        needed.update(contents.chain_to(slot, needed))",
        "        needed.add(slot)",
        world="forgets keeper",
    ),
    "files that records name are deleted": Mutant(
        "deltasync.maintenance.garbage",
        "    unnamed = [info for info in old if info.key not in references]",
        "    unnamed = list(old)",
        world="forgets keeper",
        seed=1,
    ),
    "young files are deleted": Mutant(
        "deltasync.maintenance.garbage",
        "if retention.was_stored(info.modified_s, since_s)]",
        "]",
        world="forgets keeper",
    ),
    "a relay copies records without files": Mutant(
        "deltasync.maintenance.relay",
        "        return chain if all([self._copy_files(stored) for stored in chain]) else None",
        "        return chain",
        world="relay",
        seed=5,
    ),
    # faults of the product that seeds have found
    "channel.json is read once": Mutant(
        "deltasync.channel.reading",
        "        if self.trusted is None and self._read_channel().data",
        "        if False and self._read_channel().data",
        world="rival damaged",
    ),
    "the digest that a seal names is believed": Mutant(
        "deltasync.publish.acquire",
        "        if end.version is None or end.version.epoch == end.epoch:",
        "        if True:",
        world="s3 rival damaged",
    ),
    "a relay stores channel.json as it arrived": Mutant(
        "deltasync.maintenance.copies",
        "        source.read_channel_again()\n        return source.channel_data\n",
        "        return source.store.read(item.key, limits.CHANNEL_BYTES)\n",
        world="relay signed damaged",
    ),
    # what else the protocol rests on
    "a log that is sealed is not listed again": Mutant(
        "deltasync.publish.acquire",
        "            if not any(isinstance(self._found(slot, info), _End) for slot, info in later):",
        "            if True:",
        world="s3 rival forgets",
    ),
    "whether a store decides is not tried": Mutant(
        "deltasync.publish.acquire",
        "        if self._retried(lambda: decides(self._store, key)):",
        "        if self._store.can_create:",
        world="ignores rival",
        seed=0,
    ),
    "a suspended machine's lease does not age": Mutant(
        "deltasync.publish.log",
        "    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr",
        "    return time.monotonic() if hasattr",
        world="hub rival",
    ),
    "a record that came too late counts": Mutant(
        "deltasync.publish.log", "        self._check_in_time(key, looked_s)\n", "        pass\n", world="hub rival"
    ),
    "channel.json is not put back": Mutant(
        "deltasync.publish.log",
        "        if data is None or self._begins_with(data[: limits.SMALL_BYTES]):",
        "        if True:",
    ),
    "a part is not waited for": Mutant(
        "deltasync.publish.upload",
        "        parts = [future.result() for future in stored] + others",
        "        parts = [future.result() for future in stored[:0]] + others",
        seed=0,
    ),
    "head is believed": Mutant(
        "deltasync.following.cursor",
        "            self._note(named, self.reader.record(named))",
        "            self._note(named)",
        world="outsider",
    ),
    "a version that the store lost is waited for": Mutant(
        "deltasync.following.cursor", "        elif self._is_lost(newest, found):", "        elif False:", world="restore"
    ),
    "a signed channel may go back": Mutant(
        "deltasync.following.cursor",
        "        if self.reader.trusted is not None:  # otherwise",
        "        if False:  # otherwise",
        world="restore signed",
    ),
    "versions are acknowledged by number": Mutant(
        "deltasync.channel.heartbeat",
        "    return published.get(serving.version) == serving.sha256",
        "    return True",
        world="follower0 rival restore",
    ),
    "any key is trusted": Mutant(
        "deltasync.channel.signing",
        "        trusted = self._keys.get(name)\n",
        "        trusted = self._keys.get(name) or [*_public_keys([name]).values()][0]\n",
        world="forged",
    ),
    "an audit passes": Mutant("deltasync.following.replica", "        return is_right\n", "        return True\n", seed=1),
    "versions are forgotten oldest first": Mutant(
        "deltasync.maintenance.retention",
        "        keys=[key for *_, key in sorted(order, reverse=True)],",
        "        keys=[key for *_, key in sorted(order)],",
        world="forgets keeper",
    ),
    "seals are forgotten": Mutant(
        "deltasync.maintenance.retention",
        "(record.is_version if record is not None else last[slot.epoch] != slot)",
        "True",
        world="forgets keeper s3 rival",
    ),
    "what is not listed is not asked for": Mutant(
        "deltasync.maintenance.garbage",
        "    unlisted = sorted(places.difference((slot.key for slot in held.records), held.shortcuts))",
        "    unlisted = list[str]()",
        world="forgets keeper hub",
    ),
    "unfinished uploads are deleted": Mutant(
        "deltasync.maintenance.garbage",
        "    waiting = [info for info in unnamed if references.in_progress(info.key)]",
        "    waiting = unnamed[:0]",
        world="forgets keeper",
    ),
    "a cached object is not checked": Mutant(
        "deltasync.stores.cache",
        "            check(data)\n            with contextlib",
        "            with contextlib",
        world="rot",
    ),
    # ranks
    "a rank that is lost is waited for": Mutant(
        "deltasync.ranks.ranks",
        "(silent_s := time.monotonic() - seen[rank][1]) > min(",
        "(silent_s := 0.0) > min(",
        world="job",
        seed=0,
    ),
    "a rank's error stays with it": Mutant(
        "deltasync.ranks.ranks",
        "        self.agree(problem)\n        return value",
        "        return value",
        world="job",
    ),
    "other ranks' parts are left out": Mutant(
        "deltasync.publish.upload",
        "        others = [file for files in answers for file in files]",
        "        others = list[File]()",
        world="job",
        seed=0,
    ),
    "fingerprints of one rank count": Mutant(
        "deltasync.ranks.ranks",
        "for each in said)\n            return _encoded(sum(found",
        "for each in said[:1])\n            return _encoded(sum(found",
        world="job",
        seed=1,
    ),
    "what waits is merged with nothing": Mutant(
        "deltasync.publish.publisher",
        "            pieces = [merge([waiting.delta, host_delta(shadow.layout, pieces)])]",
        "            pieces = [host_delta(shadow.layout, pieces)]",
    ),
}
"""Planted faults by name."""

QUICK = [name for name, mutant in MUTANTS.items() if mutant.seed is not None]
"""Those that `make test` looks for."""


class Planter(importlib.abc.MetaPathFinder):
    """Plants a mutant as its module is imported."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None and spec.origin is not None
        mutant = self._mutant

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> object:
                return compile(planted(mutant), self.path, "exec", dont_inherit=True)

        return importlib.util.spec_from_file_location(name, spec.origin, loader=Loader(name, spec.origin))


def planted(mutant: Mutant) -> str:
    """Return the source of a module with the fault."""
    path = Path(__file__).parents[2] / f"{mutant.module.replace('.', '/')}.py"
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise AssertionError(f"{mutant.module} has {mutant.old!r} {source.count(mutant.old)} times")
    return source.replace(mutant.old, mutant.new)


def plant(name: str) -> None:
    """Plant a mutant in this process, which has not imported the product yet."""
    sys.meta_path.insert(0, Planter(MUTANTS[name]))


class Found(NamedTuple):
    """What became of a mutant: the seed that fails and how, or None; and after how many seconds."""

    seed: int | None
    problem: str
    seconds: float


def hunt(name: str, seeds: int, seconds: float) -> Found:
    """Run seeds with a mutant, from the one that its row names, each in a process of its own, until one fails."""
    began_s = time.monotonic()
    receiver, sender = os.pipe()
    child = os.fork()
    if child:
        os.close(sender)
        with os.fdopen(receiver) as file:
            said = file.read()
        os.waitpid(child, 0)
        seed, _, problem = said.partition(" ")
        return Found(int(seed) if seed else None, problem, time.monotonic() - began_s)
    try:
        os.close(receiver)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # tracebacks of threads
        plant(name)
        prepare()
        first = MUTANTS[name].seed or 0
        for seed in range(first, first + seeds):
            problem = run_apart(seed, STEPS, MUTANTS[name].world.split())
            if problem is not None:
                os.write(sender, f"{seed} {problem}".encode())
                break
            if time.monotonic() - began_s > seconds:
                break
    finally:
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to plant; all by default")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each mutant")
    parser.add_argument("--seeds", type=int, default=1000, help="of each mutant, from the one of its row on")
    given = parser.parse_args()
    with_fixed_hashes("tests.simulator.mutants")
    import numpy  # noqa: F401 - once for all; the product is imported with each mutant
    import torch  # noqa: F401

    survived = []
    for name in given.names or MUTANTS:
        found = hunt(name, given.seeds, given.seconds)
        survived += [name] if found.seed is None else []
        outcome = "SURVIVED" if found.seed is None else f"killed by {found.seed}"
        print(f"{outcome:16} {found.seconds:5.1f} s  {name}: {found.problem[:100]}", flush=True)
    print(f"{len(survived)} survived: {survived}")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
