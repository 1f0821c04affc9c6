"""Compare a resumed trainer's first weights with what the channel has of the same step.

A trainer may load less than its checkpoint holds, and nobody but the publisher has both sets of bits.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Mapping

import numpy as np

from deltasync.channel import keys, plan
from deltasync.channel.documents import Record, VersionId
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ChainError, ChannelInUseError, FormatError, StoreError
from deltasync.opening.start import replayed
from deltasync.publish.agreement import Alone, attempt
from deltasync.publish.detect import Difference
from deltasync.publish.log import Log
from deltasync.publish.shadow import Shadow
from deltasync.stores.base import ObjectInfo
from deltasync.tensors import fingerprint
from deltasync.tensors.delta import joined

_WITHOUT_STEP = 16  # versions in a row without a step, or of one step, that are looked at
_NAMED = 5  # tensors that a message names

_LEAST = -(1 << 63)

_UNREADABLE = (FormatError, ChainError, StoreError)


class StepCheck:
    """Checks the first publish of a resumed run. All ranks make one and call it.

    Args:
        ranks: The agreement of the ranks, or of one process.
        reader: Reads the channel.
        log: Knows the newest version; at the first rank only.
    """

    def __init__(self, ranks: Alone, reader: ChannelReader, log: Log | None) -> None:
        self._ranks, self._reader, self._log = ranks, reader, log

    def __call__(
        self, step: int | None, shadow: Shadow | None, found: Difference | None, problem: BaseException | None
    ) -> None:
        """Compare what a publish has `found`, beside the shadow, with each version of this step. Nothing is
        mutated.

        `problem` is what this rank's publish has failed with, None if it has not.

        Raises:
            ChannelInUseError: the channel has this step, and no version of it has these bits; at all ranks.
            BaseException: the `problem` of a rank; at all ranks.
        """
        ranks = self._ranks
        versions = ranks.first(
            lambda: [] if step is None else versions_at(self._reader, self._tip, step),
            list[tuple[VersionId, str]],
            problem=problem,
            same=f"step {step}",
        )
        if not versions:
            return
        assert shadow is not None and found is not None
        (total,) = ranks.agree(None, [shadow.fingerprints.with_gains(found.gains).total]).tolist()
        if fingerprint.to_hex(total) in {known for _, known in versions}:
            return
        version = versions[0][0]
        is_tip = ranks.first(lambda: version == self._tip, bool)
        counts = self._differing(version, shadow, found, is_shadow=is_tip)
        raise _mismatch(self._reader.store.url, step, version, counts, shadow)

    @property
    def _tip(self) -> VersionId | None:
        return None if self._log is None else self._log.tip

    def _differing(
        self, version: VersionId, shadow: Shadow, found: Difference, *, is_shadow: bool
    ) -> dict[str, int] | None:
        """Return how many elements of each tensor differ from a version, over all ranks; None if that cannot
        be read.
        """

        def count() -> dict[str, int]:
            known: Mapping[str, np.ndarray] = shadow.bits
            if not is_shadow:
                chain = plan.find_chain(self._reader, None, version)
                known = replayed(self._reader, shadow.ranges, chain, [])
            now, delta = shadow.bits, joined(found.pieces, shadow.layout).host()
            counts = dict[str, int]()
            for name, held_N in now.items():
                bits_N, steps = held_N.copy(), delta.of(name)
                bits_N[steps.at_K - steps.at_K.dtype.type(shadow.ranges[name][0])] += steps.data_K
                counts[name] = int(np.count_nonzero(bits_N != known[name]))
            return counts

        counts, problem = attempt(count)
        is_lost = isinstance(problem, _UNREADABLE)
        shares = self._ranks.share(
            lambda: _given(counts, None if is_lost else problem), dict[str, int] | None
        )
        if any(share is None for share in shares):
            return None
        return {name: sum((share or {}).get(name, 0) for share in shares) for name in shadow.specs}


def _given(counts: dict[str, int] | None, problem: BaseException | None) -> dict[str, int] | None:
    if problem is not None:
        raise problem
    return counts


def versions_at(reader: ChannelReader, tip: VersionId | None, step: int) -> list[tuple[VersionId, str]]:
    """Return the run's versions of a trainer's step with their fingerprints, newest first.

    Within an epoch steps ascend: its folders are listed from the newest one back to the step, and searched by
    halves. A trainer that goes back to a checkpoint begins an epoch.
    """
    found, names = list[tuple[VersionId, str]](), reader.folders()
    names = [keys.VERSIONS] if names is None else names

    @functools.cache
    def listed(name: str) -> list[tuple[Slot, ObjectInfo]]:
        return reader.slots(name)

    @functools.cache
    def document(info: ObjectInfo) -> Record | None:
        with contextlib.suppress(*_UNREADABLE):
            return reader.document(info)
        return None

    while tip is not None:
        slots: list[tuple[Slot, ObjectInfo]] = []
        opening = reader.opening(tip.epoch)
        before = None if opening is None else opening.continues
        knows_before = before is not None or tip.epoch == reader.channel().epoch

        def step_at(at: int) -> int:
            """The step of a version, or of the one before it if it has none."""
            for _, info in slots[max(0, at - _WITHOUT_STEP) : at + 1][::-1]:  # noqa: B023 - used in this round only
                record = document(info)
                if record is not None and record.step is not None:
                    return record.step
            return _LEAST

        for name in names:
            if name > keys.folder(tip.version):
                continue
            slots = [pair for pair in listed(name) if _is_up_to(tip, pair[0])] + slots
            if before is not None and name <= keys.folder(before.version + 1):
                break
            if knows_before and _LEAST < step_at(min(_WITHOUT_STEP, len(slots)) - 1) < step:
                break  # what is before has smaller steps
        end = bisect.bisect_right(range(len(slots)), step, key=step_at)
        for slot, info in slots[max(0, end - _WITHOUT_STEP) : end][::-1]:
            record = document(info)
            if record is not None and record.step is not None and record.step < step:
                break
            if record is not None and record.step == step:
                with contextlib.suppress(*_UNREADABLE):  # a document alone is read without its digest
                    stored = reader.stored(slot.key)
                    found.append((stored.version, str(stored.record.fingerprint)))
        first = document(slots[0][1]) if slots and not knows_before else None
        tip = before if first is None else first.base
    return found


def _is_up_to(tip: VersionId, slot: Slot) -> bool:
    return slot.epoch == tip.epoch and slot.version <= tip.version


def _mismatch(
    url: str, step: int | None, version: VersionId, counts: dict[str, int] | None, shadow: Shadow
) -> ChannelInUseError:
    total = sum(spec.element_count for spec in shadow.specs.values())
    differing = {name: count for name, count in (counts or {}).items() if count}
    changed = sum(differing.values())
    where = "which tensors differ is not known, because that version cannot be read"
    if counts is not None:
        named = sorted(differing, key=lambda name: differing[name], reverse=True)[:_NAMED]
        more = f", and {len(differing) - len(named):,} more" if len(differing) > len(named) else ""
        where = f"{changed:,} of {total:,} elements differ ({changed / max(total, 1):.2%}), in {', '.join(named)}{more}"
    return ChannelInUseError(
        f"{url} has step {step} as version {version.version}, and the resumed trainer holds other weights at "
        "this step: "
        f"{where}. Nothing was published. Look for weights that were not loaded from the checkpoint. If "
        "these weights are "
        'meant, go on with resume="overwrite".',
        step=step,
        version=version.version,
        tensors=differing,
        changed_fraction=None if counts is None else changed / max(total, 1),
    )
