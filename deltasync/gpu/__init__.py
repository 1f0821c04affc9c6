"""The same work on an accelerator: deltas, comparison, the codec and segments there, in Triton. A wing of the
core.
"""

__all__ = [
    "backend",
    "classes",
    "codec",
    "coder",
    "delta",
    "detect",
    "devices",
    "encode",
    "groups",
    "segments",
    "shadow",
    "staging",
]
