"""A reader of `deltasync/2` channels on disk, written from docs/format.md alone, with numpy and zstandard.

It is slow and made to be compared with the page, section by section.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

FORMAT = "deltasync/2"
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
Record = dict[str, Any]
Decoded = tuple[dict[str, np.ndarray], dict[str, str]]  # bits of each changed tensor, and its fingerprint
BLOCK_ENTRIES = ("blocks", "tables", "words")
TILE_ENTRIES = ("tiles", "tile_tables", "tile_words")
Entry = tuple[str, tuple[int, ...], bytes]


class Damaged(Exception):
    """The channel contradicts the page or itself."""


def check(condition: bool, *message: object) -> None:
    if not condition:
        raise Damaged(" ".join(map(str, message)))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def document(key: str, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data.decode())
    except ValueError as error:
        raise Damaged(key, error) from error
    check(isinstance(found, dict) and found["format"] == FORMAT, "format of", key)
    check(set(found.get("requires", [])) <= {"reference"}, "requires", found.get("requires"))
    return found


# 2 to 7: objects, documents, following

EPOCH = r"[0-9]{6}-[0-9a-f]{8}"
Identity = tuple[int, str, str]  # number, epoch, digest of the record


def slot(version: int, epoch: str) -> str:
    return f"versions/{version // 1000:07}/{version:010}.{epoch}.safetensors"


def identity(named: dict[str, Any] | None) -> Identity | None:
    return None if named is None else (named["version"], named["epoch"], named["sha256"])


class Channel:
    def __init__(
        self, folder: Path, checkpoint: Path | None = None, keys: frozenset[str] = frozenset()
    ) -> None:
        self.folder = folder
        self.checkpoint = checkpoint  # that references mean, wherever they say it is
        self.keys = keys  # one of which must have signed every document; none: signatures are ignored
        data = self.bounded("channel.json", 32 << 20)
        if keys:
            check_signature("channel.json", data, keys)
        channel = document("channel.json", data)
        check(channel["fencing"] in ("seal", "lease"), "fencing")
        self.run_id, self.epoch = channel["run_id"], channel["epoch"]
        self.table = {name: (dtype, tuple(shape)) for name, (dtype, shape) in channel["tensors"].items()}
        check(all(dtype in DTYPES for dtype, _ in self.table.values()), "unknown dtype")
        table = json.dumps(
            {name: channel["tensors"][name] for name in sorted(self.table, key=str.encode)},
            separators=(",", ":"),
            ensure_ascii=False,
        )
        check(sha256(table.encode()) == channel["tensors_sha256"], "table")
        names = sum(len(name.encode()) for name in self.table)
        self.record_bytes = (5 << 20) + (len(self.table) << 10) + 32 * names
        count = sum(elements(shape) for _, shape in self.table.values())
        self.payload_bytes = 32 * count + (len(self.table) << 12) + 64 * names + (1 << 20)

    # 4: bounds

    def bounded(self, key: str, most: int) -> bytes:
        check(
            re.fullmatch(r"[\w=+@-][\w.=+@-]*(/[\w=+@-][\w.=+@-]*)*", key, re.ASCII) is not None, "key", key
        )
        path = self.folder / key
        check(path.is_file() and not path.is_symlink(), "missing", key)
        check(path.stat().st_size <= most, "bound", key)
        return path.read_bytes()

    def file(self, row: dict[str, Any]) -> bytes:
        data = self.bounded(row["key"], row["bytes"])
        check(len(data) == row["bytes"] and sha256(data) == row["sha256"], row["key"], "length or sha256")
        return data

    # 3: records

    def record(self, key: str) -> tuple[Record, str]:
        """The document of a record, with the object as `object`, and the digest of the object."""
        data = self.bounded(key, self.record_bytes + self.payload_bytes * key.startswith("compactions/"))
        check(len(data) >= 8, "record", key)
        (size,) = struct.unpack("<Q", data[-8:])
        check(0 < size <= len(data) - 8, "record", key)
        text, body = data[-8 - size : -8], data[: -8 - size]
        if self.keys:
            check_signature(key, text, self.keys)
        found = document(key, text)
        check((found["body_bytes"], found["body_sha256"]) == (len(body), sha256(body)), "body of", key)
        check(found["run_id"] == self.run_id, "another run")
        self.check_kind(key, found)
        delta, anchor = found.get("delta"), found.get("anchor")
        files = (delta or {}).get("parts", []) + (anchor or {}).get("files", [])
        check(sum(row["bytes"] for row in files) <= self.payload_bytes and len(files) <= 65_536, "bound", key)
        return found | {"requires": found.get("requires", []), "object": data}, sha256(data)

    def check_kind(self, key: str, found: Record) -> None:
        kind, base, version = found["kind"], found.get("base"), found["version"]
        names = ("base", "fingerprint", "delta", "anchor", "next_epoch", "sha256")
        has = {name for name in names if found.get(name) is not None} - {"base"}
        wanted = {
            "delta": {"fingerprint", "delta"},
            "anchor": {"fingerprint", "anchor"},
            "compaction": {"fingerprint", "sha256", "delta"},
            "announcement": {"fingerprint", "sha256", "anchor"},
            "seal": {"next_epoch"},
        }
        check(has == wanted[kind], "fields of", kind, key)
        before = 0 if base is None else base["version"]
        if kind == "compaction":
            named = re.fullmatch(rf"compactions/([0-9]{{10}})-([0-9]{{10}})\.{EPOCH}\.safetensors", key)
            check(named is not None and (int(named[1]), int(named[2])) == (before, version), "span of", key)
            check(0 < before < version, "base of", key)
        elif kind == "announcement":
            named = re.fullmatch(rf"announcements/([0-9]{{10}})\.{EPOCH}\.safetensors", key)
            check(named is not None and int(named[1]) == version and base is None, "version of", key)
        else:
            check(key == slot(version, found["epoch"]) and before == version - 1, "slot of", key)
            check(kind != "delta" or base is not None, "base of", key)

    # 7: looking

    def slots(self) -> list[tuple[str, int]]:
        """(epoch, number) of each slot that is taken, ascending."""
        found = []
        for path in (self.folder / "versions").glob("*/*"):
            named = re.fullmatch(rf"([0-9]{{10}})\.({EPOCH})\.safetensors", path.name)
            if named is not None and path.parent.name == f"{int(named[1]) // 1000:07}":
                found.append((named[2], int(named[1])))
        return sorted(found)

    def newest(self) -> Identity:
        """The last version of the greatest epoch that has one, or the base of its seal; damaged ones are
        passed over.
        """
        for epoch, number in reversed(self.slots()):
            try:
                found, digest = self.record(slot(number, epoch))
            except Damaged:
                continue
            here = identity(found.get("base")) if found["kind"] == "seal" else (number, epoch, digest)
            if here is not None:
                return here
        raise Damaged("no version")

    def numbered(self, version: int) -> Identity:
        """What is meant by a number: the slot of the greatest epoch."""
        epoch = max((epoch for epoch, number in self.slots() if number == version), default="")
        found, digest = self.record(slot(version, epoch))
        check(found["kind"] != "seal", "no version", version)
        return version, epoch, digest

    # 7: planning

    def ways(self, target: Identity) -> list[Record]:
        """The records, compactions and announcements that lead to a version, those with an anchor first."""
        number, epoch, _ = target
        beside = [
            *self.folder.glob(f"compactions/*-{number:010}.*"),
            *self.folder.glob(f"announcements/{number:010}.*"),
        ]
        keys = [str(path.relative_to(self.folder)) for path in sorted(beside)]
        found = []
        for key in [slot(number, epoch), *keys]:
            try:
                record, sha = self.record(key)
                here = (
                    identity(record)
                    if record["kind"] in ("compaction", "announcement")
                    else (record["version"], record["epoch"], sha)
                )
                check(here == target, "digest of", key)
            except Damaged as error:
                self.problems.append(error)
                continue
            found.append(record)
        return sorted(found, key=lambda record: record.get("anchor") is None)

    def read(self, version: int | Identity | None = None, by: str = "") -> Model:
        """Tensor name to dtype, shape and flat bits, all of them proven.

        Args:
            version: Which; the newest by default.
            by: The kind of the last record on the way; any by default.

        Raises:
            Damaged: this version cannot be reached without a contradiction.
        """
        self.problems: list[Exception] = []
        target = (
            self.newest()
            if version is None
            else self.numbered(version)
            if isinstance(version, int)
            else version
        )
        model = self.reach(target, by)
        if model is None:
            raise Damaged("no way to", target, self.problems)
        return model

    def reach(self, target: Identity, by: str = "") -> Model | None:
        for record in self.ways(target):
            try:
                if by not in ("", record["kind"]):
                    continue
                if record.get("anchor") is not None:
                    model = self.anchor(record)
                else:
                    start = identity(record["base"])
                    assert start is not None
                    before = self.reach(start)
                    if before is None:
                        continue
                    model = self.apply(before, record)
                total = sum(fingerprint(name, bits) for name, (_, _, bits) in model.items()) % 2**64
                check(f"{total:016x}" == record["fingerprint"], "fingerprint of version", target)
                return model
            except (
                Damaged,
                LookupError,
                ValueError,
                TypeError,
                struct.error,
                OSError,
                zstandard.ZstdError,
            ) as error:
                self.problems.append(error)
        return None

    # 9: anchors

    def anchor(self, record: Record) -> Model:
        found: Model = {}
        if record["anchor"].get("reference") is not None:
            return self.reference(record)
        folder = record["anchor"]["directory"] + "/"
        for row in record["anchor"].get("model_files") or []:
            check(row["key"].startswith(folder), "companion", row["key"])
            self.file(row)
        for row in record["anchor"]["files"]:
            check(
                row["key"].startswith("anchors/") and row["key"].startswith(folder), "weight file", row["key"]
            )
            metadata, entries = safetensors(self.file(row))
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

    def reference(self, record: Record) -> Model:
        anchor, found = record["anchor"], {}
        reference = anchor["reference"]
        check(
            (anchor["directory"], anchor["files"], record["requires"]) == ("", [], ["reference"]), "reference"
        )
        names = [key for key in ("repo", "revision", "path") if reference[key] is not None]
        check(names in (["repo", "revision"], ["path"]) and self.checkpoint is not None, "checkpoint", names)
        entries: dict[str, Entry] = {}
        for path in weight_files(self.checkpoint):
            entries |= safetensors(path.read_bytes())[1]
        check(reference["fingerprints"].keys() == self.table.keys(), "tensors of the reference")
        for name, (dtype, shape) in self.table.items():
            stored, size, data = entries[name if name in entries else reference["tied"][name]]
            if stored == "F32" and dtype == "bfloat16":  # the one rounding that the golden channel needs
                stored, data = "BF16", rounded(np.frombuffer(data, "<u4")).tobytes()
            bits = array((stored, size, data), dtype, shape)
            check(
                f"{fingerprint(name, bits):016x}" == reference["fingerprints"][name], "fingerprint of", name
            )
            found[name] = dtype, shape, bits
        return found

    # 10: payloads

    def apply(self, model: Model, record: Record) -> Model:
        before, model, delta, changed, after, seen = model, dict(model), record["delta"], 0, {}, {}
        metadata, entries = safetensors(record["object"])
        check(entries.pop(".record")[2] == record["object"][record["body_bytes"] :], "last entry")
        payloads = [(metadata, entries)] if entries else []
        for metadata, entries in payloads + [safetensors(self.file(row)) for row in delta["parts"]]:
            check(
                metadata["format"] == FORMAT and metadata["codec"] == delta["codec"],
                "payload format or codec",
            )
            check(metadata["version"] == str(record["version"]), "payload version")
            check(metadata["base_version"] == str(record["base"]["version"]), "payload base")
            check(delta["codec"] in ("raw", "packed", "context"), delta["codec"])
            decode = {"raw": self.raw, "packed": self.vectors, "context": self.vectors}[delta["codec"]]
            found, digests = decode(before, metadata, entries)
            check(found.keys() == digests.keys(), "tensors")
            here_count = 0
            # Each file says what differs from the base; several may say it of different elements of one
            # tensor.
            for name, bits in found.items():
                dtype, shape, old = before[name]
                here = bits != old
                here_count += int(here.sum())
                check(here.any(), name, "is not changed")
                check(after.setdefault(name, digests[name]) == digests[name], name)
                check(not (seen.setdefault(name, np.zeros(len(old), bool)) & here).any(), name, "parts")
                seen[name] |= here
                model[name] = dtype, shape, np.where(here, bits, model[name][2])
            check(metadata["changed"] == str(here_count), "changed")
            changed += here_count
        for name, expected in after.items():
            check(f"{fingerprint(name, model[name][2]):016x}" == expected, "fingerprint of", name)
        check(changed == delta["changed"], "changed")
        return model

    def raw(self, model: Model, metadata: dict[str, str], entries: dict) -> Decoded:
        patches = json.loads(metadata["patches"])
        check(
            entries.keys() == {f"{name}.{part}" for name in patches for part in ("indices", "values")},
            "entries",
        )
        found = {}
        for name, patch in patches.items():
            dtype, _, old = model[name]
            shape = (patch["changed"],)
            indices = array(
                entries[f"{name}.indices"], "int32" if len(old) < 2**31 else "int64", shape
            ).astype(np.int64)
            check(
                bool((np.diff(indices) > 0).all()) and indices[0] >= 0 and indices[-1] < len(old),
                name,
                "indices",
            )
            found[name] = old.copy()
            found[name][indices] = array(entries[f"{name}.values"], dtype, shape)
        return found, {name: patch["fingerprint"] for name, patch in patches.items()}

    def vectors(self, model: Model, metadata: dict[str, str], entries: dict) -> Decoded:
        block_elements = int(metadata["block_elements"])
        check(1 <= block_elements <= 2**30, "block_elements")
        digests: dict[str, str] = {}
        said: dict[str, int] = {}
        flat: dict[str, np.ndarray] = {}
        for width, row in json.loads(metadata["vectors"]).items():
            names = [name for name, (dtype, _) in self.table.items() if DTYPES[dtype][0] == 8 * int(width)]
            old = np.concatenate([model[name][2] for name in names])
            part = {entry: entries.pop(f".{width}.{entry}") for entry in ("counts", "fingerprints")}
            first, count = row["tensor"], row["tensors"]
            flags = np.ones(count, np.uint8)
            if f".{width}.tensors" in entries:
                bitmap = array(entries.pop(f".{width}.tensors"), "uint8", (-(-count // 8),))
                flags = np.unpackbits(bitmap, bitorder="little")
            check(first >= 0 and first + count <= len(names) and not flags[count:].any(), "bitmap")
            changed = [names[first + at] for at in np.flatnonzero(flags)]
            after = array(part["fingerprints"], "int64", (len(changed),))
            counts = array(part["counts"], "int32" if len(old) < 2**31 else "int64", (len(changed),))
            said |= {name: int(value) for name, value in zip(changed, counts, strict=True)}
            digests |= {name: f"{int(value):016x}" for name, value in zip(changed, after, strict=True)}
            flat[width] = old.copy()
            if "blocks" in row:
                part = {entry: entries.pop(f".{width}.{entry}") for entry in BLOCK_ENTRIES}
                flat[width] = self.vector(old, row, part, block_elements, int(width))
            if "tiles" in row:
                part = {entry: entries.pop(f".{width}.{entry}") for entry in TILE_ENTRIES}
                part |= {entry: entries.pop(f".{width}.{entry}", None) for entry in ("tiled", "ranges")}
                sizes = int(metadata["tile_elements"]), block_elements
                for name, new in self.tiles(model, changed, row["tiles"], part, sizes, said).items():
                    at = sum(len(model[other][2]) for other in names[: names.index(name)])
                    check((flat[width][at : at + len(new)] == old[at : at + len(new)]).all(), name, "twice")
                    flat[width][at : at + len(new)] = new
            at = 0
            for name in names:
                size = len(model[name][2])
                check(
                    (flat[width][at : at + size] == old[at : at + size]).all() or name in changed,
                    name,
                    "is not named",
                )
                at += size
        found = {}
        for width, new in flat.items():
            at = 0
            for name in (
                name for name, (dtype, _) in self.table.items() if DTYPES[dtype][0] == 8 * int(width)
            ):
                size = len(model[name][2])
                if name in digests:
                    found[name] = new[at : at + size]
                at += size
        check(not entries, "entries left")
        for name, count in said.items():
            check(count == int((found[name] != model[name][2]).sum()), name, "changed")
        return found, digests

    def vector(self, old: np.ndarray, row: dict, part: dict, block_elements: int, width: int) -> np.ndarray:
        sizes = None if row["planes"] is None else json.dumps(row["planes"])
        rows = block_rows(part["blocks"], sizes, (row["blocks"], 2)).tolist()
        check(row["block"] >= 0 and (row["block"] + row["blocks"] - 1) * block_elements < len(old), "blocks")
        tables, at = array(part["tables"], "uint8", (-1,)).tobytes(), 0
        words = array(part["words"], "int32", (-1,)).tolist()
        groups = list(row["groups"])
        check(groups == sorted(set(groups)) and groups[:1] == [0][: len(rows)], "groups")
        new = old.copy()
        for block, (changed, used) in enumerate(rows):
            if groups[:1] == [block]:
                groups.pop(0)
                group, at = packed_tables(tables, at)
            start = (row["block"] + block) * block_elements
            held = old[start : start + block_elements].tolist()
            check(0 <= changed <= len(held) and 0 <= used <= len(words), "block")
            if not changed:
                check(used == 0, "words of a block without changes")
                continue
            stream = Stream(words[:used])
            del words[:used]
            for index, step in packed_block(stream, group, held, changed, 8 * width):
                check(index < len(held), "index outside its block")
                new[start + index] = (held[index] + step) % 2 ** (8 * width)
            stream.end()
        check(not words and not groups and at == len(tables), "words, groups or tables left")
        return new

    def tiles(
        self,
        model: Model,
        changed: list[str],
        row: dict,
        part: dict,
        sizes: tuple[int, int],
        said: dict[str, int],
    ) -> dict[str, np.ndarray]:
        check(all(1 <= size <= 2**30 for size in sizes), "size of a tile or block")
        flags = np.ones(len(changed), np.uint8)
        if part["tiled"] is not None:
            flags = np.unpackbits(array(part["tiled"], "uint8", (-(-len(changed) // 8),)), bitorder="little")
        check(not flags[len(changed) :].any(), "bitmap of tiles")
        names = [changed[at] for at in np.flatnonzero(flags)]
        ranges = [[0, elements(self.table[name][1])] for name in names]
        if part["ranges"] is not None:
            ranges = array(part["ranges"], "int64", (len(names), 2)).astype(np.int64).reshape(-1, 2).tolist()
        blocks = [
            places(self.table[name][1], *span, *sizes) for name, span in zip(names, ranges, strict=True)
        ]
        shape = (sum(map(len, blocks)), 2)
        rows = block_rows(
            part["tiles"], None if row["planes"] is None else json.dumps(row["planes"]), shape
        ).tolist()
        words = array(part["tile_words"], "int32", (-1,)).tolist()
        tables, at = array(part["tile_tables"], "uint8", (-1,)).tobytes(), 0
        groups = list(row["groups"])
        check(groups == sorted(set(groups)) and groups[:1] == [0] and groups[-1] < len(rows), "groups")
        found, number = {}, 0
        for name, cut in zip(names, blocks, strict=True):
            dtype, _, old = model[name]
            width, _, shift, mask = DTYPES[dtype]
            found[name], left = old.copy(), said[name]
            for block in cut:
                if groups[:1] == [number]:
                    groups.pop(0)
                    classes, at = class_tables(tables, at)
                changes, used = rows[number]
                number += 1
                check(0 <= changes <= len(block) and 0 <= used <= len(words), "block")
                left -= changes
                if not changes:
                    check(used == 0, "words of a block without changes")
                    continue
                stream = Stream(words[:used])
                del words[:used]
                held = (old[block] >> np.asarray(shift, old.dtype)) & np.asarray(mask, old.dtype)
                for index, step in class_block(stream, classes, held.tolist(), changes, width):
                    found[name][block[index]] = (int(old[block[index]]) + step) % 2**width
                stream.end()
            check(left == 0, name, "changed")
        check(not words and not groups and at == len(tables), "words, groups or tables left")
        return found


def places(shape: tuple[int, ...], start: int, stop: int, tile: int, block: int) -> list[np.ndarray]:
    """The elements of each block of a range of a tensor."""
    check(0 <= start < stop <= elements(shape), "range")
    rows_of_blocks = [np.arange(first, min(first + block, stop)) for first in range(start, stop, block)]
    if len(shape) < 2:
        return rows_of_blocks
    rows, columns = shape[-2:]
    height = min(rows, (stop - start) // columns)
    # all of one matrix or more, or some rows of one
    if (
        start % columns
        or not height
        or (stop - start) % (height * columns)
        or start // columns % rows + height > rows
    ):
        return rows_of_blocks
    w = next((w for w in (16, 8, 4) if rows * columns >= tile * w**2), 2)
    down, across = math.gcd(w, rows), math.gcd(w, columns)
    band, first = rows // down, start // columns % rows
    if first % band == 0 and height % band == 0:
        down = height // band
    elif first // band == (first + height - 1) // band:
        down = 1
    else:
        return rows_of_blocks
    if down * across == 1:
        return rows_of_blocks
    found = np.arange(start, stop).reshape(-1, down, height // down, across, columns // across)
    return list(found.swapaxes(2, 3).reshape(-1, height * columns // (down * across)))


def block_rows(entry: Entry, sizes: str | None, shape: tuple[int, int]) -> np.ndarray:
    if sizes is None:
        return array(entry, "int32", (-1, -1)).astype("<u4").view("<i4").reshape(shape)
    gained = planes(entry, json.loads(sizes), "int32", shape).astype(np.int64).reshape(shape[::-1])
    return np.cumsum(np.where(gained % 2, -(gained // 2) - 1, gained // 2), axis=1).T


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
    return (
        (bits.astype(np.uint64) + 0x7FFF + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint64(16)
    ).astype("<u2")


def safetensors(data: bytes) -> tuple[dict[str, str], dict[str, Entry]]:
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size].decode())
    metadata = header.pop("__metadata__", {})
    start = 8 + size
    return metadata, {
        name: (
            row["dtype"],
            tuple(row["shape"]),
            data[start + row["data_offsets"][0] : start + row["data_offsets"][1]],
        )
        for name, row in header.items()
    }


def planes(entry: Entry, sizes: list[int], dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The flat bits of an entry in planes, each a zstandard frame of its size."""
    count, width = elements(shape), DTYPES[dtype][0] // 8
    check(len(sizes) == width and entry[0] == "U8" and sum(sizes) == len(entry[2]), "sizes of planes")
    bits, at = np.zeros(count, BITS[8 * width]), 0
    for i, size in enumerate(sizes):
        frame, at = entry[2][at : at + size], at + size
        header = zstandard.get_frame_parameters(frame)
        check(header.content_size == count and header.window_size <= max(8 << 20, count), "header of a plane")
        plane = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        check(len(plane) == count, "plane")
        bits |= np.frombuffer(plane, np.uint8).astype(bits.dtype) << bits.dtype.type(8 * i)
    return bits


def array(entry: Entry, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The flat bits of an entry, which must have this dtype and shape (-1: any)."""
    width, stored, _, _ = DTYPES[dtype]
    check(entry[0] == stored and len(entry[1]) == len(shape), "dtype or shape", entry[0], entry[1])
    check(
        all(expected in (-1, size) for expected, size in zip(shape, entry[1], strict=True)), "shape", entry[1]
    )
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
    message = b"deltasync/2 " + key.encode() + b"\n" + data[: end.start()]
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


# 8: fingerprint


def fingerprint(name: str, bits: np.ndarray) -> int:
    (key,) = struct.unpack("<Q", hashlib.sha256(name.encode()).digest()[:8])
    u = np.uint64
    with np.errstate(over="ignore"):
        z = (
            u(key)
            + np.arange(len(bits), dtype=u) * u(0x9E3779B97F4A7C15)
            + bits.astype(u) * u(0xD1B54A32D192ED03)
        )
        z = (z ^ (z >> u(30))) * u(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> u(27))) * u(0x94D049BB133111EB)
        return int((z ^ (z >> u(31))).sum(dtype=u))


# 10: symbol tables, streams, numbers

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
        check(len(words) >= 1, "stream without a state")
        self.x = words[0] + sum(word << 32 for word in words[1:2])
        check(self.x >= 2**32 or len(words) == 1, "state")
        self.words = words[2:][::-1]

    def end(self) -> None:
        check(self.x == 1 and not self.words, "end of a stream")

    def slot(self, n: int) -> int:
        return self.x % 2**n

    def take(self, n: int, start: int, freq: int) -> None:
        check(start <= self.slot(n) < start + freq, "slot")
        self.x = freq * (self.x >> n) + self.slot(n) - start
        if self.x < 2**32 and self.words:
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

    def step(self, table: SymbolTable, bits: int) -> int:
        z = self.number(table)
        m = (z >> 1) + 1
        return m if z % 2 else 2**bits - m


# 10: packed


def packed_tables(data: bytes, at: int) -> tuple[list[SymbolTable], int]:
    gaps, at = symbol_table(data, at)
    steps, at = symbol_table(data, at)
    return [gaps, steps], at


def packed_block(
    stream: Stream, tables: list[SymbolTable], old: list[int], changed: int, bits: int
) -> list[tuple[int, int]]:
    found, index = [], -1
    for _ in range(changed):
        index += stream.number(tables[0]) + 1
        found.append((index, stream.step(tables[1], bits)))
    return found


# 10: context


def integer_root(value: int, degree: int) -> int:
    """The largest integer whose power is at most `value`."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle)
    return low


RATIOS = [integer_root(2 ** (64 + j), 8) for j in range(161)]
Class = tuple[int, int, int, SymbolTable, SymbolTable]  # first and last value, level, gaps, steps


def class_tables(data: bytes, at: int) -> tuple[list[Class], int]:
    count = data[at] + 1
    rows = [tuple(data[at + 1 + 3 * c : at + 4 + 3 * c]) for c in range(count)]
    check(all(first <= last and level <= 160 for first, last, level in rows), "class")
    check(all(one[1] < other[0] for one, other in itertools.pairwise(rows)), "order of classes")
    at += 1 + 3 * count
    found = []
    for row in sorted(rows, key=lambda row: -row[2]):
        gaps, at = symbol_table(data, at)
        steps, at = symbol_table(data, at)
        found.append((*row, gaps, steps))
    return found, at


def class_block(
    stream: Stream, classes: list[Class], held: list[int], changes: int, bits: int
) -> list[tuple[int, int]]:
    """Index and step of each change of a block whose elements have these fields."""
    members = [
        [index for index, value in enumerate(held) if first <= value <= last] for first, last, *_ in classes
    ]
    c = next((c for c, member in enumerate(members) if member), len(classes) - 1)
    found, after = [], 0  # elements of class c from `after` on may be next
    for _ in range(changes):
        gap, begun = stream.number(classes[c][3]), c
        if gap < len(members[c]) - after:
            at = after + gap
        else:
            gap -= len(members[c]) - after
            while True:
                c += 1
                check(c < len(classes), "gap beyond the last class")
                ratio = RATIOS[classes[begun][2] - classes[c][2]]
                if gap < len(members[c]) * ratio >> 8:
                    break
                gap -= len(members[c]) * ratio >> 8
            at = next(x for x in range(len(members[c])) if (x + 1) * ratio >> 8 > gap)
            check((at + 1) * ratio >> 8 == gap + 1, "gap between two elements")
        after = at + 1
        found.append((members[c][at], stream.step(classes[c][4], bits)))
    return found
