"""Triton's interpreter, quicker; nothing but triton is needed here."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from typing import Any


def without_idle_work() -> None:
    """Triton 3.7's interpreter replaces the functions of `triton.language` at each launch and at each call of
    a function in a kernel, and computes each sum and product a second time for an assertion that only debug
    mode makes: half of its time. Here the functions are replaced once, and for good. Of the rest a third goes
    into types and shapes, which each operation makes anew: they are kept.
    """
    from triton import language
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    kernel = types.SimpleNamespace(__globals__={"language": language, "core": language.core})
    interpreter._patch_lang(kernel)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    language.tensor.__init__ = _tensor
    language.block_type.to_ir = lambda self, builder: self
    language.block_type.with_element_ty = _with_element_ty
    interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """As `triton.language.tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _extent(type.shape if type.is_block() else ())


def _with_element_ty(self: Any, element: Any) -> Any:
    """As `triton.language.block_type.with_element_ty`; `vars(self)` keeps what it was asked for."""
    if element.name not in vars(self):
        vars(self)[element.name] = type(self)(element, self.shape)
    return vars(self)[element.name]


@functools.cache
def _extent(shape: tuple[int, ...]) -> tuple[Any, Any]:
    from triton.language import core

    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(length) for length in shape])


def _kept_by_name(np_dtype: Any) -> Any:
    """Return a function that asks `np_dtype` once about each type; tensors have that of their elements."""
    known: dict[str, Any] = {}

    def kept(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = np_dtype(of.scalar)
        return known[name]

    return kept
