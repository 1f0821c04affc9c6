"""Valid inputs for the fuzzers to start from: `python -m tests.fuzz.seeds FOLDER` writes them, a folder for
each target.
"""

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

from deltasync.channel import anchors, documents, keys
from deltasync.channel.documents import EpochDocument, Reference, VersionId
from deltasync.codec import tiles, vector
from deltasync.kernels import reference
from deltasync.serve.heartbeat import Heartbeat, write
from deltasync.tensors import fingerprint
from deltasync.tensors.bits import bits_of, tensor_of
from tests import deltas
from tests.channels import EPOCH, RUN, Made
from tests.fuzz.containers import bundle, split_record
from tests.fuzz.targets import SPECS, _holding, old_bits

SECOND = "000002-00000002"


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
    """One change in one block, many, many in small blocks and tiles, and all."""
    for block, density in ((1 << 19, 0.01), (1 << 19, 0.3), (64, 0.1), (1 << 19, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "BLOCK", block)
            patch.setattr(vector, "GROUP_CHANGED", block)
            if block == 64:
                for limit, value in (("TILE", block), ("SMALL", 4 * block), ("LEAST", 4 * block), ("FEW", 1)):
                    patch.setattr(tiles, limit, value)
            old, new = {spec: old_bits(spec) for spec in SPECS}, {}
            for spec, old_N in old.items():
                random = np.random.default_rng(block)
                new[spec] = old_N + (random.random(old_N.size) < density).astype(old_N.dtype)
                if density == 1:
                    new[spec] = random.permutation(old_N)
            yield deltas.encode(name, SPECS, old, new, 2, 1).to_bytes()


def weight_files() -> Iterator[bytes]:
    tensors = weights(0)
    digests = {
        name: reference.fingerprint(fingerprint.tensor_key(name), bits_of(t)) for name, t in tensors.items()
    }
    yield from (data for _, data in anchors.weight_files(tensors, digests, 1 << 30))


def made(codec_name: str) -> Made:
    """An anchor and deltas in two epochs, one of them in parts; an announced anchor, a compaction, head and
    heartbeats.
    """
    channel = Made(_holding({}), codec_name=codec_name)
    channel.create(weights(0))
    written = [channel.anchor(weights(0)).version]
    for round_ in range(1, 4):
        written.append(channel.delta(weights(round_), parts=round_ % 3, step=round_).version)
    channel.announce(written[2])
    channel.seal(SECOND)
    channel.open(SECOND, channel.tip)
    written.append(channel.delta(weights(4)).version)
    channel.compaction(written[0], written[3])
    channel.head()
    for number, version in enumerate(written[:2]):
        write(channel.store, _heartbeat(f"r{number}", version))
    return channel


def _heartbeat(name: str, version: VersionId) -> Heartbeat:
    return Heartbeat(
        replica_id=name,
        run_id=RUN,
        version=version.version,
        epoch=version.epoch,
        sha256=version.sha256,
        state="serving",
        newest_version=4,
        error="x",
        time_s=1.0,
    )


def channels() -> Iterator[bytes]:
    for name in ("packed", "context", "raw"):
        store = made(name).store
        yield bundle({info.key: store.read(info.key, 1 << 30) for info in store.list("")})


def referring() -> Made:
    channel = Made(_holding({}))
    channel.create(weights(0))
    channel.refer(weights(0), Reference(repo="a/b", revision="0" * 40, tied={"half": "w"}))
    return channel


def records() -> Iterator[bytes]:
    for channel in (made("packed"), made("raw"), referring()):
        for info in channel.store.list(""):
            if info.key.startswith((keys.VERSIONS, keys.COMPACTIONS, keys.ANNOUNCEMENTS)):
                yield channel.store.read(info.key, 1 << 30)


def checkpoints() -> Iterator[bytes]:
    tensors = weights(0)
    yield bundle({"model.safetensors": save(tensors)})
    first, second = (
        {name: tensors[name] for name in names} for names in (("w", "half"), ("wide", "scale", "one"))
    )
    index = {"weight_map": dict.fromkeys(first, "model.safetensors") | dict.fromkeys(second, "a.safetensors")}
    yield bundle(
        {
            "model.safetensors": save(first),
            "a.safetensors": save(second),
            "model.safetensors.index.json": json.dumps(index).encode(),
        }
    )


def document() -> Iterator[bytes]:
    store = made("packed").store
    yield b"\0" + store.read(keys.CHANNEL, 1 << 30)
    for data in records():
        yield b"\1" + json.dumps(split_record(data)[2]).encode()
    head = store.read(keys.HEAD, 1 << 30)
    signature = f',"signature":{{"key":"{"1" * 64}","ed25519":"{"2" * 128}"}}}}\n'
    yield b"\2" + head
    yield b"\2" + head.removesuffix(b"}\n") + signature.encode()
    opening = EpochDocument(
        run_id=RUN, epoch=EPOCH, continues=VersionId(3, EPOCH, "0" * 64), writer="x", created_at="now"
    )
    yield b"\3" + documents.encode(opening)


def small() -> Iterator[bytes]:
    version = VersionId(3, EPOCH, "0" * 64)
    store = _holding({})
    write(store, _heartbeat("r", version))
    yield b"\0" + store.read(keys.replica("r"), 1 << 30)
    status = {
        "run_id": RUN,
        "version": 3,
        "epoch": EPOCH,
        "sha256": "0" * 64,
        "state": "serving",
        "error": None,
    }
    yield b"\1" + json.dumps(status | {"channel": "file:///x"}).encode()
    part = f"{keys.parts_folder(2, EPOCH, 1)}/{keys.part(0, 1)}"
    for key in (
        version.key,
        keys.compaction(1, 4, keys.TOOL + "00000000"),
        part,
        keys.epoch_document(EPOCH),
        keys.HEAD,
    ):
        yield b"\2" + key.encode()
    change = {"path": version.key, "op": "upload", "size": 10, "xetHash": "0" * 64}
    yield (
        b"\3event: ready\n\nevent: changes\ndata: "
        + json.dumps({"cursor": "c", "changes": [change]}).encode()
        + b"\n\n"
    )
    yield b"\4Bearer x"
    yield b"\4Basic eDp5"
    yield b'\5{"version": 7, "timeout_s": 1.5, "parameters_info": []}'


SEEDS = {
    "documents": document,
    "records": records,
    "small": small,
    "raw": lambda: payloads("raw"),
    "packed": lambda: payloads("packed"),
    "context": lambda: payloads("context"),
    "anchors": weight_files,
    "checkpoints": checkpoints,
    "channels": channels,
    "dashboard": channels,
}


def main(folder: Path) -> None:
    for target, make in SEEDS.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for data in make():
            (folder / target / hashlib.sha1(data).hexdigest()).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
