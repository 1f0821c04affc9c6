"""A reader of `deltasync/1` channels on disk, written from docs/format.md alone, with numpy and the standard library.

It is slow and made to be compared with the page, section by section.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "deltasync/1"
BITS = {8: np.dtype("<u1"), 16: np.dtype("<u2"), 32: np.dtype("<u4"), 64: np.dtype("<u8")}
# dtype: width, name in safetensors files, shift and mask of the class
DTYPES = {
    "bfloat16": (16, "BF16", 7, 255),
    "float16": (16, "F16", 10, 31),
    "float32": (32, "F32", 23, 255),
    "float64": (64, "F64", 55, 255),
    "float8_e4m3fn": (8, "F8_E4M3", 3, 15),
    "float8_e5m2": (8, "F8_E5M2", 2, 31),
    "int8": (8, "I8", 0, 0),
    "uint8": (8, "U8", 0, 0),
    "bool": (8, "BOOL", 0, 0),
    "int16": (16, "I16", 0, 0),
    "int32": (32, "I32", 0, 0),
    "int64": (64, "I64", 0, 0),
}
Model = dict[str, tuple[str, tuple[int, ...], np.ndarray]]


class Damaged(Exception):
    """The channel contradicts the page or itself."""


def check(condition: bool, *message: object) -> None:
    if not condition:
        raise Damaged(" ".join(map(str, message)))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# 3 to 5: documents, reading


class Channel:
    def __init__(self, folder: Path, checkpoint: Path | None = None, keys: frozenset[str] = frozenset()) -> None:
        self.folder = folder
        self.checkpoint = checkpoint  # that references mean, wherever they say it is
        self.keys = keys  # one of which must have signed every document; none: signatures are ignored
        channel = self.document("channel.json")
        self.run_id = channel["run_id"]
        self.table = {name: (dtype, tuple(shape)) for name, (dtype, shape) in channel["tensors"].items()}
        check(all(dtype in DTYPES for dtype, _ in self.table.values()), "unknown dtype")
        table = json.dumps(
            {name: channel["tensors"][name] for name in sorted(self.table, key=str.encode)},
            separators=(",", ":"),
            ensure_ascii=False,
        )
        check(sha256(table.encode()) == channel["tensors_sha256"], "table")
        head = self.document("head.json")
        self.head = int(head["version"])
        self.head_sha256 = str(head["manifest_sha256"])

    def document(self, key: str, expected_sha256: str | None = None) -> dict[str, Any]:
        data = (self.folder / key).read_bytes()
        check(expected_sha256 in (None, sha256(data)), key, "sha256")
        if self.keys:
            check_signature(key, data, self.keys)
        found = json.loads(data.decode())
        check(found["format"] == FORMAT, "format", found["format"])
        check(set(found.get("requires", [])) <= {"reference"}, "requires", found.get("requires"))
        check(found["run_id"] == getattr(self, "run_id", found["run_id"]), "another run")
        return found

    def manifest(self, version: int, expected_sha256: str) -> dict[str, Any]:
        found = self.document(f"manifests/{version:010}.json", expected_sha256)
        check(found["version"] == version, "manifest", version, "says", found["version"])
        check(found["delta"] is not None or found["anchor"] is not None, "empty version")
        check(found["kind"] == ("delta" if found["anchor"] is None else "anchor"), "kind")
        check(found["total"] == sum(elements(shape) for _, shape in self.table.values()), "total")
        return found

    def file(self, row: dict[str, Any]) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, ...], bytes]]]:
        data = (self.folder / row["key"]).read_bytes()
        check(len(data) == row["bytes"] and sha256(data) == row["sha256"], row["key"], "length or sha256")
        return safetensors(data)

    def chain(self) -> list[dict[str, Any]]:
        """The manifests from the head back, as far as each names the one before."""
        found = [self.manifest(self.head, self.head_sha256)]
        while (delta := found[-1]["delta"]) is not None:
            check(delta["base_version"] < found[-1]["version"], "base")
            found.append(self.manifest(delta["base_version"], delta["base_manifest_sha256"]))
        return found

    def links(self) -> int:
        """Hold every link of every manifest to the manifest that it stands for; returns how many there are."""
        known = {found["version"]: found for found in self.chain()}
        count = 0
        for found in known.values():
            links, after = found.get("chain", []), found
            for version, digest, fingerprint_, delta_bytes in reversed(links):
                delta, before = after["delta"], known[version]
                check((version, digest) == (delta["base_version"], delta["base_manifest_sha256"]), "link", version)
                check(fingerprint_ == before["fingerprint"], "fingerprint of link", version)
                check(
                    delta_bytes == sum(row["bytes"] for row in (before["delta"] or {"files": []})["files"]), "bytes of link"
                )
                after, count = before, count + 1
        return count

    def read_by_fold(self, base: int, version: int) -> Model:
        """The version, by the fold from `base` instead of the deltas between."""
        fold = self.document(f"folds/{base:010}-{version:010}/fold.json")
        known = {found["version"]: found for found in self.chain()}
        for which, named in ((base, fold["base_manifest_sha256"]), (version, fold["manifest_sha256"])):
            check(sha256((self.folder / f"manifests/{which:010}.json").read_bytes()) == named, "manifest of fold", which)
        check((fold["base_version"], fold["version"]) == (base, version), "fold", base, version)
        model = self.apply(self.read(base), {"version": version, "delta": fold})
        total = sum(fingerprint(name, bits) for name, (_, _, bits) in model.items()) % 2**64
        check(f"{total:016x}" == known[version]["fingerprint"], "fingerprint after fold", version)
        return model

    def read(self, version: int) -> Model:
        """Tensor name to dtype, shape and flat bits, all of them proven.

        Raises:
            Damaged: this version cannot be reached from an anchor without a contradiction.
        """
        try:
            return self.follow(version)
        except (LookupError, ValueError, TypeError, struct.error, OSError) as error:
            raise Damaged(f"malformed: {error!r}") from error

    def follow(self, version: int) -> Model:
        todo = [manifest for manifest in self.chain() if manifest["version"] <= version]
        check(bool(todo) and todo[0]["version"] == version, "no version", version)
        check(any(manifest["anchor"] is not None for manifest in todo), "no anchor")
        anchored = next(i for i, manifest in enumerate(todo) if manifest["anchor"] is not None)
        check(todo[0]["anchor_version"] == todo[anchored]["version"], "anchor_version")
        model: Model = {}
        for manifest in reversed(todo[: anchored + 1]):
            model = self.apply(model, manifest) if model else self.anchor(manifest)
            total = sum(fingerprint(name, bits) for name, (_, _, bits) in model.items()) % 2**64
            check(f"{total:016x}" == manifest["fingerprint"], "fingerprint of version", manifest["version"])
        return model

    # 7: anchors

    def anchor(self, manifest: dict[str, Any]) -> Model:
        found: Model = {}
        if manifest["anchor"].get("reference") is not None:
            return self.reference(manifest)
        for row in manifest["anchor"].get("companions") or []:
            check(row["key"].startswith(manifest["anchor"]["directory"] + "/"), "companion", row["key"])
            data = (self.folder / row["key"]).read_bytes()
            check(len(data) == row["bytes"] and sha256(data) == row["sha256"], row["key"], "length or sha256")
        for row in manifest["anchor"]["files"]:
            metadata, entries = self.file(row)
            fingerprints = json.loads(metadata["deltasync.fingerprints"])
            check(metadata["format"] == "pt" and fingerprints.keys() == entries.keys(), "anchor metadata")
            for name in entries:
                check(name in self.table and name not in found, name)
                dtype, shape = self.table[name]
                bits = array(entries[name], dtype, shape)
                check(f"{fingerprint(name, bits):016x}" == fingerprints[name], "fingerprint of", name)
                found[name] = dtype, shape, bits
        check(found.keys() == self.table.keys(), "anchor without", self.table.keys() - found.keys())
        return {name: found[name] for name in self.table}

    def reference(self, manifest: dict[str, Any]) -> Model:
        anchor, found = manifest["anchor"], {}
        reference = anchor["reference"]
        check((anchor["directory"], anchor["files"], manifest["requires"]) == ("", [], ["reference"]), "reference")
        names = [key for key in ("repo", "revision", "path") if reference[key] is not None]
        check(names in (["repo", "revision"], ["path"]) and self.checkpoint is not None, "checkpoint", names)
        entries: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        for path in weight_files(self.checkpoint):
            entries |= safetensors(path.read_bytes())[1]
        check(reference["fingerprints"].keys() == self.table.keys(), "tensors of the reference")
        for name, (dtype, shape) in self.table.items():
            stored, size, data = entries[name if name in entries else reference["tied"][name]]
            if stored == "F32" and dtype == "bfloat16":  # the one rounding that the golden channel needs
                stored, data = "BF16", rounded(np.frombuffer(data, "<u4")).tobytes()
            bits = array((stored, size, data), dtype, shape)
            check(f"{fingerprint(name, bits):016x}" == reference["fingerprints"][name], "fingerprint of", name)
            found[name] = dtype, shape, bits
        return found

    # 8: delta payloads

    def apply(self, model: Model, manifest: dict[str, Any]) -> Model:
        before, model, delta, changed, after, spans = model, dict(model), manifest["delta"], 0, {}, {}
        for row in delta["files"]:
            metadata, entries = self.file(row)
            check(metadata["format"] == FORMAT and metadata["codec"] == delta["codec"], "payload format or codec")
            check(metadata["version"] == str(manifest["version"]), "payload version")
            check(metadata["base_version"] == str(delta["base_version"]), "payload base")
            patches = json.loads(metadata["patches"])
            check(delta["codec"] in ("raw", "packed", "context"), delta["codec"])
            decode = self.raw if delta["codec"] == "raw" else self.blocks
            # Each file says what differs from the base; several may say it of different elements of one tensor.
            for name, bits in decode(before, metadata, patches, entries).items():
                dtype, shape, old = before[name]
                here = bits != old
                check(int(here.sum()) == patches[name]["changed"] > 0, name, "changed")
                check(after.setdefault(name, patches[name]["fingerprint"]) == patches[name]["fingerprint"], name)
                span = int(here.argmax()), len(here) - int(here[::-1].argmax())
                check(all(span[1] <= start or stop <= span[0] for start, stop in spans.setdefault(name, [])), name, "parts")
                spans[name].append(span)
                model[name] = dtype, shape, np.where(here, bits, model[name][2])
                changed += patches[name]["changed"]
        for name, expected in after.items():
            check(f"{fingerprint(name, model[name][2]):016x}" == expected, "fingerprint of", name)
        check(changed == delta["changed"], "changed")
        return model

    def raw(self, model: Model, metadata: dict[str, str], patches: dict, entries: dict) -> dict[str, np.ndarray]:
        check(entries.keys() == {f"{name}.{part}" for name in patches for part in ("indices", "values")}, "entries")
        found = {}
        for name, patch in patches.items():
            dtype, _, old = model[name]
            shape = (patch["changed"],)
            indices = array(entries[f"{name}.indices"], "int32" if len(old) < 2**31 else "int64", shape).astype(np.int64)
            check(bool((np.diff(indices) > 0).all()) and indices[0] >= 0 and indices[-1] < len(old), name, "indices")
            found[name] = old.copy()
            found[name][indices] = array(entries[f"{name}.values"], dtype, shape)
        return found

    def blocks(self, model: Model, metadata: dict[str, str], patches: dict, entries: dict) -> dict[str, np.ndarray]:
        context = metadata["codec"] == "context"
        block_elements = int(metadata["block_elements"])
        check(1 <= block_elements <= 2**30, "block_elements")
        dense = {name for name in patches if patches[name].get("dense")}
        found = {name: array(entries[name], *model[name][:2]) for name in dense}
        check(entries.keys() == dense | {".words", ".blocks", ".tables"}, "entries")
        words = array(entries[".words"], "int32", (-1,)).tolist()
        rows = array(entries[".blocks"], "int32", (-1, 3 if context else 2)).astype("<u4").view("<i4")
        rows = rows.reshape(-1, 3 if context else 2).tolist()
        tables = array(entries[".tables"], "uint8", (-1,)).tobytes()
        groups, at = [], 0
        while at < len(tables):
            group, at = (context_tables if context else packed_tables)(tables, at)
            groups.append(group)
        for name in patches:
            if name in dense:
                continue
            dtype, _, old = model[name]
            new, left = old.copy(), patches[name]["changed"]
            count = -(-len(old) // block_elements)
            start, stop = patches[name].get("blocks", [0, count])
            check(0 <= start <= stop <= count, name, "blocks")
            for first in range(start * block_elements, min(stop * block_elements, len(old)), block_elements):
                block = old[first : first + block_elements].tolist()
                check(bool(rows), "too few blocks")
                changed, used, *level = rows.pop(0)
                check(0 <= changed <= len(block) and 0 <= used <= len(words), "block")
                left -= changed
                if not changed:
                    check(used == 0, "words of a block without changes")
                    continue
                stream = Stream(words[:used])
                del words[:used]
                group = groups[patches[name]["group"]]
                decode = context_block if context else packed_block
                for index, step in decode(stream, group, block, changed, dtype, *level):
                    check(index < len(block), "index outside its block")
                    new[first + index] = (block[index] + step) % 2 ** DTYPES[dtype][0]
                stream.end()
            check(left == 0, name, "changed")
            found[name] = new
        check(not rows and not words, "blocks or words left")
        return found


def elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def weight_files(checkpoint: Path | None) -> list[Path]:
    assert checkpoint is not None
    index = checkpoint / "model.safetensors.index.json"
    if not index.exists():
        return [checkpoint / "model.safetensors"]
    return [checkpoint / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def rounded(bits: np.ndarray) -> np.ndarray:
    """The upper halves of float32 bits, rounded to nearest, ties to even; of numbers, not of NaN."""
    return ((bits.astype(np.uint64) + 0x7FFF + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint64(16)).astype("<u2")


def safetensors(data: bytes) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size].decode())
    metadata = header.pop("__metadata__", {})
    start = 8 + size
    return metadata, {
        name: (row["dtype"], tuple(row["shape"]), data[start + row["data_offsets"][0] : start + row["data_offsets"][1]])
        for name, row in header.items()
    }


def array(entry: tuple[str, tuple[int, ...], bytes], dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The flat bits of an entry, which must have this dtype and shape (-1: any)."""
    width, stored, _, _ = DTYPES[dtype]
    check(entry[0] == stored and len(entry[1]) == len(shape), "dtype or shape", entry[0], entry[1])
    check(all(expected in (-1, size) for expected, size in zip(shape, entry[1], strict=True)), "shape", entry[1])
    check(len(entry[2]) == elements(entry[1]) * width // 8, "length")
    return np.frombuffer(entry[2], BITS[width])


# 3: signatures. Ed25519 after RFC 8032, sections 5.1.2 to 5.1.7, on affine points

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int]


def check_signature(key: str, data: bytes, keys: frozenset[str]) -> None:
    end = re.compile(rb',"signature":\{"key":"([0-9a-f]{64})","ed25519":"([0-9a-f]{128})"\}\}\n').fullmatch(
        data, len(data) - 230
    )
    check(end is not None, key, "not signed")
    assert end is not None
    check(end[1].decode() in keys, key, "signed by another key")
    message = b"deltasync/1 " + key.encode() + b"\n" + data[: end.start()]
    check(verify(bytes.fromhex(end[1].decode()), message, bytes.fromhex(end[2].decode())), key, "signature")


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    s = int.from_bytes(signature[32:], "little")
    k = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % ORDER
    y = 4 * pow(5, -1, P) % P
    base, a, r = point(y.to_bytes(32, "little")), point(public), point(signature[:32])
    return s < ORDER and None not in (a, r) and times(s, base) == add(r, times(k, a))


def point(data: bytes) -> Point | None:
    sign, y = data[31] >> 7, int.from_bytes(data, "little") % 2**255
    if y >= P:
        return None
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P or (x == 0 and sign):
        return None
    return (P - x if x & 1 != sign else x), y


def add(one: Point | None, other: Point | None) -> Point:
    assert one is not None and other is not None
    (x1, y1), (x2, y2) = one, other
    both = D * x1 * x2 * y1 * y2
    return (x1 * y2 + x2 * y1) * pow(1 + both, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - both, -1, P) % P


def times(count: int, one: Point | None) -> Point:
    total: Point = (0, 1)
    while count:
        if count & 1:
            total = add(total, one)
        one, count = add(one, one), count >> 1
    return total


# 6: fingerprint


def fingerprint(name: str, bits: np.ndarray) -> int:
    (key,) = struct.unpack("<Q", hashlib.sha256(name.encode()).digest()[:8])
    u = np.uint64
    with np.errstate(over="ignore"):
        z = u(key) + np.arange(len(bits), dtype=u) * u(0x9E3779B97F4A7C15) + bits.astype(u) * u(0xD1B54A32D192ED03)
        z = (z ^ (z >> u(30))) * u(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> u(27))) * u(0x94D049BB133111EB)
        return int((z ^ (z >> u(31))).sum(dtype=u))


# 8: symbol tables, streams, numbers

SymbolTable = list[int]  # the slots of each symbol


def symbol_table(data: bytes, at: int) -> tuple[SymbolTable, int]:
    highest, slots = data[at], []
    at += 1
    for _ in range(highest + 1):
        value, at = data[at], at + 1
        if value >= 128:
            check(data[at] < 128, "LEB128 of more than two bytes")
            value, at = value - 128 + (data[at] << 7), at + 1
        slots.append(value)
    check(sum(slots) == 2**12 and slots[-1] > 0, "symbol table")
    return slots, at


class Stream:
    def __init__(self, words: list[int]) -> None:
        check(len(words) >= 2, "stream without a state")
        self.x = words[0] | words[1] << 32
        check(self.x >= 2**32, "state")
        self.words = words[2:][::-1]

    def end(self) -> None:
        check(self.x == 2**32 and not self.words, "end of a stream")

    def slot(self, n: int) -> int:
        return self.x % 2**n

    def take(self, n: int, start: int, freq: int) -> None:
        check(start <= self.slot(n) < start + freq, "slot")
        self.x = freq * (self.x >> n) + self.slot(n) - start
        if self.x < 2**32:
            check(bool(self.words), "stream too short")
            self.x = self.x << 32 | self.words.pop()

    def number(self, table: SymbolTable) -> int:
        slot, start, s = self.slot(12), 0, 0
        while start + table[s] <= slot:
            start, s = start + table[s], s + 1
        self.take(12, start, table[s])
        if s < 16:
            return s
        e = s // 4 - 2
        check(e <= 61, "symbol", s)
        extra, left = 0, e
        while left:
            m = min(left, 24)
            value = self.slot(m)
            self.take(m, value, 1)
            extra, left = extra << m | value, left - m
        return ((4 + s % 4) << e) + extra

    def step(self, table: SymbolTable, dtype: str) -> int:
        z = self.number(table)
        m = (z >> 1) + 1
        return m if z % 2 else 2 ** DTYPES[dtype][0] - m


# 8: packed


def packed_tables(data: bytes, at: int) -> tuple[list[SymbolTable], int]:
    gaps, at = symbol_table(data, at)
    steps, at = symbol_table(data, at)
    return [gaps, steps], at


def packed_block(
    stream: Stream, tables: list[SymbolTable], old: list[int], changed: int, dtype: str
) -> list[tuple[int, int]]:
    found, index = [], -1
    for _ in range(changed):
        index += stream.number(tables[0]) + 1
        found.append((index, stream.step(tables[1], dtype)))
    return found


# 8: context


def integer_root(value: int, degree: int) -> int:
    """The largest integer whose power is at most `value`."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle)
    return low


R = [integer_root(2 ** (448 - i), 16) for i in range(16)]
KNOTS = [2**28 - (R[j % 16] >> (j // 16)) for j in range(65)]
HAZARDS = [integer_root(2**q, 8) for q in range(177)]
END = 2**22


def survival(t: int) -> int:
    """S(t)"""
    j = t >> 16
    return KNOTS[j] if t == j << 16 else KNOTS[j] + (((t - (j << 16)) * (KNOTS[j + 1] - KNOTS[j])) >> 16)


def context_tables(data: bytes, at: int) -> tuple[tuple[dict[int, int], dict[int, int], list[SymbolTable]], int]:
    first, classes = data[at], range(data[at], data[at] + data[at + 1] + 1)
    check(classes[-1] <= 255, "class", first)
    at += 2
    levels = dict(zip(classes, data[at : at + len(classes)], strict=True))
    at += len(classes)
    count, at = data[at], at + 1
    numbers = dict(zip(classes, data[at : at + len(classes)], strict=True))
    at += len(classes)
    check(max(levels.values()) <= 176 and 1 <= count <= 64 and max(numbers.values()) < count, "group")
    steps = []
    for _ in range(count):
        table, at = symbol_table(data, at)
        steps.append(table)
    return (levels, numbers, steps), at


def context_block(
    stream: Stream,
    group: tuple[dict[int, int], dict[int, int], list[SymbolTable]],
    old: list[int],
    changed: int,
    dtype: str,
    block_level: int,
) -> list[tuple[int, int]]:
    levels, numbers, steps = group
    _, _, shift, mask = DTYPES[dtype]
    found, index = [], 0
    for _ in range(changed):
        t = 0  # when element `index` begins
        slot = stream.slot(28)
        while True:
            check(index < len(old), "no element owns the slot")
            c = (old[index] >> shift) & mask
            h = HAZARDS[min(max(levels.get(c, 0) + block_level, 0), 176)]
            if slot >= survival(END):
                # the next change is not before END: every element's time is that much less
                stream.take(28, survival(END), 2**28 - survival(END))
                slot, t = stream.slot(28), t - END
            elif 0 <= t < END and survival(t) <= slot < survival(min(t + h, END)):
                stream.take(28, survival(t), survival(min(t + h, END)) - survival(t))
                break
            else:
                index, t = index + 1, t + h
        found.append((index, stream.step(steps[numbers.get(c, 0)], dtype)))
        index += 1
    return found
