"""Fingerprints of whole tensors, of which each rank knows its share: ranks exchange only what a publish has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deltasync.ranks.peers import Peers, Range
from deltasync.tensors.fingerprint import MASK


class Digests:
    """Adds up what the ranks know of each tensor's fingerprint.

    The first time, and whenever all are asked for, every tensor costs 8 bytes a rank. Later a tensor costs as much only if
    several ranks hold it and it has changed, and otherwise a bit; of all tensors that a single rank holds there is one sum.

    Args:
        peers: The ranks.
        held: The ranges of each rank, by tensor.
    """

    def __init__(self, peers: Peers, held: Sequence[Mapping[str, Range]]) -> None:
        self._peers = peers
        held_by = {name: sum(ranges[name][0] < ranges[name][1] for ranges in held) for name in (held[0] if held else ())}
        self._split = [name for name, count in held_by.items() if count > 1]
        self._alone = [name for name, count in held_by.items() if count <= 1]
        self._own = [name for name in self._alone if held[peers.rank][name][0] < held[peers.rank][name][1]]
        self._shares: dict[str, int] = {}  # as they were when the ranks last agreed
        self._whole: dict[str, int] = {}
        self._model = 0

    def agree(self, number: int, shares: Mapping[str, int], *, everything: bool) -> tuple[int, dict[str, int], int]:
        """Exchange this rank's shares of the fingerprints.

        Args:
            number: Is added up over the ranks, too.
            shares: This rank's share by tensor.
            everything: Whether all tensors' fingerprints are wanted, not only those of the tensors held here.

        Returns:
            The sum of the numbers, the fingerprint of each tensor that is held here or of all, and that of the model.

        Raises:
            PublishError: as `Peers.agree`.
        """
        if everything or not self._whole:
            names = [*self._split, *self._alone]
            number, *digests = self._peers.agree(None, number, *(shares[name] for name in names))
            self._whole = dict(zip(names, digests, strict=True))
            self._model = sum(digests) & MASK
        else:

            def gain(name: str) -> int:
                return shares[name] - self._shares[name]

            number, alone, *split = self._peers.agree(None, number, sum(map(gain, self._own)), *map(gain, self._split))
            self._whole |= {name: shares[name] for name in self._own}
            self._whole |= {name: (self._whole[name] + more) & MASK for name, more in zip(self._split, split, strict=True)}
            self._model = (self._model + alone + sum(split)) & MASK
        self._shares = dict(shares)
        return number, dict(self._whole), self._model
