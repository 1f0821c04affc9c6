"""What differs between versions of TRL, all of it. TRL is imported inside functions only."""

from __future__ import annotations

import inspect

from deltasync.errors import ConfigError

SUPPORTED_TRL = "1.9 to 1.16"


def check_async_grpo() -> None:
    """Find out whether the installed TRL lets `AsyncGRPOTrainer` take a `weight_transfer`.

    By its signature and not by TRL's version, because experimental trainers change between versions.

    Raises:
        ConfigError: TRL is missing, or its `AsyncGRPOTrainer` does not take one.
    """
    try:
        import trl
        from trl.experimental.async_grpo import AsyncGRPOTrainer
    except ImportError as error:
        raise ConfigError(
            f"AsyncGRPOTrainer cannot be imported ({error}). Install TRL {SUPPORTED_TRL}: pip install 'deltasync[trl]'."
        ) from error
    if "weight_transfer" not in inspect.signature(AsyncGRPOTrainer.__init__).parameters:
        raise ConfigError(
            f"AsyncGRPOTrainer of TRL {trl.__version__} takes no weight_transfer. Install TRL {SUPPORTED_TRL}, or use "
            "DeltaSyncCallback without weight_transfer, which publishes after each step of any trainer."
        )
