"""Valid inputs for the fuzzers to start from: `python -m tests.fuzz.seeds FOLDER` writes them, a folder for each target."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from deltasync import Publisher, codec, fingerprint, housekeeping, layout, manifest
from deltasync.anchor import metadata
from deltasync.bits import bits_of, tensor_of
from deltasync.codec import blocks
from deltasync.heartbeat import Heartbeat, write
from deltasync.kernels import reference
from deltasync.manifest import Forgotten, Head
from deltasync.reader import ChannelReader
from tests.fuzz.containers import bundle
from tests.fuzz.targets import SPECS, _store, channel_document, old_bits


def weights(round_: int) -> dict[str, torch.Tensor]:
    """The weights that the targets take as old ones, after some rounds of small steps."""
    tensors = {}
    for name, spec in SPECS.items():
        bits_N = old_bits(name).copy()
        for number in range(round_):
            at = np.random.default_rng(number).random(bits_N.size) < 0.1
            bits_N[at] += np.uint64(1 + 1000 * number).astype(bits_N.dtype)
        tensors[name] = tensor_of(bits_N, spec)
    return tensors


def payloads(name: str) -> Iterator[bytes]:
    """One change in one block, many, and many in small blocks."""
    for block, density in ((1 << 19, 0.01), (1 << 19, 0.3), (64, 0.1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "BLOCK", block)
            encoder = codec.get(name).encoder()
            for spec in SPECS.values():
                old_N = old_bits(spec.name)
                index_K = np.flatnonzero(np.random.default_rng(block).random(old_N.size) < density).astype(np.int32)
                if not index_K.size:
                    continue
                new_N = old_N.copy()
                new_N[index_K] += np.asarray(1, old_N.dtype)
                step_K = new_N[index_K] - old_N[index_K]
                digest = fingerprint.to_hex(reference.fingerprint(fingerprint.tensor_key(spec.name), new_N))
                encoder.add(spec, index_K, step_K, new_N, digest)
            yield encoder.finish(2, 1).to_bytes()


def weight_files() -> Iterator[bytes]:
    tensors = weights(0)
    digests = {name: reference.fingerprint(fingerprint.tensor_key(name), bits_of(t)) for name, t in tensors.items()}
    yield save(tensors, metadata(digests, list(digests)))


def channels() -> Iterator[bytes]:
    """An anchor and four deltas, a fold, a forgotten version and heartbeats."""
    for name in ("packed", "context", "raw"):
        store = _store()
        with Publisher(store, codec=name, dtype="keep", anchor_every=4) as publisher:
            for round_ in range(6):
                publisher.publish(weights(round_).items(), step=round_).wait(60)
        housekeeping.write_fold(ChannelReader(store), 1, 4)
        run_id = ChannelReader(store).channel().run_id
        for number in range(2):
            write(store, Heartbeat(replica_id=f"r{number}", run_id=run_id, version=number, state="serving", time_s=1.0))
        yield bundle({info.key: store.read(info.key) for info in store.list("")})


def checkpoints() -> Iterator[bytes]:
    (whole,) = weight_files()
    yield bundle({"model.safetensors": whole})
    tensors = weights(0)
    first, second = ({name: tensors[name] for name in names} for names in (("w", "half"), ("wide", "scale", "one")))
    index = {"weight_map": dict.fromkeys(first, "model.safetensors") | dict.fromkeys(second, "a.safetensors")}
    yield bundle(
        {
            "model.safetensors": save(first),
            "a.safetensors": save(second),
            "model.safetensors.index.json": json.dumps(index).encode(),
        }
    )


def documents() -> Iterator[bytes]:
    yield b"\0" + channel_document()
    yield b"\1" + manifest.encode(Head(format=manifest.FORMAT, run_id="run", version=3, manifest_sha256="0" * 64))
    signature = f',"signature":{{"key":"{"1" * 64}","ed25519":"{"2" * 128}"}}}}\n'
    head = manifest.encode(Head(format=manifest.FORMAT, run_id="run", version=3, manifest_sha256="0" * 64))
    yield b"\1" + head.removesuffix(b"}\n") + signature.encode()
    yield b"\4" + manifest.encode(Forgotten(format=manifest.FORMAT, run_id="run", versions=[1, 2], created_at="now"))
    store = _store()
    with Publisher(store, dtype="keep", anchor_every=2) as publisher:
        for round_ in range(4):
            publisher.publish(weights(round_).items(), step=round_).wait(60)
    fold = housekeeping.write_fold(ChannelReader(store), 2, 3)
    yield b"\3" + manifest.encode(fold)
    for version in range(1, 5):
        yield b"\2" + store.read(layout.manifest(version))
    reader = ChannelReader(store)
    document = json.loads(store.read(layout.manifest(1)))
    digests = {name: "0" * 16 for name in reader.specs}
    reference_ = {"repo": "a/b", "revision": "0" * 40, "path": None, "fingerprints": digests, "tied": {"half": "w"}}
    document |= {"anchor": {"directory": "", "files": [], "reference": reference_}, "requires": ["reference"]}
    yield b"\2" + json.dumps(document).encode()


def small() -> Iterator[bytes]:
    beat = {"replica_id": "r", "run_id": "run", "version": 3, "state": "serving", "head_version": 4, "error": "x"}
    yield b"\0" + json.dumps(beat).encode()
    status = {"run_id": "run", "version": 3, "state": "serving", "head_version": 4, "error": None, "channel": "file:///x"}
    yield b"\1" + json.dumps(status).encode()
    for key in (layout.manifest(3), f"{layout.fold_dir(1, 4)}/fold.json", f"{layout.delta_dir(2, 1)}/x", layout.HEAD):
        yield b"\2" + key.encode()
    yield b'\3event: ready\n\nevent: changes\ndata: {"cursor": "c", "changes": [{"path": "head.json"}]}\n\n'
    yield b"\4Bearer x"
    yield b"\4Basic eDp5"
    yield b'\5{"version": 7, "timeout_s": 1.5, "parameters_info": []}'


SEEDS = {
    "documents": documents,
    "small": small,
    "raw": lambda: payloads("raw"),
    "packed": lambda: payloads("packed"),
    "context": lambda: payloads("context"),
    "anchors": weight_files,
    "checkpoints": checkpoints,
    "channels": channels,
}


def main(folder: Path) -> None:
    for target, make in SEEDS.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for data in make():
            (folder / target / hashlib.sha1(data).hexdigest()).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
