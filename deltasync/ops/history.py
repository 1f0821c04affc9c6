"""Ask the history of a run: which version first fails a check (`bisect`), which ones changed a tensor most
(`blame`).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError, DeltaSyncError, MissingVersionError, NotPublishedError
from deltasync.ops.copies import export
from deltasync.ops.heat import changed_of
from deltasync.ops.retention import lineage
from deltasync.ops.scan import Scan, in_parallel, result_or_error, scan_channel

Test = Callable[[int, Path], bool | None]
"""Whether a version, which is the checkpoint in a directory, is good; None if that cannot be told."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The changes of one version.

    Attributes:
        version: Its number.
        step: The trainer's step; None if it named none.
        changed: Number of elements that it changed of each of the tensors that were asked for, without those
            of which none; None if it has full weights, or its payload cannot be read.
        problem: Why it cannot be read; None if it can.
    """

    version: int
    step: int | None
    changed: dict[str, int] | None
    problem: DeltaSyncError | None = None


def blame(reader: ChannelReader, pattern: str) -> list[Change]:
    """Return what each version changed of the tensors whose names match a pattern, oldest first. Reads counts
    alone.

    Raises:
        ConfigError: no tensor matches.
        NotPublishedError: the channel has no version yet.
    """
    names = matching(reader, pattern)
    held = scan_channel(reader)
    return in_parallel(functools.partial(_change, reader, held, names), _versions(reader, held), "versions")


def matching(reader: ChannelReader, pattern: str) -> set[str]:
    """Return the tensors whose names match a pattern. Raises ConfigError if there is none."""
    names = {name for name in reader.specs if fnmatch.fnmatchcase(name, pattern)}
    if not names:
        raise ConfigError(f"No tensor of {reader.store.url} matches {pattern!r}.")
    return names


def _change(reader: ChannelReader, held: Scan, names: set[str], slot: Slot) -> Change:
    record = held.records[slot]
    assert record is not None
    found, delta = Change(version=slot.version, step=record.step, changed=None), record.delta
    if delta is None:
        return found
    counts = result_or_error(
        lambda info: changed_of(reader.store, info, delta, reader.layout), held.infos[slot.key]
    )
    if isinstance(counts, DeltaSyncError):
        return dataclasses.replace(found, problem=counts)
    return dataclasses.replace(
        found, changed={name: count for name, count in counts.items() if count and name in names}
    )


def bisect(
    reader: ChannelReader,
    test: Test,
    good: int | None = None,
    bad: int | None = None,
    on_test: Callable[[int, bool | None, int], object] = lambda version, is_good, left: None,
) -> tuple[int, int, list[int]]:
    """Find the first version that fails a test. Tests both ends first, then about log2 of the versions
    between them.

    Args:
        reader: The channel.
        test: Called with a version and a directory with its checkpoint, which is deleted afterwards.
        good: A version that passes; the oldest by default.
        bad: A later version that fails; the newest by default.
        on_test: Called with each version, what its test said, and the number of versions between good and
            bad.

    Returns:
        The last good version, the first bad one, and the versions between them whose test could not tell.

    Raises:
        ConfigError: `good` fails, or `bad` passes, or their test cannot tell.
        MissingVersionError: a version is not in the channel.
    """
    numbers = [slot.version for slot in _versions(reader, scan_channel(reader))]
    good, bad = numbers[0] if good is None else good, numbers[-1] if bad is None else bad
    for version in (good, bad):
        if version not in numbers:
            raise MissingVersionError(
                f"Version {version} is not in {reader.store.url}: not published yet, or forgotten."
            )
    if good >= bad:
        raise ConfigError(f"Version {good}, the good one, must be before version {bad}, the bad one.")
    between = [number for number in numbers if good < number < bad]

    def tested(version: int) -> bool | None:
        with tempfile.TemporaryDirectory(prefix="deltasync-bisect-") as folder:
            export(reader, version, Path(folder) / "checkpoint")
            is_good = test(version, Path(folder) / "checkpoint")
        on_test(version, is_good, len(between))
        return is_good

    for version, wanted in ((bad, False), (good, True)):
        if (found := tested(version)) is not wanted:
            said = "could not be tested" if found is None else "passes" if found else "fails"
            raise ConfigError(
                f"Version {version} {said}, so there is no first version that fails after {good}, up to "
                f"{bad}."
            )
    skipped: set[int] = set()
    while open_ := [number for number in between if number not in skipped]:
        middle = open_[len(open_) // 2]
        if (found := tested(middle)) is None:
            skipped.add(middle)
        elif found:
            good, between = middle, [number for number in between if number > middle]
        else:
            bad, between = middle, [number for number in between if number < middle]
    return good, bad, between


def _versions(reader: ChannelReader, held: Scan) -> list[Slot]:
    """Return the slots of the run's versions that can be read, oldest first."""
    found = [slot for slot in reversed(lineage(held.records)) if held.records[slot] is not None]
    if not found:
        raise NotPublishedError(f"{reader.store.url} holds no version yet.")
    return found
