"""What a publisher puts into messages to other ranks, weights for anchors aside."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from deltasync.trainer.ranks import Ranks


class Traffic:
    """Counts what this rank says to the others within `publish`, and rank 0's answers, for the life of this
    process.
    """

    def __init__(self) -> None:
        self.moved_bytes = 0
        exchange = Ranks._exchange

        def counted(ranks: Ranks, value: bytes, combine: Callable[[Iterable[bytes]], bytes]) -> bytes:
            answer = exchange(ranks, value, combine)
            self.moved_bytes += len(zlib.compress(value if ranks.rank else answer, 1))
            return answer

        Ranks._exchange = counted  # type: ignore[method-assign]
