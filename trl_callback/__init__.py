"""deltasync for TRL and transformers: publish the weights of a trainer to a channel.

trainer = AsyncGRPOTrainer(..., callbacks=[DeltaSyncCallback("s3://bucket/run")])    # or GRPOTrainer: instead of NCCL
trainer = Trainer(..., callbacks=[DeltaSyncCallback("s3://bucket/run")])             # any other trainer
"""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ModuleNotFoundError("trl_callback needs transformers, and TRL for its trainers: pip install trl.")

from trl_callback.callback import DeltaSyncCallback
from trl_callback.config import DeltaSyncConfig
from trl_callback.record import VersionRecord
from trl_callback.weight_transfer import DeltaWeightTransfer

__all__ = ["DeltaSyncCallback", "DeltaSyncConfig", "DeltaWeightTransfer", "VersionRecord"]
