"""deltasync: RL weights travel as the bits that changed, through a bucket, and are proven bit for bit.

    publisher = Publisher("file:///data/run")     # trainer
    publisher.publish(model.state_dict().items(), step=1)

    replica = Replica("file:///data/run")         # anywhere else
    replica.sync()

    with follow(model, "file:///data/run"):       # or in any torch.nn.Module
        model.generate(...)

These names are imported on first use, so that `import deltasync`, the command line and vLLM's plugin loader
stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasync import errors
    from deltasync.config import Retention
    from deltasync.following import Replica
    from deltasync.publish import Receipt
    from deltasync.serve import ModuleReplica, follow
    from deltasync.stores import open_store
    from deltasync.trainer import Publisher

__version__ = "0.1.0"

_HOME = {
    "ModuleReplica": "deltasync.serve",
    "Publisher": "deltasync.trainer",
    "Receipt": "deltasync.publish",
    "Replica": "deltasync.following",
    "Retention": "deltasync.config",
    "follow": "deltasync.serve",
    "open_store": "deltasync.stores",
}

__all__ = [
    "ModuleReplica",
    "Publisher",
    "Receipt",
    "Replica",
    "Retention",
    "__version__",
    "errors",
    "follow",
    "open_store",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("deltasync.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'deltasync' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
