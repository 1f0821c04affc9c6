"""What differs between versions of TRL and transformers, all of it. TRL is imported inside functions only."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from deltasync.errors import ConfigError

WITH_WEIGHT_TRANSFER = "1.9 to 1.16"
WITH_SERVER_CLIENT = "1.11 to 1.16"


def check_async_grpo() -> None:
    """Find out whether the installed TRL lets `AsyncGRPOTrainer` take a `weight_transfer`.

    By its signature and not by TRL's version, because experimental trainers change between versions. Where
    `AsyncDistillationTrainer` exists, from TRL 1.11 on, it takes the same object.

    Raises:
        ConfigError: TRL is missing, or its `AsyncGRPOTrainer` does not take one.
    """
    try:
        import trl
        from trl.experimental.async_grpo import AsyncGRPOTrainer
    except ImportError as error:
        raise ConfigError(
            f"AsyncGRPOTrainer cannot be imported ({error}). Install TRL {WITH_WEIGHT_TRANSFER}: "
            "pip install 'deltasync[trl]'."
        ) from error
    if "weight_transfer" not in inspect.signature(AsyncGRPOTrainer.__init__).parameters:
        raise ConfigError(
            f"AsyncGRPOTrainer of TRL {trl.__version__} takes no weight_transfer. Install TRL {WITH_WEIGHT_TRANSFER}, or "
            "use DeltaSyncCallback without weight_transfer, which publishes after each step of any trainer."
        )


def generates_on_server(args: Any) -> bool:
    """Whether a trainer with these arguments pushes its weights to a vLLM server, as GRPO and RLOO may."""
    return bool(getattr(args, "use_vllm", False)) and getattr(args, "vllm_mode", None) == "server"


def replace_client(subclass: Callable[[type], type]) -> Callable[[], None]:
    """Have the next trainer's `VLLMGeneration` talk to its server by a subclass of TRL's `VLLMClient`.

    TRL has no argument for it, and builds the client between `on_init_end` and the end of the trainer's constructor, which
    is when this is called. It holds for one client. No vLLM need be installed here: without the weights, the client is
    HTTP.

    Args:
        subclass: Makes the class from TRL's.

    Returns:
        What undoes it, where no client was made.

    Raises:
        ConfigError: TRL has no such client.
    """
    try:
        import trl
        from trl.generation import vllm_client, vllm_generation
    except ImportError as error:
        raise ConfigError(f"TRL's VLLMClient cannot be imported ({error}). Install TRL {WITH_SERVER_CLIENT}.") from error
    parameters = inspect.signature(getattr(vllm_client.VLLMClient, "update_named_params", lambda: None)).parameters
    if list(parameters) != ["self", "metadata", "named_params"]:
        raise ConfigError(
            f"VLLMClient of TRL {trl.__version__} does not take the weights as one stream. Install TRL {WITH_SERVER_CLIENT}."
        )
    available = vllm_generation.is_vllm_available, vllm_client.is_vllm_available

    def restore() -> None:
        vllm_generation.VLLMClient = vllm_client.VLLMClient
        vllm_generation.is_vllm_available, vllm_client.is_vllm_available = available

    def client_once(*args: Any, **kwargs: Any) -> Any:
        try:
            return subclass(vllm_client.VLLMClient)(*args, **kwargs)
        finally:
            restore()

    vllm_generation.VLLMClient = client_once
    vllm_generation.is_vllm_available = vllm_client.is_vllm_available = lambda *_, **__: True
    return restore


def add_first(callback: TrainerCallback) -> bool:
    """Put a callback before all others of the trainer whose event is being handled; call it from there.

    A callback is given neither the trainer nor its `CallbackHandler`, and `report_to` integrations come before the
    callbacks of users. So the handler is looked for among the callers.

    Returns:
        Whether it was found.
    """
    handler = _caller(CallbackHandler)
    if handler is None:
        return False
    others = [other for other in handler.callbacks if other is not callback]
    # It goes on with the old list; the progress flow stays in front.
    place = int(bool(others) and isinstance(others[0], DefaultFlowCallback))
    handler.callbacks = [*others[:place], callback, *others[place:]]
    return True


def replace_stream(take_part: Callable[[], None]) -> None:
    """Keep TRL from gathering the weights when it syncs them; call it in all processes, from an event of the trainer.

    TRL streams the weights in all of them, as they gather each tensor together. The main process hands the stream to the
    weight transfer or to the client, which look after themselves; the others only iterate it.

    Args:
        take_part: What each of the others does instead.

    Raises:
        ConfigError: the trainer has no such stream.
    """
    from transformers import Trainer

    trainer: Any = _caller(Trainer)

    def stream() -> Iterator[Any]:
        if not trainer.accelerator.is_main_process:
            take_part()
        return iter(())

    generation: Any = getattr(trainer, "vllm_generation", None)
    if hasattr(trainer, "_streaming_iter"):
        trainer._streaming_iter = stream
    elif hasattr(generation, "_iter_named_params") and hasattr(generation, "_weight_metadata"):
        generation._iter_named_params = stream
        generation._weight_metadata = []  # which TRL would gather the weights for
    else:
        raise ConfigError(
            f"{type(trainer).__name__} has no stream of weights that the shards of each process could take the place of. "
            f"Install TRL {WITH_SERVER_CLIENT}, or train with DDP."
        )


def _caller(kind: type) -> Any:
    """The object of this class whose method is running, the innermost one; None if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
    return None
