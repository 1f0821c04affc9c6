"""`.venv/bin/python tests/golden/make.py` writes the golden channels: bytes of `deltasync/1` that every reader must read.

Run it only when the format itself changes; what it wrote before is thrown away. It leaves `without_chain` alone, which was
written before manifests named their chain. `expected.json` holds the sha256 of each
tensor's bits (little-endian) at each version, computed from the tensors that were published.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import safetensors.torch
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from deltasync import Publisher, housekeeping
from deltasync.reader import ChannelReader
from deltasync.signing import Signer

GOLDEN = Path(__file__).parent
CODECS = ("raw", "packed", "context")
MODEL, COMMIT = "golden/model", "0123456789abcdef0123456789abcdef01234567"
BLOCK = 256  # elements, instead of 2**19, so that small tensors have several blocks
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.05

    return {
        "model.embed.weight": normal(40, 50).to(torch.bfloat16),
        "model.layers.0.q_proj.weight": normal(40, 10).to(torch.bfloat16),
        "model.norm.weight": torch.ones(30, dtype=torch.bfloat16),
        "half": normal(20, 20).to(torch.float16),
        "single": normal(7, 11, 5),
        "double": normal(150).to(torch.float64),
        "e4m3": (normal(20, 30) * 20).to(torch.float8_e4m3fn),
        "e5m2": (normal(20, 30) * 20).to(torch.float8_e5m2),
        "int8": torch.randint(-128, 128, (300,), generator=random, dtype=torch.int8),
        "uint8": torch.randint(0, 256, (300,), generator=random, dtype=torch.uint8),
        "bool": torch.rand(300, generator=random) < 0.5,
        "int16": torch.randint(-(2**15), 2**15, (300,), generator=random, dtype=torch.int16),
        "int32": torch.randint(-(2**31), 2**31 - 1, (200,), generator=random, dtype=torch.int32),
        "int64": torch.randint(-(2**63), 2**63 - 1, (200,), generator=random),
        "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        'Gewicht/größe "1"\n': torch.arange(20, dtype=torch.int32),
    }


def view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(SIGNED[tensor.element_size()])


def moved(before: Weights, seed: int, fraction: float, only: tuple[str, ...] = ("",)) -> Weights:
    """Bit patterns of some elements moved by little, one in each larger tensor by anything."""
    random = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in (tensor for name, tensor in after.items() if name.startswith(only)):
        bits = view(tensor)
        if tensor.dtype == torch.bool:
            bits ^= (torch.rand(bits.shape, generator=random) < fraction).to(torch.int8)
        elif bits.numel() >= 100:
            small = torch.randint(-2, 3, bits.shape, generator=random).to(bits.dtype)
            bits += torch.where(torch.rand(bits.shape, generator=random) < fraction, small, 0)
            width = 8 * tensor.element_size()
            far = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1) - 1, (1,), generator=random)
            bits[int(torch.randint(bits.numel(), (1,), generator=random))] = far.to(bits.dtype)
    return after


def versions() -> list[Weights]:
    first = weights()
    view(first["model.norm.weight"])[:3] = torch.tensor([0, -0x8000, 0x7F80], dtype=torch.int16)  # +0, -0, infinity
    second = moved(first, 2, 0.01, ("model", "single"))
    second["scalar"] = torch.tensor(-0.0, dtype=torch.bfloat16)
    third = second  # nothing changes
    fourth = moved(third, 4, 0.02)
    fourth = moved(fourth, 44, 0.4, ("model.embed",))  # enough for two step tables
    # -0, +0 and NaNs of several payloads, infinities
    view(fourth["model.norm.weight"])[:5] = torch.tensor([-0x8000, 0, 0x7FC1, -0x3F, 0x7F81], dtype=torch.int16)
    view(fourth["single"])[:3] = torch.tensor([0x7FC00001, -0x800000, -0x80000000], dtype=torch.int32)
    view(fourth["half"])[:3] = torch.tensor([0x7E01, 0x7C00, -0x400], dtype=torch.int16)
    view(fourth["double"])[:2] = torch.tensor([0x7FF8000000000001, -(2**63)])
    fourth = dict(reversed(fourth.items()))  # a stream in another order than the channel's table
    fifth = moved({name: fourth[name] for name in first}, 5, 0.01)  # also an anchor
    random = torch.Generator().manual_seed(55)
    for name in ("model.layers.0.q_proj.weight", "e5m2"):  # every bit: dense
        bits = view(fifth[name])
        width = 8 * bits.element_size()
        bits[:] = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), bits.shape, generator=random).to(bits.dtype)
    sixth = moved(fifth, 6, 0.002, ("model",))
    return [first, second, third, fourth, fifth, sixth]


def rows(tensors: Weights) -> dict[str, list]:
    return {
        name: [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
        ]
        for name, tensor in tensors.items()
    }


def publish(
    folder: Path, codec: str, published: list[Weights], initial: str | None = None, before: int = 0, **settings: Any
) -> dict[str, dict]:
    """A new channel, or more versions of one that has `before`."""
    if not before:
        shutil.rmtree(folder, ignore_errors=True)
    with (
        mock.patch("deltasync.publish.publisher.uuid.uuid4", return_value=UUID(int=1)),
        mock.patch("deltasync.publish.publisher.now", return_value="2026-01-01T00:00:00.000+00:00"),
        mock.patch("deltasync.publish.encode.now", return_value="2026-01-01T00:00:00.000+00:00"),
        mock.patch("deltasync.housekeeping.folds.now", return_value="2026-01-01T00:00:00.000+00:00"),
        mock.patch("deltasync.codec.blocks.BLOCK", BLOCK),
        Publisher(
            f"file://{folder}",
            codec=codec,
            dtype="keep",
            anchor_every=4,
            shard_bytes=8000,
            initial=initial,
            resume=before > 0,
            **settings,
        ) as publisher,
    ):
        for step, tensors in enumerate(published, start=before + 1):
            publisher.publish(tensors.items(), step=10 * step).wait(timeout_s=60)
        if len(published) > 2:
            signer = Signer(settings["signing_key"]) if settings else None
            housekeeping.write_fold(
                ChannelReader(publisher.store), 1, before + len(published), codec_name=codec, signer=signer
            )
    return {str(version): rows(tensors) for version, tensors in enumerate(published, start=before + 1)}


def write_json(path: Path, document: dict) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s([^][]*\[[^]]*\][^]]*)\]", lambda row: " ".join(row[0].split()), text)  # a tensor on a line
    path.write_text(text + "\n", encoding="utf-8")


def flip(data: bytes, entry: str) -> bytes:
    """Another bit in the middle of an entry of a safetensors file."""
    (size,) = struct.unpack_from("<Q", data)
    first, last = json.loads(data[8 : 8 + size])[entry]["data_offsets"]
    changed = bytearray(data)
    changed[8 + size + (first + last) // 2] ^= 1
    return bytes(changed)


def reseal(folder: Path, version: int, damaged: bytes) -> None:
    """Make lengths and digests of manifest and head those of a damaged payload."""
    path = folder / f"manifests/{version:010}.json"
    manifest = json.loads(path.read_text())
    manifest["delta"]["files"][0]["sha256"] = hashlib.sha256(damaged).hexdigest()
    path.write_text(json.dumps(manifest))
    head = json.loads((folder / "head.json").read_text())
    head["manifest_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "head.json").write_text(json.dumps(head))


def damage(name: str, codec: str, entry: str, error: str, then: Callable[[Path, int, bytes], None] | None) -> None:
    """A channel of two versions, the second of which must be refused."""
    folder = GOLDEN / "damaged" / name
    random = torch.Generator().manual_seed(1)
    first = {"w": torch.randn(20, 40, generator=random).to(torch.bfloat16)}
    expected = publish(folder, codec, [first, moved(first, 2, 0.05)])
    (path,) = (folder / "deltas").rglob("*.safetensors")
    damaged = flip(path.read_bytes(), entry)
    path.chmod(0o644)
    path.write_bytes(damaged)
    if then is not None:
        then(folder, 2, damaged)
    write_json(folder / "expected.json", {"versions": {"1": expected["1"]}, "refused": 2, "error": error})


def reference() -> None:
    """A channel that starts from a model on the Hub, here in its cache: two files, some float32, without the tied head."""
    folder = GOLDEN / "reference"
    snapshot = folder / "hub" / f"models--{MODEL.replace('/', '--')}" / "snapshots" / COMMIT
    shutil.rmtree(folder, ignore_errors=True)
    snapshot.mkdir(parents=True)
    embed = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) * 0.05  # as in `weights`, before it is rounded
    stored = weights() | {"model.embed.weight": embed, "nobody reads this": torch.zeros(3)}
    names, files = list(stored), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for number, file in enumerate(files):
        safetensors.torch.save_file({name: stored[name] for name in names[number::2]}, snapshot / file)
    index = {"weight_map": {name: files[number % 2] for number, name in enumerate(names)}}
    write_json(snapshot / "model.safetensors.index.json", index)
    first = weights()
    first["lm_head.weight"] = first["model.embed.weight"].clone()
    with mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub")):
        expected = publish(folder / "channel", "packed", [first, moved(first, 2, 0.01)], f"{MODEL}@{COMMIT}")
    write_json(folder / "expected.json", {"versions": expected})


def signed() -> None:
    """A channel of two keys: the second one takes over at version 3, where the first is still trusted."""
    folder = GOLDEN / "signed"
    random = torch.Generator().manual_seed(3)
    first = {"w": torch.randn(20, 40, generator=random).to(torch.bfloat16)}
    states = [first]
    for seed in range(4):
        states.append(moved(states[-1], seed, 0.05))
    with tempfile.TemporaryDirectory() as private:
        names = []
        for number in (1, 2):
            key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)  # that everybody knows: for tests only
            path = Path(private) / f"key{number}"
            path.touch(0o600)
            path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            names.append(Signer(path).public)
        trusted = Path(private) / "trusted"
        trusted.write_text("\n".join(names))
        settings = {"model_files": {"config.json": b"{}"}, "trusted_keys": trusted}
        expected = publish(folder / "channel", "packed", states[:2], signing_key=Path(private) / "key1", **settings)
        expected |= publish(
            folder / "channel", "packed", states[2:], before=2, signing_key=Path(private) / "key2", **settings
        )
    write_json(folder / "expected.json", {"keys": names, "versions": expected})


def main() -> None:
    reference()
    signed()
    for codec in CODECS:
        expected = publish(GOLDEN / codec, codec, versions())
    write_json(GOLDEN / "expected.json", {"versions": expected})  # the same for every codec
    damage("sha256", "context", ".words", "CorruptDataError", None)
    damage("stream", "packed", ".words", "CorruptDataError", reseal)
    damage("fingerprint", "raw", "w.values", "FingerprintMismatchError", reseal)


if __name__ == "__main__":
    main()
