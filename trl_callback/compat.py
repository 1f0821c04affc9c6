"""What differs between versions of TRL and transformers, all of it. TRL is imported inside functions only."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from deltasync.errors import ConfigError

WITH_WEIGHT_TRANSFER = "1.9 to 1.16"
WITH_SERVER_CLIENT = "1.11 to 1.16"


def generates_on_server(args: Any) -> bool:
    """Whether a trainer with these arguments pushes its weights to a vLLM server, as GRPO and RLOO may."""
    return bool(getattr(args, "use_vllm", False)) and getattr(args, "vllm_mode", None) == "server"


def streams_weights(args: Any) -> bool:
    """Whether the trainer whose event is being handled syncs its weights by a `weight_transfer`, in any process.

    AsyncGRPO and AsyncDistillation do, which their arguments tell before the transfer is built; others may.
    """
    from transformers import Trainer

    of_trl = any(_is_trl(base) and base.__name__.startswith("Async") for base in type(args).__mro__)
    return of_trl or hasattr(_caller(Trainer), "weight_transfer")


def compares_logprobs(args: Any) -> bool:
    """Whether a trainer with these arguments compares the server's log probabilities with its own.

    AsyncGRPO always does, and GRPO unless told not to. RLOO and AsyncDistillation use none of the server's.
    """
    if any(_is_trl(base) and base.__name__ == "AsyncGRPOConfig" for base in type(args).__mro__):
        return True
    return bool(getattr(args, "vllm_importance_sampling_correction", False))


def replace_transfer(transfer: Any) -> Callable[[], None]:
    """Have the trainer whose constructor is running sync its weights by `transfer`; call it from `on_init_end`.

    All processes call it. Where the constructor was given no `weight_transfer`, TRL builds a `WeightTransferClient` between
    `on_init_end` and the end of the constructor. For a PEFT model it asks the server before whether to send the adapter
    alone; the answer is no, as if a `weight_transfer` had been given.

    Args:
        transfer: Has the methods of TRL's `WeightTransferProtocol`.

    Returns:
        What undoes it, where TRL built none.

    Raises:
        ConfigError: this trainer has no transfer that could be replaced.
    """
    import trl
    from transformers import Trainer

    trainer: Any = _caller(Trainer)
    module: Any = _module_with_transfer(trainer)
    if not hasattr(module, "WeightTransferClient"):
        raise ConfigError(
            f"{type(trainer).__name__} of TRL {trl.__version__} has no weight transfer that DeltaSyncCallback could "
            f"take the place of. Install TRL {WITH_WEIGHT_TRANSFER}."
        )
    original = inspect.unwrap(module.WeightTransferClient)  # a constructor before may have failed

    def restore() -> None:
        module.WeightTransferClient = original

    @functools.wraps(original, updated=())
    def transfer_once(*args: Any, **kwargs: Any) -> Any:
        restore()
        return transfer if _caller(Trainer) is trainer else original(*args, **kwargs)

    module.WeightTransferClient = transfer_once
    trainer._init_lora_sync = lambda model: False
    return restore


def _module_with_transfer(trainer: Any) -> Any:
    """The module of TRL whose trainer takes a `weight_transfer`, None if there is none."""
    for base in type(trainer).__mro__:
        if _is_trl(base) and "weight_transfer" in inspect.signature(vars(base).get("__init__", lambda: None)).parameters:
            return sys.modules[base.__module__]
    return None


def check_transfer(transfer: Any, is_main: bool) -> None:
    """Check that the trainer whose event is being handled syncs its weights by `transfer` and nothing else.

    Raises:
        ConfigError: it does not, as the callback or another transfer came later.
    """
    from transformers import Trainer

    trainer: Any = _caller(Trainer)
    found = getattr(trainer, "weight_transfer", None)
    sends_adapter = getattr(trainer, "_lora_sync", False)
    if sends_adapter or found is not (transfer if is_main else None):
        other = "adapters that the server loads" if sends_adapter else type(found).__name__
        raise ConfigError(
            f"{type(trainer).__name__} syncs its weights by {other} instead of the channel: give the callback to the "
            "trainer's constructor, callbacks=[DeltaSyncCallback(url)], and no other weight_transfer."
        )


def replace_version(update: Callable[[int, Callable[[int], None]], None]) -> None:
    """Have the rollouts of the trainer whose event is being handled told another version than the one TRL counts.

    TRL counts a version when the transfer returns, and tells its rollout worker, which stamps samples with it.

    Args:
        update: Gets the version that TRL counts, and what tells the worker.
    """
    from transformers import Trainer

    worker: Any = getattr(_caller(Trainer), "rollout_worker", None)
    if worker is None:
        return  # in another process than the main one
    original = inspect.unwrap(worker.update_model_version)  # it may train twice

    @functools.wraps(original)
    def update_model_version(model_version: int) -> None:
        update(model_version, original)

    worker.update_model_version = update_model_version


def rollout_server(args: Any) -> str | None:
    """URL of the server that the trainer whose event is being handled has its rollout worker ask.

    None in other processes than the main one, and if the worker is not TRL's.
    """
    from transformers import Trainer

    worker = getattr(_caller(Trainer), "rollout_worker", None)
    return args.vllm_server_base_url if any(map(_is_trl, type(worker).__mro__)) else None


def _is_trl(kind: type) -> bool:
    return kind.__module__.startswith("trl.")


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
