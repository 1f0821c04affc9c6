"""Channels of format 2 made record by record, without a publisher, so that tests can have whatever a store
may hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import msgspec
import torch

from deltasync import codec
from deltasync.channel import anchors, documents, keys, record
from deltasync.channel.documents import (
    REFERENCE,
    Anchor,
    Channel,
    DeltaFiles,
    EpochDocument,
    File,
    Head,
    Record,
    Reference,
    VersionId,
    sha256_hex,
)
from deltasync.channel.record import StoredRecord
from deltasync.channel.signing import Signer
from deltasync.codec.base import Encoded
from deltasync.kernels import native
from deltasync.stores import Store
from deltasync.tensors import Delta, Layout, Sparse, TensorSpec, fingerprint
from deltasync.tensors.bits import bits_of, spec_of, tensor_of
from deltasync.tensors.delta import joined
from tests.builders import Weights, trained, weights

EPOCH = "000001-00000001"
RUN = "run"


@dataclasses.dataclass
class Made:
    """A channel in a store.

    Attributes:
        bits: The weights of each version, by the digest of its record.
        tip: The newest version of the epoch that is written now.
    """

    store: Store
    signer: Signer | None = None
    codec_name: str = "packed"
    epoch: str = EPOCH
    tip: VersionId | None = None
    bits: dict[str, Weights] = dataclasses.field(default_factory=dict)
    specs: dict[str, TensorSpec] = dataclasses.field(default_factory=dict)
    run_id: str = RUN

    def create(self, model: Weights, fencing: str = "seal", owner: str | None = None) -> None:
        """Store channel.json."""
        self.specs = {name: spec_of(name, tensor) for name, tensor in model.items()}
        table = {name: (spec.dtype, spec.shape) for name, spec in self.specs.items()}
        channel = Channel(
            run_id=self.run_id,
            created_at=documents.now(),
            fencing=fencing,
            epoch=self.epoch,
            dtype="bfloat16",
            tensors=table,
            tensors_sha256=documents.table_sha256(table),
            owner=msgspec.UNSET if owner is None else owner,
        )
        self._put(keys.CHANNEL, self._signed(keys.CHANNEL, documents.encode(channel)))

    def anchor(self, model: Weights, step: int | None = None, shard_bytes: int = 1 << 30) -> StoredRecord:
        """The next version, of full weights."""
        number = 1 if self.tip is None else self.tip.version + 1
        stored = self.store_anchor(model, number, shard_bytes)
        return self.append(self.record("anchor", number, model, anchor=stored, step=step), None, model)

    def refer(self, model: Weights, reference: Reference) -> StoredRecord:
        """The next version, of weights that lie elsewhere; `reference` gets their fingerprints."""
        number = 1 if self.tip is None else self.tip.version + 1
        digests = {name: self.fingerprint(name, model) for name in self.specs}
        anchor = Anchor(reference=dataclasses.replace(reference, fingerprints=digests))
        return self.append(
            self.record("anchor", number, model, anchor=anchor, requires=[REFERENCE]), None, model
        )

    def delta(
        self, model: Weights, parts: int = 0, step: int | None = None, inline: bool = True
    ) -> StoredRecord:
        """The next version, a delta; so many parts hold some of its tensors each, the record the rest, if
        `inline`.
        """
        assert self.tip is not None
        number = self.tip.version + 1
        groups = self.encode(self.bits[self.tip.sha256], model, number, self.tip.version, parts + inline)
        files = []
        for at, (encoded, _) in enumerate(groups[:parts], start=1):
            key = f"{keys.parts_folder(number, self.epoch)}/{keys.part(0, at)}"
            files.append(self.put_file(key, encoded.to_bytes()))
        inline = groups[parts][0] if len(groups) > parts else None
        delta = DeltaFiles(codec=self.codec_name, changed=sum(changed for _, changed in groups), parts=files)
        return self.append(self.record("delta", number, model, delta=delta, step=step), inline, model)

    def seal(self, next_epoch: str) -> StoredRecord:
        """End the log, and go on in another epoch."""
        number = 1 if self.tip is None else self.tip.version + 1
        sealed = Record(
            run_id=self.run_id,
            kind="seal",
            version=number,
            epoch=self.epoch,
            created_at=documents.now(),
            base=self.tip,
            next_epoch=next_epoch,
        )
        stored = record.encode(sealed, keys.slot(number, self.epoch), None, self.signer)
        self._put(stored.key, stored.data)
        self.epoch = next_epoch
        return stored

    def compaction(self, base: VersionId, version: VersionId) -> StoredRecord:
        """Another way from one version to a later one."""
        before, after = self.bits[base.sha256], self.bits[version.sha256]
        groups = self.encode(before, after, version.version, base.version, 1)
        delta = DeltaFiles(codec=self.codec_name, changed=sum(changed for _, changed in groups))
        return self._compaction(base, version, after, groups[0][0] if groups else None, delta=delta)

    def announce(self, version: VersionId, requires: Sequence[str] = ()) -> StoredRecord:
        """Full weights of a version, beside the log."""
        model = self.bits[version.sha256]
        stored = self.store_anchor(model, version.version)
        return self._compaction(None, version, model, None, anchor=stored, requires=[*requires])

    def open(self, epoch: str, continues: VersionId | None) -> None:
        """Store what an epoch says of itself; write in it from now on."""
        opening = EpochDocument(
            run_id=self.run_id, epoch=epoch, continues=continues, writer="a test", created_at=documents.now()
        )
        self._put(keys.epoch_document(epoch), documents.encode(opening))
        self.epoch = epoch

    def head(self, version: VersionId | None = None) -> None:
        """Point head at a version, the newest by default."""
        newest = version or self.tip
        assert newest is not None
        named = Head(run_id=self.run_id, version=newest.version, epoch=newest.epoch, sha256=newest.sha256)
        self._put(keys.HEAD, documents.encode(named))

    def append(self, document: Record, payload: Encoded | None, model: Weights) -> StoredRecord:
        stored = record.encode(document, keys.slot(document.version, document.epoch), payload, self.signer)
        self._put(stored.key, stored.data)
        self.tip = stored.version
        self.bits[stored.sha256] = {name: tensor.clone() for name, tensor in model.items()}
        return stored

    def encode(
        self, before: Weights, after: Weights, version: int, base: int, count: int
    ) -> list[tuple[Encoded, int]]:
        """Payloads with some of the changed tensors each, and how many elements each changes."""
        layout = Layout(self.specs)
        changed = []
        for name in after:
            index_K, step_K = native.diff(bits_of(before[name]), bits_of(after[name]))
            if index_K.size:
                width, first, _ = layout.span(name)
                at_K = (index_K + first).astype(layout.vectors[width].index_dtype)
                changed.append(Delta(layout, {width: Sparse(at_K, step_K)}))
        encoded = []
        for group in (changed[at::count] for at in range(count)):
            if group:
                delta, chosen = joined(group), codec.get(self.codec_name)
                digests = self.fingerprints(after)
                encoded.append(
                    (
                        chosen.encode(delta, lambda name: (bits_of(after[name]), 0), digests, version, base),
                        delta.changed,
                    )
                )
        return encoded

    def fingerprint(self, name: str, model: Weights) -> str:
        return fingerprint.to_hex(native.fingerprint(fingerprint.tensor_key(name), bits_of(model[name])))

    def fingerprints(self, model: Weights) -> dict[str, int]:
        return {name: int(self.fingerprint(name, model), 16) for name in self.specs}

    def store_anchor(self, model: Weights, version: int, shard_bytes: int = 1 << 30) -> Anchor:
        """Store weight files and a config."""
        folder = keys.anchor_folder(version, self.epoch)
        tensors = {
            name: tensor_of(bits_of(tensor).copy(), self.specs[name]) for name, tensor in model.items()
        }
        written = anchors.weight_files(tensors, self.fingerprints(model), shard_bytes)
        files = {name: self.put_file(f"{folder}/{name}", data) for name, data in written}
        model_files = [self.put_file(f"{folder}/config.json", b"{}")]
        model_files += [file for name, file in files.items() if name == anchors.INDEX]
        weight_files = [file for name, file in files.items() if name != anchors.INDEX]
        return Anchor(directory=folder, files=weight_files, model_files=model_files)

    def put_file(self, key: str, data: bytes) -> File:
        self._put(key, data)
        return File(key=key, bytes=len(data), sha256=sha256_hex(data))

    def record(self, kind: str, number: int, model: Weights, **rest: object) -> Record:
        return Record(
            run_id=self.run_id,
            kind=kind,
            version=number,
            epoch=self.epoch,
            created_at=documents.now(),
            base=self.tip,
            fingerprint=fingerprint.to_hex(sum(self.fingerprints(model).values())),
            **rest,  # type: ignore[arg-type]
        )

    def _compaction(
        self,
        base: VersionId | None,
        version: VersionId,
        model: Weights,
        payload: Encoded | None,
        **rest: object,
    ) -> StoredRecord:
        number, kind = version.version, "announcement" if base is None else "compaction"
        key = (
            keys.announcement(number, self.epoch)
            if base is None
            else keys.compaction(base.version, number, self.epoch)
        )
        made = self.record(kind, number, model, **rest)
        made = dataclasses.replace(made, epoch=version.epoch, base=base, sha256=version.sha256)
        stored = record.encode(made, key, payload, self.signer)
        self._put(key, stored.data)
        return stored

    def _signed(self, key: str, data: bytes) -> bytes:
        return data if self.signer is None else self.signer.seal(key, data)

    def _put(self, key: str, data: bytes | None) -> None:
        assert data is not None
        self.store.put(key, data)


def made(
    store: Store, versions: int, signer: Signer | None = None, compactions: Sequence[tuple[int, int]] = ()
) -> Made:
    """A channel with an anchor and deltas after it, compactions between some of them, and head."""
    channel = Made(store, signer)
    model: Weights = weights()
    channel.create(model)
    written = [channel.anchor(model).version]
    for seed in range(1, versions):
        model = trained(model, seed)
        written.append(channel.delta(model).version)
    for base, version in compactions:
        channel.compaction(written[base - 1], written[version - 1])
    channel.head()
    return channel


def states_of(element_count: int, count: int = 12) -> list[dict[str, torch.Tensor]]:
    """Weights, version by version; about 20 elements of `w` change each time, and one of `ids`."""
    random = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(element_count, generator=random).to(torch.bfloat16), "ids": torch.arange(9)}]
    for _ in range(count - 1):
        w, ids = (tensor.clone() for tensor in states[-1].values())
        w.view(torch.int16)[torch.randint(0, element_count, (20,), generator=random)] += 1
        ids[0] += 1
        states.append({"w": w, "ids": ids})
    return states


def filled(
    store: Store,
    states: Sequence[Weights],
    *,
    anchors: Collection[int] = (),
    parts: Collection[int] = (),
    seals: Collection[int] = (),
    compactions: Collection[tuple[int, int]] = (),
    signer: Signer | None = None,
) -> tuple[Made, list[VersionId]]:
    """A channel with a version of each state, whose trainer's step is ten times its number; and its versions.

    Args:
        store: Where.
        states: Weights of the versions, from 1 on; the first is an anchor, the others are deltas.
        anchors: Versions whose anchor is announced beside the log.
        parts: Versions whose payload is in parts.
        seals: Versions after which the log is sealed and an epoch begins.
        compactions: (base, version) of each.
        signer: Signs it.
    """
    channel, versions = Made(store, signer), list[VersionId]()
    channel.create(states[0])
    for number, model in enumerate(states, start=1):
        step = 10 * number
        stored = (
            channel.anchor(model, step) if number == 1 else channel.delta(model, 2 * (number in parts), step)
        )
        versions.append(stored.version)
        if number in anchors:
            channel.announce(stored.version)
        for base, version in compactions:
            if version == number:
                channel.compaction(versions[base - 1], stored.version)
        if number in seals:
            following = keys.new_epoch(keys.epoch_number(channel.epoch) + 1)
            channel.seal(following)
            opening = EpochDocument(
                run_id=RUN, epoch=following, continues=channel.tip, writer="", created_at=documents.now()
            )
            channel.put_file(keys.epoch_document(following), documents.encode(opening))
    channel.head()
    return channel, versions
