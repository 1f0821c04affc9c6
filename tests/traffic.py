"""What a publisher puts into messages to other ranks, weights for anchors aside."""

from __future__ import annotations

from collections.abc import Callable

from deltasync.ranks.peers import Peers


class Traffic:
    """Counts what this rank says to the others within `publish`, and rank 0's answers, for the life of this process."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        exchange = Peers._exchange

        def counted(peers: Peers, value: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
            answer = exchange(peers, value, combine)
            self.moved_bytes += len(value if peers.rank else answer)
            return answer

        Peers._exchange = counted  # type: ignore[method-assign]
