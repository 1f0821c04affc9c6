"""Triton's interpreter, quicker; nothing but triton is needed here."""

from __future__ import annotations

import dataclasses
import types


def without_idle_work() -> None:
    """Triton 3.7's interpreter replaces the functions of `triton.language` at each launch and at each call of
    a function in a kernel, and computes each sum and product a second time for an assertion that only debug
    mode makes: half of its time. Here the functions are replaced once, and for good.
    """
    from triton import language
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    kernel = types.SimpleNamespace(__globals__={"language": language, "core": language.core})
    interpreter._patch_lang(kernel)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
