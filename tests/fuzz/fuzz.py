"""Fuzz one reader, guided by coverage: `python -m tests.fuzz.fuzz TARGET FOLDER [libFuzzer's options]`, as
`run` calls it.

FOLDER is the corpus, which grows. Ends with an error at the first input that makes the reader do what it must
not, or takes more than 60 s or 2 GiB; that input is the last one in FOLDER.last (8 bytes of size, then the
input).

The codecs' targets run the decoders of `kernels.reference` in Python (DELTASYNC_SIMD=none, see
`tests.fuzz.run`), so that coverage is seen in them too; `tests.fuzz.sanitized` feeds the extension.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import pkgutil
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import atheris
import numpy as np
import torch

_LIMIT_BYTES = 2 << 30
_LIMIT_S = 60  # on a machine that does other things too
_MOST_BYTES = 1 << 20

_ROOMS = "tensors", "codec", "stores", "channel", "live", "following", "maintenance", "dashboard"
with atheris.instrument_imports(include=["deltasync", "vllm_plugin"]):
    import deltasync
    import deltasync.serve.requests
    from tests.fuzz import mutate
    from tests.fuzz.targets import TARGETS

    for _found in pkgutil.walk_packages(deltasync.__path__, "deltasync."):
        if _found.name.split(".")[1] in _ROOMS:
            try:
                importlib.import_module(_found.name)
            except ModuleNotFoundError as error:
                # it stands beside site-packages, and what needs it reads nothing here
                if error.name != "triton":
                    raise


def _mutated(data: bytes, most_bytes: int, seed: int) -> bytes:
    rng = random.Random(seed)
    try:
        return mutate.inside(data, atheris.Mutate, rng)[:most_bytes]
    except UnicodeError:
        return atheris.Mutate(data, most_bytes)


def _mutated_behind_first(data: bytes, most_bytes: int, seed: int) -> bytes:
    """As `_mutated`, of an input whose first byte chooses what the rest is."""
    if len(data) < 2 or seed % 32 == 0:
        return atheris.Mutate(data, most_bytes)
    return data[:1] + _mutated(data[1:], most_bytes - 1, seed)


def _noted(target: Callable[[bytes], None], path: str) -> Callable[[bytes], None]:
    """The target, with each input noted where it outlives the process, which ends where one takes too
    long.
    """
    with open(path, "wb") as file:
        file.truncate(8 + _MOST_BYTES)
    with open(path, "r+b") as file:
        last = mmap.mmap(file.fileno(), 0)

    def run(data: bytes) -> None:
        last[: 8 + len(data)] = len(data).to_bytes(8, "little") + data
        signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
        target(data)
        signal.setitimer(signal.ITIMER_REAL, 0)

    return run


def main() -> None:
    name, *options = sys.argv[1:]
    folders = [option.rstrip("/") for option in options if not option.startswith("-")]
    logging.disable(logging.CRITICAL)
    np.seterr(over="ignore")  # kernels count modulo 2**64
    torch.set_num_threads(1)
    for folder in folders:
        for path in Path(folder).iterdir():
            TARGETS[name](path.read_bytes())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # of a merge, which starts itself again, the outer one's
    _, hardest = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + _LIMIT_BYTES if hardest == resource.RLIM_INFINITY else min(used + _LIMIT_BYTES, hardest)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    custom = _mutated_behind_first if name in ("documents", "small") else _mutated
    # As libFuzzer starts itself again to merge, without the folders.
    program = f"{sys.executable} -W ignore -m tests.fuzz.fuzz {name}"
    target = _noted(TARGETS[name], f"{folders[0]}.last") if folders else TARGETS[name]
    atheris.Setup([program, *options, "-timeout=0"], target, custom_mutator=custom)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
