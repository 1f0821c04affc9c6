"""Follow a channel that holds an adapter: each version is loaded by vLLM's runtime LoRA, under a name of its own.

    head -> fetch, check and decode in a thread -> a directory as PEFT writes it -> load NAME-v7; NAME now means it too

A request keeps the version that it began with, so nothing is paused, and vLLM's prefix cache tells the versions apart. The
last versions can be asked for by name; older ones are unloaded once no request uses them.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

from deltasync import companions, manifest
from deltasync.bits import bits_of
from deltasync.chain import Step
from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, ConfigError, FingerprintMismatchError, ObjectMissingError, SleepingError
from deltasync.fingerprint import tensor_key
from deltasync.kernels import cpu
from deltasync.live import LiveMemory
from deltasync.manifest import Head, Manifest
from deltasync.replica import Follower
from vllm_plugin.driver import HISTORY, Driver
from vllm_plugin.metrics import Commit, Metrics, generated_tokens, running_requests

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

KEPT = 2
"""Newest versions that can be asked for by name."""

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_GRACE_S = 60.0  # a request may have looked up a version's name, and not be among the running ones yet


class AdapterDriver(Driver):
    """Follows the channel of an adapter for one server. No worker of vLLM is told of it.

    Args:
        engine: vLLM's engine client.
        settings: With a channel and an adapter's name.
        metrics: Told what happens.
        models: vLLM's served models and adapters.

    Raises:
        ConfigError: the adapter has the name of a served model.
    """

    def __init__(self, engine: Any, settings: ReplicaSettings, metrics: Metrics, models: Any) -> None:
        super().__init__(engine, settings, metrics)
        assert settings.adapter is not None
        if models.is_base_model(settings.adapter):
            raise ConfigError(f"The adapter cannot be named {settings.adapter}, as a model that vLLM serves.")
        self._name = settings.adapter
        self._models = models
        self._follower: Follower | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._root = tempfile.TemporaryDirectory(prefix="deltasync-adapter-")
        self._served: list[int] = []  # by name, ascending
        self._retired: dict[int, float] = {}  # when a version was last in use, of those that are not served by name

    async def run(self) -> None:
        """Follow until cancelled; then nothing is left on the disk."""
        with self._root:
            await super().run()

    def status(self, commit_count: int = HISTORY) -> dict[str, Any]:
        """As of any driver, and the names that requests may ask for."""
        names = [self._name, *map(self._versioned, reversed(self._served))] if self._served else []
        return super().status(commit_count) | {"adapters": names}

    async def digest(self) -> dict[str, Any]:
        """sha256 of every tensor in the files that vLLM loaded the newest version from."""
        async with self._busy:
            version = self._version
            tensors = {} if version is None else await asyncio.to_thread(_read, self._folder(version))
        sha256 = {name: manifest.sha256_hex(bits_of(tensor).data) for name, tensor in tensors.items()}
        return {"version": version, "sha256": sha256}

    async def _follow_once(self, version: int | None) -> None:
        head = self._head = await asyncio.to_thread(self._reader.head)
        async with self._busy:
            await self._retire()
            if await self._engine.is_sleeping():
                raise SleepingError("vLLM sleeps. No adapter is loaded until it wakes up.")
            if self._version != (version or head.version):
                await self._take(head, version)
            self._report("serving", None)

    async def _take(self, head: Head, version: int | None) -> None:
        """Fetch a version and load it."""
        tokens_before, running = generated_tokens(), running_requests()
        self._state = "staging"
        before = time.perf_counter()
        target, steps = await asyncio.to_thread(self._fetch, head, version)
        fetched = time.perf_counter()
        self._state = "committing"
        await self._load(target.version)
        loaded = time.perf_counter()
        self._version = target.version
        served_at = time.time()
        commit = Commit(
            version=target.version,
            anchor=any(step.use_anchor for step in steps),
            changed=target.total if target.delta is None else target.delta.changed,
            payload_bytes=sum(step.payload_bytes for step in steps),
            stage_s=fetched - before,
            pause_s=0.0,
            scatter_s=0.0,
            reload_s=loaded - fetched,
            lag_s=served_at - datetime.datetime.fromisoformat(target.created_at).timestamp(),
            tokens_during_sync=generated_tokens() - tokens_before,
            running_requests=running,
            served_at=served_at,
        )
        self.commits.append(commit)
        self._metrics.committed(commit, "anchor" if commit.anchor else "delta")
        logger.info(
            "deltasync serves version=%d as %s changed=%d stage_s=%.3f load_s=%.3f lag_s=%.3f",
            commit.version,
            self._versioned(commit.version),
            commit.changed,
            commit.stage_s,
            commit.reload_s,
            commit.lag_s,
        )

    def _fetch(self, head: Head, version: int | None) -> tuple[Manifest, Sequence[Step]]:
        """Bring the tensors to a version and write its directory; what it took."""
        if self._follower is None:
            memory, self._tensors = LiveMemory.on_host(self._reader.specs)
            memory.audit()
            self._follower = Follower(self._reader, memory)
        steps = self._reader.plan(self._follower.version, head, version)
        target = self._reader.manifest(self._follower.advance(head, version))
        folder = self._folder(target.version)
        folder.mkdir(exist_ok=True)
        (folder / _CONFIG).write_bytes(self._config(target))
        save_file(self._tensors, folder / _WEIGHTS, {"format": "pt"})
        written = {name: cpu.fingerprint(tensor_key(name), bits_of(tensor)) for name, tensor in _read(folder).items()}
        if written != self._follower.memory.fingerprints:
            raise FingerprintMismatchError(f"{folder} does not hold the bits of version {target.version} that were written.")
        return target, steps

    def _config(self, target: Manifest) -> bytes:
        anchor = self._reader.manifest(target.anchor_version).anchor
        assert anchor is not None
        try:
            return companions.read(self._reader, anchor, _CONFIG)
        except ObjectMissingError:
            raise ConfigError(
                f"{self._channel} holds no {_CONFIG}, so it is not the channel of an adapter. Publish with "
                "adapter_only=True, or start the server without --adapter."
            ) from None

    async def _load(self, version: int) -> None:
        """Have vLLM load a version that was written, and take it for what requests for the adapter mean."""
        name = self._versioned(version)
        reply = await self._models.load_lora_adapter(
            LoadLoRAAdapterRequest(lora_name=name, lora_path=str(self._folder(version)))
        )
        if not isinstance(reply, str):
            raise ApplyError(f"vLLM did not load {name}: {reply.error.message}")
        self._models.lora_requests[self._name] = self._models.lora_requests[name]
        self._served.append(version)

    async def _retire(self) -> None:
        """Unload what is older than the versions that are kept, and remove directories, once no request needs them."""
        used = {state.lora_name for state in self._engine.output_processor.request_states.values()}
        for version in [version for version in self._served[:-KEPT] if self._versioned(version) not in used]:
            await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=self._versioned(version)))
            self._served.remove(version)
            self._retired[version] = time.monotonic()
        for version, since in list(self._retired.items()):
            if self._versioned(version) in used:
                self._retired[version] = time.monotonic()
            elif time.monotonic() - since > _GRACE_S:
                await asyncio.to_thread(shutil.rmtree, self._folder(version))
                del self._retired[version]

    def _versioned(self, version: int) -> str:
        return f"{self._name}-v{version}"

    def _folder(self, version: int) -> Path:
        return Path(self._root.name) / self._versioned(version)


def _read(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / _WEIGHTS)
    return tensors
