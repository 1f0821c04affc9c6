"""Following a channel that holds an adapter: vLLM's runtime LoRA loads each version under a name of its own.

    next chain -> fetch, check and decode in a thread -> PEFT's files in memory -> load NAME-v7; NAME now means it too

A request keeps the version that it began with, so nothing is paused, and vLLM's prefix cache tells the
versions apart. One that names a maximum lag (`constraint.max_lag`) ends at the first commit that makes its
version older than that. The newest versions can be requested by name, or as the one version that a request
demands, and so can those that requests used last; another one's name is answered with 409. An adapter of
another base model than the one that vLLM has loaded is refused.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file
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
from deltasync.serve.constraint import MAX_LAG_HEADER, constraint, max_lag
from deltasync.serve.engine import around, unique_name
from deltasync.tensors.bits import bits_of
from deltasync.tensors.fingerprint import tensor_key
from vllm_plugin import logger
from vllm_plugin.adapter_files import CONFIG, AdapterFiles
from vllm_plugin.pauses import OnLoop, generated_tokens, running_requests
from vllm_plugin.versions import resolved

KEPT, KEPT_USED = 2, 6
"""How many of the newest versions can be requested by name, and how many older ones that requests used last."""

_GRACE_S = 60.0  # for requests that have looked up a version's name and do not run yet


class Names(dict[str, Any]):
    """vLLM's adapters by the names that requests may use. vLLM looks a request's model up here.

    Attributes:
        used_s: When a request last used a version, by the version's name.
    """

    def __init__(self, adapter: str, loaded: dict[str, Any]) -> None:
        super().__init__(loaded)
        self.used_s: dict[str, float] = {}
        self._adapter = adapter
        self._versioned = re.compile(rf"{re.escape(adapter)}(?:-v([0-9]+)(?:-[0-9a-f]+)?)?")

    def __contains__(self, name: object) -> bool:
        """Whether an adapter has this name. Notes its use, and why the request is refused if it is not served."""
        found = self.get(self._meant(name)) if isinstance(name, str) else None
        if isinstance(name, str) and self._versioned.fullmatch(name):
            return self._resolve(name, None if found is None else found.lora_name)
        return found is not None

    def __getitem__(self, name: str) -> Any:
        """Return vLLM's request of the adapter that a name means."""
        return super().__getitem__(self._meant(name))

    def kept(self) -> dict[int, str]:
        """Return the names of the versions that are served, by their numbers."""
        return {number: name for name in self if (number := self.number(name)) is not None}

    def number(self, name: str) -> int | None:
        """Return the number in a version's name; None for the adapter's own, and other names."""
        match = self._versioned.fullmatch(name)
        return None if match is None or match[1] is None else int(match[1])

    @property
    def newest(self) -> int:
        """The number of the version that the adapter's name means; 0 before there is one."""
        found = self.get(self._adapter)
        return 0 if found is None else self.number(found.lora_name) or 0

    def _meant(self, name: str) -> str:
        """Return the name of the one version that the request demands of the adapter, or the name as it
        is.
        """
        wanted = constraint.get()
        if name != self._adapter or wanted is None or not wanted.exact or wanted.version is None:
            return name
        return self.kept().get(wanted.version, name)

    def _resolve(self, name: str, versioned: str | None) -> bool:
        if versioned is None:
            resolved(None, self._refusal(name))
            return False
        number, lag = self.number(versioned), max_lag.get()
        assert number is not None
        if lag is not None and self.newest - number > lag:
            sentence = (
                f"{name} is older than version {self.newest} by more than {MAX_LAG_HEADER}: {lag} allows."
            )
            resolved(None, (409, sentence))
            return False
        self.used_s[versioned] = time.monotonic()
        resolved(number, None)
        return True

    def _refusal(self, name: str) -> tuple[int, str]:
        if not (kept := self.kept()):
            return 503, f"No version of {self._adapter} is served yet."
        return 409, (
            f"{name} is not served here. Name {self._adapter}, the newest version, or one that is kept: "
            f"{', '.join(kept.values())}."
        )


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
        self._requests = models.lora_requests = Names(self._adapter, models.lora_requests)
        name_of = models.model_name
        models.model_name = lambda lora=None: self._fixed(lora) or name_of(lora)
        self._show = models.show_available_models
        models.show_available_models = self._listed
        around(engine, "add_request")(self._add_request)
        self._last: StoredRecord | None = None  # of `version`
        self._config = b""
        self._staging: tuple[
            StoredRecord, bytes, int, float
        ]  # the end of the chain, its config, tokens and time at the beginning
        self._refusals: dict[bytes | None, str | None] = {}  # of each base that the channel named
        self._names: OrderedDict[int, str] = OrderedDict()
        self._files: dict[str, AdapterFiles] = {}  # of each version's name
        # when each version that is not served by name any more was last in use
        self._retired: dict[str, float] = {}

    @property
    def models(self) -> list[str]:
        """The model names that requests may use: the adapter's own, which means the newest version, then each
        version's, the newest first.
        """
        return [self._adapter, *reversed(self.served)]

    @property
    def kept(self) -> dict[int, str]:
        """Names of the versions that a request may demand alone, by their numbers."""
        return self._requests.kept()

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
            for name, tensor in load_file(self._files[self._versioned(self._last.version)].weights).items():
                bits_of(self.tensors[name])[:] = bits_of(tensor)
        self._opened.identified(self._last)
        super().settle()
        self.version = self._opened.version

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion | Sequence[StoredRecord] | None:
        """As `Target.stage`; refuse an adapter of another base model."""
        tokens_before, begun_s, config = generated_tokens(), time.perf_counter(), self._config
        if chain[0].use_anchor:
            found = self._model_file(chain[0], CONFIG)
            if found is None:
                raise ConfigError(
                    f"{self.reader.store.url} holds no {CONFIG}, so it is not the channel of an adapter. "
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
        self._write(name, config)
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
        loaded, path = self._requests.get(name), self._files[name].path
        if loaded is None or loaded.lora_path != path:  # vLLM refuses a name that is another adapter's
            request = LoadLoRAAdapterRequest(lora_name=name, lora_path=path)
            reply = await self._models.load_lora_adapter(request)
            if not isinstance(reply, str):
                self._files.pop(name).close()
                raise ApplyError(f"vLLM did not load {name}: {reply.error.message}")
        self._requests[self._adapter] = self._requests[name]
        self._retired.pop(name, None)
        self.served = [*(each for each in self.served if each != name), name]
        await self._end_old()

    async def _add_request(self, add_request: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, in the context of the request; note the newest version that it may meet."""
        added = await add_request(request_id, *args, **kwargs)
        lag, lora = max_lag.get(), kwargs.get("lora_request")
        number = None if lora is None else self._requests.number(lora.lora_name)
        if lag is not None and number is not None:
            processor = self._engine.output_processor
            for each in processor.external_req_ids.get(request_id, ()):
                processor.request_states[each].deltasync_newest = number + lag
            await self._end_old()  # a version may have come while it was added
        return added

    async def _end_old(self) -> None:
        """End the requests whose version is older than they allow, with the tokens that they have."""
        states, newest = self._engine.output_processor.request_states, self._requests.newest
        old = [name for name, state in states.items() if getattr(state, "deltasync_newest", newest) < newest]
        if old:
            await self._engine.abort(old, internal=True)

    def _write(self, name: str, config: bytes) -> None:
        """Write the tensors into files as PEFT does, unless vLLM has that version, and compare the files with
        them.
        """
        if name not in self._files:
            self._files[name] = AdapterFiles(config, self.tensors)
        tensors = load_file(self._files[name].weights)
        written = {
            each: native.fingerprint(tensor_key(each), bits_of(tensor)) for each, tensor in tensors.items()
        }
        if written != self._opened.memory.fingerprints:
            self._files.pop(name).close()
            raise ApplyError(
                f"{name} does not hold the bits of version {self._opened.version} that were written."
            )

    async def _retire(self) -> None:
        """Unload versions that are neither new nor used lately, and free their files, once no request uses
        them.
        """
        used = {state.lora_name for state in self._engine.output_processor.request_states.values()}
        used_s = self._requests.used_s
        older = [name for name in self.served[:-KEPT] if name not in used]
        last_used = sorted((name for name in older if name in used_s), key=used_s.__getitem__)[-KEPT_USED:]
        for name in older:
            if name not in last_used:
                await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
                self.served.remove(name)
                used_s.pop(name, None)
                self._retired[name] = time.monotonic()
        for name, since in list(self._retired.items()):
            if name in used:
                self._retired[name] = time.monotonic()
            elif time.monotonic() - since > _GRACE_S:
                self._files.pop(name).close()
                del self._retired[name]

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor in the file that vLLM loaded the version from."""
        files = None if self.version is None else self._files[self._versioned(self.version)]
        tensors = {} if files is None else load_file(files.weights)
        return {name: sha256_hex(bits_of(tensor).data) for name, tensor in tensors.items()}

    def close(self) -> None:
        """Give up what is being loaded."""
        self._run.cancel()

    def _versioned(self, version: VersionId) -> str:
        return f"{self._adapter}-v{unique_name(self._names, version)}"

    async def _listed(self) -> Any:
        """As vLLM lists its models, which takes the names of adapters from their versions."""
        listed, names = await self._show(), list(self._requests)
        for card, name in zip(listed.data[len(listed.data) - len(names) :], names, strict=True):
            card.id = name
        return listed

    def _fixed(self, lora: Any) -> str | None:
        """Return the adapter's own name for any version of it; None for another adapter, and the base."""
        return self._adapter if lora is not None and lora.lora_name in self._files else None
