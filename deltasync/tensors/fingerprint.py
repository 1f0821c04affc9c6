"""Fingerprint of tensor bits: an additive 64-bit digest that a commit updates at the cost of what changed.

    F(tensor) = sum over i of h(key(name), i, bits(i))   modulo 2**64
    F(model)  = sum over its tensors of F(tensor)        modulo 2**64

h is splitmix64's finalizer over the flat checkpoint index and the bit pattern
(`kernels.reference.cell_hash`). Sums over shards add up to the whole, and writing element i adds h(new) -
h(old). h must not be linear in the bits: with mix(i) * bits(i), adding a step to a wrong old value would
change F as if the old value had been right (docs/decisions/0002-fingerprint.md). It detects faults, not
attackers.
"""

from __future__ import annotations

import hashlib

MASK = (1 << 64) - 1

# Odd 64-bit constants: the golden ratio and two from Steele, Lea and Flood, "Fast Splittable Pseudorandom
# Number Generators" (OOPSLA 2014, splitmix64), and one more odd one for the value.
INDEX_STEP, VALUE_STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def tensor_key(name: str) -> int:
    """Return a tensor's 64-bit key: the first 8 bytes, little-endian, of the sha256 of its UTF-8 name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def to_hex(value: int) -> str:
    """Return 16 lower-case hexadecimal digits."""
    return f"{value & MASK:016x}"
