"""The exchange of whole segments with new bits, in a commit. Scattered elements are
`kernels.table.Writes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deltasync.errors import undoing

Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""A view of live memory, its new bits on the host, and there its old ones if they are not made by exchanging;
flat, in row-major order. All are mutated."""


class Copy:
    """An exchange of whole segments, piece by piece: its own undo log, as a second one brings the old values
    back.

    In host memory new bits and old ones change places. On an accelerator, whose old bits were saved on the
    host before the pause, new ones are written, and old ones the next time.

    Args:
        pieces: The pieces.
        room_B: A buffer there, large enough for any piece: to copy to memory with gaps would take memory.
        keeps: The owner of the memory in which pieces lie.

    Attributes:
        changed: Number of elements.
    """

    def __init__(self, pieces: Sequence[Piece], room_B: torch.Tensor, keeps: object = None) -> None:
        self.pieces, self._room_B, self._keeps = [*pieces], room_B, keeps
        self.changed = sum(live.numel() for live, *_ in pieces)
        self.nbytes = room_B.nbytes

    def exchange(self) -> None:
        """Exchange all pieces; mutates live memory. Raises CommitError if it failed and could not be
        undone.
        """
        done = 0
        try:
            for done in range(len(self.pieces)):
                self._exchange(done)
        except BaseException:
            with undoing():
                for number in range(done):
                    self._exchange(number)
            raise

    def _exchange(self, number: int) -> None:
        live, new_N, old_N = self.pieces[number]
        if old_N is not None:
            try:
                self._write(live, new_N)
            except BaseException:
                with undoing():
                    self._write(live, old_N)
                raise
            self.pieces[number] = live, old_N, new_N
            return
        held = self._in_room(live).copy_(live)
        try:
            live.copy_(new_N.view(live.shape))
            new_N.copy_(held.view(-1))
        except BaseException:
            with undoing():
                live.copy_(held)
            raise

    def _write(self, live: torch.Tensor, bits_N: torch.Tensor) -> None:
        bits = bits_N.view(live.shape)
        if not live.is_contiguous():
            bits = self._in_room(live).copy_(bits, non_blocking=True)
        live.copy_(bits, non_blocking=True)

    def _in_room(self, live: torch.Tensor) -> torch.Tensor:
        return self._room_B[: live.nbytes].view(live.dtype).view(live.shape)
