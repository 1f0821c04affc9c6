"""numba's compiler, with a cache on disk that stays correct when several processes fill it, or any source file changes.

numba's own cache puts a file's name into its index before it writes the file, and reuses names: a process that reads
between the two gets the previous file, which may be another kernel or one of an older version. It also notices changes only
in the kernel's own source file, though kernels inline functions of other files.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.core.caching import IndexDataCacheFile

logger = logging.getLogger(__name__)

CURE = "Set NUMBA_CACHE_DIR to a folder that can be written."

_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
"""The source files of kernels. If any of them changes, kernels are compiled again. Times do not count: layers of images lose
the fractions of their seconds.
"""


class CacheFile(IndexDataCacheFile):
    """A cache whose data files have random names, which the index gets only after they are written.

    Processes that write the index at the same time may lose each other's entries; those kernels are compiled again. The
    folder `image`, which may be read-only, as in a container, is read for kernels that are not there.
    """

    def __init__(self, folder: str, name: str, stamp: object, image: str | None = None) -> None:
        super().__init__(folder, name, stamp)
        self._image = None if image in (None, folder) else IndexDataCacheFile(image, name, stamp)

    def load(self, key: Any) -> Any:
        """Return a compiled kernel; None if there is none."""
        found = super().load(key)
        return self._image.load(key) if found is None and self._image is not None else found

    def save(self, key: Any, data: Any) -> None:
        """Add a compiled kernel."""
        overloads = self._load_index()
        if not overloads:  # the first kernel of this version: no index names the files that are there
            for path in Path(self._cache_path).glob(self._data_name("*")):
                with contextlib.suppress(OSError):
                    path.unlink()
        name = self._data_name(uuid.uuid4().hex)
        self._save_data(name, data)
        overloads[key] = name
        self._save_index(overloads)

    def _data_name(self, number: str) -> str:
        return str(self._data_name_pattern.replace("{number:d}", number))


class _Thread(threading.local):
    is_ahead = False


_thread = _Thread()


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Note that nothing waits for what this thread compiles in this context."""
    _thread.is_ahead = True
    try:
        yield
    finally:
        _thread.is_ahead = False


functions: list[str] = []
"""Functions of kernels that were compiled in this process."""

waited: list[str] = []
"""Those of them that something waited for."""

folder = ""
"""Where compiled kernels are kept."""


class _Compilations(event.Listener):
    def __init__(self) -> None:
        self._logged: set[str] = set()

    def on_start(self, event: event.Event) -> None:
        """Note what is compiled. Log where something waits for it, once for each thread that does."""
        function, thread = event.data["dispatcher"].py_func, threading.current_thread().name
        if not function.__module__.startswith(f"{__package__}."):
            return
        functions.append(function.__name__)
        if _thread.is_ahead:
            return
        waited.append(function.__name__)
        if thread not in self._logged:
            self._logged.add(thread)
            logger.log(
                logging.INFO if thread.startswith("deltasync") else logging.WARNING,  # no step waits for our threads
                "%s waits for kernels to be compiled, some seconds, once for each kind of machine. `deltasync compile` does "
                "it ahead.",
                thread,
            )

    def on_end(self, event: event.Event) -> None:
        """Do nothing."""


event.register("numba:compile", _Compilations())


uncached: list[str] = []
"""Why kernels are compiled in each process anew, if they are."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function when it is first called: in parallel, without the GIL, and cached on disk if that is possible."""
    dispatcher = numba.njit(parallel=True, nogil=True)(function)
    try:
        if dispatcher is not function:  # with NUMBA_DISABLE_JIT=1 they are the same
            dispatcher.enable_caching()
    except RuntimeError as error:  # neither the package's folder nor the user's can be written
        if not uncached:
            logger.warning("Kernels are compiled anew in this process, which takes some seconds: %s. %s", error, CURE)
        uncached.append(str(error))
        return dispatcher
    if dispatcher is not function:
        global folder
        cache = dispatcher._cache
        folder, image = cache._cache_path, None
        if numba.config.CACHE_DIR:  # numba does not use it unless it can write there
            source = function.__code__.co_filename
            image = os.path.join(numba.config.CACHE_DIR, cache._impl.locator.get_suitable_cache_subpath(source))
        cache._cache_file = CacheFile(folder, cache._impl.filename_base, _SOURCES, image)
    return dispatcher
