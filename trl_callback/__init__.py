"""deltasync for TRL and transformers: publish the weights of a trainer to a channel.

sync = DeltaSyncCallback("file:///data/run")
trainer = AsyncGRPOTrainer(..., weight_transfer=sync.weight_transfer, callbacks=[sync])    # instead of NCCL
trainer = Trainer(..., callbacks=[sync])                                                   # any other trainer
"""

from trl_callback.callback import DeltaSyncCallback
from trl_callback.config import DeltaSyncConfig
from trl_callback.record import VersionRecord
from trl_callback.weight_transfer import DeltaWeightTransfer

__all__ = ["DeltaSyncCallback", "DeltaSyncConfig", "DeltaWeightTransfer", "VersionRecord"]
