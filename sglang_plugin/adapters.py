"""Following a channel that holds an adapter: SGLang's LoRA loads each version from tensors, under a name of its
own (`deltasync.serve.adapters`).

The follow loop runs in the HTTP server's process, beside SGLang's registry of adapters. A request's version is
chosen when it arrives, by its body, whatever route it takes. SGLang's radix cache tells versions apart by the
id that each loaded adapter gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Container, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
import torch
from fastapi import FastAPI, HTTPException
from starlette.datastructures import MutableHeaders

from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, ModelMismatchError, first_five
from deltasync.following import Follow
from deltasync.serve.adapters import AdapterLoader, VersionNames
from deltasync.serve.constraint import (
    App,
    Message,
    Receive,
    Send,
    body_messages,
    constraint,
    replay,
    reply_error,
)
from deltasync.serve.engine import OnLoop, around, open_reader
from deltasync.serve.heartbeats import HeartbeatWriter
from deltasync.serve.replies import VERSIONS_HEADER
from deltasync.serve.requests import Refused
from deltasync.serve.routes import AdapterStatus, Routes
from sglang_plugin import logger

_LAYER = re.compile(
    r"(?:(?:base_|language_)?model\.|transformer\.)*layers\.[0-9]+\.(?:.*\.)?([a-z_]+)\.lora_[AB]\.weight"
)
"""Names of the tensors that SGLang's LoRA was run with: a module of the language model's layers, and its
matrix. By the number of a layer SGLang would take those of other parts, such as images', for the language
model's.
"""


class _Copy(NamedTuple):
    """What SGLang loads: its form of the adapter's config, and the tensors behind each other in one."""

    config: dict[str, Any]
    bucket: Any


def sglang_config(config: bytes, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what SGLang reads of a PEFT `adapter_config.json`, so that it computes as PEFT does.

    SGLang scales by `lora_alpha / r`, whatever the config says beside, and passes over tensors that it does not
    know. A request for an adapter with `up_proj` and without `gate_proj` ends its scheduler.

    Raises:
        ModelMismatchError: SGLang would not compute with this adapter as PEFT does.
    """
    peft = json.loads(config)
    rank, alpha = peft["r"], peft["lora_alpha"]
    unknown = [
        name
        for name in tensors
        if _LAYER.fullmatch(name) is None
        or ".experts." in name
        or (".up_proj." in name and name.replace(".up_proj.", ".gate_proj.") not in tensors)
    ]
    other = [
        name
        for name, tensor in tensors.items()
        if tensor.shape[1 if name.endswith(".lora_B.weight") else 0] != rank
    ]
    if unknown or other or peft.get("alpha_pattern"):
        raise ModelMismatchError(
            "SGLang computes with A and B of layers' linear modules, all of one rank and scale, and this "
            f"adapter has others: {first_five(unknown or other or [*peft['alpha_pattern']])}. Serve it by vLLM, "
            "or publish merged weights."
        )
    modules = {match[1] for name in tensors if (match := _LAYER.fullmatch(name))}
    scale = math.sqrt(rank) if peft.get("use_rslora") else 1
    return {"peft_type": "LORA", "target_modules": sorted(modules), "r": rank, "lora_alpha": alpha * scale}


class TensorsTarget(AdapterLoader):
    """The adapter that SGLang's tokenizer `manager` has under the name `settings.adapter`."""

    def __init__(self, manager: Any, settings: ReplicaSettings, run: OnLoop) -> None:
        assert settings.adapter is not None
        super().__init__(open_reader(settings), settings.adapter, run, logger)
        self._manager, self._on_loop = manager, run
        self._copies: dict[str, _Copy] = {}  # of the newest version, and of one that is being loaded
        self._ids: dict[str, str] = {}  # SGLang's, of each loaded version

    def base_model(self) -> tuple[str, str | None]:
        """As `AdapterLoader.base_model`."""
        return self._manager.server_args.model_path, self._manager.server_args.revision

    def refusal(self, base: bytes | None) -> str | None:
        """As `AdapterLoader.refusal`; refuse an unknown base, as SGLang sees only in a request whether shapes
        fit, and ends.
        """
        if base is None:
            return (
                f"{self.reader.store.url} does not say which base model its adapter was trained on: publish it "
                "with adapter_base.json, as the trainer's callback does."
            )
        return super().refusal(base)

    def give(self, name: str, config: bytes) -> None:
        """As `AdapterLoader.give`."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        if name not in self._copies:
            aligned = sorted(self.tensors.items(), key=lambda item: -item[1].itemsize)
            self._copies[name] = _Copy(sglang_config(config, self.tensors), FlattenedTensorBucket(aligned))

    def given(self, name: str) -> Mapping[str, torch.Tensor]:
        """As `AdapterLoader.given`. The newest version's are in memory that SGLang's schedulers share."""
        return dict(self._copies[name].bucket.reconstruct_tensors())

    def take_back(self, name: str) -> None:
        """As `AdapterLoader.take_back`."""
        del self._copies[name]

    async def load(self, name: str) -> None:
        """As `AdapterLoader.load`. Each rank compares what it has got with the digests."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput

        found = self._manager.lora_registry.get_all_adapters().get(name)
        if found is None or found.lora_id != self._ids.get(name):
            request = LoadLoRAAdapterFromTensorsReqInput(
                lora_name=name,
                config_dict=self._copies[name].config,
                serialized_named_tensors=self._payloads(name),
                load_format="flattened_bucket",
                expected_checksums=self.digest_of(name),
            )
            reply = await self._manager.load_lora_adapter_from_tensors(request)
            if not reply.success:
                self.take_back(name)
                await self._end_load(name)
                raise ApplyError(f"SGLang did not load {name}: {reply.error_message}")
            self._ids[name] = request.lora_id
        self._copies = {name: self._copies[name]}

    def _payloads(self, name: str) -> list[bytes]:
        """Return handles of a version's memory, one for each rank, which may read it once."""
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.utils.common import MultiprocessingSerializer

        bucket = self._copies[name].bucket
        tensors = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        return [MultiprocessingSerializer.serialize(tensors) for _ in range(get_parallel().tp_size)]

    async def _end_load(self, name: str) -> None:
        """Have the ranks forget a version that some of them have not loaded."""
        if name in self._manager.pending_lora_unloads:
            await self._unloaded(name)

    async def unload(self, name: str) -> None:
        """As `AdapterLoader.unload`."""
        await self._unloaded(name)
        self._manager.lora_ref_cache.pop(name, None)  # by which SGLang would load it again
        self._ids.pop(name, None)

    async def _unloaded(self, name: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        reply = await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
        if not reply.success:
            logger.warning("SGLang did not unload %s: %s", name, reply.error_message)

    def in_use(self) -> Container[str]:
        """As `AdapterLoader.in_use`, by SGLang's counters of requests."""
        counters = self._manager.lora_registry._counters
        return {name for name, each in self._ids.items() if each in counters and counters[each].value()}

    def running_requests(self) -> int:
        """As `AdapterLoader.running_requests`."""
        return len(self._manager.rid_to_state)

    def close(self) -> None:
        """Give up what is being loaded."""
        self._on_loop.cancel()


class _Choice(NamedTuple):
    """The version that makes a reply: its name, and its number."""

    name: str
    number: int


# of the request of this context
_choice: ContextVar[_Choice | None] = ContextVar("deltasync_adapter", default=None)


class AdapterRoutes(Routes):
    """Routes to the follow loop, which runs in this process while the application does."""

    def __init__(self, server: Any) -> None:
        super().__init__()
        self._server = server
        self._refused = "This server has not begun to follow its channel."

    @property
    def target(self) -> TensorsTarget | None:
        """The target of the follow loop; None before that runs."""
        return None if self._follow is None else self._follow.target  # type: ignore[return-value]

    @property
    def last_not_ready(self) -> str | None:
        """As `Routes.not_ready`."""
        return self._refused if self._follow is None else self._follow.not_ready

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Follow the channel."""
        from deltasync.serve.metrics import Metrics  # SGLang sets up prometheus_client first

        manager = self._server._global_state.tokenizer_manager
        settings = self.settings.at_port(manager.server_args.port, None)
        target = TensorsTarget(manager, settings, OnLoop(asyncio.get_running_loop()))
        beats = HeartbeatWriter(target.reader.store)
        follow = Follow(target.reader, target, settings, observer=Metrics(), heartbeats=beats, log=logger)
        self._list(manager.lora_registry, target)
        self._follow = follow
        logger.info(
            "deltasync follows %s (%s) as %s", target.reader.store.url, follow.pin, settings.replica_id
        )
        follow.start()
        yield
        await asyncio.to_thread(follow.stop)

    def _list(self, registry: Any, target: TensorsTarget) -> None:
        """Have SGLang list the adapter under its own name too."""

        @around(registry, "get_all_adapters")
        def listed(get_all_adapters: Any) -> dict[str, Any]:
            found: dict[str, Any] = get_all_adapters()
            newest = found.get(target.names.find(target.names.adapter) or "")
            own = {} if newest is None else {target.names.adapter: self._named(newest, target)}
            return own | found

    @staticmethod
    def _named(newest: Any, target: TensorsTarget) -> Any:
        return msgspec.structs.replace(newest, lora_name=target.names.adapter)

    async def status(self, commits: int) -> AdapterStatus:
        """As `Routes.status`."""
        found = AdapterStatus(**msgspec.structs.asdict(self.follow().status(commits)))
        found.adapters = [] if self.target is None else self.target.models
        manager = self._server._global_state.tokenizer_manager
        found.base_models = [manager.served_model_name]
        found.max_lora_rank = manager.server_args.max_lora_rank
        found.lora_target_modules = sorted(manager.server_args.lora_target_modules)
        return found


def choose_versions(app: App, routes: AdapterRoutes) -> App:
    """ASGI middleware that chooses the version of a request that names the adapter, and names it in the reply's
    header `x-deltasync-versions`.

    A request names it as its `model`, alone or after the base's name and a colon, or as SGLang's `lora_path`. The
    application then finds the adapter's own name as the model.
    """

    async def call(scope: Any, receive: Receive, send: Send) -> None:
        target = routes.target
        if scope["type"] != "http" or target is None:
            return await app(scope, receive, send)
        messages = [message async for message in body_messages(receive)]
        document = _document(b"".join(message.get("body", b"") for message in messages))
        asked = _adapters(document, target.names)
        if not any(map(target.names.is_named, asked)):
            return await app(scope, replay(messages, receive), send)
        if len(asked) > 1:
            sentence = f"A request names one version of {target.names.adapter} for all its prompts, or none."
            return await reply_error(send, 400, sentence)
        try:
            name = target.names.use(*asked)
        except Refused as error:
            return await reply_error(send, error.status_code, str(error))
        number, wanted = target.names.number(name) or 0, constraint.get()
        if wanted is not None and not wanted.allows(number, number):
            return await reply_error(send, 409, wanted.refusal(number))
        _choice.set(_Choice(name, number))
        if "model" in document:
            named = json.dumps(document | {"model": target.names.adapter}).encode()
            messages = [{"type": "http.request", "body": named, "more_body": False}]

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append(VERSIONS_HEADER, f"{number}..{number}")
            await send(message)

        await app(scope, replay(messages, receive), send_with_version)

    return call


def _document(body: bytes) -> dict[str, Any]:
    """Return a request's JSON object; an empty one for another body, of which the application says so."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _adapters(document: Mapping[str, Any], names: VersionNames) -> set[str]:
    """Return the adapters that a request names, by its model or else for its prompts; an empty name for those
    without one.
    """
    model, paths = str(document.get("model")).rpartition(":")[2], document.get("lora_path")
    if names.is_named(model):
        return {model}
    return {str(each or "") for each in (paths if isinstance(paths, list) else [paths])}


def _made_by_choice(asked: Any) -> int | None:
    """Have SGLang make a reply by the version that was chosen. Returns its number; None for the base.

    Raises:
        HTTPException: it is the base's, and demands a version.
    """
    choice, wanted = _choice.get(), constraint.get()
    if choice is not None:
        asked.lora_path = choice.name
        return choice.number
    if wanted is not None:
        raise HTTPException(409, wanted.refusal(None, "No version makes this reply."))
    return None


def _name_version(output: Any, number: int) -> None:
    """Name the adapter's version in SGLang's own fields, which have the base's."""
    for each in output if isinstance(output, list) else [output]:
        meta = each.get("meta_info", {})
        meta["weight_version"] = str(number)
        meta["weight_versions"] = [
            span | {"version": str(number)} for span in meta.get("weight_versions") or ()
        ]


def install(server: Any) -> AdapterRoutes:
    """Add routes to SGLang's application, in its module `server`, and have requests name the adapter."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    routes = AdapterRoutes(server)
    server.app.add_middleware(choose_versions, routes=routes)
    routes.attach(server.app)

    @around(TokenizerManager, "generate_request")
    async def generated(
        generate_request: Any, self: Any, asked: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        number = _made_by_choice(asked)
        async with contextlib.aclosing(generate_request(self, asked, *args, **kwargs)) as outputs:
            async for output in outputs:
                if number is not None:
                    _name_version(output, number)
                yield output

    return routes
