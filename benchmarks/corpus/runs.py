"""A folder of real runs: one channel each, the checkpoint that they start from, and what was logged while
training.

    FOLDER/base/            the checkpoint, a directory that `from_pretrained` loads
    FOLDER/NAME/            the channel of a run, a version for each optimizer step
    FOLDER/NAME.json        its learning rate and logged steps; a run whose channel was not kept has this file alone

Shape suffix: N elements of the whole model, tensor after tensor in the order of the channel's table.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deltasync.channel.keys import CHANNEL
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.following import Replica
from deltasync.stores import open_store
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import bits_of

BASE = "base"


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The weights of one version."""

    version: int
    step: int | None  # the trainer's step
    bits_N: np.ndarray  # bfloat16 bit patterns, uint16


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A run whose channel was kept."""

    name: str
    url: str
    # `learning_rate`, and `steps` with step and reward of each; empty if nothing was logged
    facts: Mapping[str, Any]

    def specs(self) -> dict[str, TensorSpec]:
        """Return the channel's tensors by name.

        Raises:
            ModelMismatchError: a tensor is not bfloat16, and these benchmarks compare nothing else.
        """
        found = ChannelReader(open_store(self.url)).specs
        if others := [spec.name for spec in found.values() if spec.dtype != "bfloat16"]:
            raise ModelMismatchError(f"{self.url} has tensors that are not bfloat16, such as {others[0]}.")
        return found

    def length(self) -> int:
        """Return the number of steps: versions after the first one."""
        reader = ChannelReader(open_store(self.url))
        newest = reader.newest_version()
        return 0 if newest is None else newest.version - 1

    def states(self, base: Path) -> Iterator[State]:
        """Yield the weights of each version, oldest first; every bit is checked against the fingerprints of
        the channel.

        Raises:
            ConfigError: the run did not start from the checkpoint `base`.
        """
        replica, reader = Replica(self.url), ChannelReader(open_store(self.url))
        records = [found.record for found in reader.back_from(reader.newest_version())][::-1]
        if replica.load(base) != records[0].version:
            raise ConfigError(f"{self.url} did not start from the checkpoint in {base}.")
        for record in records:
            replica.sync(record.version)
            tensors = replica.state_dict().values()
            yield State(record.version, record.step, np.concatenate([bits_of(tensor) for tensor in tensors]))


def find(folder: Path) -> list[Run]:
    """Return the runs of a folder whose channels were kept, by learning rate.

    Raises:
        ConfigError: it has none.
    """
    found = [
        Run(path.parent.name, path.parent.resolve().as_uri(), facts(path.parent))
        for path in folder.glob(f"*/{CHANNEL}")
    ]
    if not found:
        raise ConfigError(f"{folder} has no run: no sub-folder of it holds a {CHANNEL}.")
    return sorted(found, key=lambda run: (run.facts.get("learning_rate", 0.0), run.name))


def facts(run: Path) -> dict[str, Any]:
    """Return what was logged of a run, by the path of its channel."""
    path = run.with_name(f"{run.name}.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def by_tensor(specs: Mapping[str, TensorSpec], bits_N: np.ndarray) -> dict[str, np.ndarray]:
    """Return the bits of each tensor, flat, as views."""
    ends = np.cumsum([spec.element_count for spec in specs.values()])[:-1]
    return dict(zip(specs, np.split(bits_N, ends), strict=True))
