"""Following a channel that holds an adapter: vLLM's runtime LoRA loads each version under a name of its own
(`deltasync.serve.adapters`), from PEFT's files in memory.

vLLM's prefix cache tells the versions apart. A request that names a maximum lag (`constraint.max_lag`) ends at
the first commit that makes its version older than that.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, ConfigError, SleepingError
from deltasync.following import Identify
from deltasync.serve.adapters import AdapterLoader, VersionNames
from deltasync.serve.constraint import max_lag
from deltasync.serve.engine import OnLoop, around
from deltasync.serve.requests import Refused
from vllm_plugin import logger
from vllm_plugin.adapter_files import AdapterFiles
from vllm_plugin.pauses import generated_tokens, running_requests
from vllm_plugin.versions import resolved

_GRACE_S = 60.0  # for requests that have looked up a version's name and do not run yet


class Names(dict[str, Any]):
    """vLLM's adapters by the names that requests may use. vLLM looks a request's model up here."""

    def __init__(self, versions: VersionNames, loaded: dict[str, Any]) -> None:
        super().__init__(loaded)
        self._versions = versions

    def __contains__(self, name: object) -> bool:
        """Whether an adapter has this name. Notes its use, and why the request is refused if it is not served."""
        if not isinstance(name, str) or not self._versions.is_named(name):
            return super().__contains__(name)
        try:
            resolved(self._versions.number(self._versions.use(name)), None)
        except Refused as error:
            resolved(None, (error.status_code, str(error)))
            return False
        return True

    def __getitem__(self, name: str) -> Any:
        """Return vLLM's request of the adapter that a name means."""
        return super().__getitem__(self._versions.find(name) or name)


class AdapterTarget(AdapterLoader):
    """The adapter that vLLM's served `models` have under the name `settings.adapter`.

    Raises:
        ConfigError: the adapter has the name of a served model.
    """

    def __init__(
        self, engine: Any, reader: ChannelReader, settings: ReplicaSettings, models: Any, run: OnLoop
    ) -> None:
        assert settings.adapter is not None
        if models.is_base_model(settings.adapter):
            raise ConfigError(f"The adapter cannot be named {settings.adapter}, as a model that vLLM serves.")
        super().__init__(reader, settings.adapter, run, logger)
        self._engine, self._models, self._on_loop = engine, models, run
        self._requests = models.lora_requests = Names(self.names, models.lora_requests)
        name_of = models.model_name
        models.model_name = lambda lora=None: self._fixed(lora) or name_of(lora)
        self._show = models.show_available_models
        models.show_available_models = self._listed
        around(engine, "add_request")(self._add_request)
        self._files: dict[str, AdapterFiles] = {}  # of each version's name
        # when each version that is not served by name any more was last in use
        self._retired: dict[str, float] = {}

    def open(self, identify: Identify) -> None:
        """Make host memory for what vLLM will have loaded."""
        self._refuse_asleep()
        super().open(identify)

    def is_settled(self, asked: bool) -> bool:
        """As `AdapterLoader.is_settled`."""
        self._refuse_asleep()
        return super().is_settled(asked)

    def _refuse_asleep(self) -> None:
        if self._run(self._engine.is_sleeping()):
            raise SleepingError("vLLM sleeps. No adapter is loaded until it wakes up.")

    def base_model(self) -> tuple[str, str | None]:
        """As `AdapterLoader.base_model`."""
        config = self._engine.vllm_config.model_config
        return config.model, config.revision

    def give(self, name: str, config: bytes) -> None:
        """Write the tensors into files as PEFT does, unless vLLM has that version."""
        if name not in self._files:
            self._files[name] = AdapterFiles(config, self.tensors)

    def given(self, name: str) -> Mapping[str, torch.Tensor]:
        """As `AdapterLoader.given`."""
        tensors: dict[str, torch.Tensor] = load_file(self._files[name].weights)
        return tensors

    def take_back(self, name: str) -> None:
        """As `AdapterLoader.take_back`."""
        self._files.pop(name).close()

    async def load(self, name: str) -> None:
        """As `AdapterLoader.load`."""
        loaded, path = self._requests.get(name), self._files[name].path
        if loaded is None or loaded.lora_path != path:  # vLLM refuses a name that is another adapter's
            request = LoadLoRAAdapterRequest(lora_name=name, lora_path=path)
            reply = await self._models.load_lora_adapter(request)
            if not isinstance(reply, str):
                self.take_back(name)
                raise ApplyError(f"vLLM did not load {name}: {reply.error.message}")
        self._retired.pop(name, None)

    async def serve(self, name: str) -> None:
        """As `AdapterLoader.serve`; end the requests whose version is older than they allow."""
        await super().serve(name)
        self._requests[self.names.adapter] = self._requests[name]
        await self._end_old()

    async def unload(self, name: str) -> None:
        """As `AdapterLoader.unload`. The files stay for a while."""
        await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
        self._retired[name] = time.monotonic()

    def in_use(self) -> Container[str]:
        """As `AdapterLoader.in_use`."""
        return {state.lora_name for state in self._engine.output_processor.request_states.values()}

    async def retire(self) -> None:
        """As `AdapterLoader.retire`. Also free the files of versions that no request can use any more."""
        await super().retire()
        used = self.in_use()
        for name, since in list(self._retired.items()):
            if name in used:
                self._retired[name] = time.monotonic()
            elif time.monotonic() - since > _GRACE_S:
                self._files.pop(name).close()
                del self._retired[name]

    def running_requests(self) -> int:
        """As `AdapterLoader.running_requests`."""
        return running_requests()

    def generated_tokens(self) -> int:
        """As `AdapterLoader.generated_tokens`."""
        return generated_tokens()

    async def _add_request(self, add_request: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, in the context of the request; note the newest version that it may meet."""
        added = await add_request(request_id, *args, **kwargs)
        lag, lora = max_lag.get(), kwargs.get("lora_request")
        number = None if lora is None else self.names.number(lora.lora_name)
        if lag is not None and number is not None:
            processor = self._engine.output_processor
            for each in processor.external_req_ids.get(request_id, ()):
                processor.request_states[each].deltasync_newest = number + lag
            await self._end_old()  # a version may have come while it was added
        return added

    async def _end_old(self) -> None:
        """End the requests whose version is older than they allow, with the tokens that they have."""
        states, newest = self._engine.output_processor.request_states, self.names.newest
        old = [name for name, state in states.items() if getattr(state, "deltasync_newest", newest) < newest]
        if old:
            await self._engine.abort(old, internal=True)

    def close(self) -> None:
        """Give up what is being loaded."""
        self._on_loop.cancel()

    async def _listed(self) -> Any:
        """As vLLM lists its models, which takes the names of adapters from their versions."""
        listed, names = await self._show(), list(self._requests)
        for card, name in zip(listed.data[len(listed.data) - len(names) :], names, strict=True):
            card.id = name
        return listed

    def _fixed(self, lora: Any) -> str | None:
        """Return the adapter's own name for any version of it; None for another adapter, and the base."""
        return self.names.adapter if lora is not None and lora.lora_name in self._files else None
