"""FOLLOW: read a channel. Everything that leaves here was checked against the digest that refers to it.

The chain of trust: head names the newest manifest's sha256, a manifest names those of its files and of the manifest that it
builds on, and the fingerprint of the resulting bits is checked after commit. Nothing here touches weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load

from deltasync import anchor, bits, chain, codec, layout, manifest
from deltasync.errors import (
    CorruptDataError,
    MissingVersionError,
    NotPublishedError,
    ObjectMissingError,
    RunMismatchError,
)
from deltasync.manifest import Channel, FileRef, Head, Manifest
from deltasync.stores.base import Store
from deltasync.types import Patch, TensorSpec


class ChannelReader:
    """One channel, read-only. Pins the run it saw first: another run under the same URL is refused."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._channel: Channel | None = None
        self._specs: dict[str, TensorSpec] = {}
        # Immutable, and small next to weights: kept to plan without reading them again.
        self._manifests: dict[int, tuple[Manifest, str]] = {}

    def channel(self) -> Channel:
        """The channel's description.

        Raises:
            NotPublishedError: there is none yet.
        """
        if self._channel is None:
            try:
                data = self.store.read(layout.CHANNEL)
            except ObjectMissingError:
                raise NotPublishedError(f"{self.store.url} holds no channel yet.") from None
            self._channel = manifest.decode(data, Channel, layout.CHANNEL)
            self._specs = self._channel.specs
        return self._channel

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
        """
        channel = self.channel()
        try:
            data = self.store.read(layout.HEAD)
        except ObjectMissingError:
            raise NotPublishedError(f"{self.store.url} holds no complete version yet.") from None
        head = manifest.decode(data, Head, layout.HEAD)
        self._check_run(layout.HEAD, head.run_id, channel.run_id)
        return head

    def manifest(self, version: int, sha256: str | None = None) -> Manifest:
        """The manifest of one version.

        Args:
            version: Which.
            sha256: Digest it must have, where the caller knows it (from head, or from the manifest of the next version).

        Raises:
            MissingVersionError: not in the store.
            CorruptDataError: not the bytes that were named, or not a manifest of this version.
        """
        key = layout.manifest(version)
        if version not in self._manifests:
            self._manifests[version] = self._read_manifest(version, key)
        document, found = self._manifests[version]
        if sha256 is not None and found != sha256:
            del self._manifests[version]
            raise CorruptDataError(f"{key} does not have the sha256 that head or the next manifest names.")
        return document

    def _read_manifest(self, version: int, key: str) -> tuple[Manifest, str]:
        try:
            data = self.store.read(key)
        except ObjectMissingError:
            raise MissingVersionError(f"{self.store.url} has no manifest of version {version} ({key}).") from None
        document = manifest.decode(data, Manifest, key)
        if document.version != version:
            raise CorruptDataError(f"{key} describes version {document.version}.")
        self._check_run(key, document.run_id, self.channel().run_id)
        return document, manifest.sha256_hex(data)

    def versions(self) -> list[int]:
        """Versions whose manifest is in the store, ascending. Costs a listing."""
        found = (layout.manifest_version(info.key) for info in self.store.list(layout.MANIFESTS))
        return sorted(version for version in found if version is not None)

    def plan(self, current: int | None, head: Head, version: int | None = None) -> list[chain.Step]:
        """The cheapest steps from `current` to `version` (default: head's), reading the manifests in between.

        Raises:
            MissingVersionError: version is not published, or nothing leads to it.
        """
        target = head.version if version is None else version
        if target > head.version or target < 1:
            raise MissingVersionError(f"Version {target} is not published; head is at version {head.version}.")
        manifests: dict[int, Manifest] = {}
        wanted: int | None = target
        sha256 = head.manifest_sha256 if target == head.version else None
        while wanted is not None and wanted != current:
            try:
                found = manifests[wanted] = self.manifest(wanted, sha256)
            except MissingVersionError:
                # Pruned: the deltas before an anchor are only the cheaper way.
                if not any(document.anchor for document in manifests.values()):
                    raise
                break
            past_current = current is None or wanted < current
            if found.delta is None or (found.anchor and past_current):
                break
            wanted, sha256 = found.delta.base_version, found.delta.base_manifest_sha256
        return chain.plan(current, target, manifests)

    def fetch(self, file: FileRef) -> bytes:
        """The bytes of one file.

        Raises:
            MissingVersionError: the object is gone.
            CorruptDataError: another length or another sha256.
        """
        try:
            data = self.store.read(file.key)
        except ObjectMissingError:
            raise MissingVersionError(f"{file.key} is referred to by a manifest but is not in {self.store.url}.") from None
        if len(data) != file.bytes:
            raise CorruptDataError(f"{file.key} has {len(data)} bytes, its manifest says {file.bytes}.")
        if manifest.sha256_hex(data) != file.sha256:
            raise CorruptDataError(f"{file.key} does not have the sha256 that its manifest names.")
        return data

    def patches(self, step: chain.Step, old: codec.OldBits | None = None) -> Iterator[tuple[Patch, int]]:
        """Patches of one step and the fingerprint of each tensor after it, fetched and decoded tensor by tensor.

        Args:
            step: Which.
            old: Gives the bits of a tensor before the step; some codecs need them.

        Raises:
            FormatError, MissingVersionError: as `fetch` and `Codec.decode`.
        """
        return self._anchor_patches(step.manifest) if step.use_anchor else self._delta_patches(step.manifest, old)

    def _delta_patches(self, version: Manifest, old: codec.OldBits | None) -> Iterator[tuple[Patch, int]]:
        assert version.delta is not None
        for file in version.delta.files:
            payload = codec.open_payload(self.fetch(file))
            names = (payload.codec, payload.version, payload.base_version)
            if names != (version.delta.codec, version.version, version.delta.base_version):
                raise CorruptDataError(f"{file.key} says {names}, which is not what its manifest says.")
            fingerprints = payload.fingerprints
            for patch in codec.get(payload.codec).decode(payload, self.specs, old):
                yield patch, fingerprints[patch.name]

    def _anchor_patches(self, version: Manifest) -> Iterator[tuple[Patch, int]]:
        assert version.anchor is not None
        missing = dict(self.specs)
        for file in version.anchor.files:
            data = self.fetch(file)
            fingerprints = anchor.fingerprints(data)
            for name, tensor in _load(data, file.key).items():
                # Not `spec_of`, for which a dtype that no channel carries is the caller's mistake.
                spec, found = missing.pop(name, None), (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                if spec is None or found != (spec.dtype, spec.shape) or name not in fingerprints:
                    raise CorruptDataError(
                        f"{file.key} holds {name} {found[0]}{list(found[1])}, which the channel does not."
                    )
                yield Patch(name, None, bits.bits_of(tensor), absolute=True), fingerprints[name]
        if missing:
            raise CorruptDataError(f"Anchor {version.version} lacks {', '.join(sorted(missing))}.")

    @staticmethod
    def _check_run(key: str, found: str, expected: str) -> None:
        if found != expected:
            raise RunMismatchError(
                f"{key} belongs to run {found}, this channel to run {expected}. Follow a channel of its own."
            )


def _load(data: bytes, key: str) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = safetensors_load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CorruptDataError(f"{key} is not a safetensors file: {error}.") from error
    return tensors
