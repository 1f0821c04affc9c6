"""The agreement of the ranks of a sharded trainer as they publish."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from deltasync import limits
from deltasync.channel import anchors, keys
from deltasync.errors import ConfigError, PublishError, StoreError, get_logger
from deltasync.publish.detect import Difference
from deltasync.publish.pending import Pending
from deltasync.publish.ranges import NOTHING, Range
from deltasync.publish.shadow import Shadow
from deltasync.publish.snapshot import Weights
from deltasync.stores import Store
from deltasync.stores.retries import holds
from deltasync.tensors import Fingerprints, TensorSpec
from deltasync.threads import each
from deltasync.trainer.ranks import Ranks, ranks_of

logger = get_logger(__name__)

_NUMBERS = re.compile(r"[0-9a-f]*[0-9][0-9a-f.-]*")  # in which messages of one cause differ


class Agreement(Ranks):
    """The agreement of ranks; see `Alone` for the methods, and `Ranks` for how they talk."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        self._whole: Fingerprints | None = None  # of the whole tensors, as the shadows of all ranks have them
        self._cause = ""  # why the last version was lost, after which there was no delta

    def prove_writes(self, store: Store) -> None:
        """Have each rank store something that the first one reads, before a step is trained for nothing.

        Raises:
            StoreError: a rank cannot write.
            ConfigError: it writes to another place than the first one.
        """
        token = self.name
        proofs = [keys.probe(f"{token}-{other}") for other in range(self.size)]

        def write() -> None:
            try:
                store.put(proofs[self.rank], token.encode())
            except StoreError as error:
                raise StoreError(f"{store.url} cannot be written from this rank: {error}") from error

        def read() -> None:
            found = each(proofs, lambda key: holds(store, key, token.encode()), None)
            wrong = [other for other, holds in enumerate(found) if not holds]
            if wrong:
                raise ConfigError(
                    f"Rank 0 cannot read what {ranks_of(wrong).lower()} wrote to {store.url}. Use a "
                    "directory that all hosts share, or an object store."
                )

        try:
            self.all(write)
            self.first(read)
        finally:
            with contextlib.suppress(StoreError):  # a trainer may have no right to delete
                store.delete(proofs[self.rank])

    def check_step(self, step: int | None) -> None:
        """Refuse a publish that names no step."""
        if step is None:
            raise ConfigError(
                "Ranks that publish together name the step, publish(..., step=N): one that left a call out "
                "would go unnoticed, and a version would mix the weights of two steps. Nothing was published."
            )

    def forget(self) -> None:
        """See `Alone`."""
        self._whole = None

    def totals(
        self, shadow: Shadow, found: Difference, changed: int, *, needed: bool
    ) -> tuple[int, Fingerprints]:
        """See `Alone`.

        The first time the ranks exchange their shares; later what these gain, which costs a bit for a tensor
        that gains nothing.
        """
        before = self._whole
        sizes = {width: len(vector.specs) for width, vector in shadow.layout.vectors.items()}

        def added() -> list[np.ndarray]:
            gains = shadow.fingerprints.with_gains(found.gains).of if before is None else found.gains
            return [gains.get(width, np.zeros(size, np.uint64)) for width, size in sizes.items()]

        counts = np.array([changed, before is None], np.uint64)
        (changed, new), sums = np.split(self.agree(None, np.concatenate([counts, *added()])), [2])
        if new and new != self.size:  # a rank has lost count
            before = None
            sums = self.agree(None, np.concatenate(added()))
        sums_of = dict(zip(sizes, np.split(sums, np.cumsum([*sizes.values()])[:-1]), strict=True))
        whole = Fingerprints(shadow.layout, sums_of)
        self._whole = whole if before is None else before.with_gains(whole.of)
        return int(changed), self._whole

    def collects(self, wanted: bool) -> bool:
        """See `Alone`."""
        return wanted

    def weights(
        self,
        shadow: Shadow,
        specs: Mapping[str, TensorSpec],
        held: Sequence[Mapping[str, Range]],
        fingerprints: Mapping[str, int],
    ) -> Weights | None:
        """Collect the weight files in a temporary directory of the first rank; return None at the others.

        All ranks call this. `specs` and `fingerprints` are of the whole tensors, in the same order on all
        ranks; `held` has the ranges of each rank (`Source.held`).

        Raises:
            OSError: the first rank's disk is full; then all ranks raise.
            PublishError: a rank did not answer.
        """

        def take(name: str, out_N: np.ndarray | None) -> int:
            self.collect(shadow.bits[name], [ranges.get(name, NOTHING) for ranges in held], out_N)
            return fingerprints[name]

        if self.rank:
            for name in specs:
                take(name, None)
            self.agree(None)
            return None
        folder, paths = tempfile.TemporaryDirectory(prefix="deltasync-"), list[Path]()
        problem: OSError | None = None

        def room(name: str, size: int) -> np.ndarray:
            nonlocal problem
            if problem is None:
                try:
                    return _mapped(Path(folder.name, name), size)
                except OSError as error:
                    problem = error
            return np.empty(size, np.uint8)  # the others go on sending

        try:
            for name, data in anchors.taken_files(specs, take, limits.WEIGHT_FILE_BYTES, room):
                paths.append(Path(folder.name, name))
                if problem is None and not paths[-1].exists():
                    try:
                        paths[-1].write_bytes(data)
                    except OSError as error:
                        problem = error
            self.agree(problem)
        except BaseException:
            folder.cleanup()
            raise
        return Weights(((path.name, _read(path)) for path in paths), folder.cleanup)

    def ended(self, job: Pending, error: Exception | None, digest: str, payload_bytes: int) -> None:
        """See `Alone`."""
        described = None if error is None else (type(error).__name__, str(error))
        try:
            self.say(serial=job.serial, error=described, digest=digest, payload_bytes=payload_bytes)
        except RuntimeError:  # they time out
            logger.exception("The other ranks could not be told how an upload ended.")
        if error is None and not job.full:
            self._cause = ""

    def lost(self, cause: Exception) -> PublishError | None:
        """Refuse the next publish if versions are lost twice for one cause: each has collected full
        weights.
        """
        before, self._cause = self._cause, _NUMBERS.sub("", f"{type(cause).__name__} {cause}")
        if self._cause != before:
            return None
        self._cause = ""
        return PublishError(
            f"Two versions were lost for one cause, so it will not pass: {cause} Remove it; the next publish "
            "tries again, with full weights."
        )


def _mapped(path: Path, size: int) -> np.ndarray:
    """Return the bytes of a new file on the disk, which the system writes and drops from memory as it likes.

    Raises:
        OSError: the disk has no room for them; nothing of it would be known while the bytes are set.
    """
    with path.open("xb+") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)


def _read(path: Path) -> memoryview:
    """Return the bytes of a file, which are read as they are used."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
