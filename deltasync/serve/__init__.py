"""The parts by which servers follow a channel: shards of an engine and their load plan, a torch module and its
gate, routes, metrics, heartbeats. A wing of the core.

The names are imported on first use, so that a reader of heartbeats loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasync.serve.draft import DRAFT, WithDraft
    from deltasync.serve.gate import Gate, GatedTarget, Mapped, Names, Part, gated_calls, reclassed
    from deltasync.serve.module import ModuleReplica, follow

_HOME = {
    **dict.fromkeys(("DRAFT", "WithDraft"), "draft"),
    **dict.fromkeys(("Gate", "GatedTarget", "Mapped", "Names", "Part", "gated_calls", "reclassed"), "gate"),
    **dict.fromkeys(("ModuleReplica", "follow"), "module"),
}

__all__ = [
    "DRAFT",
    "Gate",
    "GatedTarget",
    "Mapped",
    "ModuleReplica",
    "Names",
    "Part",
    "WithDraft",
    "adapters",
    "calls",
    "constraint",
    "derived",
    "engine",
    "follow",
    "gated_calls",
    "heartbeat",
    "heartbeats",
    "in_place",
    "load_plan",
    "metrics",
    "mirror",
    "proof",
    "reclassed",
    "replies",
    "requests",
    "routes",
    "shard",
    "shards",
    "startup",
    "twin",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deltasync.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"deltasync.serve.{_HOME[name]}"), name)
