"""Arrays, and compiled functions, that a model keeps outside of its parameters: a new version must not meet
old ones.

A model may compute something from its weights at its first call and keep it in an attribute, and a compiled
function has the arrays that it was compiled with. A call has made all that a newly built model does not have:
it is dropped, and the next call makes it from the new weights. An array that a newly built model has as well,
with the same bits, is a constant.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from deltasync.errors import ModelMismatchError, StageError

_COMPILED = type(mx.compile(lambda: None))
_ABSENT = object()
_Known = tuple[set[int], set[int]]


class KeptArrays:
    """The arrays and compiled functions of a model outside of its parameters, compared with those of a newly
    built one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        like = _built_anew(model)
        self._can_build = like is not None
        source = model if like is None else like
        self._built: dict[str, tuple[type, dict[str, Any]]] = {
            path: (type(module), dict(_attributes(module))) for path, module in source.named_modules()
        }
        for of in (source, model):  # a graph is computed in the thread that built it
            known, held = _known(of), [each for module in of.modules() for each in _attributes(module)]
            mx.eval([each for one in held for each in _kept(known, *one) if isinstance(each, mx.array)])
        self._known_built = _known(source)

    def drop(self) -> None:
        """Drop those that calls have made. Nobody may compute meanwhile. Mutates the model's attributes.

        Raises:
            ModelMismatchError: the model keeps something that cannot be dropped and may be made from weights.
        """
        known = _known(self._model)
        for path, module in self._model.named_modules():
            kind, built = self._built.get(path, (type(None), {}))
            for key, value in list(_attributes(module)):
                found = _kept(known, key, value)
                if not found:
                    continue
                was = built.get(key, _ABSENT)
                constants = _kept(self._known_built, key, was)
                if isinstance(module, kind) and not constants and _is_plain(was):
                    _restore(module, key, was)
                elif not (isinstance(module, kind) and self._can_build and _are_same(found, constants)):
                    raise ModelMismatchError(self._sentence(f"{path}.{key}".lstrip("."), found))
                else:
                    built[key] = value  # equal by identity from now on

    def _sentence(self, where: str, found: list[Any]) -> str:
        what = "a compiled function" if any(isinstance(each, _COMPILED) for each in found) else "an array"
        why = (
            ""
            if self._can_build
            else f" {type(self._model).__name__}(model.args) would have to build the model anew."
        )
        return (
            f"{where} of the model is {what} that is no parameter and may come from weights, so a new "
            "version would leave "
            f"it as it is: this model cannot follow.{why}"
        )


def _built_anew(model: nn.Module) -> nn.Module | None:
    """Return the same model as it is built, of which no weight is computed; None if it does not say how to
    build it.
    """
    high, low = mx.random.state[0].tolist()
    try:
        for given in (getattr(model, "args", None), getattr(model, "config", None)):
            with contextlib.suppress(Exception):  # whatever it is, this is not how to build it
                if given is not None:
                    return type(model)(given)
        return None
    finally:
        mx.random.seed(high << 32 | low)  # which building has moved on


def _known(model: nn.Module) -> _Known:
    """Return the identities of a model's modules; and with those of its parameters."""
    modules = {id(each) for each in model.modules()}
    return modules, modules | {id(array) for _, array in tree_flatten(model.parameters())}


def _kept(known: _Known, key: str, value: Any) -> list[Any]:
    """Return the arrays and the compiled functions that a module keeps in an attribute and that are no
    parameters.

    Parameters count as such only where `parameters()` looks for them.
    """
    may_be_parameter = not key.startswith("_") and isinstance(value, mx.array | dict | list)
    return list(_within(value, known[may_be_parameter], set()))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from vars(module).items()
    yield from module.items()


def _within(value: Any, known: set[int], seen: set[int]) -> Iterator[Any]:
    """Yield the arrays and the compiled functions that can be reached from a value without passing something
    known.
    """
    if id(value) in known or id(value) in seen or isinstance(value, type | types.ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, mx.array | _COMPILED):
        yield value
        return
    inner: list[Any] = [*vars(value).values()] if hasattr(value, "__dict__") else []
    if isinstance(value, dict):
        inner += value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner += value
    elif isinstance(value, functools.partial):
        inner += [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        inner += [value.__self__, value.__func__]
    elif inspect.isfunction(value):
        inner += [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not None]
    for each in inner:
        yield from _within(each, known, seen)


def _are_same(found: list[Any], constants: list[Any]) -> bool:
    if len(found) != len(constants):
        return False
    for one, other in zip(found, constants, strict=True):
        if one is other:
            continue
        if (
            isinstance(one, _COMPILED)
            or isinstance(other, _COMPILED)
            or (one.dtype, one.shape) != (other.dtype, other.shape)
        ):
            return False
        try:
            if not mx.array_equal(one, other, equal_nan=True):
                return False
        except RuntimeError as error:
            raise StageError(
                f"The model has an array that is not computed: call mx.eval on its state. {error}"
            ) from None
    return True


def _is_plain(value: Any) -> bool:
    """Whether a copy of a value is the same for another model."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or value is _ABSENT or isinstance(value, bool | int | float | str)


def _restore(module: nn.Module, key: str, was: Any) -> None:
    if was is _ABSENT:
        delattr(module, key)
    else:
        setattr(module, key, copy.copy(was))
