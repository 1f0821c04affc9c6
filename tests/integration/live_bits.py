"""A worker extension for tests: sha256 of a worker's parameters as vLLM holds them, without anything of
deltasync.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class LiveBits:
    model_runner: Any

    def live_bits(self) -> dict[str, str]:
        parameters = self.model_runner.get_model().named_parameters()
        return {
            name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).cpu().numpy()).hexdigest()
            for name, tensor in parameters
        }
