"""An adapter's two files in memory, which vLLM's workers read by the server's file descriptors.

vLLM reads an adapter when it is loaded, and again when a request names it after its eviction from
`--max-cpu-loras`. An error in that second read ends the engine. So the files have no name that somebody could
delete, and are sealed: they live as long as the server's process keeps them open.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save

from deltasync.errors import first_five

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_LINKS_IN = "/dev/shm"
_TRIES = 100  # of a load whose links are deleted each time


class AdapterFiles:
    """The config and the weights of one version of an adapter, as PEFT writes them.

    Attributes:
        path: The path that vLLM gets for the adapter: both files, by this process's id.
        weights: The weights' path, for this process.
    """

    def __init__(self, config: bytes, tensors: dict[str, torch.Tensor]) -> None:
        self._descriptors = [os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in (CONFIG, WEIGHTS)]
        paths = [f"/proc/{os.getpid()}/fd/{each}" for each in self._descriptors]
        self.path, self.weights = ":".join(paths), Path(paths[1])
        Path(paths[0]).write_bytes(config)
        self.weights.write_bytes(save(tensors, {"format": "pt"}))
        for each in self._descriptors:
            fcntl.fcntl(each, fcntl.F_ADD_SEALS, _SEALS)

    def close(self) -> None:
        """Free the memory, once no worker maps it any more."""
        for each in self._descriptors:
            os.close(each)
        self._descriptors.clear()


@contextlib.contextmanager
def linked(path: str) -> Iterator[Path]:
    """Yield a temporary folder that has the files of an `AdapterFiles.path` under PEFT's names."""
    where = _LINKS_IN if os.access(_LINKS_IN, os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix="deltasync-adapter-", dir=where, ignore_cleanup_errors=True
    ) as folder:
        for name, file in zip((CONFIG, WEIGHTS), path.split(":"), strict=True):
            Path(folder, name).symlink_to(file)
        yield Path(folder)


def install() -> None:
    """Have this process's workers load adapters from such files. May be called more than once."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    load: Any = WorkerLoRAManager._load_adapter
    if not hasattr(load, "deltasync_loads"):
        WorkerLoRAManager._load_adapter = _from_memory(load)


def _from_memory(load: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def loaded(self: Any, lora_request: Any) -> Any:
        if not lora_request.lora_path.startswith("/proc/"):
            return load(self, lora_request)
        tries = 0
        while True:
            tries += 1
            with linked(lora_request.lora_path) as folder:
                try:
                    lora = load(self, msgspec.structs.replace(lora_request, lora_path=str(folder)))
                    _check_layers(self._adapter_manager, lora)
                    return lora
                except Exception:
                    is_whole = all((folder / name).is_symlink() for name in (CONFIG, WEIGHTS))
                    if is_whole or tries == _TRIES:
                        raise
            # somebody deleted the links meanwhile

    loaded.deltasync_loads = load  # type: ignore[attr-defined]
    return loaded


def _check_layers(manager: Any, lora: Any) -> None:
    """Check that vLLM will compute with all that an adapter has for the layers of this worker (else
    ValueError). It would leave out layers that it has not prepared for adapters, without a word.
    """
    prepared = {*manager.modules, *itertools.chain.from_iterable(manager.packed_modules.values())}
    left = [
        name
        for name in lora.loras
        if prepared.isdisjoint(
            itertools.accumulate(name.split("."), "{}.{}".format)
        )  # it, or what contains it
        and _is_here(manager.model, name)
    ]
    if left:
        raise ValueError(
            f"vLLM would leave {first_five(left)} of the adapter out: its options (--lora-target-modules, "
            "--enable-tower-connector-lora) or its model do not prepare them for adapters."
        )


def _is_here(model: torch.nn.Module, name: str) -> bool:
    """Whether this worker has a layer, or what contains it. vLLM puts an identity in place of the layers of
    other stages of a pipeline.
    """
    parent, _, last = name.rpartition(".")
    try:
        around = model.get_submodule(parent)
    except AttributeError:
        return False
    return not any(isinstance(each, torch.nn.Identity) for each in (around, getattr(around, last, None)))
