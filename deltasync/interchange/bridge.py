"""Between version directories (`version_dirs`) and channels: publish what they hold, or write them from a
channel.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltasync.channel import anchors
from deltasync.channel.anchors import INDEX
from deltasync.channel.reading import ChannelReader
from deltasync.codec.base import body
from deltasync.errors import (
    ChainError,
    ChannelInUseError,
    ConfigError,
    CorruptDataError,
    MissingVersionError,
    ModelMismatchError,
    NotPublishedError,
    ObjectMissingError,
)
from deltasync.following import Replica
from deltasync.interchange import version_dirs
from deltasync.interchange.version_dirs import VersionDir, Weights, bytes_of
from deltasync.opening import checkpoint
from deltasync.ops import model_files
from deltasync.stores import Store, open_store
from deltasync.trainer import Publisher

logger = logging.getLogger(__name__)

_SOURCE = "source.json"  # beside what a relay writes: where it comes from
_PASSED = "%s It is passed over for version %d, which has full weights."
_OPENING = {"opening": True}  # in it until the channel is open


class Import:
    """Publishes each version of version directories to a channel, which any replica then follows.

    The channel's versions are numbered from 1; `step` of each is the number of its directory. A tensor's
    checksum is what proves a delta, and nothing proves a full version that has none: these directories have
    no digest of the whole model, no writer's epoch and no signature. Memory: the model twice, and the tensors
    that a version changes once more.

    Args:
        source: The version directories: a URL, a path or a store.
        target: The channel: a URL, a path or a store. A used one is continued if it was made from the same
            directories.
        base: The checkpoint that version 0 is, where the directories do not hold it: a directory, or a model
            on the Hub.
        **options: See `PublisherSettings`, but for `dtype`: all tensors keep their own.

    Raises:
        ConfigError: an option is wrong, or `base` is no checkpoint.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Store,
        target: str | os.PathLike[str] | Store,
        base: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._dirs, self._target = open_store(source), open_store(target)
        self._base, self._options = base, options
        self.number = -1
        """The version that the channel has; -1 before the first."""
        self.unfinished: NotPublishedError | None = None
        """Why the last `versions` ended before the newest directory, or had none; None if it did not."""
        self._weights = Weights()
        self._is_noted = False  # whether the target names these directories as its source
        self._is_ours = False  # whether it has a channel that was made from them
        self._publisher: Publisher | None = None

    def versions(self) -> Iterator[tuple[int, int]]:
        """Publish the versions that the channel lacks, in order: yield the number of each, and that in the
        channel, when it is visible there.

        A version that is unfinished, damaged or without its base is passed over if a later one has full
        weights. Otherwise this ends before an unfinished version, and sets `unfinished`.

        Raises:
            ChainError: a version is missing, or no full version precedes the first delta.
            CorruptDataError: a file is damaged. The channel stays at the version before.
            ChannelInUseError: the channel was made from something else.
            PublishError: a version could not be published; nothing later is published by this object.
        """
        if self.number < 0:
            self._resume()
        found = version_dirs.find(self._dirs, self.number)
        ready, problems = {version.number: version for version in found.ready}, found.problems
        fulls = [number for number, version in ready.items() if version.base is None]
        start, self.unfinished = self.number, None
        if start < 0 and not ready and not problems:
            self.unfinished = NotPublishedError(f"{self._dirs.url} holds no version directory yet.")
        if self.number < 0 and fulls:
            start = fulls[-1]  # what a new reader starts from
        elif self.number < 0 and ready:
            if self._base is None:
                raise ChainError(
                    f"{self._dirs.url} holds no full version before version {min(ready)}. Name the "
                    "checkpoint "
                    "that the deltas begin with (--base)."
                )
            self._open(initial=self._base)
            base = checkpoint.load(checkpoint.find(self._base))
            yield self._publish(0, dict(base.tensors(sorted(base.files))))
        for number in sorted(ready.keys() | problems.keys()):
            if number < start:
                if number in problems:
                    logger.warning(_PASSED, problems[number], start)
                continue
            try:
                if number in problems:
                    raise problems[number]
                weights = self._next(ready[number])
            except (ChainError, CorruptDataError, ModelMismatchError) as error:
                later = next((full for full in fulls if full > number), None)
                if later is not None:
                    logger.warning(_PASSED, error, later)
                    start = later
                    continue
                if not isinstance(error, NotPublishedError):
                    raise
                self.unfinished = error
                return
            if self._publisher is None:
                self._open(model_files=ready[number].small_files())
            yield self._publish(number, weights)

    def _open(self, **options: Any) -> None:
        """Open the channel. Its source is noted before, so that a call after a kill knows the channel as its
        own.
        """
        if self._publisher is not None:
            return
        own = {"source": self._dirs.url}
        if not self._is_noted:
            self._target.put(_SOURCE, json.dumps(own | _OPENING).encode())
        self._publisher = Publisher(
            self._target, dtype="keep", resume=self._is_ours, **options, **self._options
        )
        self._target.put(_SOURCE, json.dumps(own).encode())
        self._is_noted = self._is_ours = True

    def close(self) -> None:
        """End the publisher."""
        if self._publisher is not None:
            self._publisher.close()

    def _next(self, version: VersionDir) -> Weights:
        if version.base is None:
            return version.full()
        if version.base != self.number:
            raise ChainError(
                f"{self._dirs.url} holds version {version.number}, a delta to version {version.base}, and "
                "the channel "
                f"has version {self.number}. It goes on with the next full version."
            )
        return self._weights | version.delta(self._weights)

    def _publish(self, number: int, weights: Weights) -> tuple[int, int]:
        assert self._publisher is not None
        receipt = self._publisher.publish(weights, step=number)
        receipt.wait()
        self.number, self._weights = number, weights
        return number, receipt.version

    def _resume(self) -> None:
        """Find out whether the channel is one of these directories, and which version it has."""
        reader, source, own = ChannelReader(self._target), _source(self._target), {"source": self._dirs.url}
        is_opening = source == own | _OPENING
        self._is_noted = is_opening or source == own
        try:
            reader.channel()
        except NotPublishedError:
            return
        # A kill during the opening leaves no version. A channel that has one was opened by somebody else.
        if not self._is_noted or (is_opening and reader.newest_version() is not None):
            raise ChannelInUseError(
                f"{self._target.url} holds a channel that was not made from {self._dirs.url}. Choose another "
                "target."
            )
        self._is_ours = True
        replica = Replica(reader)
        try:
            replica.sync()
        except NotPublishedError:
            return
        assert replica.identity is not None
        self.number = reader.record(replica.identity).record.step or 0
        self._weights = replica.state_dict()


def _source(store: Store) -> Any:
    """Read where the contents of a store come from; None if that is not said."""
    with contextlib.suppress(ObjectMissingError, ValueError):
        return json.loads(store.read(_SOURCE, 1 << 16))
    return None


class Export:
    """Writes version directories from a channel: the first version as a checkpoint, each later one as a
    delta.

    Memory: the model twice.

    Args:
        reader: The channel.
        target: Where the directories go: a URL, a path or a store. Later versions of the same run may be
            added.
        encoding: `xor`, or `overwrite`, which can be applied twice.
        algorithm: The checksum: adler32, xxh3-128 or blake3. ModelExpress reads adler32 alone.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        reader: ChannelReader,
        target: str | os.PathLike[str] | Store,
        encoding: str = "xor",
        algorithm: str = "adler32",
    ) -> None:
        if encoding not in version_dirs.ENCODINGS:
            raise ConfigError(f"The encoding {encoding!r} is none of {', '.join(version_dirs.ENCODINGS)}.")
        version_dirs.checksum(algorithm, np.empty(0, np.uint8))
        self._reader, self._dirs = reader, open_store(target)
        self._encoding, self._algorithm = encoding, algorithm
        self._replica = Replica(reader)
        self._weights = Weights()
        # why the next version has to be written with full weights
        self._forgotten: MissingVersionError | None = None
        self._unfinished = set[int]()  # directories that calls wrote before they were killed
        self.number = -1
        """The newest version that was written; -1 before the first."""

    def versions(self, newest: int | None = None, first: int | None = None) -> Iterator[tuple[int, int]]:
        """Write the versions of the channel that are not there: yield the number of each, and the bytes of
        its weights.

        Args:
            newest: The last version to write; by default the newest.
            first: The version to begin with in an empty target; by default the last one.

        Raises:
            NotPublishedError: the channel has no version yet.
            MissingVersionError: the last version cannot be read any more; those before it are there. After
                others that cannot be read, the next one is written with full weights.
            ChannelInUseError: the target has version directories of something else.
        """
        newest = self._reader.numbered(newest).version.version if newest is not None else self._newest()
        if self.number < 0 and not self._resumes(newest):
            number = newest if first is None else first
            yield number, self._full(number)
        there: set[int] | None = None  # the versions that the channel lists, once one is missing
        for number in range(self.number + 1, newest + 1):
            if there is not None and number not in there:
                continue
            try:
                size = self._delta(number) if self._forgotten is None else self._full(number)
            except MissingVersionError as error:
                self._forgotten, there = error, {slot.version for slot, _ in self._reader.slots()}
                continue
            if self._forgotten is not None:
                logger.warning("%s Version %d is written with full weights.", self._forgotten, number)
                self._forgotten = None
            yield number, size
        if self._forgotten is not None:
            raise self._forgotten

    def _newest(self) -> int:
        found = self._reader.newest_version()
        if found is None:
            raise NotPublishedError(f"{self._reader.store.url} holds no version yet.")
        return found.version

    def _resumes(self, newest: int) -> bool:
        """Go on behind the last version of the target, if it has any."""
        found, own = version_dirs.find(self._dirs, -1), {"run": self._reader.channel().run_id}
        ready, numbers = found.ready, {version.number for version in found.ready} | found.problems.keys()
        is_ours = _source(self._dirs) == own
        if is_ours:  # what has no index was being written when a call like this one was killed
            ready = [version for version in ready if version.has_index]
            self._unfinished = numbers - {version.number for version in ready}
        elif not numbers:
            self._dirs.put(_SOURCE, json.dumps(own).encode())
        if not ready and (is_ours or not numbers):
            return False
        last = ready[-1] if ready else None
        digest = None if last is None else last.metadata.deltasync_sha256
        if last is not None and digest is not None and last.number <= newest:
            try:
                self._replica.sync(last.number)
            except MissingVersionError as error:
                if not is_ours:
                    raise
                self.number, self._forgotten = last.number, error
                return True
        if last is None or digest is None or self._replica.digest != digest:
            raise ChannelInUseError(
                f"{self._dirs.url} holds version {max(numbers)}, which is not that of "
                f"{self._reader.store.url}. "
                "Nothing was written; choose another target."
            )
        self._note(last.number)
        return True

    def _note(self, number: int) -> Weights:
        """Keep a copy of the replica's weights, which change with each version."""
        self.number, self._weights = (
            number,
            {name: each.clone() for name, each in self._replica.state_dict().items()},
        )
        return self._weights

    def _full(self, number: int) -> int:
        self._replica.sync(number)
        assert self._replica.identity is not None
        index, last, tensors = dict[str, Any](), "", self._replica.state_dict()
        for last, data in itertools.chain(
            model_files(self._reader, self._replica.identity).items(),
            anchors.weight_files(tensors, self._replica.fingerprints),  # the last
        ):
            if last == INDEX:
                index = json.loads(bytes(data))
            else:
                self._put(number, last, data)
        self._end(number, index.get("weight_map") or dict.fromkeys(tensors, last), index.get("metadata", {}))
        return sum(each.nbytes for each in self._note(number).values())

    def _delta(self, number: int) -> int:
        old, before = self._weights, dict(self._replica.fingerprints)
        self._replica.sync(number)
        tensors, after = self._replica.state_dict(), self._replica.fingerprints
        new = {name: tensors[name].clone() for name in tensors if before[name] != after[name]}
        file, data = "model-00001-of-00001.safetensors", b""
        if new:
            sums = {
                name: version_dirs.checksum(self._algorithm, bytes_of(tensor)) for name, tensor in new.items()
            }
            coded = {
                name: torch.frombuffer(
                    bytearray(version_dirs.encode(self._encoding, bytes_of(old[name]), bytes_of(tensor))),
                    dtype=torch.uint8,
                )
                for name, tensor in new.items()
            }
            data = b"".join(body(coded, sums))
            self._put(number, file, data)
        metadata = {
            "version": f"{number:06d}",
            "base_version": f"{self.number:06d}",
            "delta_encoding": self._encoding,
            "compression_format": "zstd",
            "checksum_format": self._algorithm,
        }
        self._end(number, dict.fromkeys(new, file), metadata)
        old.update(new)
        self.number = number
        return len(data)

    def _put(self, number: int, file: str, data: bytes | memoryview) -> None:
        self._dirs.put(f"weight_v{number:06d}/{file}", data)

    def _end(self, number: int, weight_map: dict[str, str], metadata: dict[str, Any]) -> None:
        """Store the index of a version: from here on a reader takes it."""
        metadata["deltasync_sha256"] = self._replica.digest
        if number in self._unfinished:
            folder = f"weight_v{number:06d}/"
            found = [info.key for info in self._dirs.list(folder) if info.key.endswith(anchors.WEIGHTS)]
            named = {folder + file for file in weight_map.values()}
            self._dirs.delete(*(key for key in found if key not in named))
        self._put(number, INDEX, json.dumps({"metadata": metadata, "weight_map": weight_map}).encode())
