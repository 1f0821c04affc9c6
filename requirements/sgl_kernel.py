"""Stand-in for SGLang's compiled kernels, which have no build for CPUs on the package index; see `make
test-sglang`.

SGLang imports names from it that its other backends never call: every name is here, and calling one fails.
The server then computes with torch alone (`--attention-backend torch_native --sampling-backend pytorch`).

It is a plugin of SGLang's too: with torch's attention, prompts of a latent attention (MLA) fail on their
usual path. So they take the path of later tokens, which computes with the products of `kv_b_proj`. LoRA asks for
pinned memory, which there is only beside an accelerator, and gets ordinary memory.
"""

import sys
from collections.abc import Callable
from typing import Any


def register() -> None:
    """Have prompts of latent attentions take the same path as later tokens, with torch's attention, and pin no
    memory.
    """
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    _leave_unpinned()
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)


def _leave_unpinned() -> None:
    import torch

    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]
    for name in ("tensor", "zeros"):
        make = getattr(torch, name)

        def unpinned(
            *args: Any, make: Callable[..., Any] = make, pin_memory: bool = False, **kwargs: Any
        ) -> Any:
            return make(*args, **kwargs)

        setattr(torch, name, unpinned)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for CPUs.")

    missing.__name__ = name
    return missing
