"""Stand-in for SGLang's compiled kernels, which have no build for CPUs on the package index; see `make test-sglang`.

SGLang imports names from it that its other backends never call: every name is here, and calling one fails. The server then
computes with torch alone (`--attention-backend torch_native --sampling-backend pytorch`).
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for CPUs.")

    missing.__name__ = name
    return missing
