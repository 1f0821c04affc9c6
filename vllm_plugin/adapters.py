"""Following a channel that holds an adapter: vLLM's runtime LoRA loads each version under a name of its own.

    next chain -> fetch, check and decode in a thread -> a directory as PEFT writes it -> load NAME-v7; NAME now means it too

A request keeps the version that it began with, so nothing is paused, and vLLM's prefix cache tells the
versions apart. The last versions can be requested by name. Older ones are unloaded once no request uses them.
An adapter of another base model than the one that vLLM has loaded is refused.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file, save_file
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    ApplyError,
    ConfigError,
    CorruptDataError,
    MissingVersionError,
    ModelMismatchError,
    SleepingError,
    first_five,
)
from deltasync.following import Commit, Identify, MemoryTarget, StagedVersion
from deltasync.kernels import native
from deltasync.opening import adapter_base
from deltasync.opening.adapter_base import AdapterBase
from deltasync.opening.checkpoint import find, load
from deltasync.serve.engine import unique_name
from deltasync.tensors.bits import bits_of
from deltasync.tensors.fingerprint import tensor_key
from vllm_plugin import logger
from vllm_plugin.pauses import OnLoop, generated_tokens, running_requests

KEPT = 2
"""How many of the newest versions can be requested by name."""

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_GRACE_S = 60.0  # for requests that have looked up a version's name and do not run yet


class AdapterTarget(MemoryTarget):
    """The adapter that vLLM's served `models` have under the name `settings.adapter`. Workers take no part.

    Attributes:
        version: The version that the adapter's name means.
        served: Names of the versions that may be requested, oldest first.

    Raises:
        ConfigError: the adapter has the name of a served model.
    """

    version: VersionId | None = None

    def __init__(
        self, engine: Any, reader: ChannelReader, settings: ReplicaSettings, models: Any, run: OnLoop
    ) -> None:
        assert settings.adapter is not None
        if models.is_base_model(settings.adapter):
            raise ConfigError(f"The adapter cannot be named {settings.adapter}, as a model that vLLM serves.")
        super().__init__(reader)
        self.served: list[str] = []
        self._engine, self._models, self._run = engine, models, run
        self._adapter = settings.adapter
        self._last: StoredRecord | None = None  # of `version`
        self._config = b""
        self._staging: tuple[
            StoredRecord, bytes, int, float
        ]  # the end of the chain, its config, tokens and time at the beginning
        self._refusals: dict[bytes | None, str | None] = {}  # of each base that the channel named
        self._names: OrderedDict[int, str] = OrderedDict()
        self._root = tempfile.TemporaryDirectory(prefix="deltasync-adapter-")
        # when each version that is not served by name any more was last in use
        self._retired: dict[str, float] = {}

    @property
    def models(self) -> list[str]:
        """The model names that requests may use, the newest first."""
        return [self._adapter, *reversed(self.served)] if self.served else []

    def open(self, identify: Identify) -> None:
        """Make host memory for what vLLM will have loaded."""
        self._refuse_asleep()
        super().open(identify)

    def is_settled(self, asked: bool) -> bool:
        """Whether the host memory holds what vLLM has loaded. Also unloads versions that nobody uses."""
        self._refuse_asleep()
        self._run(self._retire())
        return super().is_settled(asked) and self._opened.version == self.version

    def _refuse_asleep(self) -> None:
        if self._run(self._engine.is_sleeping()):
            raise SleepingError("vLLM sleeps. No adapter is loaded until it wakes up.")

    def settle(self) -> None:
        """Bring the host memory back to the version that vLLM has loaded, from the file that it was loaded
        from.
        """
        if self._last is not None:
            for name, tensor in load_file(
                self._folder(self._versioned(self._last.version)) / _WEIGHTS
            ).items():
                bits_of(self.tensors[name])[:] = bits_of(tensor)
        self._opened.identified(self._last)
        super().settle()
        self.version = self._opened.version

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion | Sequence[StoredRecord] | None:
        """As `Target.stage`; refuse an adapter of another base model."""
        tokens_before, begun_s, config = generated_tokens(), time.perf_counter(), self._config
        if chain[0].use_anchor:
            found = self._model_file(chain[0], _CONFIG)
            if found is None:
                raise ConfigError(
                    f"{self.reader.store.url} holds no {_CONFIG}, so it is not the channel of an adapter. "
                    "Publish with "
                    "adapter_only=True, or start the server without --adapter."
                )
            config, base = found, self._model_file(chain[0], adapter_base.FILE)
            if base not in self._refusals:
                self._refusals[base] = self._refusal(base)
            if (refusal := self._refusals[base]) is not None:
                raise ModelMismatchError(refusal)
        self._staging = chain[-1], config, tokens_before, begun_s
        return super().stage(chain)

    def _refusal(self, base: bytes | None) -> str | None:
        """Return why the adapter of this base model cannot be served over what vLLM has loaded, or None if it
        can.

        A warning says what cannot be compared.
        """
        url, config = self.reader.store.url, self._engine.vllm_config.model_config
        if base is None:
            logger.warning(
                "%s does not say which base model its adapter was trained on; %s is taken for it.",
                url,
                config.model,
            )
            return None
        trained_on = AdapterBase.decode(base)
        is_on_hub = config.revision is not None and not Path(config.model).is_dir()
        try:
            served = load(find(f"{config.model}@{config.revision}" if is_on_hub else config.model))
            different, unknown = trained_on.compare(served)
        except (ConfigError, CorruptDataError) as error:
            logger.warning(
                "The base model of the adapter, %s, cannot be compared: %s", trained_on.name, error
            )
            return None
        if different:
            return (
                f"The adapter of {url} was trained on {trained_on.name or 'another model'}, and "
                f"{config.model}, which is "
                f"served here, has other weights: {first_five(different)}. Serve the model that it was "
                "trained on."
            )
        if unknown:
            logger.warning(
                "%d of %d tensors of the adapter's base model were not compared, as they have other names or "
                "are quantized "
                "in %s: %s.",
                *(len(unknown), len(trained_on.tensors), config.model, first_five(unknown)),
            )
        return None

    def _model_file(self, stored: StoredRecord, name: str) -> bytes | None:
        """Read a file beside an anchor's weights; None if there is none."""
        anchor = stored.record.anchor
        assert anchor is not None
        try:
            found = (
                self.reader.fetch(file)
                for file in anchor.model_files
                if file.key == f"{anchor.directory}/{name}"
            )
            return next(found, None)
        except (CorruptDataError, MissingVersionError) as error:
            error.key = stored.key
            raise

    def commit(self, staged: StagedVersion | Sequence[StoredRecord]) -> Commit:
        """Write the tensors, have vLLM load them, and serve them under the adapter's name too."""
        running, done = running_requests(), super().commit(staged)
        last, config, tokens_before, begun_s = self._staging
        name = self._versioned(last.version)
        self._write(self._folder(name), config)
        written_s = time.perf_counter()
        self._run(self._load(name))
        self.version, self._last, self._config = last.version, last, config
        stage_s, reload_s, tokens = (
            written_s - begun_s,
            time.perf_counter() - written_s,
            generated_tokens() - tokens_before,
        )
        measured = {"stage_s": stage_s, "pause_s": 0.0, "reload_s": reload_s, "tokens_during_sync": tokens}
        return msgspec.structs.replace(done, running_requests=running, **measured)

    async def _load(self, name: str) -> None:
        """Have vLLM load a version, unless it still has it, and make the adapter's name mean it."""
        if name not in self._models.lora_requests:
            request = LoadLoRAAdapterRequest(lora_name=name, lora_path=str(self._folder(name)))
            reply = await self._models.load_lora_adapter(request)
            if not isinstance(reply, str):
                raise ApplyError(f"vLLM did not load {name}: {reply.error.message}")
        self._models.lora_requests[self._adapter] = self._models.lora_requests[name]
        self._retired.pop(name, None)
        self.served = [*(each for each in self.served if each != name), name]

    def _write(self, folder: Path, config: bytes) -> None:
        """Write the tensors as a PEFT directory, and compare the files with them."""
        folder.mkdir(exist_ok=True)
        (folder / _CONFIG).write_bytes(config)
        save_file(self.tensors, folder / _WEIGHTS, {"format": "pt"})
        tensors = load_file(folder / _WEIGHTS)
        written = {
            name: native.fingerprint(tensor_key(name), bits_of(tensor)) for name, tensor in tensors.items()
        }
        if written != self._opened.memory.fingerprints:
            raise ApplyError(
                f"{folder} does not hold the bits of version {self._opened.version} that were written."
            )

    async def _retire(self) -> None:
        """Unload versions older than those that are kept, and remove their directories, once no request uses
        them.
        """
        used = {state.lora_name for state in self._engine.output_processor.request_states.values()}
        for name in [name for name in self.served[:-KEPT] if name not in used]:
            await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
            self.served.remove(name)
            self._retired[name] = time.monotonic()
        for name, since in list(self._retired.items()):
            if name in used:
                self._retired[name] = time.monotonic()
            elif time.monotonic() - since > _GRACE_S:
                await asyncio.to_thread(shutil.rmtree, self._folder(name))
                del self._retired[name]

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor in the file that vLLM loaded the version from."""
        path = None if self.version is None else self._folder(self._versioned(self.version)) / _WEIGHTS
        tensors = {} if path is None else load_file(path)
        return {name: sha256_hex(bits_of(tensor).data) for name, tensor in tensors.items()}

    def close(self) -> None:
        """Give up what is being loaded."""
        self._run.cancel()

    def _versioned(self, version: VersionId) -> str:
        return f"{self._adapter}-v{unique_name(self._names, version)}"

    def _folder(self, name: str) -> Path:
        return Path(self._root.name) / name
