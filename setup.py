"""Builds the extension. Everything else about the package is in pyproject.toml."""

import os
import platform

from setuptools import Extension, setup

SANITIZED = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
]
sanitize = SANITIZED if os.environ.get("SANITIZE") else []  # as `make fuzz` builds it

platform_tag = os.environ.get("WHEEL_PLATFORM")  # `make dist` names it; else it is this machine's

native = Extension(
    "deltasync._native",
    ["deltasync/_native.c"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    extra_compile_args=["-std=c11", "-O3", "-pthread", "-fno-math-errno", "-g0", *sanitize],
    extra_link_args=["-pthread", *sanitize],
    optional=True,  # without a compiler, numpy serves, with a warning
)
setup(
    ext_modules=[] if platform.python_implementation() != "CPython" else [native],
    options={
        "bdist_wheel": {"py_limited_api": "cp311"} | ({"plat_name": platform_tag} if platform_tag else {})
    },
)
