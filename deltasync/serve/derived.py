"""Copies of weights, and other tensors made from them, that an engine keeps outside of its parameters.

FlashInfer, for example, keeps a float32 copy of the attention sinks. A commit that writes the parameter does
not change the copy, so the layer has to make it again, in place, because captured CUDA graphs hold its
address.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import torch

from deltasync.errors import ModelMismatchError
from deltasync.live import LiveMemory
from deltasync.serve.draft import WithDraft
from deltasync.serve.load_plan import held_tensors, writes
from deltasync.tensors.bits import int_view

_HEAD = 1024  # elements that are compared first
_PART = 16  # fewest elements in which a copy of another size is alike


@dataclasses.dataclass(frozen=True)
class DerivedCopy:
    """A copy: `holder.name` is a tensor that was made from a parameter, and `make` makes it again.

    Attributes:
        path: Its name in the model.
    """

    holder: Any
    name: str
    make: Callable[[], object]
    path: str = ""

    @property
    def tensor(self) -> torch.Tensor:
        """The copy in live memory."""
        return held_tensors(self.holder)[self.name]

    def __str__(self) -> str:
        return f"{type(self.holder).__name__}.{self.name}"


_built: weakref.WeakKeyDictionary[torch.nn.Module, tuple[frozenset[str], dict[tuple[int, str], int]]]
# names of modules, and sums of other tensors, before weights were loaded
_built = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[torch.nn.Module, set[tuple[int, str]]] = weakref.WeakKeyDictionary()


def note_built(model: torch.nn.Module) -> None:
    """Note a model before its weights are loaded, to see later what loading changes."""
    _built[model] = frozenset(name for name, _ in model.named_modules()), _sums(model)


def note_loaded(model: torch.nn.Module) -> None:
    """Note which tensors other than parameters loading changed. Only the first call for a model does
    something.
    """
    if model in _built and model not in _made:
        before = _built[model][1]
        _made[model] = {key for key, value in _sums(model).items() if before.get(key) != value}


def is_complete(model: torch.nn.Module) -> bool:
    """Whether a model is known to have all modules with which it was built: its loader then ignores what it
    ignored.
    """
    return all(
        each in _built and _built[each][0] <= {name for name, _ in each.named_modules()}
        for each in _parts(model)
    )


def is_made(model: torch.nn.Module, holder: Any, name: str) -> bool:
    """Whether loading weights is known to have changed `holder.name`, or to have made it."""
    return any((id(holder), name) in _made.get(each, ()) for each in _parts(model))


def _parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the models that were loaded by themselves."""
    return [*model.children()] if isinstance(model, WithDraft) else [model]


def _sums(model: torch.nn.Module) -> dict[tuple[int, str], int]:
    """Return the sums of the bits of tensors that are no parameters and not one repeated value."""
    return {
        (id(holder), name): int(int_view(tensor).sum())
        for holder in _holders(model).values()
        for name, tensor in held_tensors(holder).items()
        if not isinstance(tensor, torch.nn.Parameter) and _may_be_made(tensor)
    }


def _may_be_made(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values may come from weights: floating point, and not one repeated value as default
    scales are.
    """
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() < 2:
        return False
    flat = int_view(tensor)
    return not bool((flat == flat[0]).all())


def _holders(model: torch.nn.Module) -> dict[str, Any]:
    """Return modules, and objects that those hold and that process weights, such as an attention's `impl`, by
    what their attributes' names begin with in the model.
    """
    found = dict[int, tuple[str, Any]]()
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        objects = {f"{start}{name}.": each for name, each in vars(module).items() if _processes(each)}
        for prefix, holder in {start: module, **objects}.items():
            found.setdefault(id(holder), (prefix, holder))
    return dict(found.values())


def _processes(value: object) -> bool:
    return _is_object(value) and callable(getattr(value, "process_weights_after_loading", None))


def _is_object(value: object) -> bool:
    """Whether a module's attribute may hold tensors in attributes of its own, without being a module."""
    return not isinstance(value, torch.nn.Module | torch.Tensor | type) and hasattr(value, "__dict__")


def find(
    model: torch.nn.Module,
    covered: Set[int],
    reloaded: Set[torch.nn.Module] = frozenset(),
    later: Mapping[str, str | None] = MappingProxyType({}),
) -> list[DerivedCopy]:
    """Find the copies that a commit has to refresh, and prove that refreshing works in place. Call it while
    paused.

    A copy is what loading the weights made or changed, and what begins as a parameter does. Changes live
    memory and restores it.

    Args:
        model: As the engine has loaded it.
        covered: Addresses of the storages that commits write.
        reloaded: Modules that are loaded again with all that they hold.
        later: Names of attributes that the first forward call makes from weights, and the attribute that says
            that it will, if any does.

    Raises:
        ModelMismatchError: a copy is not made again in place.
    """
    parameters = list(model.parameters())
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    # vLLM fills other buffers by itself
    loaded = covered | {_storage(tensor) for tensor in model.state_dict().values()}
    by_start: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.numel() > 1:
            by_start.setdefault(_start(parameter.data), []).append(parameter.data)
    copies = []
    for module in model.modules():
        for holder in (module, *filter(_is_object, vars(module).values())):
            for name in later.keys() & vars(holder).keys():
                asked = later[name]
                if asked is None or getattr(holder, asked, True):
                    raise _refusal(DerivedCopy(holder, name, lambda: None))
    for prefix, holder in _holders(model).items():
        found = [
            name
            for name, tensor in held_tensors(holder).items()
            if holder not in reloaded and _storage(tensor) not in loaded and _may_be_made(tensor)
            if is_made(model, holder, name) or _is_copy(tensor, by_start)
        ]
        make = _maker(model, holder, dtype, covered) if found else _nobody
        copies += [DerivedCopy(holder, name, make, prefix + name) for name in found]
    for make in dict.fromkeys(copy.make for copy in copies):
        if stale := _stale([copy for copy in copies if copy.make == make]):
            raise _refusal(stale[0])
    return copies


def _nobody() -> None:
    raise NotImplementedError("Nobody makes it again.")


def _maker(
    model: torch.nn.Module, holder: Any, dtype: torch.dtype, covered: Set[int]
) -> Callable[[], object]:
    """Return what makes the tensors of a holder again: itself, as in vLLM, or the model around it, as in
    SGLang.

    A model that writes to `covered` storages would change weights, so it is not asked.
    """
    make: Any = getattr(holder, "process_weights_after_loading", None)
    if callable(make):
        return functools.partial(make, dtype)
    for owner in reversed([*model.modules()]):
        if hasattr(owner, "post_load_weights") and holder in {*owner.modules()}:
            make = owner.post_load_weights
            return _nobody if writes(owner, make) & covered else make
    return _nobody


def _refusal(copy: DerivedCopy) -> ModelMismatchError:
    return ModelMismatchError(
        f"The engine keeps what it made from a weight in {copy} and does not make it again in place, so this "
        "model cannot "
        "be updated."
    )


def _start(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a tensor and its copies have in common, in any dtype."""
    return tensor.device, *int_view(tensor.detach().reshape(-1)[:2].to(torch.bfloat16)).tolist()


def _is_copy(tensor: torch.Tensor, by_start: dict[tuple[object, ...], list[torch.Tensor]]) -> bool:
    """Whether a tensor begins as a parameter does, to the end of the shorter one: a copy, or one of several
    in a row.
    """
    flat = tensor.detach().reshape(-1)
    for source in by_start.get(_start(tensor), ()):
        size = min(flat.numel(), source.numel())
        if size < _PART and flat.numel() != source.numel():
            continue
        head, part = flat[: min(size, _HEAD)], source.reshape(-1)[:size]
        # One repeated value: scales and the like, which values cannot tell from weights.
        if not (head == head[0]).all() and _equal(head, part[:_HEAD]) and _equal(flat[:size], part):
            return True
    return False


def _equal(copy: torch.Tensor, source: torch.Tensor) -> bool:
    return torch.equal(int_view(copy.to(source.dtype)), int_view(source))


def _stale(copies: Sequence[DerivedCopy]) -> Sequence[DerivedCopy]:
    """Return those of the copies of one maker that it does not make again in place. Their values are
    restored.
    """
    before = []
    for copy in copies:
        buffers = copy.holder._buffers if isinstance(copy.holder, torch.nn.Module) else {}
        tensor = copy.tensor
        before.append((copy, buffers, dict(vars(copy.holder)), dict(buffers), tensor, tensor.clone()))
    try:
        with torch.no_grad():
            for *_, tensor, _ in before:
                tensor.neg_().sub_(1)
        refresh(copies)
        return [
            copy
            for copy, *_, tensor, value in before
            if copy.tensor is not tensor or not torch.equal(int_view(tensor), int_view(value))
        ]
    except Exception:  # noqa: BLE001 - whatever it is, these copies are not made again
        return copies
    finally:
        for copy, buffers, attributes, held, tensor, value in before:
            vars(copy.holder).update(attributes)
            buffers.update(held)
            with torch.no_grad():
                tensor.copy_(value)


def refresh(copies: Sequence[DerivedCopy]) -> None:
    """Have these copies made again. Mutates live memory."""
    with torch.no_grad():
        for make in dict.fromkeys(copy.make for copy in copies):
            make()


def memory_of(copies: Sequence[DerivedCopy]) -> LiveMemory:
    """Return the memory of copies, by their names in the model, as it is now."""
    return LiveMemory.audited({copy.path: copy.tensor for copy in copies})


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
