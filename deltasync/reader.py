"""FOLLOW: read a channel. Everything that leaves here was checked against the digest that refers to it.

The chain of trust: head names the newest manifest's sha256, a manifest names those of its files and of the manifest that it
builds on, and the fingerprint of the resulting bits is checked after commit. With trusted keys every document is held to its
signature before it is parsed. Nothing here touches weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from deltasync import anchor, bits, chain, checkpoint, codec, fingerprint, layout, manifest, signing
from deltasync.codec.base import load_tensors
from deltasync.config import ReaderSettings
from deltasync.errors import (
    ConfigError,
    CorruptDataError,
    MissingVersionError,
    ModelMismatchError,
    NotPublishedError,
    ObjectMissingError,
    RunMismatchError,
    StaleHeadError,
)
from deltasync.kernels import cpu
from deltasync.manifest import Anchor, Channel, Delta, Document, FileRef, Fold, Head, Manifest, Reference
from deltasync.signing import Trusted
from deltasync.stores.base import Store
from deltasync.stores.cache import CachedStore, Check
from deltasync.types import Patch, TensorSpec

_FOLDS_FROM = 4  # steps from which on a listing of the folds is likely to save more than it costs
_FILES_AHEAD = 2
# Most bytes that a delta, fold or anchor takes: for each element, for each tensor, and beside.
_ELEMENT_BYTES, _TENSOR_BYTES, _FILE_BYTES = 32, 1 << 12, 1 << 20
_MANIFESTS = 256  # each with its chain takes some 30 kB


FetchedStep = tuple[Delta | Fold, Sequence[tuple[FileRef, bytes]]]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Document = TypeVar("_Document", bound=Document)


def ahead(action: Callable[[_Item], _Result], items: Sequence[_Item], count: int) -> Generator[_Result, None, None]:
    """Results of `action` in order, those of the next `count` items being made in threads meanwhile."""
    if len(items) == 1:
        yield action(items[0])
        return
    with ThreadPoolExecutor(count, thread_name_prefix="deltasync-fetch") as pool:
        waiting = deque(pool.submit(action, item) for item in items[:count])
        try:
            for at in range(len(items)):
                result = waiting.popleft().result()
                if at + count < len(items):
                    waiting.append(pool.submit(action, items[at + count]))
                yield result
        finally:
            for future in waiting:
                future.cancel()


class ChannelReader:
    """One channel, read-only. Pins the run it saw first: another run under the same URL is refused.

    Args:
        store: The channel's.
        trusted_keys: What no such key has signed is refused; from the environment if None, and else everything is taken.
        max_head_age_s: See `ReaderSettings`; not from the environment.

    Attributes:
        trusted: The keys, None if everything is taken.
        signed: Whether `channel` found a signature, checked or not.
    """

    def __init__(
        self, store: Store, trusted_keys: str | Path | Trusted | None = None, max_head_age_s: float | None = None
    ) -> None:
        self.store = store
        if not isinstance(trusted_keys, Trusted):
            path = ReaderSettings.from_env(trusted_keys=trusted_keys).trusted_keys
            trusted_keys = None if path is None else Trusted(path=Path(path))
        self.trusted = trusted_keys
        self.signed = False
        self._max_head_age_s = max_head_age_s
        self._channel: Channel | None = None
        self._pinned = False
        self._specs: dict[str, TensorSpec] = {}
        # Immutable; the last ones are kept to plan without reading them again.
        self._manifests: dict[int, tuple[Manifest, str]] = {}
        self._trimming = threading.Lock()
        self._folds: tuple[int, list[chain.Step]] = 0, []
        self._distrusted: set[chain.Step] = set()

    def channel(self) -> Channel:
        """The channel's description.

        Raises:
            NotPublishedError: there is none yet.
        """
        if self._channel is None:
            try:
                data = self.store.read(layout.CHANNEL, manifest.DOCUMENT_BYTES)
            except ObjectMissingError:
                raise NotPublishedError(f"{self.store.url} holds no channel yet.") from None
            self._channel = self.decode(data, Channel, layout.CHANNEL)
            self.signed = signing.signed_by(data) is not None
            self._specs = self._channel.specs
        return self._channel

    def decode(self, data: bytes, kind: type[_Document], key: str) -> _Document:
        """A document that was read, see `manifest.decode`, once it is known to be from whom it must be.

        Raises:
            SignatureError: it is not.
            FormatError: as `manifest.decode`.
        """
        if self.trusted is not None:
            self.trusted.check(key, data)
        return manifest.decode(data, kind, key)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensor table by name."""
        self.channel()
        return self._specs

    def head(self) -> Head:
        """The newest complete version.

        Raises:
            NotPublishedError: no version is complete yet.
            RunMismatchError: head belongs to another run than the channel that was read first.
            StaleHeadError: it is too old.
        """
        return self.read_head()[0]

    def read_head(self) -> tuple[Head, bytes]:
        """As `head`, with the bytes of its document."""
        channel = self.channel()
        try:
            data = self.store.read(layout.HEAD, manifest.DOCUMENT_BYTES)
        except ObjectMissingError:
            raise NotPublishedError(f"{self.store.url} holds no complete version yet.") from None
        head = self.decode(data, Head, layout.HEAD)
        if head.run_id != channel.run_id and not self._pinned:
            # Nothing names the digest of channel.json: what was read of it may have been damaged on the way.
            self._channel = None
            channel = self.channel()
        self._check_run(layout.HEAD, head.run_id, channel.run_id)
        self._pinned = True
        self._check_age(head)
        return head, data

    def _check_age(self, head: Head) -> None:
        if self._max_head_age_s is None:
            return
        created_at = self.manifest(head.version, head.manifest_sha256).created_at
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(created_at)
        if age.total_seconds() > self._max_head_age_s:
            raise StaleHeadError(
                f"Head names version {head.version}, which is {age.total_seconds():.0f} s old; at most "
                f"{self._max_head_age_s:g} s are allowed. Nothing newer was published, or somebody keeps it back."
            )

    def manifest(self, version: int, sha256: str | None = None) -> Manifest:
        """The manifest of one version.

        Args:
            version: Which.
            sha256: Digest it must have, where the caller knows it (from head, or from the manifest of the next version).

        Raises:
            MissingVersionError: not in the store.
            CorruptDataError: not the bytes that were named, or not a manifest of this version.
        """
        return self.read_manifest(version, sha256)[0]

    def read_manifest(self, version: int, sha256: str | None = None) -> tuple[Manifest, str]:
        """As `manifest`, with the digest of its bytes."""
        key = layout.manifest(version)
        if version not in self._manifests:
            self._manifests[version] = self._read_manifest(version, key, sha256)
        document, found = self._manifests[version]
        with self._trimming:
            if len(self._manifests) > _MANIFESTS:
                del self._manifests[next(iter(self._manifests))]
        if sha256 is not None and found != sha256:
            self._manifests.pop(version, None)
            raise _not_the_named(key, "head or the next manifest")
        return document, found

    def _read_manifest(self, version: int, key: str, sha256: str | None) -> tuple[Manifest, str]:
        def check(data: bytes) -> None:
            if manifest.sha256_hex(data) != sha256:
                raise _not_the_named(key, "head or the next manifest")

        try:
            most = manifest.DOCUMENT_BYTES
            data = self.store.read(key, most) if sha256 is None else self._read_known(key, sha256, 0, check, most)
        except ObjectMissingError:
            raise MissingVersionError(f"{self.store.url} has no manifest of version {version} ({key}).") from None
        document = self.decode(data, Manifest, key)
        if document.version != version:
            raise CorruptDataError(f"{key} describes version {document.version}.")
        self._check_run(key, document.run_id, self.channel().run_id)
        return document, manifest.sha256_hex(data)

    def versions(self) -> list[int]:
        """Versions whose manifest is in the store, ascending. Costs a listing."""
        found = (layout.manifest_version(info.key) for info in self.store.list(layout.MANIFESTS))
        return sorted(version for version in found if version is not None)

    def plan(self, current: int | None, head: Head, version: int | None = None) -> list[chain.Step]:
        """The cheapest steps from `current` to `version` (default: head's).

        Costs one manifest for every anchor it looks back to, one for every delta where manifests name no chain, and a
        listing of the folds for a replica that is more than a few versions behind.

        Raises:
            MissingVersionError: version is not published, or nothing leads to it.
        """
        target = head.version if version is None else version
        if target > head.version or target < 1:
            raise MissingVersionError(f"Version {target} is not published; head is at version {head.version}.")
        if target == current:
            return []
        known = self._steps_back(target, head.manifest_sha256 if target == head.version else None, current)
        steps = self._plan(current, target, known)
        if current is None or len(steps) < _FOLDS_FROM:
            return steps
        sha256 = {step.version: step.manifest_sha256 for step in known}
        folds = [
            dataclasses.replace(fold, manifest_sha256=sha256[fold.version])
            for fold in self._list_folds(head)
            if fold.version in sha256
        ]
        return self._plan(current, target, [*known, *folds])

    def _plan(self, current: int | None, target: int, steps: list[chain.Step]) -> list[chain.Step]:
        """The cheapest way without the steps that failed, or with them if there is no other."""
        try:
            return chain.plan(current, target, [step for step in steps if step not in self._distrusted])
        except MissingVersionError:
            return chain.plan(current, target, steps)

    def _steps_back(self, target: int, sha256: str | None, current: int | None) -> list[chain.Step]:
        """Anchors and deltas from the target back to `current`, or to the last anchor that did not fail, for a replica that
        has none of these versions.
        """
        steps: list[chain.Step] = []
        wanted: int | None = target
        while wanted is not None and wanted != current:
            try:
                found = self.manifest(wanted, sha256)
            except MissingVersionError:
                # Pruned: the deltas before an anchor are only the cheaper way.
                if not any(step.use_anchor for step in steps):
                    raise
                break
            sha256 = sha256 or self._manifests[wanted][1]
            full = None
            if found.anchor is not None:
                full = chain.Step(wanted, sha256, None, found.anchor.payload_bytes)
                steps.append(full)
            if found.delta is None:
                break
            base = found.delta.base_version
            steps.append(chain.Step(wanted, sha256, base, found.delta.payload_bytes))
            if full is not None and full not in self._distrusted and (current is None or wanted < current):
                break
            wanted, sha256 = base, found.delta.base_manifest_sha256
            for link, before in itertools.pairwise(reversed(found.chain)):
                if wanted == current:
                    break
                steps.append(chain.Step(link.version, link.manifest_sha256, before.version, link.delta_bytes))
                wanted, sha256 = before.version, before.manifest_sha256
        return steps

    def _list_folds(self, head: Head) -> list[chain.Step]:
        """Every fold there is, by a listing that is made once for each head."""
        if self._folds[0] != head.version:
            infos = list(self.store.list(layout.FOLDS))
            sizes: dict[str, int] = {}
            for info in infos:
                folder = info.key.rpartition("/")[0]
                sizes[folder] = sizes.get(folder, 0) + info.bytes
            folds = []
            for info in infos:
                span = layout.fold_span(info.key)
                if span is not None:
                    folds.append(chain.Step(span[1], None, span[0], sizes[info.key.rpartition("/")[0]], info.key))
            self._folds = head.version, folds
        return self._folds[1]

    def distrust(self, step: chain.Step) -> None:
        """Plan without this step from now on where another way leads on."""
        self._distrusted.add(step)

    def distrusts(self, step: chain.Step) -> bool:
        """Whether `distrust` was told of it."""
        return step in self._distrusted

    def fold(self, step: chain.Step) -> Fold:
        """The document of a fold.

        Raises:
            MissingVersionError: it is gone.
            CorruptDataError: it is not the fold that the step names.
        """
        assert step.fold is not None
        try:
            document = self.decode(self.store.read(step.fold, manifest.DOCUMENT_BYTES), Fold, step.fold)
        except ObjectMissingError:
            raise MissingVersionError(f"{self.store.url} has no fold {step.fold} any more.") from None
        found = document.run_id, document.base_version, document.version, document.manifest_sha256
        if found != (self.channel().run_id, step.base_version, step.version, step.manifest_sha256):
            raise CorruptDataError(
                f"{step.fold} is not a fold of versions {step.base_version} to {step.version} of this channel."
            )
        return document

    def fetch(self, file: FileRef) -> bytes:
        """The bytes of one file.

        Raises:
            MissingVersionError: the object is gone.
            CorruptDataError: another length or another sha256.
        """

        def check(data: bytes) -> None:
            if len(data) != file.bytes:
                raise CorruptDataError(f"{file.key} has {len(data)} bytes, its manifest says {file.bytes}.")
            if manifest.sha256_hex(data) != file.sha256:
                raise _not_the_named(file.key, "its manifest")

        try:
            return self._read_known(file.key, file.sha256, file.bytes, check, file.bytes)
        except ObjectMissingError:
            raise MissingVersionError(f"{file.key} is referred to by a manifest but is not in {self.store.url}.") from None

    def _read_known(self, key: str, sha256: str, size: int, check: Check, most_bytes: int) -> bytes:
        """An object whose digest is known, checked; out of the node's cache if the store has one."""
        if isinstance(self.store, CachedStore):
            return self.store.read_known(key, sha256, size, check, most_bytes)
        data = self.store.read(key, most_bytes)
        check(data)
        return data

    def _fetch_all(self, files: Sequence[FileRef]) -> Iterator[tuple[FileRef, bytes]]:
        """Files in order, the next ones being fetched while one is used."""
        return zip(files, ahead(self.fetch, files, _FILES_AHEAD), strict=True)

    def fetch_step(self, step: chain.Step) -> FetchedStep:
        """All that it takes to decode a delta or fold, in memory. May run in several threads.

        Raises:
            FormatError, MissingVersionError: as `fetch`.
        """
        delta = self._delta(step)
        return delta, [(file, self.fetch(file)) for file in delta.files]

    def _delta(self, step: chain.Step) -> Delta | Fold:
        delta = self.manifest(step.version, step.manifest_sha256).delta if step.fold is None else self.fold(step)
        if delta is None or delta.base_version != step.base_version:
            raise MissingVersionError(f"Version {step.version} has no delta from version {step.base_version}.")
        self._check_size(step.version, delta)
        return delta

    def _check_size(self, version: int, part: Delta | Fold | Anchor) -> None:
        """Refuse what no model of these tensors takes, before any of it is fetched."""
        most = sum(_ELEMENT_BYTES * spec.element_count + 64 * len(spec.name) for spec in self.specs.values())
        most += _TENSOR_BYTES * len(self.specs) + _FILE_BYTES
        if part.payload_bytes > most:
            raise CorruptDataError(
                f"Version {version} names {part.payload_bytes:,} bytes, but the channel's tensors take {most:,} at most."
            )

    def patches(
        self,
        step: chain.Step,
        old: codec.OldBits | None = None,
        wanted: codec.Wanted | None = None,
        fetched: FetchedStep | None = None,
    ) -> Iterator[tuple[Patch, int]]:
        """Patches of one step and the fingerprint of each tensor after it, fetched and decoded tensor by tensor.

        Args:
            step: Which.
            old: Gives the bits of a tensor before the step; some codecs need them.
            wanted: As in `Codec.decode`.
            fetched: What `fetch_step` returned; otherwise files are fetched as they are needed.

        Raises:
            FormatError, MissingVersionError: as `fetch` and `Codec.decode`.
        """
        if step.use_anchor:
            version = self.manifest(step.version, step.manifest_sha256)
            if version.reference is None:
                yield from self._anchor_patches(version)
            else:
                yield from self._reference_patches(version.version, version.reference)
            return
        files: Iterable[tuple[FileRef, bytes]]
        if fetched is None:
            delta = self._delta(step)
            files = self._fetch_all(delta.files)
        else:
            delta, files = fetched
        parts, changed = _Parts(), 0
        for file, data in files:
            with _naming(file.key):
                payload = codec.open_payload(data)
            names = (payload.codec, payload.version, payload.base_version)
            if names != (delta.codec, step.version, delta.base_version):
                raise CorruptDataError(f"{file.key} says {names}, which is not what its manifest says.")
            changed += sum(row["changed"] for row in payload.patches.values())
            if changed > delta.changed:
                raise CorruptDataError(f"{file.key} changes more elements than its manifest says, {delta.changed}.")
            fingerprints = payload.fingerprints
            for patch in codec.get(payload.codec).decode(payload, self.specs, old, wanted):
                parts.check(patch, fingerprints[patch.name], file.key)
                yield patch, fingerprints[patch.name]

    def _anchor_patches(self, version: Manifest) -> Iterator[tuple[Patch, int]]:
        assert version.anchor is not None
        self._check_size(version.version, version.anchor)
        missing = dict(self.specs)
        for file, data in self._fetch_all(version.anchor.files):
            with _naming(file.key):
                fingerprints, tensors = anchor.fingerprints(data), load_tensors(data)
            for name, tensor in tensors.items():
                # Not `spec_of`, for which a dtype that no channel carries is the caller's mistake.
                spec, found = missing.pop(name, None), (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                if spec is None or found != (spec.dtype, spec.shape) or name not in fingerprints:
                    raise CorruptDataError(
                        f"{file.key} holds {name} {found[0]}{list(found[1])}, which the channel does not."
                    )
                yield Patch(name, None, bits.bits_of(tensor), absolute=True), fingerprints[name]
        if missing:
            raise CorruptDataError(f"Anchor {version.version} lacks {', '.join(sorted(missing))}.")

    def _reference_patches(self, version: int, reference: Reference) -> Iterator[tuple[Patch, int]]:
        if reference.fingerprints.keys() != self.specs.keys():
            raise CorruptDataError(f"The reference of version {version} does not name the channel's tensors.")
        try:
            found = checkpoint.load(reference)
        except ConfigError as error:
            raise MissingVersionError(
                f"Version {version} refers to the checkpoint {reference}, which this machine cannot load: {error}"
            ) from error
        wrong = []
        try:
            for name, bits_N in found.read(self.specs):
                expected = int(reference.fingerprints[name], 16)
                if cpu.fingerprint(fingerprint.tensor_key(name), bits_N) == expected:
                    yield Patch(name, None, bits_N, absolute=True), expected
                else:
                    wrong.append(name)
        except ModelMismatchError as error:
            raise CorruptDataError(f"The checkpoint {reference} is not version {version}: {error}") from error
        if wrong:
            raise CorruptDataError(f"The checkpoint {reference} is not version {version}: {_differing(wrong, self.specs)}")

    def unlike(self, head: Head, fingerprints: Mapping[str, int]) -> str | None:
        """Which tensors are not those of the checkpoint that head's anchor refers to, as a sentence.

        Args:
            head: Of the channel.
            fingerprints: Of every tensor.

        Returns:
            None if head's anchor is not a reference.
        """
        version = self.manifest(head.version, head.manifest_sha256).anchor_version
        reference = self.manifest(version).reference
        if reference is None:
            return None
        wrong = [name for name, digest in reference.fingerprints.items() if fingerprints.get(name) != int(digest, 16)]
        return f"The weights here are not those of {reference}: {_differing(wrong, self.specs)}"

    @staticmethod
    def _check_run(key: str, found: str, expected: str) -> None:
        if found != expected:
            raise RunMismatchError(
                f"{key} belongs to run {found}, this channel to run {expected}. Follow a channel of its own."
            )


class _Parts:
    """The payloads of one step: those that patch the same tensor patch different ranges of it, to the same fingerprint."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, list[tuple[int, int]]]] = {}

    def check(self, patch: Patch, expected: int, key: str) -> None:
        index_K = patch.index_K
        first, last = (0, sys.maxsize) if index_K is None else (int(index_K[0]), int(index_K[-1]))
        known, ranges = self._known.setdefault(patch.name, (expected, []))
        if known != expected or any(first <= end and start <= last for start, end in ranges):
            raise CorruptDataError(f"{key} contradicts another file of its version about {patch.name}.")
        ranges.append((first, last))


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Say of what is wrong within which file it is."""
    try:
        yield
    except CorruptDataError as error:
        raise CorruptDataError(f"{key}: {error}") from error


def _not_the_named(key: str, where: str) -> CorruptDataError:
    return CorruptDataError(f"{key} does not have the sha256 that {where} names.")


def _differing(names: Sequence[str], specs: Mapping[str, TensorSpec]) -> str:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{len(names)} of {len(specs)} tensors differ: {shown}."
