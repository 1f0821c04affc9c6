"""`.venv/bin/python -m tests.golden.make` writes the golden channels: bytes of `deltasync/2` that every
reader must read.

Run it only when the format itself changes; what it wrote before is thrown away. Times, epochs and keys are
fixed, so it writes the same bytes each time. `expected.json` holds the sha256 of each tensor's bits
(little-endian) at each version.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import safetensors.torch
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from obstore.store import MemoryStore

from deltasync import codec
from deltasync.channel import keys
from deltasync.channel.documents import DeltaFiles, Reference, VersionId
from deltasync.channel.signing import Signer
from deltasync.codec.base import Encoded
from deltasync.kernels import native
from deltasync.stores.object import ObstoreStore
from deltasync.tensors import ITEM_BYTES, Delta, Layout, Sparse, TensorSpec
from deltasync.tensors.bits import bits_of, tensor_of
from tests.channels import EPOCH, Made

GOLDEN = Path(__file__).parent
CODECS = ("raw", "packed", "context")
SECOND, THIRD = "000002-00000002", "000003-00000003"
MODEL, COMMIT = "golden/model", "0123456789abcdef0123456789abcdef01234567"
BLOCK = 256  # elements, instead of 2**19, so that small tensors have several blocks
# the same for tiles: some tensors have them, some are coded by gaps
TILE, SMALL, LEAST, FEW = 100, 160, 400, 1
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Weights = dict[str, torch.Tensor]
Rows = dict[str, list]


def random_bits(random: np.random.Generator, dtype: str, *shape: int) -> torch.Tensor:
    spec = TensorSpec("", dtype, shape)
    bits = np.frombuffer(random.bytes(spec.element_count * ITEM_BYTES[dtype]), spec.bits_dtype)
    return tensor_of(bits.copy() % 2 if dtype == "bool" else bits.copy(), spec)


def normal(random: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(random.normal(0, 0.05, shape).astype(np.float32))


def weights() -> Weights:
    random = np.random.default_rng(0)
    return {
        "model.embed.weight": normal(random, 40, 50).to(torch.bfloat16),
        "model.layers.0.q_proj.weight": normal(random, 40, 10).to(torch.bfloat16),
        "model.norm.weight": torch.ones(30, dtype=torch.bfloat16),
        "half": normal(random, 20, 20).to(torch.float16),
        "single": normal(random, 7, 11, 5),
        "double": normal(random, 150).to(torch.float64),
        "e4m3": (normal(random, 20, 30) * 20).to(torch.float8_e4m3fn),
        "e5m2": (normal(random, 20, 30) * 20).to(torch.float8_e5m2),
        **{name: random_bits(random, name, 300) for name in ("int8", "uint8", "bool", "int16")},
        **{name: random_bits(random, name, 200) for name in ("int32", "int64")},
        "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        'Gewicht/größe "1"\n': torch.arange(20, dtype=torch.int32),
    }


def view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(SIGNED[tensor.element_size()])


def moved(
    before: Mapping[str, torch.Tensor], seed: int, fraction: float, only: tuple[str, ...] = ("",)
) -> Weights:
    """Bit patterns of some elements moved by little, one in each larger tensor by anything."""
    random = np.random.default_rng(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in (tensor for name, tensor in after.items() if name.startswith(only)):
        bits = bits_of(tensor)
        here = random.random(bits.size) < fraction
        if tensor.dtype == torch.bool:
            bits ^= here.astype(np.uint8)
        elif bits.size >= 100:
            bits += (here * random.integers(-2, 3, bits.size)).astype(bits.dtype)
            bits[random.integers(bits.size)] = np.frombuffer(random.bytes(bits.itemsize), bits.dtype)[0]
    return after


def versions() -> list[Weights]:
    first = weights()
    # +0, -0, infinity
    view(first["model.norm.weight"])[:3] = torch.tensor([0, -0x8000, 0x7F80], dtype=torch.int16)
    second = moved(first, 2, 0.01, ("model", "single"))
    second["scalar"] = torch.tensor(-0.0, dtype=torch.bfloat16)
    third = second  # nothing changes
    fourth = moved(third, 4, 0.02)
    fourth = moved(fourth, 44, 0.4, ("model.embed",))  # enough for two classes
    # -0, +0 and NaNs of several payloads, infinities
    view(fourth["model.norm.weight"])[:5] = torch.tensor(
        [-0x8000, 0, 0x7FC1, -0x3F, 0x7F81], dtype=torch.int16
    )
    view(fourth["single"])[:3] = torch.tensor([0x7FC00001, -0x800000, -0x80000000], dtype=torch.int32)
    view(fourth["half"])[:3] = torch.tensor([0x7E01, 0x7C00, -0x400], dtype=torch.int16)
    view(fourth["double"])[:2] = torch.tensor([0x7FF8000000000001, -(2**63)])
    fourth = dict(reversed(fourth.items()))  # in another order than the channel's table
    fifth = moved({name: fourth[name] for name in first}, 5, 0.01)
    random = np.random.default_rng(55)
    for name in ("model.layers.0.q_proj.weight", "e5m2"):  # every bit
        fifth[name] = random_bits(random, str(fifth[name].dtype).removeprefix("torch."), *fifth[name].shape)
    fifth["model.embed.weight"] = normal(random, 40, 50).to(torch.bfloat16)
    sixth = moved(fifth, 6, 0.002, ("model",))
    return [first, second, third, fourth, fifth, sixth]


def small(count: int) -> list[Weights]:
    """States of one matrix of bfloat16."""
    states: list[Weights] = [{"w": normal(np.random.default_rng(3), 20, 40).to(torch.bfloat16)}]
    for seed in range(count - 1):
        states.append(moved(states[-1], seed, 0.05))
    return states


def rows(tensors: Mapping[str, torch.Tensor]) -> Rows:
    return {
        name: [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
        ]
        for name, tensor in tensors.items()
    }


def table(states: list[Weights]) -> dict[str, Rows]:
    return {str(version): rows(tensors) for version, tensors in enumerate(states, start=1)}


def made(
    codec_name: str,
    first: Weights,
    signer: Signer | None = None,
    fencing: str = "seal",
    owner: str | None = None,
) -> Made:
    """A new channel, in memory, with its first epoch."""
    channel = Made(ObstoreStore("memory://golden", MemoryStore()), signer, codec_name)
    channel.create(first, fencing, owner)
    channel.open(EPOCH, None)
    return channel


def succeed(channel: Made, epoch: str) -> None:
    """Seal the log and go on in another epoch."""
    channel.seal(epoch)
    channel.open(epoch, channel.tip)


def write(channel: Made, folder: Path) -> None:
    for info in channel.store.list(""):
        path = folder / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(channel.store.read(info.key, 1 << 30))


def write_json(path: Path, document: dict) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False)
    # a tensor on a line
    text = re.sub(r"\[\s([^][]*\[[^]]*\][^]]*)\]", lambda row: " ".join(row[0].split()), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def by_codec(folder: Path, codec_name: str) -> None:
    """Six versions in two epochs: inline, without changes, in parts, of every bit; an announced anchor and a
    compaction.
    """
    states = versions()
    channel = made(codec_name, states[0])
    written = [channel.anchor(states[0], step=10, shard_bytes=8000).version]
    written.append(channel.delta(states[1], step=20).version)
    written += [channel.delta(states[2]).version, channel.delta(states[3], parts=2, step=-1).version]
    written.append(channel.delta(states[4]).version)
    channel.announce(written[4])
    succeed(channel, SECOND)
    written.append(channel.delta(states[5], step=2**63 - 1).version)
    channel.compaction(written[0], written[5])
    channel.head()
    write(channel, folder / codec_name)


def announced(folder: Path) -> None:
    """Announced weights, and nothing else that leads to version 2."""
    states = versions()
    channel = made("packed", states[0])
    channel.anchor(states[0])
    second = channel.delta(states[3])
    channel.announce(second.version)
    channel.store.delete(*(info.key for info in channel.store.list(keys.anchor_folder(1, EPOCH))))
    channel.head()
    write(channel, folder / "announced/channel")
    write_json(folder / "announced/expected.json", {"versions": {"2": rows(states[3])}})


def reference(folder: Path) -> None:
    """A channel that starts from a model on the Hub, here in its cache: two files, some float32, without the
    tied head.
    """
    snapshot = folder / "reference/hub" / f"models--{MODEL.replace('/', '--')}" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    embed = normal(np.random.default_rng(0), 40, 50)  # as in `weights`, before it is rounded
    stored = weights() | {"model.embed.weight": embed, "nobody reads this": torch.zeros(3)}
    names, files = list(stored), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for number, file in enumerate(files):
        safetensors.torch.save_file({name: stored[name] for name in names[number::2]}, snapshot / file)
    index = {"weight_map": {name: files[number % 2] for number, name in enumerate(names)}}
    write_json(snapshot / "model.safetensors.index.json", index)
    first = weights()
    first["lm_head.weight"] = first["model.embed.weight"].clone()
    states = [first, moved(first, 2, 0.01)]
    channel = made("packed", first)
    tied = {"lm_head.weight": "model.embed.weight"}
    channel.refer(first, Reference(repo=MODEL, revision=COMMIT, tied=tied))
    channel.delta(states[1])
    channel.head()
    write(channel, folder / "reference/channel")
    write_json(folder / "reference/expected.json", {"versions": table(states)})


def signers(directory: Path) -> list[Signer]:
    """Two keys that everybody knows: for tests only."""
    found = []
    for number in (1, 2):
        key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
        path = directory / f"key{number}"
        path.touch(0o600)
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        found.append(Signer(path))
    return found


def signed(folder: Path) -> None:
    """A channel of two keys: the second one takes over at version 3, where the first is still trusted."""
    states = small(5)
    with tempfile.TemporaryDirectory() as private:
        first, second = signers(Path(private))
    channel = made("packed", states[0], first)
    written = [channel.anchor(states[0]).version, channel.delta(states[1]).version]
    succeed(channel, SECOND)
    channel.signer = second
    written += [channel.delta(model).version for model in states[2:]]
    channel.compaction(written[0], written[4])
    channel.announce(written[4])
    channel.head()
    write(channel, folder / "signed/channel")
    write_json(
        folder / "signed/expected.json", {"keys": [first.public, second.public], "versions": table(states)}
    )


def lease(folder: Path) -> None:
    """Epochs without seals, and no head. The first writer's version 3 came late: it is beside the channel's,
    a fork.
    """
    states = small(5)
    channel = made("packed", states[0], fencing="lease")
    channel.anchor(states[0])
    second = channel.delta(states[1])
    channel.delta(moved(states[1], 99, 0.2))
    channel.tip = second.version
    channel.open(SECOND, None)
    channel.open(SECOND, second.version)
    channel.delta(states[2])
    channel.delta(states[3])
    channel.open(THIRD, channel.tip)
    channel.anchor(states[4])  # what was before could not be read
    write(channel, folder / "lease/channel")
    write_json(folder / "lease/expected.json", {"versions": table(states)})


def owned(folder: Path) -> None:
    """A channel that names its owner."""
    states = small(2)
    channel = made("packed", states[0], owner="slurm:4711")
    channel.anchor(states[0], step=0)
    channel.delta(states[1], step=1)
    channel.head()
    write(channel, folder / "owned/channel")
    write_json(folder / "owned/expected.json", {"versions": table(states)})


def ranks(folder: Path) -> None:
    """Version 2 in three payloads of two ranks, each of which held some rows of the matrix; one of them has
    it all.
    """
    states = small(2)
    for codec_name in CODECS:
        channel = made(codec_name, states[0])
        channel.anchor(states[0])
        old, new = (bits_of(state["w"]) for state in states)
        payloads: list[Encoded] = []
        for start, stop in ((0, BLOCK), (BLOCK, 3 * BLOCK), (3 * BLOCK, new.size)):
            index_K, step_K = native.diff(old[start:stop], new[start:stop])
            layout = Layout(channel.specs)
            steps = Delta(layout, {2: Sparse(index_K.astype(np.int32) + np.int32(start), step_K)})
            held, digests = (new[start:stop], start), channel.fingerprints(states[1])
            payloads.append(codec.get(codec_name).encode(steps, lambda _, held=held: held, digests, 2, 1))
        folder_key = keys.parts_folder(2, EPOCH, attempt=1)
        files = [
            channel.put_file(f"{folder_key}/{keys.part(rank, 1)}", payload.to_bytes())
            for rank, payload in enumerate(payloads[1:], start=1)
        ]
        changed = int((old != new).sum())
        delta = DeltaFiles(codec=codec_name, changed=changed, parts=files[::-1])
        channel.append(channel.record("delta", 2, states[1], delta=delta), payloads[0], states[1])
        channel.head()
        write(channel, folder / f"ranks/{codec_name}")
    write_json(folder / "ranks/expected.json", {"versions": table(states)})


def flip(data: bytes, at: int | None = None) -> bytes:
    """Another bit in one byte, in the middle by default."""
    changed = bytearray(data)
    changed[len(data) // 2 if at is None else at] ^= 1
    return bytes(changed)


def damage_object(key: Callable[[VersionId], str]) -> Callable[[Made, list[Weights]], None]:
    """Damage an object of version 2, so that its digest does not fit."""

    def damaged(channel: Made, states: list[Weights]) -> None:
        second = channel.delta(states[1], parts=1)
        found = key(second.version)
        channel.store.put(found, flip(channel.store.read(found, 1 << 30), 12))

    return damaged


def damage_entry(entry: str) -> Callable[[Made, list[Weights]], None]:
    """Damage an entry of the payload of version 2, and make all digests those of the damaged one."""

    def damaged(channel: Made, states: list[Weights]) -> None:
        before, after = states[0], states[1]
        ((payload, changed),) = channel.encode(before, after, 2, 1, 1)
        array = payload.arrays[entry]
        raw = array.view(torch.uint8).numpy().copy()
        raw.reshape(-1)[raw.size // 2 if entry == "w.values" else 1] ^= 1
        arrays = payload.arrays | {entry: torch.from_numpy(raw).view(array.dtype)}
        delta = DeltaFiles(codec=channel.codec_name, changed=changed)
        record = channel.record("delta", 2, after, delta=delta)
        channel.append(record, dataclasses.replace(payload, arrays=arrays), after)

    return damaged


def require_more(channel: Made, states: list[Weights]) -> None:
    """A feature that nobody knows."""
    ((payload, changed),) = channel.encode(states[0], states[1], 2, 1, 1)
    delta = DeltaFiles(codec=channel.codec_name, changed=changed)
    channel.append(
        channel.record("delta", 2, states[1], delta=delta, requires=["telepathy"]), payload, states[1]
    )


def contradict(channel: Made, states: list[Weights]) -> None:
    """A record that says that it changes fewer elements than its payload does."""
    ((payload, changed),) = channel.encode(states[0], states[1], 2, 1, 1)
    delta = DeltaFiles(codec=channel.codec_name, changed=changed - 1)
    channel.append(channel.record("delta", 2, states[1], delta=delta), payload, states[1])


def promise_more(channel: Made, states: list[Weights]) -> None:
    """A record that names a part that is larger than any may be."""
    files = [channel.put_file(f"{keys.parts_folder(2, EPOCH)}/{keys.part(0, 1)}", b"x")]
    files = [dataclasses.replace(file, bytes=1 << 40) for file in files]
    delta = DeltaFiles(codec=channel.codec_name, changed=1, parts=files)
    channel.append(channel.record("delta", 2, states[1], delta=delta), None, states[1])


DAMAGED: dict[str, tuple[str, Callable[[Made, list[Weights]], None]]] = {
    "record": ("packed", damage_object(lambda version: version.key)),
    "part": ("context", damage_object(lambda version: f"{keys.parts_folder(2, EPOCH)}/{keys.part(0, 1)}")),
    "stream": ("packed", damage_entry(".2.words")),
    "fingerprint": ("raw", damage_entry("w.values")),
    "requires": ("packed", require_more),
    "changed": ("packed", contradict),
    "bound": ("packed", promise_more),
}
"""The codec, and how version 2 is damaged; it must be refused."""


def damaged(folder: Path) -> None:
    states = small(2)
    write_json(folder / "damaged/expected.json", {"versions": {"1": rows(states[0])}})
    for name, (codec_name, damage) in DAMAGED.items():
        channel = made(codec_name, states[0])
        channel.anchor(states[0])
        damage(channel, states)
        channel.head()
        write(channel, folder / "damaged" / name)


def detour(folder: Path) -> None:
    """Version 3, the seal and the first anchor are damaged; a compaction and an announced anchor lead on."""
    states = small(5)
    channel = made("context", states[0])
    written = [channel.anchor(states[0]).version]
    written += [channel.delta(model).version for model in states[1:4]]
    channel.announce(written[1])
    channel.compaction(written[1], written[3])
    succeed(channel, SECOND)
    written.append(channel.delta(states[4]).version)
    channel.head()
    weight_file = f"{keys.anchor_folder(1, EPOCH)}/{keys.anchor_shard(1, 1)}"
    for key in (written[2].key, keys.slot(5, EPOCH), weight_file):
        channel.store.put(key, flip(channel.store.read(key, 1 << 30)))
    write(channel, folder / "detour/channel")
    readable = {number: found for number, found in table(states).items() if number in ("2", "4", "5")}
    write_json(folder / "detour/expected.json", {"versions": readable})


def main(folder: Path = GOLDEN) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    with (
        mock.patch("deltasync.channel.documents.now", return_value="2026-01-01T00:00:00.000+00:00"),
        mock.patch("deltasync.codec.tiles.BLOCK", BLOCK),
        mock.patch.multiple("deltasync.codec.tiles", TILE=TILE, SMALL=SMALL, LEAST=LEAST, FEW=FEW),
        mock.patch("deltasync.codec.classes.COSTS", (0.0, 1.0, 0.0)),
    ):
        for codec_name in CODECS:
            by_codec(folder, codec_name)
        write_json(folder / "expected.json", {"versions": table(versions())})  # the same for every codec
        for make in (announced, reference, signed, lease, owned, ranks, damaged, detour):
            make(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
