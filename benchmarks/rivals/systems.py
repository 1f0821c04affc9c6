"""Each system by its own code: how its trainer makes the bytes of one step, and how its replica takes them.

A system is prepared without being timed (`trainer`, `replica`), then makes or takes one payload, which is
timed. Where a system reads files, they are in the page cache. `make rivals` installs the packages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pickle
import shutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from deltasync import Publisher, Replica
from deltasync.channel.keys import HEAD, VERSIONS

Weights = dict[str, torch.Tensor]
"""bfloat16 tensors by name, on the host."""

WEIGHTS = "model.safetensors"
_WAIT_S = 600.0


class Holder(Protocol):
    """A replica that holds the old weights."""

    def apply(self, payload: bytes) -> None:
        """Take a payload."""

    def weights(self) -> Weights:
        """Return what the replica now holds."""


@dataclasses.dataclass
class System:
    """One system, with the weights of two consecutive steps.

    Args:
        folder: For its files; `old/` and `new/` in it are checkpoints with `WEIGHTS`.
        old: The weights before the step.
        new: Those after it.
    """

    package: ClassVar[str]  # its name on the index
    needs: ClassVar[str]  # what a replica must have, and what it makes of it

    folder: Path
    old: Weights
    new: Weights

    def trainer(self) -> Callable[[], bytes]:
        """Prepare a trainer that published the old weights; the function compares, encodes and returns the
        payload.
        """
        raise NotImplementedError

    def replica(self) -> Holder:
        """Prepare a replica that holds the old weights, beside what the trainer stored."""
        raise NotImplementedError

    def fresh(self, name: str) -> Path:
        """Return an empty folder."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path


# --- deltasync
# ---------------------------------------------------------------------------------------------------------


class DeltaSync(System):
    """From `publish` to a visible version, and from that version to proven weights, over a directory.

    The payload is the version's record, with the document and all digests in it.
    """

    package = "deltasync"
    needs = "old values of what changed; patched in place"
    codec: ClassVar[str] = "context"
    publisher: Publisher | None = None

    def trainer(self) -> Callable[[], bytes]:
        """See `System`."""
        self._finish()
        self.channel = self.fresh("channel")
        self.publisher = publisher = Publisher(
            self.channel.as_uri(), codec=self.codec, initial=self.folder / "old"
        )
        publisher.publish(self.old).wait(_WAIT_S)

        def encode() -> bytes:
            publisher.publish(self.new).wait(_WAIT_S)
            return self._record().read_bytes()

        return encode

    def _finish(self) -> None:
        """Wait for what the publisher still writes, such as head."""
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def _record(self) -> Path:
        """Return the record of version 2, which holds its payload too."""
        if any(self.channel.glob("parts/*/*")):
            raise AssertionError("the payload is larger than a record")
        (found,) = self.channel.glob(f"{VERSIONS}*/{2:010}.*")
        return found

    def replica(self) -> Holder:
        """See `System`."""
        self._finish()
        channel = self.fresh("replica")
        shutil.copytree(self.channel, channel, dirs_exist_ok=True)
        record = channel / self._record().relative_to(self.channel)
        record.unlink()  # until it is published
        (channel / HEAD).unlink(missing_ok=True)
        replica = Replica(channel.as_uri())
        if replica.load(self.folder / "old") != 1:
            raise AssertionError("the replica does not hold version 1")
        return _Follower(replica, record)


class DeltaSyncPacked(DeltaSync):
    """The codec that is the least work on CPUs."""

    codec = "packed"


@dataclasses.dataclass
class _Follower:
    replica: Replica
    record: Path

    def apply(self, payload: bytes) -> None:
        self.record.write_bytes(payload)
        self.replica.sync(2)

    def weights(self) -> Weights:
        return self.replica.state_dict()


# --- Fireworks
# ---------------------------------------------------------------------------------------------------------


class Arc2(System):
    """XOR of whole tensors, zstd, Adler-32 of each new tensor, in a safetensors file."""

    package = "fireworks-delta-compression"
    needs = "the checkpoint as a file, rewritten in place; the engine then loads it"
    format: ClassVar[str] = "arc_v2"

    def trainer(self) -> Callable[[], bytes]:
        """See `System`."""
        from fireworks_delta_compression import delta_compress_dicts_to_file

        path = self.fresh("fireworks") / "delta.safetensors"

        def encode() -> bytes:
            delta_compress_dicts_to_file(
                src=self.old, dst=self.new, diff_file=str(path), compression_format=self.format
            )
            return path.read_bytes()

        return encode

    def replica(self) -> Holder:
        """See `System`."""
        base = self.fresh("replica") / WEIGHTS
        shutil.copy(self.folder / "old" / WEIGHTS, base)
        return _Patched(base, self.format)


@dataclasses.dataclass
class _Patched:
    base: Path
    format: str

    def apply(self, payload: bytes) -> None:
        from fireworks_delta_compression import delta_decompress_inplace

        delta = self.base.with_name("delta.safetensors")
        delta.write_bytes(payload)
        delta_decompress_inplace(
            base_path=str(self.base), diff_path=str(delta), compression_format=self.format
        )

    def weights(self) -> Weights:
        return load_file(self.base)


class Arc3(Arc2):
    """The smallest of `arc_v2` and of four layouts of changed mantissas, each pickled and compressed.

    Of these five only those count that are ready when the first one has taken half as long again.
    """

    format = "arc_v3"
    needs = "the checkpoint as a file, rewritten in place, and trust: payloads are unpickled; the engine then loads it"

    def __post_init__(self) -> None:
        """Import the package, so that this is not timed."""
        importlib.import_module("fireworks_delta_compression")

    def runs_code(self) -> bool:
        """Return whether a replica runs a function that a payload names."""
        from fireworks_delta_compression.backends import arc3

        self.trainer()()
        replica, mark = self.replica(), self.folder / "ran"
        forged = arc3._ARC3_ENVELOPE_PREFIX + pickle.dumps(_Call(mark))
        path = self.fresh("forged") / "delta.safetensors"
        patch = {each: torch.frombuffer(bytearray(forged), dtype=torch.uint8) for each in self.old}
        save_file(patch, path, metadata=dict.fromkeys(self.old, "0"))
        with contextlib.suppress(Exception):  # it is refused, after it ran
            replica.apply(path.read_bytes())
        return mark.exists()


class Arc3Patient(Arc3):
    """The smallest of all five, however long they take; `ARC3_CANDIDATE_WAIT_MULTIPLIER` sets it."""

    def __post_init__(self) -> None:
        """Change the setting, which is read when the package is imported."""
        from fireworks_delta_compression.backends import arc3

        arc3._CANDIDATE_WAIT_MULTIPLIER = 1e6


@dataclasses.dataclass
class _Call:
    """Pickled, it creates a file when it is unpickled."""

    mark: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


# --- PULSE
# -------------------------------------------------------------------------------------------------------------


class Pulse3(System):
    """PULSEPT1, format 3: Rice codes of ranks by old exponent, zigzag steps, zstd, XXH3 of every new
    tensor.
    """

    package = "basilica-sdk"
    needs = "a copy of the weights on the host, patched in place; the engine then loads it"
    format: ClassVar[int] = 3

    def trainer(self) -> Callable[[], bytes]:
        """See `System`. As its publisher does, with a thread for each core."""
        from basilica._pulse import codec

        snapshot = codec.Snapshot(self.old)
        model = codec.ModelMeta("model", snapshot.digest(), snapshot.param_count())

        def encode() -> bytes:
            patch, _ = snapshot.encode_step(
                self.new.items(),
                step=1,
                base_step=0,
                model=model,
                base_state_digest=model.digest,
                workers=os.cpu_count() or 1,
                format_version=self.format,
            )
            return patch

        return encode

    def replica(self) -> Holder:
        """See `System`."""
        from basilica._pulse import codec

        return _Snapshot(codec, codec.Snapshot(self.old))


class Pulse2(Pulse3):
    """Format 2: Rice codes of gaps, zigzag steps."""

    format = 2


class Pulse1(Pulse3):
    """Format 1, its default: gaps of 16 bits, new values."""

    format = 1


@dataclasses.dataclass
class _Snapshot:
    codec: types.ModuleType
    snapshot: Any

    def apply(self, payload: bytes) -> None:
        self.snapshot.apply_patch(self.codec.parse_patch(payload))

    def weights(self) -> Weights:
        return dict(self.snapshot.named_tensors())


# --- ModelExpress
# ------------------------------------------------------------------------------------------------------


class ModelExpress(System):
    """Its canonical deltas over object storage: its publication method and its checkpoint cache.

    The bucket and the control service are stand-ins in memory.
    """

    package = "modelexpress"
    needs = "a checkpoint cache on disk, twice the weights; the engine then loads it"

    _MODEL, _PREFIX = "model", "s3://bucket/model"

    def trainer(self) -> Callable[[], bytes]:
        """See `System`. The payload is the weight file; its index names every tensor again."""
        from modelexpress_rl import refit_pb2
        from modelexpress_rl.train.methods.canonical_delta import CanonicalDeltaPublicationMethod
        from modelexpress_rl.version import WeightVersionRef

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
            )
        self.bucket: dict[str, bytes] = {}
        version = refit_pb2.WeightVersion(
            uid="v1",
            model_name=self._MODEL,
            payload_format=refit_pb2.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA,
            base_version_id="v0",
            object_storage=refit_pb2.ObjectStorageSource(
                storage_type=refit_pb2.OBJECT_STORAGE_TYPE_S3, uri=f"{self._PREFIX}/v1/{_INDEX}"
            ),
        )
        service = types.SimpleNamespace(
            GetWeightVersion=lambda request, timeout: refit_pb2.GetWeightVersionResponse(version=version)
        )
        method = CanonicalDeltaPublicationMethod(
            config=types.SimpleNamespace(initial_base_version_id="v0", uri_prefix=self._PREFIX),
            model_name=self._MODEL,
            service=lambda: service,
            rpc_timeout_seconds=_WAIT_S,
            process_group=torch.distributed.group.WORLD,
            read_seed_tensor=lambda name: self.old[name].reshape(-1).view(torch.uint8).numpy(),
            s3=_Bucket(self.bucket),
        )
        method.prepare_base(hf_tensor_iter=[list(self.old.items())])

        def encode() -> bytes:
            staged = method.stage(
                version=WeightVersionRef("v1"), hf_tensor_iter=[[each] for each in self.new.items()]
            )
            method.publish(version=WeightVersionRef("v1"), staged=staged)
            return self.bucket[self._file()]

        return encode

    def _file(self) -> str:
        (found,) = (key for key in self.bucket if key.endswith(".safetensors"))
        return found

    def replica(self) -> Holder:
        """See `System`."""
        from modelexpress_rl.inference import receiver
        from modelexpress_rl.object_storage import ObjectStorageType
        from modelexpress_rl.train import WeightPayloadFormat

        bucket = dict(self.bucket)
        checkpoint = receiver._LocalCheckpoint(
            model_name=self._MODEL,
            config=receiver.ObjectStorageGeneratorConfig(
                storage_type=ObjectStorageType.S3,
                initial_base_version_id="v0",
                seed_checkpoint_path=self.folder / "old",
                refit_checkpoint_dir=self.fresh("replica"),
            ),
            s3=_Bucket(bucket),
        )
        checkpoint.initialize()
        target = receiver._S3Version("v1", "v0", WeightPayloadFormat.XOR_DELTA, f"{self._PREFIX}/v1/{_INDEX}")
        return _Refitted(checkpoint, target, bucket, self._file(), checkpoint.local_checkpoint)


_INDEX = "model.safetensors.index.json"


@dataclasses.dataclass
class _Bucket:
    """What ModelExpress uses of its S3 client."""

    objects: dict[str, bytes]

    def get(self, uri: str) -> bytes:
        return self.objects[uri]

    def put(self, *, uri: str, data: bytes) -> None:
        self.objects[uri] = bytes(data)


@dataclasses.dataclass
class _Refitted:
    checkpoint: Any
    target: Any
    bucket: dict[str, bytes]
    file: str
    path: Path

    def apply(self, payload: bytes) -> None:
        self.bucket[self.file] = payload
        self.path = self.checkpoint.prepare(self.target).path

    def weights(self) -> Weights:
        return load_file(self.path / WEIGHTS)


# --- vLLM
# --------------------------------------------------------------------------------------------------------------


class VllmSparse(System):
    """vLLM's loader of sparse patches, into a model whose loader copies each tensor; the trainer's diff is
    torch's.

    vLLM sends int32 indices and values of each tensor by NCCL, names and counts by HTTP; the payload is the
    former.
    """

    package = "vllm"
    needs = "the live weights, and for each tensor a full one filled with NaN"

    def trainer(self) -> Callable[[], bytes]:
        """See `System`."""
        self.counts: dict[str, int] = {}

        def encode() -> bytes:
            parts = []
            for name, new in self.new.items():
                new_N, old_N = new.reshape(-1), self.old[name].reshape(-1)
                index_K = torch.nonzero(new_N.view(torch.int16) != old_N.view(torch.int16)).reshape(-1)
                self.counts[name] = index_K.numel()
                parts += [index_K.to(torch.int32).numpy(), new_N[index_K].view(torch.int16).numpy()]
            return b"".join(part.tobytes() for part in parts)

        return encode

    def replica(self) -> Holder:
        """See `System`."""
        from vllm.model_executor.model_loader import checkpoint_weight_patch

        return _Served(
            {name: tensor.clone() for name, tensor in self.old.items()}, self.counts, checkpoint_weight_patch
        )


@dataclasses.dataclass
class _Served:
    live: Weights
    counts: dict[str, int]
    loader: types.ModuleType

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """Load as a model of vLLM does that has no fused parameters."""
        return {name for name, tensor in weights if self.live[name].copy_(tensor) is not None}

    def apply(self, payload: bytes) -> None:
        patches, at = [], 0
        for name, count in self.counts.items():
            if count:
                index_K = torch.from_numpy(np.frombuffer(payload, np.int32, count, at).copy())
                value_K = torch.from_numpy(np.frombuffer(payload, np.int16, count, at + 4 * count).copy())
                shape = tuple(self.live[name].shape)
                values = value_K.view(torch.bfloat16)
                patches.append(
                    self.loader.CheckpointWeightPatch(name, shape, torch.bfloat16, values, index_K)
                )
            at += 6 * count
        self.loader.load_checkpoint_weight_patches(self, patches)

    def weights(self) -> Weights:
        return self.live


# --- neighbours: checkpoints kept as differences
# -----------------------------------------------------------------------


class Reminis(System):
    """Weights as rows of SQLite databases, and packs of what differs between two of them."""

    package = "reminis"
    needs = "the weights as a database, read twice for its hashes, and a second one of the same size for the result"

    def trainer(self) -> Callable[[], bytes]:
        """See `System`. The new weights are stored and converted as well, because it compares databases."""
        from reminis.diff import diff_models
        from reminis.safetensors_io import safetensors_to_sqlite

        folder = self.fresh("reminis")
        self.base = safetensors_to_sqlite(
            str(self.folder / "old" / WEIGHTS), str(folder / "old.db"), verbose=False
        )

        def encode() -> bytes:
            save_file(self.new, folder / WEIGHTS)
            (folder / "new.db").unlink(missing_ok=True)
            new = safetensors_to_sqlite(str(folder / WEIGHTS), str(folder / "new.db"), verbose=False)
            diff_models(self.base, new, str(folder / "pack.db"), verbose=False)
            return (folder / "pack.db").read_bytes()

        return encode

    def replica(self) -> Holder:
        """See `System`."""
        folder = self.fresh("replica")
        shutil.copy(self.base, folder / "old.db")
        return _Rebuilt(folder)


@dataclasses.dataclass
class _Rebuilt:
    folder: Path

    def apply(self, payload: bytes) -> None:
        from reminis.diff import apply_delta

        (self.folder / "pack.db").write_bytes(payload)
        old, pack, new = (str(self.folder / name) for name in ("old.db", "pack.db", "new.db"))
        apply_delta(old, pack, new, verbose=False)

    def weights(self) -> Weights:
        from reminis.safetensors_io import sqlite_to_safetensors

        sqlite_to_safetensors(str(self.folder / "new.db"), str(self.folder / WEIGHTS), verbose=False)
        return load_file(self.folder / WEIGHTS)


class Moonclip(System):
    """A store of checkpoints; a later one is the XOR with the last full one, in byte planes, zstd level 3."""

    package = "moonclip"
    needs = "the store with the last full snapshot; returns new bytes, which the engine then loads"

    def trainer(self) -> Callable[[], bytes]:
        """See `System`. The payload is the snapshot's pack; a small manifest names it."""
        import moonclip

        self.store = self.fresh("moonclip")
        manager = moonclip.MoonclipManager(str(self.store), async_save=False)
        manager.save_tensors(0, _contiguous(self.old))
        before = set(self.store.rglob("*"))

        def encode() -> bytes:
            manager.save_tensors(1, _contiguous(self.new))
            made = [path for path in self.store.rglob("*") if path.is_file() and path not in before]
            self.pack = max(made, key=lambda path: path.stat().st_size).relative_to(self.store)
            return (self.store / self.pack).read_bytes()

        return encode

    def replica(self) -> Holder:
        """See `System`."""
        store = self.fresh("replica")
        shutil.copytree(self.store, store, dirs_exist_ok=True)
        return _Restored(store, self.pack, {name: tensor.shape for name, tensor in self.old.items()})


def _contiguous(weights: Weights) -> Weights:
    return {name: tensor.contiguous() for name, tensor in weights.items()}


@dataclasses.dataclass
class _Restored:
    store: Path
    pack: Path
    shapes: dict[str, torch.Size]

    def apply(self, payload: bytes) -> None:
        import moonclip

        (self.store / self.pack).write_bytes(payload)
        _, self.loaded = moonclip.MoonclipManager(str(self.store), async_save=False).load_latest()

    def weights(self) -> Weights:
        return {
            name: torch.frombuffer(self.loaded[name], dtype=torch.bfloat16).reshape(shape)
            for name, shape in self.shapes.items()
        }


class DeltaTensors(System):
    """Differences in float32, of which the largest tenth is kept (`sparse`, its default)."""

    package = "deltatensors"
    needs = "the checkpoint as a directory, hashed; returns float32"
    strategy: ClassVar[str] = "sparse"

    def trainer(self) -> Callable[[], bytes]:
        """See `System`. The new weights are stored as well, because it compares directories."""
        import deltatensors

        folder = self.fresh("deltatensors")
        (folder / "new").mkdir()

        def encode() -> bytes:
            save_file(self.new, folder / "new" / WEIGHTS)
            path = folder / "delta.wdelta"
            deltatensors.save_delta_from_paths(
                path, folder / "new", self.folder / "old", strategy=self.strategy
            )
            return path.read_bytes()

        return encode

    def replica(self) -> Holder:
        """See `System`."""
        return _Added(self.fresh("replica") / "delta.wdelta", self.folder / "old")


class DeltaTensorsInt4(DeltaTensors):
    """Differences in four bits, with outliers; what its documentation shows."""

    strategy = "int4"


@dataclasses.dataclass
class _Added:
    path: Path
    base: Path

    def apply(self, payload: bytes) -> None:
        import deltatensors

        self.path.write_bytes(payload)
        self.found = deltatensors.load_delta_from_paths(self.path, self.base)

    def weights(self) -> Weights:
        return {
            name: torch.from_numpy(np.asarray(array)).to(torch.bfloat16) for name, array in self.found.items()
        }


SYSTEMS: dict[str, type[System]] = {
    "deltasync, context": DeltaSync,
    "deltasync, packed": DeltaSyncPacked,
    "PULSEPT v3": Pulse3,
    "PULSEPT v2": Pulse2,
    "PULSEPT v1": Pulse1,
    "Fireworks arc_v3": Arc3,
    "Fireworks arc_v3, all candidates": Arc3Patient,
    "Fireworks arc_v2": Arc2,
    "ModelExpress, canonical delta": ModelExpress,
    "vLLM, sparse loader": VllmSparse,
    "reminis, delta pack": Reminis,
    "moonclip, delta snapshot": Moonclip,
    "deltatensors, sparse": DeltaTensors,
    "deltatensors, int4": DeltaTensorsInt4,
}
"""By name, ours first."""
