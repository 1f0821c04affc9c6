"""Following a channel that holds an adapter: vLLM's runtime LoRA loads each version under a name of its own.

    next way -> fetch, check and decode in a thread -> a directory as PEFT writes it -> load NAME-v7; NAME now means it too

A request keeps the version that it began with, so nothing is paused, and vLLM's prefix cache tells the versions apart. The
last versions can be requested by name. Older ones are unloaded once no request uses them.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

from deltasync.channel.documents import Version, sha256_hex
from deltasync.channel.record import Stored
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    ApplyError,
    ConfigError,
    CorruptDataError,
    FingerprintMismatchError,
    MissingVersionError,
    SleepingError,
)
from deltasync.follow import Follower, Pin
from deltasync.kernels import cpu
from deltasync.live import LiveMemory
from deltasync.tensors.bits import bits_of
from deltasync.tensors.fingerprint import tensor_key
from vllm_plugin.driver import HISTORY, Driver
from vllm_plugin.messages import CommitReply, Status
from vllm_plugin.metrics import Metrics, generated_tokens, running_requests

KEPT = 2
"""How many of the newest versions can be requested by name."""

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_GRACE_S = 60.0  # for requests that have looked up a version's name and do not run yet


class _Ahead(NamedTuple):
    """A version in the tensors that vLLM has not loaded yet, and what was noted when staging it began."""

    way: Sequence[Stored]
    tokens_before: int
    running: int
    begun_s: float
    changed: int


class AdapterDriver(Driver):
    """Follows the channel of an adapter for one server, through vLLM's served `models`. Workers take no part.

    Raises:
        ConfigError: the adapter has the name of a served model.
    """

    def __init__(self, engine: Any, settings: ReplicaSettings, metrics: Metrics, models: Any) -> None:
        super().__init__(engine, settings, metrics)
        assert settings.adapter is not None
        if models.is_base_model(settings.adapter):
            raise ConfigError(f"The adapter cannot be named {settings.adapter}, as a model that vLLM serves.")
        self._adapter = settings.adapter
        self._models = models
        self._follower: Follower | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._config = b""
        self._ahead: _Ahead | None = None
        self._root = tempfile.TemporaryDirectory(prefix="deltasync-adapter-")
        self._served: list[str] = []  # names of versions, oldest first
        self._retired: dict[str, float] = {}  # when each version that is not served by name any more was last in use

    async def run(self) -> None:
        """Follow the channel until cancelled; then remove all files."""
        with self._root:
            await super().run()

    def status(self, commit_count: int = HISTORY) -> Status:
        """Return the driver's status, with the model names that requests may use."""
        status = super().status(commit_count)
        status.adapters = [self._adapter, *reversed(self._served)] if self._served else []
        return status

    async def digest(self) -> dict[str, Any]:
        """Return the version served, and the sha256 of every tensor in the files that vLLM loaded it from."""
        async with self._busy:
            version = self.identity
            path = None if version is None else self._folder(self._versioned(version)) / _WEIGHTS
            tensors = {} if path is None else await asyncio.to_thread(load_file, path)
        sha256 = {name: sha256_hex(bits_of(tensor).data) for name, tensor in tensors.items()}
        return {"version": self.version, "sha256": sha256}

    @property
    def _have(self) -> Version | None:
        return None if self._follower is None else self._follower.version

    async def _follow_once(self, pin: Pin) -> bool:
        """Take the next step. Returns whether there was nothing to take."""
        await self._scout.ask("published", self._check_published)
        async with self._busy:
            await self._retire()
            if await self._engine.is_sleeping():
                raise SleepingError("vLLM sleeps. No adapter is loaded until it wakes up.")
            if self._follower is not None and not self._follower.settled:
                await asyncio.to_thread(self._find_out, self._follower)
        way = await self._scout.next(self._have, pin)
        async with self._busy:
            if way:
                self._state = "staging"
                self._ahead = await asyncio.to_thread(self._advance, way)
            if self._ahead is not None and self._have != self.identity:
                await self._load(self._ahead)
            self._ahead = None
            self._report("serving", self._course.problem)
        return not way

    def _find_out(self, follower: Follower) -> None:
        """Audit the bits in memory."""
        before = follower.version
        follower.settle()
        if follower.version != before:
            self._scout.acquit()

    def _advance(self, way: Sequence[Stored]) -> _Ahead:
        """Bring the tensors to the end of a way."""
        began = generated_tokens(), running_requests(), time.perf_counter()
        if self._follower is None:
            memory, self._tensors = LiveMemory.on_host(self._reader.specs)
            memory.audit()
            self._follower = Follower(self._reader, memory)
        failed = None
        try:
            for stored in way:
                if stored.use_anchor:
                    failed = stored.key
                    self._config = self._read_config(stored)
            failed = None
            staged = self._follower.stage(way)
            self._follower.confirm(self._follower.commit(staged))
        except BaseException as error:
            is_blamed = isinstance(error, CorruptDataError | MissingVersionError | FingerprintMismatchError)
            self._scout.failed((way, failed or self._follower.failed, error) if is_blamed else None)
            raise
        return _Ahead(way, *began, staged.staged.changed)

    def _read_config(self, stored: Stored) -> bytes:
        anchor = stored.record.anchor
        assert anchor is not None
        for file in anchor.companions:
            if file.key == f"{anchor.directory}/{_CONFIG}":
                return self._reader.fetch(file)
        raise ConfigError(
            f"{self._channel} holds no {_CONFIG}, so it is not the channel of an adapter. Publish with "
            "adapter_only=True, or start the server without --adapter."
        )

    async def _load(self, ahead: _Ahead) -> None:
        """Write the tensors, have vLLM load them, and serve them under the adapter's name too."""
        version = ahead.way[-1].version
        name = self._versioned(version)
        await asyncio.to_thread(self._write, self._folder(name))
        written = time.perf_counter()
        self._state = "committing"
        reply = await self._models.load_lora_adapter(
            LoadLoRAAdapterRequest(lora_name=name, lora_path=str(self._folder(name)))
        )
        if not isinstance(reply, str):
            raise ApplyError(f"vLLM did not load {name}: {reply.error.message}")
        self._models.lora_requests[self._adapter] = self._models.lora_requests[name]
        self._served.append(name)
        self.identity, self._served_s = version, time.monotonic()
        done = CommitReply(ahead.changed, written - ahead.begun_s, 0.0, time.perf_counter() - written)
        self._committed(ahead.way, done, generated_tokens() - ahead.tokens_before, ahead.running, 0.0)

    def _write(self, folder: Path) -> None:
        """Write the tensors as a PEFT directory, and compare the files with them."""
        assert self._follower is not None
        folder.mkdir(exist_ok=True)
        (folder / _CONFIG).write_bytes(self._config)
        save_file(self._tensors, folder / _WEIGHTS, {"format": "pt"})
        tensors = load_file(folder / _WEIGHTS)
        written = {name: cpu.fingerprint(tensor_key(name), bits_of(tensor)) for name, tensor in tensors.items()}
        if written != self._follower.memory.fingerprints:
            raise FingerprintMismatchError(f"{folder} does not hold the bits of version {self._have} that were written.")

    async def _retire(self) -> None:
        """Unload versions older than those that are kept, and remove their directories, once no request uses them."""
        used = {state.lora_name for state in self._engine.output_processor.request_states.values()}
        for name in [name for name in self._served[:-KEPT] if name not in used]:
            await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
            self._served.remove(name)
            self._retired[name] = time.monotonic()
        for name, since in list(self._retired.items()):
            if name in used:
                self._retired[name] = time.monotonic()
            elif time.monotonic() - since > _GRACE_S:
                await asyncio.to_thread(shutil.rmtree, self._folder(name))
                del self._retired[name]

    def _versioned(self, version: Version) -> str:
        return f"{self._adapter}-v{self._name(version)}"

    def _folder(self, name: str) -> Path:
        return Path(self._root.name) / name
