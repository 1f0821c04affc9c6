"""Numbers that others published: the changes of a step, and the bits of their own code."""

from __future__ import annotations

PULSE_RUNS = (
    ("Qwen2.5-0.5B, 3e-6", 0.494e9, (0.0074, 0.0119, 0.0165)),
    ("Qwen2.5-1.5B, 5e-7", 1.54e9, (0.0020, 0.0025, 0.0030)),
    ("Qwen2.5-1.5B, 1e-6", 1.54e9, (0.0027, 0.0037, 0.0048)),
    ("Qwen2.5-1.5B, 3e-6", 1.54e9, (0.0057, 0.0090, 0.0123)),
    ("Qwen2.5-1.5B, 5e-6", 1.54e9, (0.0094, 0.0153, 0.0214)),
    ("Llama-3.2-3B, 3e-6", 3.21e9, (0.0087, 0.0141, 0.0195)),
    ("Gemma-3-4B, 3e-6", 4.3e9, (0.0107, 0.0178, 0.0252)),
    ("Qwen2.5-7B, 3e-6", 7.62e9, (0.0086, 0.0142, 0.0199)),
    ("Qwen2.5-1.5B, fine-tuning, 2e-5", 1.54e9, (0.0400, 0.0652, 0.0894)),
)
"""Model and learning rate, parameters, and the mean fractions that 1, 8 and 32 steps changed.

Source: the public history of `one-covenant/grail` on GitHub, `data/*.csv`, 109,903 rows.
"""

_COO, _DENSE, _GAP, _RAW = "COO u8/u16 + bf16, zstd", "dense XOR, zstd", "u16 gap + XOR, zstd", "int32 + bf16"

PEER_BITS = (
    (
        "PULSE (grail), production, 7.6 B",
        0.00775,
        "23.10",
        "calculated, its files: 58.9 M changed, 170.0 MB",
        _COO,
        "bf16",
    ),
    ("NeMo-DCR, 120B", 0.03, "12.6", "calculated, paper: 5.82 of 247.2 GB", _GAP, "fp32"),
    ("NeMo-DCR, 120B", 0.05, "12.1", "calculated, paper: 9.35 of 247.2 GB", _GAP, "fp32"),
    ("NeMo-DCR, Qwen3-30B", 0.03, "13.0", "calculated, paper: 1.49 GB", _GAP, "fp32"),
    ("Stitch, GLM-4.7-Flash", 0.005, "24 a byte", "calculated, cookbook: 0.469 GB", _DENSE, "fp32"),
    ("vime, Qwen3-30B-A3B", 0.045, "48.0", "calculated, issue 392: 8.24 GB", _RAW, "fp32"),
)
"""Whose, changed fraction, bits per changed element, how they are known, the encoding as named
in `peers.PEERS`, and the simulated master that it is compared with."""
