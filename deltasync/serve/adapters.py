"""An adapter's channel on a server that loads each version under a name of its own: `policy-v7` beside `policy`.

    next chain -> fetch, check and decode in a thread -> a copy for the engine -> load NAME-v7; NAME now means it too

A request keeps the version that it began with, so nothing is paused. The newest versions can be requested by
name, or as the one version that a request demands, and so can those that requests used last; another one's
name is answered with 409. An adapter of another base model than the one that the engine has loaded is refused.
"""

from __future__ import annotations

import logging
import re
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    ApplyError,
    ConfigError,
    CorruptDataError,
    ModelMismatchError,
    first_five,
)
from deltasync.following import Commit, MemoryTarget, StagedVersion
from deltasync.kernels import native
from deltasync.opening import adapter_base
from deltasync.opening.adapter_base import AdapterBase
from deltasync.opening.checkpoint import find, load
from deltasync.serve.constraint import MAX_LAG_HEADER, constraint, max_lag
from deltasync.serve.engine import unique_name
from deltasync.serve.in_place import CONFIG, model_file
from deltasync.serve.requests import Refused
from deltasync.tensors.bits import bits_of
from deltasync.tensors.fingerprint import tensor_key

KEPT, KEPT_USED = 2, 6
"""How many of the newest versions can be requested by name, and how many older ones that requests used last."""


class VersionNames:
    """The versions of an adapter that a server keeps, by the names that requests may use.

    Attributes:
        adapter: The adapter's own name, which means the newest version.
        served: Names of the versions that may be requested, oldest first.
    """

    def __init__(self, adapter: str) -> None:
        self.adapter = adapter
        self.served: list[str] = []
        self._used_s: dict[str, float] = {}  # when a request last used a version
        self._first: OrderedDict[int, str] = OrderedDict()
        self._named = re.compile(rf"{re.escape(adapter)}(?:-v([0-9]+)(?:-[0-9a-f]+)?)?")

    def name(self, version: VersionId) -> str:
        """Return a version's name."""
        return f"{self.adapter}-v{unique_name(self._first, version)}"

    def is_named(self, name: str) -> bool:
        """Whether this is the adapter's own name, or that of a version, served or not."""
        return self._named.fullmatch(name) is not None

    def number(self, name: str) -> int | None:
        """Return the number in a version's name; None for the adapter's own, and other names."""
        match = self._named.fullmatch(name)
        return None if match is None or match[1] is None else int(match[1])

    @property
    def newest(self) -> int:
        """The number of the version that the adapter's name means; 0 before there is one."""
        return (self.number(self.served[-1]) or 0) if self.served else 0

    @property
    def kept(self) -> dict[int, str]:
        """Names of the versions that a request may demand alone, by their numbers."""
        return {number: name for name in self.served if (number := self.number(name)) is not None}

    def find(self, name: str) -> str | None:
        """Return the name of the version that a request means by a name in this context, where it may demand
        one version (`constraint`); None if it is not served.
        """
        wanted = constraint.get()
        if name == self.adapter and wanted is not None and wanted.exact and wanted.version in self.kept:
            return self.kept[wanted.version]
        if name == self.adapter and self.served:
            return self.served[-1]
        return name if name in self.served else None

    def use(self, name: str) -> str:
        """Return the name of the version that a request means, as `find`, and note its use.

        Raises:
            Refused: it is not served, or is older than the request allows (`max_lag`).
        """
        found, lag = self.find(name), max_lag.get()
        if found is None and not self.served:
            raise Refused(503, f"No version of {self.adapter} is served yet.")
        if found is None:
            raise Refused(
                409,
                f"{name} is not served here. Name {self.adapter}, the newest version, or one that is kept: "
                f"{', '.join(self.kept.values())}.",
            )
        if lag is not None and self.newest - (self.number(found) or 0) > lag:
            raise Refused(
                409,
                f"{name} is older than version {self.newest} by more than {MAX_LAG_HEADER}: {lag} allows.",
            )
        self._used_s[found] = time.monotonic()
        return found

    def serve(self, name: str) -> None:
        """Have the adapter's name mean this version from now on."""
        self.served = [*(each for each in self.served if each != name), name]

    def expired(self, in_use: Container[str]) -> list[str]:
        """Return the versions that are neither new, nor in use, nor used lately."""
        older = [name for name in self.served[:-KEPT] if name not in in_use]
        used = sorted((name for name in older if name in self._used_s), key=self._used_s.__getitem__)
        return [name for name in older if name not in used[-KEPT_USED:]]

    def drop(self, name: str) -> None:
        """Serve a version no more."""
        self.served.remove(name)
        self._used_s.pop(name, None)


class AdapterLoader(MemoryTarget):
    """An adapter over the model that an engine has loaded; a subclass has the engine's part. The engine's
    workers take no part.

    Args:
        adapter: The adapter's name.
        run: Runs a coroutine on the engine's event loop, and returns its result.
        log: Where warnings go.

    Attributes:
        version: The version that the adapter's name means.
        names: The versions that are served, by name.
    """

    version: VersionId | None = None

    def __init__(
        self,
        reader: ChannelReader,
        adapter: str,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        log: logging.Logger,
    ) -> None:
        super().__init__(reader)
        self.names = VersionNames(adapter)
        self._run, self._log = run, log
        self._last: StoredRecord | None = None  # of `version`
        self._config = b""
        # the end of the chain, its config, tokens and time at the beginning
        self._staging: tuple[StoredRecord, bytes, int, float]
        self._refusals: dict[bytes | None, str | None] = {}  # of each base that the channel named

    # The engine's part

    @abstractmethod
    def base_model(self) -> tuple[str, str | None]:
        """Return the model that the engine has loaded: a directory, or a name on the Hub, and its revision."""

    @abstractmethod
    def give(self, name: str, config: bytes) -> None:
        """Make the copy of `tensors` that the engine loads under this name, unless there is one.

        Raises:
            ModelMismatchError: the engine would not compute with it as PEFT does.
        """

    @abstractmethod
    def given(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors that the engine loads under this name: the newest version's, or one that was
        given just now.
        """

    @abstractmethod
    def take_back(self, name: str) -> None:
        """Free a copy that the engine has not loaded."""

    @abstractmethod
    async def load(self, name: str) -> None:
        """Have the engine load what was given, unless it still has it. Raises ApplyError if it does not."""

    @abstractmethod
    async def unload(self, name: str) -> None:
        """Have the engine forget a version."""

    @abstractmethod
    def in_use(self) -> Container[str]:
        """Return the names of the versions that requests use now."""

    def running_requests(self) -> int:
        """Return the number of requests in flight, 0 where that is not known."""
        return 0

    def generated_tokens(self) -> int:
        """Return the tokens generated since the engine started, 0 where that is not known."""
        return 0

    # As `Target`

    @property
    def kept(self) -> dict[int, str]:
        """Names of the versions that a request may demand alone, by their numbers."""
        return self.names.kept

    @property
    def models(self) -> list[str]:
        """The model names that requests may use: the adapter's own, which means the newest version, then each
        version's, the newest first.
        """
        return [self.names.adapter, *reversed(self.names.served)]

    def is_settled(self, asked: bool) -> bool:
        """Whether the host memory holds what the engine has loaded. Also unloads versions that nobody uses."""
        self._run(self.retire())
        return super().is_settled(asked) and self._opened.version == self.version

    def settle(self) -> None:
        """Bring the host memory back to the version that the engine has loaded, from the copy that it was
        given.
        """
        if self._last is not None:
            for name, tensor in self.given(self.names.name(self._last.version)).items():
                bits_of(self.tensors[name])[:] = bits_of(tensor)
        self._opened.identified(self._last)
        super().settle()
        self.version = self._opened.version

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion | Sequence[StoredRecord] | None:
        """As `Target.stage`; refuse an adapter of another base model."""
        tokens_before, begun_s, config = self.generated_tokens(), time.perf_counter(), self._config
        if chain[0].use_anchor:
            found = model_file(self.reader, chain[0], CONFIG)
            if found is None:
                raise ConfigError(
                    f"{self.reader.store.url} holds no {CONFIG}, so it is not the channel of an adapter. "
                    "Publish with adapter_only=True, or start the server without --adapter."
                )
            config, base = found, model_file(self.reader, chain[0], adapter_base.FILE)
            if base not in self._refusals:
                self._refusals[base] = self.refusal(base)
            if (refusal := self._refusals[base]) is not None:
                raise ModelMismatchError(refusal)
        self._staging = chain[-1], config, tokens_before, begun_s
        return super().stage(chain)

    def refusal(self, base: bytes | None) -> str | None:
        """Return why the adapter of this base model cannot be served over what the engine has loaded, or None
        if it can.

        A warning says what cannot be compared.

        Args:
            base: The channel's `adapter_base.json`; None if it has none.
        """
        url, (model, revision) = self.reader.store.url, self.base_model()
        if base is None:
            self._log.warning(
                "%s does not say which base model its adapter was trained on; %s is taken for it.", url, model
            )
            return None
        trained_on = AdapterBase.decode(base)
        try:
            is_on_hub = revision is not None and not Path(model).is_dir()
            different, unknown = trained_on.compare(load(find(f"{model}@{revision}" if is_on_hub else model)))
        except (ConfigError, CorruptDataError) as error:
            self._log.warning(
                "The base model of the adapter, %s, cannot be compared: %s", trained_on.name, error
            )
            return None
        if different:
            return (
                f"The adapter of {url} was trained on {trained_on.name or 'another model'}, and {model}, which "
                f"is served here, has other weights: {first_five(different)}. Serve the model that it was "
                "trained on."
            )
        if unknown:
            self._log.warning(
                "%d of %d tensors of the adapter's base model were not compared, as they have other names or "
                "are quantized in %s: %s.",
                *(len(unknown), len(trained_on.tensors), model, first_five(unknown)),
            )
        return None

    def commit(self, staged: StagedVersion | Sequence[StoredRecord]) -> Commit:
        """Write the tensors, have the engine load them, and serve them under the adapter's name too."""
        running, done = self.running_requests(), super().commit(staged)
        last, config, tokens_before, begun_s = self._staging
        name = self.names.name(last.version)
        self.give(name, config)
        self._compare(name)
        written_s = time.perf_counter()
        self._run(self.serve(name))
        self.version, self._last, self._config = last.version, last, config
        measured = {
            "stage_s": written_s - begun_s,
            "pause_s": 0.0,
            "reload_s": time.perf_counter() - written_s,
            "tokens_during_sync": self.generated_tokens() - tokens_before,
        }
        return msgspec.structs.replace(done, running_requests=running, **measured)

    def _compare(self, name: str) -> None:
        """Compare the bits of a copy with the version's. Raises ApplyError if they differ."""
        given = {
            each: native.fingerprint(tensor_key(each), bits_of(tensor))
            for each, tensor in self.given(name).items()
        }
        if given != self._opened.memory.fingerprints:
            self.take_back(name)
            raise ApplyError(
                f"{name} does not hold the bits of version {self._opened.version} that were written."
            )

    async def serve(self, name: str) -> None:
        """Have the engine load a version, and make the adapter's name mean it."""
        await self.load(name)
        self.names.serve(name)

    async def retire(self) -> None:
        """Unload versions that are neither new nor used lately, once no request uses them."""
        for name in self.names.expired(self.in_use()):
            await self.unload(name)
            self.names.drop(name)

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor of the copy that the engine loaded the version from."""
        return {} if self.version is None else self.digest_of(self.names.name(self.version))

    def digest_of(self, name: str) -> dict[str, str]:
        """Return the sha256 of every tensor that was given under a name, as `given` takes it."""
        return {each: sha256_hex(bits_of(tensor).data) for each, tensor in self.given(name).items()}

    def close(self) -> None:
        """Do nothing: what was given stays as long as the engine."""
