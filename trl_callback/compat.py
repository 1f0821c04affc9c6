"""All uses of undocumented parts of TRL and transformers. TRL is imported inside functions only."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from deltasync.errors import ConfigError
from trl_callback.tokens import TokenAges, make_versioned_loop

WITH_WEIGHT_TRANSFER = "1.9 to 1.16"
WITH_SERVER_CLIENT = WITH_TOKEN_VERSIONS = "1.11 to 1.16"


def generates_on_server(args: Any) -> bool:
    """Whether a trainer with these arguments pushes its weights to a vLLM server, as GRPO and RLOO may."""
    return bool(getattr(args, "use_vllm", False)) and getattr(args, "vllm_mode", None) == "server"


def check_colocated(args: Any) -> None:
    """Refuse vLLM in the trainer's own process where there is no GPU, before TRL starts it.

    Raises:
        ConfigError: vLLM's own error would only name an attribute that its workers for CPUs lack.
    """
    if not getattr(args, "use_vllm", False) or getattr(args, "vllm_mode", None) != "colocate":
        return
    if args.device.type != "cpu" or torch.cuda.is_available():
        return
    from trl.generation import vllm_generation

    if getattr(vllm_generation, "LLM", object).__module__.startswith("vllm."):
        raise ConfigError(
            'vllm_mode="colocate" needs a GPU: vLLM on CPUs does not run in the trainer\'s process. Use vllm_mode="server", '
            "with a server that follows the channel."
        )


def streams_weights(args: Any) -> bool:
    """Whether the running trainer syncs its weights with a `weight_transfer`, in any process.

    AsyncGRPO and AsyncDistillation do, and are recognised by their arguments before the transfer is built;
    others may.
    """
    return any(name.startswith("Async") for name in _names_in_trl(args)) or hasattr(
        running_trainer(), "weight_transfer"
    )


def compares_logprobs(args: Any) -> bool:
    """Whether a trainer with these arguments compares the server's log probabilities with its own.

    AsyncGRPO always does, and GRPO unless told not to. RLOO and AsyncDistillation use none of the server's.
    """
    return "AsyncGRPOConfig" in _names_in_trl(args) or bool(
        getattr(args, "vllm_importance_sampling_correction", False)
    )


def replace_transfer(transfer: Any) -> Callable[[], None]:
    """Make the trainer whose constructor is running sync its weights with `transfer`. Call it from
    `on_init_end`.

    All processes call it. Without a `weight_transfer` argument, TRL builds a `WeightTransferClient` between
    `on_init_end` and the end of the constructor. For a PEFT model, TRL first asks the server whether to send
    the adapter alone; here the answer is no, as with a `weight_transfer` argument. Returns a function that
    undoes the replacement if TRL built none.
    """
    import trl

    trainer: Any = running_trainer()
    bases = (
        base for base in _in_trl(trainer) if "weight_transfer" in _parameters(vars(base).get("__init__"))
    )
    module: Any = next((sys.modules[base.__module__] for base in bases), None)
    if not hasattr(module, "WeightTransferClient"):
        raise ConfigError(
            f"{type(trainer).__name__} of TRL {trl.__version__} has no weight transfer that "
            "DeltaSyncCallback could "
            f"replace. Install TRL {WITH_WEIGHT_TRANSFER}."
        )

    def transfer_once(*args: Any, **kwargs: Any) -> Any:
        restore()
        return transfer if running_trainer() is trainer else module.WeightTransferClient(*args, **kwargs)

    original = _replace(module, "WeightTransferClient", transfer_once)
    restore = functools.partial(setattr, module, "WeightTransferClient", original)
    trainer._init_lora_sync = lambda model: False
    return restore


def check_transfer(transfer: Any, is_main: bool) -> None:
    """Check that the running trainer syncs its weights only with `transfer`, and nothing was added later
    (ConfigError).
    """
    trainer: Any = running_trainer()
    found = getattr(trainer, "weight_transfer", None)
    sends_adapter = getattr(trainer, "_lora_sync", False)
    if sends_adapter or found is not (transfer if is_main else None):
        other = "adapters that the server loads" if sends_adapter else type(found).__name__
        raise ConfigError(
            f"{type(trainer).__name__} syncs its weights with {other} instead of the channel. Give the "
            "callback to the "
            "trainer's constructor, callbacks=[DeltaSyncCallback(url)], and no other weight_transfer."
        )
    _check_protocol(trainer, transfer)


def _check_protocol(trainer: Any, transfer: Any) -> None:
    """Check that TRL calls a `weight_transfer` by the methods that `transfer` has (ConfigError)."""
    import trl

    for base in _in_trl(trainer):
        protocol = getattr(sys.modules[base.__module__], "WeightTransferProtocol", None)
        for name, method in vars(protocol).items() if protocol is not None else ():
            is_called = inspect.isfunction(method) and not name.startswith("_")
            if is_called and _parameters(method) != _parameters(getattr(type(transfer), name, None)):
                raise ConfigError(
                    f"TRL {trl.__version__} calls its weight transfer in another form ({name}) than DeltaSyncCallback "
                    f"knows. Install TRL {WITH_WEIGHT_TRANSFER}."
                )


def replace_version(update: Callable[[int, Callable[[int], None]], None]) -> None:
    """Change the version that the running trainer reports to its rollout worker.

    TRL counts a version when the transfer returns, and reports it to its rollout worker, which stamps samples
    with it. Instead, `update` is called with that version and the function that reports a version to the
    worker.
    """
    worker: Any = getattr(running_trainer(), "rollout_worker", None)
    if worker is None:
        return  # not the main process

    def update_model_version(model_version: int) -> None:
        update(model_version, original)

    original = _replace(worker, "update_model_version", update_model_version)


def follow_tokens(ages: TokenAges, train_dataloader: Any) -> bool:
    """Attach the versions of tokens to the running trainer's samples, and pass the samples to `ages`.

    Call it in all processes when training begins, before the rollout worker starts. It is for AsyncGRPO.
    Returns whether samples carry versions: not with a rollout worker that is not TRL's, nor in TRL before
    1.11. In AsyncGRPO's processes without samples, all but the main one, it returns True.
    """
    trainer: Any = running_trainer()
    if "AsyncGRPOConfig" not in _names_in_trl(trainer.args):
        return False
    worker, dataset = trainer.rollout_worker, getattr(trainer, "_rollout_dataset", None)
    loop_class = getattr(worker, "_loop_cls", None)
    if loop_class is None or dataset is None:
        return worker is None
    if isinstance(loop_class, type):  # else replaced by an earlier `train`
        ages.demanded = worker._mp_ctx.Value("q", 0)
        worker._loop_cls = functools.partial(make_versioned_loop, loop_class, ages.demanded, ages.max_lag)
    _watch_queue(dataset.queue, ages)
    _watch_batches(train_dataloader.collate_fn, ages)
    _watch_loss(trainer, ages)
    ages.begin(lambda: trainer.model_version, trainer.args.max_staleness)
    return True


def _watch_queue(queue: Any, ages: TokenAges) -> None:
    """Leave out of a queue the samples that `ages` drops."""

    def get(*args: Any, **kwargs: Any) -> Any:
        while not ages.admit(sample := original(*args, **kwargs)):
            pass
        return sample

    original = _replace(queue, "get", get)


def _watch_batches(collator: Any, ages: TokenAges) -> None:
    """Pass the samples of each batch from TRL's collator to `ages`."""
    collate = collator.torch_call

    def torch_call(examples: list[Any]) -> Any:
        batch = collate(examples)
        (rows,) = examples
        ages.add_batch(sample for row in rows for sample in getattr(row, "samples", row))
        return batch

    collator.torch_call = torch_call


def _watch_loss(trainer: Any, ages: TokenAges) -> None:
    """Count each trained batch in `ages`."""

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        ages.train()
        return loss

    original = _replace(trainer, "compute_loss", compute_loss)


def rollout_server(args: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the URL of the server of TRL's rollout worker, and the arguments of its loop, which begins later
    and requests the model `model_name`; None for another worker.
    """
    worker = getattr(running_trainer(), "rollout_worker", None)
    if not _names_in_trl(worker):
        return None
    return args.vllm_server_base_url, getattr(worker, "_loop_kwargs", {})


def replace_client(subclass: Callable[[type], type]) -> Callable[[], None]:
    """Make the next trainer's `VLLMGeneration` use a subclass of TRL's `VLLMClient`, which `subclass` makes.

    TRL has no argument for it. It builds the client between `on_init_end`, when this is called, and the end
    of the trainer's constructor. The replacement holds for one client. vLLM need not be installed here,
    because a client that sends no weights uses only HTTP. Returns a function that undoes the replacement if
    no client was made.
    """
    try:
        import trl
        from trl.generation import vllm_client, vllm_generation
    except ImportError as error:
        raise ConfigError(
            f"TRL's VLLMClient cannot be imported ({error}). Install TRL {WITH_SERVER_CLIENT}."
        ) from error
    if _parameters(getattr(vllm_client.VLLMClient, "update_named_params", None)) != [
        "self",
        "metadata",
        "named_params",
    ]:
        raise ConfigError(
            f"VLLMClient of TRL {trl.__version__} does not accept one stream of weights. Install TRL "
            f"{WITH_SERVER_CLIENT}."
        )

    def client_once(*args: Any, **kwargs: Any) -> Any:
        try:
            return subclass(vllm_client.VLLMClient)(*args, **kwargs)
        finally:
            restore()

    def restore() -> None:
        for place in originals:
            setattr(*place)

    replacements: list[tuple[Any, str, Any]] = [
        (vllm_generation, "VLLMClient", client_once),
        (vllm_generation, "is_vllm_available", lambda *_, **__: True),
        (vllm_client, "is_vllm_available", lambda *_, **__: True),
    ]
    originals = [(module, name, _replace(module, name, function)) for module, name, function in replacements]
    return restore


def add_around(own: TrainerCallback, first: TrainerCallback, last: TrainerCallback) -> int:
    """Insert callbacks before and after all others of the running trainer.

    A callback has access neither to the trainer nor to its `CallbackHandler`, and `report_to` integrations
    run before the callbacks of users. So the handler is found among the callers. Returns the number of `own`
    among the trainer's callbacks of its class, from 1 on.
    """
    handler: Any = _caller(CallbackHandler)
    others = [other for other in handler.callbacks if other is not first and other is not last]
    # The running event continues with the old list. The default flow stays first.
    place = int(bool(others) and isinstance(others[0], DefaultFlowCallback))
    handler.callbacks = [*others[:place], first, *others[place:], last]
    return 1 + [other for other in others if isinstance(other, type(own))].index(own)


def replace_stream(take_part: Callable[[], None]) -> None:
    """Prevent TRL from streaming the weights when it syncs. Call it in all processes, from an event of the
    trainer.

    TRL streams the weights in all processes, which gather each tensor together. The main process passes the
    stream to the weight transfer or to the client, which do not read it. The others iterate it, which now
    calls `take_part` instead. TRL no longer merges adapters into the live weights for the stream.
    """
    trainer: Any = running_trainer()

    def stream() -> Iterator[Any]:
        if not trainer.accelerator.is_main_process:
            take_part()
        return iter(())

    generation: Any = getattr(trainer, "vllm_generation", None)
    if hasattr(trainer, "_streaming_iter"):
        trainer._streaming_iter = stream
        if hasattr(trainer, "_sync_weight_merged"):
            trainer._sync_weight_merged = functools.partial(
                _unmerged, trainer, type(trainer)._sync_weight_merged
            )
    elif hasattr(generation, "_iter_named_params") and hasattr(generation, "_weight_metadata"):
        generation._iter_named_params = stream
        generation._weight_metadata = []  # otherwise TRL gathers the weights for it
    else:
        raise ConfigError(
            f"{type(trainer).__name__} has no stream of weights that DeltaSyncCallback could replace with "
            "shards. "
            f"Install TRL {WITH_SERVER_CLIENT}, or train with DDP."
        )


def _unmerged(trainer: Any, sync: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run TRL's sync without merging adapters, which would change the bits of the base weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    names = [name for name in ("merge_adapter", "unmerge_adapter") if hasattr(model, "peft_config")]
    try:
        for name in names:
            setattr(model, name, lambda *_, **__: None)
        return sync(trainer, *args, **kwargs)
    finally:
        for name in names:
            delattr(model, name)


def _replace(owner: Any, name: str, function: Any) -> Any:
    """Replace a function of a module or an object, and return the original.

    The current one may be an earlier replacement: a constructor may have failed, and a trainer may train
    twice.
    """
    found = getattr(owner, name)
    function._replaces = getattr(found, "_replaces", found)
    setattr(owner, name, function)
    return function._replaces


def averages(optimizer: Any) -> Any:
    """Return the optimizer, without wrappers, if its `train` and `eval` switch the model between two sets of
    weights.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # accelerate's has both methods around any
    return optimizer if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")) else None


def holds_average(optimizer: Any) -> bool:
    """Whether a schedule-free optimizer may have left its average in the model, as after an evaluation."""
    average = averages(optimizer)
    return average is not None and not all(group.get("train_mode", False) for group in average.param_groups)


def _parameters(function: Any) -> list[str]:
    return [] if function is None else list(inspect.signature(function).parameters)


def _in_trl(thing: object) -> list[type]:
    return [base for base in type(thing).__mro__ if base.__module__.startswith("trl.")]


def _names_in_trl(thing: object) -> list[str]:
    return [base.__name__ for base in _in_trl(thing)]


def running_trainer() -> Any:
    """Return the trainer whose constructor or event is running."""
    from transformers import Trainer

    return _caller(Trainer)


def _caller(kind: type) -> Any:
    """Return the innermost caller that is a method of an object of this class; None if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
    return None
