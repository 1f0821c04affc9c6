"""Between version directories (`version_dirs`) and channels: publish what they hold, or write them from a channel."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltasync.channel import anchors, checkpoint
from deltasync.channel.anchors import INDEX
from deltasync.channel.reading import ChannelReader
from deltasync.codec.base import body
from deltasync.errors import (
    UNREADABLE_JSON,
    ChainError,
    ChannelInUseError,
    ConfigError,
    NotPublishedError,
    ObjectMissingError,
)
from deltasync.following import Replica
from deltasync.interchange import version_dirs
from deltasync.interchange.version_dirs import VersionDir, Weights, bytes_of
from deltasync.maintenance import model_files
from deltasync.publish import Publisher
from deltasync.stores import Store, open_store

_SOURCE = "source.json"  # beside the channel that `Import` writes: where it comes from


class Import:
    """Publishes each version of version directories to a channel, which any replica then follows.

    The channel's versions are numbered from 1; `step` of each is the number of its directory. A tensor's checksum is what
    proves a delta, and nothing proves a full version that has none: these directories have no digest of the whole model, no
    writer's epoch and no signature. Memory: the model twice, and the tensors that a version changes once more.

    Args:
        source: The version directories: a URL, a path or a store.
        target: The channel: a URL, a path or a store. A used one is continued if it was made from the same directories.
        base: The checkpoint that version 0 is, where the directories do not hold it: a directory, or a model on the Hub.
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
        self._weights = Weights()
        self._publisher: Publisher | None = None

    def versions(self) -> Iterator[tuple[int, int]]:
        """Publish the versions that the channel lacks, in order: yield the number of each, and that in the channel, when it
        is visible there.

        Raises:
            ChainError: a version is missing, or no full version precedes the first delta.
            CorruptDataError: a file is damaged. The channel stays at the version before.
            PublishError: a version could not be published; nothing later is published by this object.
        """
        if self.number < 0:
            self._resume()
        found = version_dirs.complete(self._dirs, self.number)
        if self.number < 0:
            fulls = [n for n, version in enumerate(found) if version.base is None]
            if found and not fulls and self._base is None:
                raise ChainError(
                    f"{self._dirs.url} holds no full version before version {found[0].number}. Name the checkpoint "
                    "that the deltas begin with (--base)."
                )
            if fulls:
                found = found[fulls[-1] :]  # what a new reader starts from
            elif found and self._base is not None:
                self._open(initial=self._base)
                base = checkpoint.load(checkpoint.find(self._base))
                yield self._publish(0, dict(base.tensors(sorted(base.files))))
        for version in found:
            weights = self._next(version)
            if self._publisher is None:
                self._open(model_files=version.small_files(), resume=self.number >= 0)
            yield self._publish(version.number, weights)

    def _open(self, **options: Any) -> None:
        self._publisher = Publisher(self._target, dtype="keep", **options, **self._options)
        self._target.put(_SOURCE, json.dumps({"source": self._dirs.url}).encode())

    def close(self) -> None:
        """End the publisher."""
        if self._publisher is not None:
            self._publisher.close()

    def _next(self, version: VersionDir) -> Weights:
        if version.base is None:
            return version.full()
        if version.base != self.number:
            raise ChainError(
                f"{self._dirs.url} holds version {version.number}, a delta to version {version.base}, and the channel "
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
        """Find out which version the channel has."""
        reader = ChannelReader(self._target)
        replica = Replica(reader)
        try:
            replica.sync()
        except NotPublishedError:
            return
        assert replica.identity is not None
        with contextlib.suppress(ObjectMissingError, *UNREADABLE_JSON):
            if json.loads(self._target.read(_SOURCE, 1 << 16)) != {"source": self._dirs.url}:
                raise ObjectMissingError(_SOURCE)
            self.number = reader.record(replica.identity).record.step or 0
        if self.number < 0:
            raise ChannelInUseError(
                f"{self._target.url} holds a channel that was not made from {self._dirs.url}. Choose another target."
            )
        self._weights = replica.state_dict()


class Export:
    """Writes version directories from a channel: the first version as a checkpoint, each later one as a delta.

    Memory: the model twice.

    Args:
        reader: The channel.
        target: Where the directories go: a URL, a path or a store. Later versions of the same run may be added.
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
        self._weights: Weights | None = None
        self.number = -1
        """The newest version that was written; -1 before the first."""

    def versions(self, newest: int | None = None, first: int | None = None) -> Iterator[tuple[int, int]]:
        """Write the versions of the channel that are not there: yield the number of each, and the bytes of its weights.

        Args:
            newest: The last version to write; by default the newest.
            first: The version to begin with in an empty target; by default the last one.

        Raises:
            NotPublishedError: the channel has no version yet.
            MissingVersionError: a version cannot be read any more; the versions before it are there.
            ChannelInUseError: the target has version directories of something else.
        """
        newest = self._reader.numbered(newest).version.version if newest is not None else self._newest()
        if self._weights is None and not self._resumes(newest):
            number = newest if first is None else first
            yield number, self._full(number)
        assert self._weights is not None
        for number in range(self.number + 1, newest + 1):
            yield number, self._delta(number, self._weights)

    def _newest(self) -> int:
        found = self._reader.newest_version()
        if found is None:
            raise NotPublishedError(f"{self._reader.store.url} holds no version yet.")
        return found.version

    def _resumes(self, newest: int) -> bool:
        """Go on behind the last version of the target, if it has any."""
        there = version_dirs.complete(self._dirs, -1)
        if not there:
            return False
        last = there[-1]
        if last.number <= newest:
            self._replica.sync(last.number)
        if self._replica.digest != last.metadata.deltasync_sha256 or self._replica.digest is None:
            raise ChannelInUseError(
                f"{self._dirs.url} holds version {last.number}, which is not that of {self._reader.store.url}. "
                "Nothing was written; choose another target."
            )
        self._note(last.number)
        return True

    def _note(self, number: int) -> Weights:
        """Keep a copy of the replica's weights, which change with each version."""
        self.number, self._weights = number, {name: each.clone() for name, each in self._replica.state_dict().items()}
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

    def _delta(self, number: int, old: Weights) -> int:
        before = dict(self._replica.fingerprints)
        self._replica.sync(number)
        tensors, after = self._replica.state_dict(), self._replica.fingerprints
        new = {name: tensors[name].clone() for name in tensors if before[name] != after[name]}
        file, data = "model-00001-of-00001.safetensors", b""
        if new:
            sums = {name: version_dirs.checksum(self._algorithm, bytes_of(tensor)) for name, tensor in new.items()}
            coded = {
                name: torch.frombuffer(
                    bytearray(version_dirs.encode(self._encoding, bytes_of(old[name]), bytes_of(tensor))), dtype=torch.uint8
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
        self._put(number, INDEX, json.dumps({"metadata": metadata, "weight_map": weight_map}).encode())
