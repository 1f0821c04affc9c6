"""Which rank of a sharded trainer publishes what: known from what all ranks hold, never assumed."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.kernels import native
from deltasync.publish.shards import (
    TensorRange,
    check_alike,
    check_ignored,
    empty_like,
    gathered_places,
    part_of,
    pieces,
    places,
)
from deltasync.publish.stream import Stream, Tensor, pair_of, tensors_of
from deltasync.ranks.peers import Peers, Range
from deltasync.tensors import fingerprint
from deltasync.tensors.bits import bits_of, dtype_for, dtype_name, readable, served_dtype, spec_of

_Pairs = Iterable[tuple[str, Tensor]]


class _Held(NamedTuple):
    """The part of a tensor that a rank holds."""

    dtype: str  # as it is served
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: int | None  # of a tensor that it holds whole; None for a shard


_Table = dict[str, _Held]


class Ownership:
    """Turns what each rank hands over into the ranges that it publishes. Every element is published by one rank.

    A tensor that several ranks hold whole is published by the first of them, and of equal shards the first one is. If every
    rank hands over a module, a mapping or a list, a rank may lack tensors that others hold, such as other pipeline stages or
    experts. From other streams, which are read once, all ranks take the same names, and whole tensors are the first rank's.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._table: _Table | None = None  # of this rank, once a stream was looked at
        self._lacks: dict[str, _Held] = {}  # tensors that only other ranks hold
        self._mine: dict[str, bool] = {}  # whether this rank publishes what it holds of a tensor
        self._is_settled = False

    def first(self, stream: Stream, dtype: str) -> Stream:
        """Agree on who publishes what of a first stream, and return what this rank is to read of it; then `settle`.

        Raises:
            ConfigError: a tensor cannot be published from what the ranks hold; at all ranks.
            ModelMismatchError: the ranks do not agree about a tensor's dtype or shape; at all ranks.
        """
        peers = self._peers
        self._table, self._lacks, self._mine, self._is_settled = None, {}, {}, False
        if peers.size == 1:
            return _alone(stream)
        if dtype == "fp8":  # which refuses shards
            return stream

        def look() -> tuple[_Pairs, _Table | None]:
            pairs = tensors_of(stream)
            if not isinstance(pairs, ItemsView | Sequence):
                return pairs, None
            known, gathered = [pair_of(pair) for pair in pairs], gathered_places()
            return known, {name: _held(name, tensor, dtype, gathered) for name, tensor in known}

        pairs, table = peers.all(look)
        tables = peers.share(table, _Table | None)
        found = [each for each in tables if each is not None]
        if len(found) < peers.size:
            self._table = {}
            return self._as_read(pairs, dtype)
        self._table = found[peers.rank]
        self._agree(found)
        return self._owned(pairs)

    def settle(self) -> list[str]:
        """Agree on who publishes what, once the first stream has been read. Raises as `first`.

        Returns:
            The tensors that were read here, and that another rank publishes.
        """
        if self._table is None or self._is_settled:
            return []
        tables = self._peers.share(self._table, _Table)
        for rank, table in enumerate(tables):
            for other in tables[0].keys() ^ table.keys():
                with_it, without = (0, rank) if other in tables[0] else (rank, 0)
                raise ModelMismatchError(
                    f"Rank {with_it} publishes {other}, and rank {without} does not. If each rank has tensors of its own, "
                    "hand over a module, a mapping or a list, not a generator."
                )
        self._agree(tables)
        return [name for name, held in self._table.items() if held.digest is None and not self._mine[name]]

    def later(self, stream: Stream) -> Stream:
        """Return what this rank is to read of a stream after the first one.

        Raises:
            ConfigError, ModelMismatchError: at once, or when it is read: a shard is whole now, or the other way round.
        """
        if self._peers.size == 1:
            return _alone(stream)
        return stream if self._table is None else self._owned(tensors_of(stream))

    def _as_read(self, pairs: _Pairs, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Yield what the first rank holds whole, and all shards; note what this rank holds."""
        assert self._table is not None
        gathered = gathered_places()
        for name, tensor in map(pair_of, pairs):
            held = self._table[name] = _held(name, tensor, dtype, gathered)
            yield name, _range(name, tensor, held.digest is None or self._peers.rank == 0)

    def _owned(self, pairs: _Pairs) -> Stream:
        """Return the pairs as ranges, in a list if they stay in memory."""
        return list(self._ranges(pairs)) if isinstance(pairs, ItemsView | Sequence) else self._ranges(pairs)

    def _ranges(self, pairs: _Pairs) -> Iterator[tuple[str, Tensor]]:
        assert self._table is not None
        for name, tensor in map(pair_of, pairs):
            held = self._table.get(name)
            part = part_of(name, tensor)
            if held is not None and (part is None) != (held.digest is not None):
                was, now = ("a shard", "whole") if part is None else ("whole", "a shard")
                raise ModelMismatchError(f"{name} was published as {was}, and now is {now}. {_GATHERED}")
            if held is not None and part is not None and not self._mine[name]:
                _check_place(name, part, held)
            yield name, _range(name, tensor, self._mine.get(name, True))
        for name, held in self._lacks.items():
            yield name, TensorRange(torch.empty(0, dtype=getattr(torch, held.dtype)), 0, held.shape)

    def _agree(self, tables: Sequence[_Table]) -> None:
        """Find out who publishes what; the same at all ranks, from what each of them holds."""
        own = tables[self._peers.rank]
        for name in {name: None for table in tables for name in table}:
            found = {rank: table[name] for rank, table in enumerate(tables) if name in table}
            first_rank, first = next(iter(found.items()))
            whole: tuple[int, int] | None = None
            published: dict[Range, int] = {}
            for rank, held in found.items():
                if held[:2] != first[:2]:
                    raise ModelMismatchError(
                        f"Rank {rank} publishes {name} as {held.dtype}{list(held.shape)}, and rank {first_rank} as "
                        f"{first.dtype}{list(first.shape)}. {_LOCAL}"
                    )
                if held.digest is not None:
                    whole = (rank, held.digest) if whole is None else whole
                    if held.digest != whole[1]:
                        raise ConfigError(f"{name} is whole at ranks {whole[0]} and {rank}, and differs. {_LOCAL}")
                if held.start < held.stop or held.digest is not None:
                    published.setdefault((held.start, held.stop), rank)
            shards = [rank for rank, held in found.items() if held.digest is None and held.start < held.stop]
            if whole is not None and shards:
                raise ConfigError(f"{name} is whole at rank {whole[0]}, and a shard at rank {shards[0]}. {_GATHERED}")
            if name in own:
                place = own[name].start, own[name].stop
                self._mine[name] = published.get(place, self._peers.rank) == self._peers.rank
            else:
                self._lacks[name] = first
        self._is_settled = True


_GATHERED = (
    "An evaluation leaves some parameters of FSDP2 gathered, and rounded with mixed precision: publish the module or its "
    "state_dict(), not named_parameters()."
)
_LOCAL = (
    "If each rank has experts, layers or shards of its own, publish them by the names of the checkpoint, or as TensorRange; "
    "if all ranks should have the same, such as a buffer, broadcast it from one."
)


def check_equal(peers: Peers, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that all ranks hold the same whole tensors, so that the first one may publish alone. All ranks call this.

    Raises:
        ConfigError: a tensor differs, or a rank lacks it; at all ranks.
    """
    if peers.size == 1:
        return
    table = peers.all(lambda: {name: _held(name, tensor, "keep", set()) for name, tensor in tensors.items()})
    for rank, other in enumerate(tables := peers.share(table, _Table)):
        for name in sorted(tables[0].keys() ^ other.keys()):
            with_it, without = (0, rank) if name in tables[0] else (rank, 0)
            raise ConfigError(f"Rank {with_it} holds {name}, and rank {without} does not. {_ALONE_CURE}")
        for name, held in other.items():
            if held != tables[0][name]:
                raise ConfigError(f"{name} differs between ranks 0 and {rank}, and rank 0 publishes alone. {_ALONE_CURE}")


_ALONE_CURE = (
    "If each rank trains experts or layers of its own, publish from a loop of your own on all ranks, each with "
    "Publisher(..., group=group), by the names of the checkpoint; otherwise broadcast the parameter from one rank."
)


def _alone(stream: Stream) -> Stream:
    """Return the stream of a process that publishes alone. Check that it holds every tensor whole.

    Raises:
        ConfigError: at once, or when it is read: a tensor is gathered for a moment only, or other processes hold other ones.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return stream
    if isinstance(stream, torch.nn.Module):
        check_ignored(stream)
    pairs, gathered = tensors_of(stream), gathered_places()

    def checked() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in map(pair_of, pairs):
            if isinstance(tensor, torch.Tensor) and part_of(name, tensor) is None:
                if gathered and places(tensor) & gathered:
                    raise ConfigError(
                        f"{name} is gathered by FSDP2, and rank {dist.get_rank()} publishes alone. {_TOGETHER}"
                    )
                check_alike(name, tensor)
            yield name, tensor

    return list(checked()) if isinstance(pairs, ItemsView | Sequence) else checked()


_TOGETHER = "Publish the module from all ranks, each with Publisher(..., group=torch.distributed.group.WORLD)."


def _held(name: str, tensor: Tensor, dtype: str, gathered: set[int]) -> _Held:
    part = part_of(name, tensor)
    if part is not None:
        return _Held(_served(name, part.held, dtype), part.shape, part.start, part.stop, None)
    assert isinstance(tensor, torch.Tensor)
    spec_of(name, tensor)  # refuses what no channel carries
    served, shape = _served(name, tensor, dtype), tuple(tensor.shape)
    if tensor.is_meta:
        return _Held(served, shape, 0, tensor.numel(), 0)  # which is refused when it is read
    if gathered and places(tensor) & gathered:
        raise ConfigError(f"{name} is gathered by FSDP2. {_GATHERED}")
    key = fingerprint.tensor_key(name)
    digest = sum(native.fingerprint(key, bits_of(piece), start) for start, piece in pieces(readable(name, tensor)))
    return _Held(served, shape, 0, tensor.numel(), digest & fingerprint.MASK)


def _served(name: str, tensor: torch.Tensor, dtype: str) -> str:
    return dtype_name(served_dtype(tensor, dtype_for(name, dtype)), name)


def _range(name: str, tensor: Tensor, is_published: bool) -> TensorRange:
    part = part_of(name, tensor)
    if part is None:
        assert isinstance(tensor, torch.Tensor)
        part = TensorRange(tensor, 0, tuple(tensor.shape))
    return part if is_published else TensorRange(empty_like(part.held), 0, part.shape)


def _check_place(name: str, part: TensorRange, held: _Held) -> None:
    if (part.start, part.stop) != (held.start, held.stop):
        raise ModelMismatchError(
            f"{name} was published from element {held.start} on by this rank, and now from {part.start} on. {_GATHERED}"
        )
