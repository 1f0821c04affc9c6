"""numba's compiler, with a cache on disk that is right however many processes fill it at once, and whichever file changes.

numba's own cache writes the name of a file into its index before the file, and reuses names: a process that looks between
the two gets what lay there before, which may be another kernel or one of an older version. It also looks for changes in no
other file than the kernel's, though kernels inline functions of others.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import IndexDataCacheFile

_SOURCES = tuple(
    (path.name, status.st_mtime_ns, status.st_size)
    for path in sorted(Path(__file__).parent.glob("*.py"))
    for status in [path.stat()]
)
"""What compiled kernels are made of: they are compiled anew if any of it changes."""


class CacheFile(IndexDataCacheFile):
    """Names data files at random and never twice, and the index names them once they are there.

    Processes that write their indices at the same time lose each other's entries, which are then compiled again.
    """

    def save(self, key: Any, data: Any) -> None:
        """Add a compiled kernel."""
        overloads = self._load_index()
        if not overloads:  # the first, or the first of this version: files that no index names are of no use
            for path in Path(self._cache_path).glob(self._data_name("*")):
                with contextlib.suppress(OSError):
                    path.unlink()
        name = self._data_name(uuid.uuid4().hex)
        self._save_data(name, data)
        overloads[key] = name
        self._save_index(overloads)

    def _data_name(self, number: str) -> str:
        return str(self._data_name_pattern.replace("{number:d}", number))


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function when it is called first: in parallel, without the GIL, and cached on disk."""
    dispatcher = numba.njit(parallel=True, nogil=True, cache=True)(function)
    if dispatcher is not function:  # which it is with NUMBA_DISABLE_JIT=1
        cache = dispatcher._cache
        cache._cache_file = CacheFile(cache._cache_path, cache._impl.filename_base, _SOURCES)
    return dispatcher
