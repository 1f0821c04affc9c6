"""How `GRPOTrainer(vllm_mode="server")` gives its weights to the channel instead of to the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trl_callback.weight_transfer import DeltaWeightTransfer


def client_class(transfer: DeltaWeightTransfer, check: Callable[[str], object] | None, base: type) -> type:
    """Make the subclass of TRL's `VLLMClient` that publishes the weights by `transfer`.

    Trainer and server form no process group and need no CUDA. An update returns once the replicas serve the version, as
    the trainer is on-policy.

    Args:
        transfer: What publishes. It is told the server's URL.
        check: Called with the server's URL once it is up; raises if the trainer cannot use its log probabilities.
        base: TRL's `VLLMClient`.
    """

    class DeltaSyncClient(base):
        """Generation is the base class's."""

        def init_communicator(self, device: Any = 0) -> None:
            """Learn the server's URL."""
            transfer.server_url = self.base_url
            if check is not None:
                check(self.base_url)

        def close_communicator(self) -> None:
            """No process group."""

        def update_named_params(
            self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
        ) -> None:
            """Publish the stream, and wait until the replicas serve it."""
            transfer.init_weight_transfer()
            transfer.send_weights(named_params)
            transfer.resume()

        def reset_prefix_cache(self) -> None:
            """A replica looks after its caches when it commits a version."""

        def get_server_info(self) -> dict[str, Any]:
            """All that TRL asks for: log probabilities are processed, or as good as that once `check` has returned."""
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    return DeltaSyncClient
