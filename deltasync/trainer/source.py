"""The ranges of tensors that each rank of a trainer holds, and which of them it publishes.

A list or a mapping keeps its tensors until `publish` returns. They are checked once: as long as names, types,
dtypes, shapes and devices stay what they were, a publish only looks at these and at the tensors' addresses,
in loops that run outside of Python. A generator's tensors are checked and compared as they come, because each
of them may be gone when the next one is asked for; those of a first stream are copied.
"""

from __future__ import annotations

import math
import operator
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deltasync.errors import ConfigError, ModelMismatchError, get_logger
from deltasync.kernels import native
from deltasync.publish.agreement import Alone
from deltasync.publish.detect import Difference, Traits, copied, have_traits, pieces, traits_of
from deltasync.publish.ranges import NOTHING, Range, Stream, TensorRange, Tensors
from deltasync.publish.shadow import Shadow
from deltasync.tensors import TensorSpec, check_specs, fingerprint
from deltasync.tensors.bits import bits_of, readable, served_name
from deltasync.trainer.stream import (
    MARKS,
    addresses_of,
    check_alike,
    empty_like,
    fp8_blocks,
    gathered_places,
    pair_of,
    part_of,
    stays,
    tensors_of,
)

logger = get_logger(__name__)

_NAME, _GIVEN, _DICT = operator.itemgetter(0), operator.itemgetter(1), operator.attrgetter("__dict__")

_Ranges = list[tuple[int, tuple[int, ...]]]


class _Held(NamedTuple):
    """The part of a tensor that a rank holds."""

    dtype: str  # as it is served
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: int | None  # of a tensor that it holds whole, 0 if no other rank has it; None for a shard


_Table = dict[str, _Held]


class Source:
    """Turns what each rank hands over into the ranges that it publishes. Every element is published by one
    rank.

    A tensor that several ranks hold whole is published by the first of them, and of equal shards the first
    one is. If every rank hands over a module, a mapping or a list, a rank may lack tensors that others hold,
    such as other pipeline stages or experts. From other streams, which are read once, all ranks take the same
    names.

    Args:
        ranks: The agreement of the ranks, or of one process.
        dtype: The rule of served dtypes.
        specs: The tensors of the channel, None if there is none yet.

    Attributes:
        specs: The whole tensors, in the channel's order; once a stream was read, unless they were given.
        held: The ranges that each rank publishes, by name: of this rank all, of others those with an element.
        devices: Where the tensors of the first stream were.
        are_copies: Whether what `first` returned are copies on the host.
    """

    def __init__(self, ranks: Alone, dtype: str, specs: Mapping[str, TensorSpec] | None) -> None:
        self.specs, self._known = dict(specs or {}), specs is not None
        self.held: list[dict[str, Range]] = [
            {name: (0, spec.element_count) for name, spec in self.specs.items()}
        ]
        self.devices, self.are_copies = set[torch.device](), False
        self._ranks, self._dtype = ranks, dtype
        self._table: _Table = {}  # of this rank
        if ranks.size == 1:
            self._table = {
                n: _Held(spec.dtype, spec.shape, *self.held[0][n], 0) for n, spec in self.specs.items()
            }
        # Of what the shadow has a table of: names and traits.
        self._planned: tuple[list[str], Traits] | None = None
        # Of the stream of that, if its tensors are those: names, types, ranges.
        self._given: tuple[list[str], list[type], _Ranges] | None = None

    def first(self, stream: Stream) -> dict[str, TensorRange]:
        """Read a first stream, and agree on who publishes what. Return what this rank publishes, by name.

        Raises:
            ConfigError: a tensor cannot be published from what the ranks hold; at all ranks.
            ModelMismatchError: the ranks do not agree about the model, or it is not the channel's; at all
                ranks.
        """
        self._table, self._planned, self._given, self.devices = {}, None, None, set()
        parts: dict[str, TensorRange] = {}

        def read() -> tuple[bool, _Table]:
            pairs, lasts = self._opened(stream)
            table: _Table = {}
            self.are_copies = not (lasts and stays(pairs))
            given = dict[str, torch.dtype]()
            for name, part, is_whole in self._parts(pairs):
                held = part.held
                digest = None if not is_whole else digest_of(name, held) if self._ranks.size > 1 else 0
                given[name], dtype = held.dtype, served_name(name, held.dtype, self._rule)
                table[name] = _Held(dtype, part.shape, part.start, part.stop, digest)
                if held.numel():
                    self.devices.add(held.device)
                if not lasts and is_whole and self._ranks.rank:
                    part = _nothing(part)  # the first rank has it, too
                elif self.are_copies:
                    part = TensorRange(copied(held, dtype), part.start, part.shape)
                parts[name] = part
            if not table:
                raise ModelMismatchError("The stream held no tensors; nothing was published.")
            _warn_of_rounding(given, table, self._rule)
            return lasts, table

        shared = self._ranks.share(read, tuple[bool, _Table])
        tables = [table for _, table in shared]
        self._agree(tables, all(lasts for lasts, _ in shared))
        self._table, mine = tables[self._ranks.rank], self.held[self._ranks.rank]
        for name, spec in self.specs.items():
            if name not in parts:  # only other ranks hold it
                parts[name] = TensorRange(
                    torch.empty(0, dtype=getattr(torch, spec.dtype), device="cpu"), 0, spec.shape
                )
            elif (parts[name].start, parts[name].stop) != mine[name]:
                parts[name] = _nothing(parts[name])
        return {name: parts[name] for name in self.specs}

    def compare(self, shadow: Shadow, stream: Stream) -> Difference:
        """Compare a stream after the first one with the bits that were published.

        Raises:
            ModelMismatchError: it holds other tensors, or other ranges of them.
            ConfigError: a tensor cannot be published from here.
        """
        pairs, lasts = self._opened(stream)
        if lasts and (known := self._again(pairs)) is not None:
            return self._compared(shadow, known, None)
        seen: dict[str, TensorSpec] = {}
        if not (lasts and stays(pairs)):
            found = shadow.compare_each(self._published(pairs, seen))
            check_specs(self.specs, seen, "The published model")
            return found
        parts = list(self._published(pairs, seen))
        check_specs(self.specs, seen, "The published model")
        given, names, held = [*map(_GIVEN, pairs)], [name for name, _ in parts], [held for _, held in parts]
        are_same = len(given) == len(held) and all(
            each is of or (type(of) is TensorRange and each is of.held)
            for each, of in zip(held, given, strict=True)
        )
        planned = self._planned
        is_planned = planned is not None and names == planned[0] and have_traits(held, planned[1])
        self._given = ([*map(_NAME, pairs)], [*map(type, given)], _ranges(given)) if are_same else None
        return self._compared(shadow, held, None if is_planned else names)

    def _compared(self, shadow: Shadow, held: Sequence[torch.Tensor], names: list[str] | None) -> Difference:
        """Compare tensors; with None for the names, they are those that the shadow has a table of."""
        planned, self._planned = self._planned, None  # if the shadow is interrupted
        found = shadow.compare(held, names)
        self._planned = planned if names is None else (names, traits_of(held))
        return found

    @property
    def _rule(self) -> str:
        return "keep" if self._dtype == "fp8" else self._dtype

    def _opened(self, stream: Stream) -> tuple[Any, bool]:
        """Return a stream's pairs, quantized if that is the served dtype, and whether they can be read
        again.
        """
        pairs: Any = tensors_of(stream, self._is_alone)
        pairs = fp8_blocks(map(pair_of, pairs)) if self._dtype == "fp8" else pairs
        return pairs, isinstance(pairs, ItemsView | Sequence)

    @property
    def _is_alone(self) -> bool:
        """Whether one of several processes publishes alone."""
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return many and self._ranks.size == 1

    def _parts(self, pairs: Tensors) -> Iterator[tuple[str, TensorRange, bool]]:
        """Yield what this rank holds of each tensor, and whether that is all of it; nothing of what another
        one publishes.

        Raises:
            ModelMismatchError: a tensor occurs twice, is one that no channel carries, or was another part
                before.
            ConfigError: it cannot be read from here, or other processes hold other ones.
        """
        names, alone = set[str](), self._is_alone
        gathered = gathered_places() if alone or not self._table else set()
        for name, tensor in map(pair_of, pairs):
            if name in names:
                raise ModelMismatchError(f"The stream held {name} twice; nothing was published.")
            names.add(name)
            part, before = part_of(name, tensor), self._table.get(name)
            is_whole = part is None
            if before is not None and is_whole != (before.digest is not None):
                was, now = ("a shard", "whole") if is_whole else ("whole", "a shard")
                raise ModelMismatchError(f"{name} was published as {was}, and now is {now}. {_GATHERED}")
            if part is None:
                assert isinstance(tensor, torch.Tensor)
                if gathered and addresses_of(tensor) & gathered:
                    of = (
                        f", and rank {dist.get_rank()} publishes alone. {_TOGETHER}"
                        if alone
                        else f". {_GATHERED}"
                    )
                    raise ConfigError(f"{name} is gathered by FSDP2{of}")
                if alone:
                    check_alike(name, tensor)
                part = TensorRange(tensor, 0, tuple(tensor.shape))
            elif before is not None and (part.start, part.stop) != (before.start, before.stop):
                raise ModelMismatchError(
                    f"{name} was published from element {before.start} on by this rank, and now from "
                    f"{part.start} on. "
                    f"{_GATHERED}"
                )
            if before is None and self._table and name in self.specs:
                raise ModelMismatchError(
                    f"{name} was published by another rank only, and now comes from this one, too."
                )
            if part.held.is_meta:
                raise ConfigError(
                    f"{name} is offloaded: it is on the meta device, without values. Train without "
                    "offloading, or publish "
                    "tensors that were gathered."
                )
            if (
                before is not None
                and before.start < before.stop
                and self.held[self._ranks.rank][name] == NOTHING
            ):
                part = _nothing(part)
            held = readable(name, part.held)
            yield name, part if held is part.held else TensorRange(held, part.start, part.shape), is_whole

    def _published(self, pairs: Tensors, seen: dict[str, TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank holds of the known tensors; fill `seen` with all of them, for `check_specs`."""
        for name, part, _ in self._parts(pairs):
            served, spec = served_name(name, part.held.dtype, self._rule), self.specs.get(name)
            if spec is not None and (spec.dtype, spec.shape) == (served, part.shape):
                seen[name] = spec
                yield name, part.held
            else:
                seen[name] = TensorSpec(name, served, part.shape)
        seen |= {name: spec for name, spec in self.specs.items() if name not in self._table}  # of other ranks

    def _again(self, pairs: Any) -> list[torch.Tensor] | None:
        """Return the tensors of a stream if they differ from the known ones in their addresses and bits
        alone.
        """
        if self._planned is None or self._given is None or len(pairs) != len(self._given[0]):
            return None
        try:
            # No list of pairs: so many tuples at once start the garbage collector.
            names, given, lengths = [*map(_NAME, pairs)], [*map(_GIVEN, pairs)], {*map(len, pairs)}
        except (TypeError, LookupError):
            return None
        if lengths != {2} or (names, [*map(type, given)], _ranges(given)) != self._given:
            return None
        held = [each.held if type(each) is TensorRange else each for each in given]
        if not have_traits(held, self._planned[1]) or not all(map(MARKS.isdisjoint, map(_DICT, held))):
            return None
        if not all(map(torch.Tensor.data_ptr, held)) and any(
            each.numel() and not each.data_ptr() for each in held
        ):
            return None  # memory was freed
        return held

    def _agree(self, tables: Sequence[_Table], lasts: bool) -> None:
        """Find out who publishes what, from what each rank holds; the same at all ranks. Raises as
        `first`.
        """
        given: dict[str, dict[int, _Held]] = {}  # of each tensor, by rank
        for rank, table in enumerate(tables):
            for name, each in table.items():
                given.setdefault(name, {})[rank] = each
        specs: dict[str, TensorSpec] = {}
        held: list[dict[str, Range]] = [{} for _ in tables]
        held[self._ranks.rank] = dict.fromkeys(given, NOTHING)
        for name, found in given.items():
            if len(found) < len(tables) and not lasts:
                without = next(rank for rank in range(len(tables)) if rank not in found)
                raise ModelMismatchError(
                    f"Rank {next(iter(found))} publishes {name}, and rank {without} does not. If each rank "
                    "has tensors of "
                    "its own, hand over a module, a mapping or a list, not a generator."
                )
            first_rank, first = next(iter(found.items()))
            whole: tuple[int, int] | None = None
            published: dict[Range, int] = {}
            for rank, each in found.items():
                if each[:2] != first[:2]:
                    raise ModelMismatchError(
                        f"Rank {rank} publishes {name} as {each.dtype}{list(each.shape)}, and rank "
                        f"{first_rank} as "
                        f"{first.dtype}{list(first.shape)}. {_LOCAL}"
                    )
                if each.digest is not None:
                    whole = (rank, each.digest) if whole is None else whole
                    if each.digest != whole[1]:
                        raise ConfigError(
                            f"{name} is whole at ranks {whole[0]} and {rank}, and differs. {_LOCAL}"
                        )
                if each.start < each.stop:
                    published.setdefault((each.start, each.stop), rank)
            shards = [rank for rank, each in found.items() if each.digest is None and each.start < each.stop]
            if whole is not None and shards:
                raise ConfigError(
                    f"{name} is whole at rank {whole[0]}, and a shard at rank {shards[0]}. {_GATHERED}"
                )
            specs[name] = TensorSpec(name, first.dtype, first.shape)
            for place, rank in published.items():
                held[rank][name] = place
        if self._known:
            check_specs(self.specs, specs, "The published model")
        else:
            self.specs = specs
        check_coverage(self.specs, held)
        self.held = held


def digest_of(name: str, held: torch.Tensor) -> int:
    """Return the fingerprint of a whole tensor, on any device."""
    key = fingerprint.tensor_key(name)
    return (
        sum(native.fingerprint(key, bits_of(piece), start) for start, piece in pieces(held))
        & fingerprint.MASK
    )


def _nothing(part: TensorRange) -> TensorRange:
    return TensorRange(empty_like(part.held), 0, part.shape)


def _ranges(given: Sequence[Any]) -> _Ranges:
    return [(each.start, each.shape) for each in given if type(each) is TensorRange]


_GATHERED = (
    "An evaluation leaves some parameters of FSDP2 gathered, and rounded with mixed precision: publish the "
    "module or its "
    "state_dict(), not named_parameters()."
)
_LOCAL = (
    "If each rank has experts, layers or shards of its own, publish them by the names of the checkpoint, or "
    "as TensorRange; "
    "if all ranks should have the same, such as a buffer, broadcast it from one."
)
_TOGETHER = (
    "Publish the module from all ranks, each with Publisher(..., group=torch.distributed.group.WORLD)."
)


def _warn_of_rounding(given: Mapping[str, torch.dtype], table: _Table, rule: str) -> None:
    """Warn of tensors that the model holds in a wider dtype than most, and that are published in a narrower
    one.
    """
    sizes: dict[torch.dtype, int] = {}
    for name, dtype in given.items():
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(table[name].shape)
    main = max(sizes, key=lambda dtype: sizes[dtype])
    rounded = [
        name
        for name, dtype in given.items()
        if dtype.is_floating_point
        and dtype.itemsize > max(main.itemsize, getattr(torch, table[name].dtype).itemsize)
    ]
    if rounded:
        name = rounded[0]
        logger.warning(
            "%d tensors are wider than the model's %s, and published in %s: %s. A server with their dtype "
            "will differ. "
            'To publish them as they are: dtype="%s,*%s=keep" (served_dtype= of DeltaSyncCallback).',
            *(len(rounded), str(main).removeprefix("torch."), table[name].dtype, ", ".join(rounded[:5])),
            *(rule, ".".join(name.split(".")[-2:])),
        )


def check_coverage(specs: Mapping[str, TensorSpec], held: Sequence[Mapping[str, Range]]) -> None:
    """Check that the ranges of all ranks hold every element of a model once.

    Raises:
        ConfigError: one rank publishes alone, and does not hold all of a tensor.
        ModelMismatchError: elements are missing, or held by several ranks.
    """
    found: dict[str, list[Range]] = {name: [] for name in specs}
    for ranges in held:
        for name, (start, stop) in ranges.items():
            if start < stop:
                found[name].append((start, stop))
    for name, spec in specs.items():
        at = 0
        for start, stop in sorted(found[name]):
            if start != at:
                break
            at = stop
        else:
            if at == spec.element_count:
                continue
        if len(held) == 1:
            raise ConfigError(
                f"This rank holds only a part of {name}. Publish from all ranks, each with Publisher(..., "
                "group=group)."
            )
        raise ModelMismatchError(f"The ranks do not cover every element of {spec} exactly once.")
