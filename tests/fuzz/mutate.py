"""Mutations that keep the outside of an input whole, so that what lies inside is reached."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

from tests.fuzz import containers

Mutate = Callable[[bytes, int], bytes]
"""libFuzzer's own mutation: bytes and the most bytes to return."""

_VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        1,
        -1,
        2,
        255,
        2**31 - 1,
        2**31,
        2**32,
        2**53,
        2**63 - 1,
        2**63,
        2**64,
        10**30,
        0.5,
        1e308,
        float("nan"),
    ),
    *(
        "",
        "..",
        "/etc/passwd",
        "a/../../b",
        "%2e%2e/x",
        "\0",
        "\ud800",
        "é",
        "\N{ARABIC-INDIC DIGIT ONE}" * 10,
    ),
    *("a" * 5000, "1" * 5000, "0" * 16, "0" * 64, "reference", "delta", "anchor", "seal", "compaction"),
    *("000001-00000001", "raw", "packed", "context", [], [0], [2**40, 2**40], {}),
]


def json_text(data: bytes, mutate: Mutate, rng: random.Random) -> bytes:
    """Change one or two places of a document."""
    document = json.loads(data)
    for _ in range(rng.choice((1, 1, 2))):
        document = _change(document, mutate, rng)
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _change(value: Any, mutate: Mutate, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(10):
            case 0:
                del value[key]
            case 1:
                value[str(rng.choice(_VALUES))] = value[key]
            case 2:
                other = rng.choice(list(value))
                value[key], value[other] = value[other], value[key]
            case _:
                value[key] = _change(value[key], mutate, rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                del value[at]
            case 1:
                value.insert(at, value[-1])
            case _:
                value[at] = _change(value[at], mutate, rng)
        return value
    if isinstance(value, str) and rng.random() < 0.6:
        if value.startswith(("{", "[")):  # the metadata of a safetensors file holds JSON in strings
            with contextlib.suppress(ValueError):
                return json_text(value.encode(), mutate, rng).decode("utf-8", "surrogatepass")
        return mutate(value.encode("utf-8", "surrogatepass"), 2 * len(value) + 8).decode("utf-8", "replace")
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 7, -128, 1 << 20))
    return rng.choice(_VALUES)


def safetensors(data: bytes, mutate: Mutate, rng: random.Random) -> bytes:
    """Change the header, or one tensor and then its size and the offsets of those behind."""
    header, body = containers.split(data)
    if rng.random() < 0.4:
        return containers.join(json.loads(json_text(json.dumps(header).encode(), mutate, rng)), body)
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    entries.sort(key=lambda item: item[1]["data_offsets"])
    changed = rng.randrange(len(entries))
    parts = []
    at = 0
    for number, (_, entry) in enumerate(entries):
        start, end = entry["data_offsets"]
        part = body[start:end]
        if number == changed:
            new = mutate(part or b"\0", 2 * len(part) + 64)
            rows = entry["shape"]
            width = len(part) // rows[0] if rows and rows[0] else 1
            if rng.random() < 0.7 and width and len(new) >= width:
                new = new[: len(new) // width * width]
                entry["shape"] = [len(new) // width, *rows[1:]] if rows else []
            part = new
        entry["data_offsets"] = [at, at + len(part)]
        at += len(part)
        parts.append(part)
    return containers.join(header, b"".join(parts))


def record(data: bytes, mutate: Mutate, rng: random.Random) -> bytes:
    """Change the document, or what lies before it."""
    header, body, document = containers.split_record(data)
    if len(header) <= 2 or rng.random() < 0.5:
        return containers.join_record(
            header, body, json.loads(json_text(json.dumps(document).encode(), mutate, rng))
        )
    before = containers.join({name: entry for name, entry in header.items() if name != ".record"}, body)
    return containers.join_record(*containers.split(safetensors(before, mutate, rng)), document)


def bundled(data: bytes, mutate: Mutate, rng: random.Random) -> bytes:
    """Change, drop, copy or exchange objects."""
    parts = containers.unbundle(data)
    names = list(parts)
    name = rng.choice(names)
    match rng.randrange(12):
        case 0:
            del parts[name]
        case 1:
            parts[rng.choice(names)] = parts[name]
        case 2:
            parts[mutate(name.encode(), 2 * len(name)).decode("utf-8", "replace")] = parts[name]
        case _:
            parts[name] = inside(parts[name], mutate, rng)
    return containers.bundle(parts)


def inside(data: bytes, mutate: Mutate, rng: random.Random) -> bytes:
    """Change data by what it is; as bytes now and then, and if it is nothing known."""
    kinds = [record, safetensors, json_text, bundled] if rng.random() < 0.85 else []
    for kind in kinds:
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return kind(data, mutate, rng)
    return mutate(data, 2 * len(data) + 64)
