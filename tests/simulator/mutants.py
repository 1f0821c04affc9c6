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
import subprocess
import sys
import time
from types import ModuleType
from typing import NamedTuple

SECONDS = 60.0  # of one mutant


class Mutant(NamedTuple):
    """A planted fault: `old` occurs once in the module, and becomes `new`."""

    module: str
    old: str
    new: str


MUTANTS = {
    # what is read
    "a record's body is not hashed": Mutant(
        "deltasync.channel.record", "    if found.body_sha256 != digest.hexdigest():", "    if False:"
    ),
    "a record may have another size": Mutant(
        "deltasync.channel.record", "    if found.body_bytes + len(document) + _LENGTH.size != size:", "    if False:"
    ),
    "a file's digest is not checked": Mutant(
        "deltasync.channel.reading", "        _check_digest(data, key, sha256)\n        return data", "        return data"
    ),
    "a document needs no signature": Mutant(
        "deltasync.channel.record", "        trusted.check(key, document)\n", "        pass\n"
    ),
    "what a chain leads to is not compared": Mutant(
        "deltasync.channel.plan", '        if found.version != at or found.record.kind == "seal":', "        if False:"
    ),
    "a damaged object ends the search": Mutant(
        "deltasync.channel.plan",
        "                edges.remove(error.edge)",
        "                raise MissingVersionError(str(error)) from None",
    ),
    "only deltas are planned": Mutant(
        "deltasync.channel.plan",
        "                edges.append(Edge(span.base, span.version, info.bytes + (0 if span.base else full_bytes), info.key))",
        "                pass",
    ),
    # replicas
    "the version of another lineage is taken": Mutant(
        "deltasync.following.tip",
        "            if stored is not None and slot.version != wanted and stored.record.base != self.newest:",
        "            if False:",
    ),
    "seals are passed over": Mutant(
        "deltasync.following.tip",
        "                self.next_epoch = stored.record.next_epoch\n                continue",
        "                break",
    ),
    "head is never read": Mutant(
        "deltasync.following.tip", "        named = None if head is None else head.newest\n", "        named = None\n"
    ),
    "a skip never ends": Mutant(
        "deltasync.following.cursor",
        "            self.skips[key] = Skip(time.monotonic() + SKIP_S, str(why))",
        "            self.skips[key] = Skip(math.inf, str(why))",
    ),
    "the rest of a chain is taken for another version": Mutant(
        "deltasync.following.cursor", "        elif self._rest and self._rest[0].base == have:", "        elif self._rest:"
    ),
    "an error is remembered for ever": Mutant(
        "deltasync.following.cursor", "        self.failure, self._failures = None, 0\n", ""
    ),
    "a pin is not kept": Mutant(
        "deltasync.following.pin",
        "        if self.version is not None:\n            return self.version\n        return max",
        "        return max",
    ),
    "a commit is labelled with the version before": Mutant(
        "deltasync.following.weights",
        "        self.version, self._fingerprint = stored.version, stored.record.fingerprint\n        return self.version",
        "        self.version, self._fingerprint = stored.record.base, stored.record.fingerprint\n        return stored.version",
    ),
    "old bits are those before the chain": Mutant(
        "deltasync.following.weights",
        "                for delta in done:\n                    delta.apply(name, bits_N)",
        "                pass",
    ),
    "a load that failed keeps its label": Mutant(
        "deltasync.following.weights", "                        self.version, self.settled = None, False\n", ""
    ),
    "a loaded chain is not compared": Mutant(
        "deltasync.following.weights",
        '            if done and right and f"{model_fingerprint(found):016x}" == done[-1].record.fingerprint:',
        "            if done:",
    ),
    # publishers
    "a create that finds other bytes is taken for ours": Mutant(
        "deltasync.publish.writes", "        return is_ours\n    return True", "        return True\n    return True"
    ),
    "a create that finds our bytes is taken for another's": Mutant(
        "deltasync.publish.writes", "        return is_ours\n    return True", "        return False\n    return True"
    ),
    "records are put, not created": Mutant(
        "deltasync.publish.log",
        "                is_ours = self._retried(lambda: writes.create(self.store, key, data))",
        "                self._retried(lambda: self.store.put(key, data))",
    ),
    "a lease is not looked at": Mutant(
        "deltasync.publish.log", "            looked_s = self._check_lease(look.result())", "            looked_s = boot_s()"
    ),
    "a lease is believed for ever": Mutant(
        "deltasync.publish.log",
        "        if not 0 <= boot_s() - began_s <= self._lease.recheck_s:\n            began_s = self._read_epochs()\n        age_s",
        "        return began_s\n        age_s",
    ),
    "a lease does not settle": Mutant("deltasync.publish.acquire", "                self._lease.wait(claimed_s)\n", ""),
    "no epoch counts as newer": Mutant(
        "deltasync.publish.log", "            if newest > self.epoch and self._is_opening(newest):", "            if False:"
    ),
    "a log is not sealed": Mutant(
        "deltasync.publish.acquire",
        "        if self._retried(lambda: writes.create(self._store, slot.key, data)):\n            return None",
        "        return None",
    ),
    "a log ends where a listing does": Mutant(
        "deltasync.publish.acquire",
        "            if following is None:\n                return end\n            end = following",
        "            return end",
    ),
    "two epochs have one number": Mutant(
        "deltasync.publish.acquire",
        "max(map(keys.epoch_number, found), default=0)",
        "max(map(keys.epoch_number, found), default=0) * 0",
    ),
    "a pending version is forgotten": Mutant(
        "deltasync.publish.log",
        '        self._put(stored.key, stored.data, f"version {stored.record.version}")\n',
        '        self.pending = None\n        self._put(stored.key, stored.data, f"version {stored.record.version}")\n        self.pending = stored\n',
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
    "the shadow does not move": Mutant("deltasync.publish.shadow", "            difference.apply()\n", ""),
    "fingerprints do not move": Mutant(
        "deltasync.publish.shadow", "            self.fingerprints = before.with_gains(difference.gains)\n", ""
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
    ),
    "files that records name are deleted": Mutant(
        "deltasync.maintenance.garbage",
        "    unnamed = [info for info in old if info.key not in references]",
        "    unnamed = list(old)",
    ),
    "young files are deleted": Mutant(
        "deltasync.maintenance.garbage",
        "if retention.was_stored(info.modified_s, since_s)]",
        "]",
    ),
    "a relay copies head first": Mutant(
        "deltasync.maintenance.relay",
        "        if newest is not None and newest.slot.newness <= self.version.slot.newness:\n",
        "        if newest is not None:\n",
    ),
    "a relay copies records without files": Mutant(
        "deltasync.maintenance.relay",
        "        return chain if all([self._copy_files(stored) for stored in chain]) else None",
        "        return chain",
    ),
}
"""Planted faults by name."""


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
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    if source.count(mutant.old) != 1:
        raise AssertionError(f"{mutant.module} has {mutant.old!r} {source.count(mutant.old)} times")
    return source.replace(mutant.old, mutant.new)


def plant(name: str) -> None:
    """Plant a mutant in this process, which has not imported the product yet."""
    sys.meta_path.insert(0, Planter(MUTANTS[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to plant; all by default")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each mutant")
    given = parser.parse_args()
    survived = []
    for name in given.names or MUTANTS:
        began_s = time.monotonic()
        command = [sys.executable, "-m", "tests.simulator", "--mutant", name, "--seeds", "100000", "--first"]
        command += ["--seconds", str(given.seconds), "--steps", "100"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
        said = last[0].rpartition("  ")[2][:120] if last else "nothing"
        print(
            f"{'killed  ' if done.returncode == 1 else 'SURVIVED'} {time.monotonic() - began_s:6.1f} s  {name}: {said}",
            flush=True,
        )
        if done.returncode != 1:
            survived.append(name)
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
