"""Blocks that vLLM's OffloadingConnector keeps in host memory, on a CPU: all of it is vLLM's but the copying,
for GPUs only.

While the file in OFFLOADING_HOLD exists, loads do not end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostSpec(CPUOffloadingSpec):
    """The spec to name in `kv_connector_extra_config`."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return HostWorker([each.tensor for each in kv_caches.tensors], self.num_chunks)


class HostWorker(OffloadingWorker):
    def __init__(self, live: list[torch.Tensor], count: int) -> None:
        self._live, self._kept = live, [tensor.new_empty(count, tensor.shape[1]) for tensor in live]
        self._loads: list[tuple[int, list[int], list[int]]] = []
        self._done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for live, kept in zip(self._live, self._kept, strict=True):
            kept[dst_spec.block_ids.tolist()] = live[src_spec.block_ids.tolist()]
        self._done.append(job_id)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._loads.append((job_id, src_spec.block_ids.tolist(), dst_spec.block_ids.tolist()))
        return True

    def get_finished(self) -> list[TransferResult]:
        if not Path(os.environ["OFFLOADING_HOLD"]).exists():
            self.wait({job for job, _, _ in self._loads})
        return [*self._finished()]

    def _finished(self) -> Iterator[TransferResult]:
        while self._done:
            yield TransferResult(self._done.pop(0), success=True)

    def wait(self, job_ids: set[int]) -> None:
        for job, sources, places in self._loads:
            if job in job_ids:
                for live, kept in zip(self._live, self._kept, strict=True):
                    live[places] = kept[sources]
                self._done.append(job)
        self._loads = [load for load in self._loads if load[0] not in job_ids]
