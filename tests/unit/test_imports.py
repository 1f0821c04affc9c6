from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import json
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import deltasync

ROOT = Path(deltasync.__file__).parents[1]
PACKAGES = ("deltasync", "vllm_plugin", "sglang_plugin", "mlx_plugin", "trl_callback")

# The core is what every version passes; a wing has the cases, and is handed to it (docs/architecture.md).
# Each room imports from itself and from rooms before it in these lists, by what their `__init__` offers in
# `__all__`: names, and modules that are entered as a whole. A new room gets a place here.
CORE = ("tensors", "kernels", "codec", "stores", "channel", "live", "publish", "following")
WINGS = ("clouds", "gpu", "opening", "serve", "ops", "trainer", "interchange")
ROOMS = (*CORE, *WINGS)
# Where the core looks up a wing by its name, once it meets the case: a store's scheme, a device, weights that are
# outside the channel. Nothing comes to it.
LOOKED_UP = {
    "channel.payloads opening.references:weights",
    "following.replica opening.references:local",
    "kernels gpu.segments",
    "kernels.backend gpu.backend",
    "stores clouds:OPEN",
}
# What plugins still import of other rooms than `serve`, and, beside a trainer, `trainer`. Nothing comes to it.
PLUGINS_KNOWN = {
    "mlx_plugin channel.reading",
    "mlx_plugin channel.record",
    "mlx_plugin following",
    "sglang_plugin following",
    "sglang_plugin tensors.bits",
    "trl_callback channel.anchors",
    "trl_callback channel.documents",
    "trl_callback channel.keys",
    "trl_callback channel.reading",
    "trl_callback ending",
    "trl_callback opening.adapter_base",
    "trl_callback opening.owner",
    "trl_callback publish.agreement",
    "trl_callback stores",
    "trl_callback tensors.bits",
    "trl_callback threads",
    "vllm_plugin channel.reading",
    "vllm_plugin following",
    "vllm_plugin kernels.backend",
    "vllm_plugin kernels.native",
    "vllm_plugin limits",
    "vllm_plugin live",
    "vllm_plugin stores.cache",
    "vllm_plugin tensors",
    "vllm_plugin tensors.bits",
    "vllm_plugin tensors.fingerprint",
}
FOR_ALL = ("errors", "config", "limits", "threads", "ending")
PROGRAMS = ("deltasync.ops.dashboard", "deltasync.ops.cli")
HEAVY = ("vllm", "sglang", "trl", "transformers", "obstore", "matplotlib", "cryptography")


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _imports(path: Path) -> set[str]:
    """Full names of what a file imports anywhere in it; `from a import b` counts as `a.b` where that is a
    module.
    """
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path} imports relatively"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                as_path = ROOT / name.replace(".", "/")
                is_module = as_path.is_dir() or as_path.with_suffix(".py").is_file()
                found.add(name if is_module else node.module)
    return found


def _room(module: str) -> str:
    """The room of a module of deltasync; of a plugin its package, and of deltasync itself nothing."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "deltasync" else package


def _floor(module: str) -> str:
    """The room of a module; the programs stand above the rest of theirs."""
    return next((program for program in PROGRAMS if module.startswith(program)), _room(module))


def _offered(room: str) -> list[str]:
    """`__all__` of a room."""
    for node in _tree(ROOT / "deltasync" / room / "__init__.py").body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def test_every_room_is_in_the_list_and_nothing_else_is_at_the_root() -> None:
    root = ROOT / "deltasync"
    assert {path.parent.name for path in root.glob("*/__init__.py")} == set(ROOMS)
    assert {path.stem for path in root.glob("*.py")} == {"__init__", "__main__", *FOR_ALL}


def test_imports_point_one_way() -> None:
    order = [*FOR_ALL, *ROOMS, *PROGRAMS, "__main__"]
    wrong = {
        f"{module[10:]} {name[10:]}"
        for module, path in _modules("deltasync")
        for name in _imports(path)
        if module != "deltasync" and name.startswith("deltasync.")
        if order.index(_floor(name)) > order.index(_floor(module))
    }
    assert not wrong


def test_the_core_looks_up_a_wing_where_it_meets_the_case() -> None:
    wing = re.compile(rf"(?:deltasync\.)?((?:{'|'.join(WINGS)})[.:][\w.:]+)")
    found = {
        f"{module[10:]} {match[1]}"
        for module, path in _modules("deltasync")
        if _room(module) in CORE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and (match := wing.fullmatch(str(node.value)))
    }
    assert found == LOOKED_UP


def test_what_is_for_all_imports_no_room() -> None:
    imported = {name for part in FOR_ALL for name in _imports(ROOT / "deltasync" / f"{part}.py")}
    assert {_room(name) for name in imported if name.startswith("deltasync.")} <= set(FOR_ALL)


def test_a_room_is_entered_by_what_it_offers() -> None:
    wrong = []
    for module, path in (found for package in PACKAGES for found in _modules(package)):
        for node in ast.walk(_tree(path)):
            if (
                not isinstance(node, ast.ImportFrom)
                or node.module is None
                or not node.module.startswith("deltasync.")
            ):
                continue
            room, *inside = node.module.split(".")[1:]
            if room in ROOMS and room != _room(module):
                asked = inside[:1] or [alias.name for alias in node.names]
                wrong += [f"{module} takes {name} of {room}" for name in asked if name not in _offered(room)]
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_room_offers_exists(room: str) -> None:
    package = importlib.import_module(f"deltasync.{room}")
    for name in _offered(room):
        assert hasattr(package, name) or importlib.util.find_spec(f"deltasync.{room}.{name}")


def test_no_module_imports_the_package_that_imports_it() -> None:
    importers = [module for module, path in _modules("deltasync") if "deltasync" in _imports(path)]
    assert not {_floor(module) for module in importers} - {"", *PROGRAMS}


def test_imports_have_no_cycle() -> None:
    graph = {
        module: {name for name in _imports(path) if name.startswith("deltasync.") and name != module}
        for module, path in _modules("deltasync")
        if module != "deltasync"
    }
    # A package's __init__ names its own submodules, which name each other.
    graphlib.TopologicalSorter(graph).prepare()


def test_a_class_name_stands_once() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in (each for package in PACKAGES for each in _modules(package)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_only_the_choice_of_kernels_imports_the_oracle() -> None:
    users = {
        module
        for package in PACKAGES
        for module, path in _modules(package)
        if "deltasync.kernels.reference" in _imports(path)
    }
    assert users == {"deltasync.kernels.native"}


def test_stores_know_no_tensors() -> None:
    stores = [
        (module, path) for module, path in _modules("deltasync") if module.startswith("deltasync.stores")
    ]
    assert stores
    wrong = [
        f"{module} imports {name}"
        for module, path in stores
        for name in _imports(path)
        if name.split(".")[0] in ("torch", "numpy", "safetensors")
    ]
    assert not wrong


def test_plugins_never_import_each_other_and_the_core_never_imports_them() -> None:
    wrong = [
        f"{module} imports {name}"
        for package in PACKAGES
        for module, path in _modules(package)
        for name in _imports(path)
        if name.split(".")[0] in set(PACKAGES) - {package, "deltasync"} and not module.startswith(PROGRAMS)
    ]
    assert not wrong


def test_plugins_enter_the_rooms_of_servers_and_trainers_only() -> None:
    public = {"errors", "config", "", "serve"}
    wrong = {
        f"{module.partition('.')[0]} {name[10:]}"
        for package in PACKAGES[1:]
        for module, path in _modules(package)
        for name in _imports(path)
        if name.startswith("deltasync.")
        if _room(name) not in (public | {"trainer"} if package == "trl_callback" else public)
    }
    assert wrong == PLUGINS_KNOWN


def test_adapters_of_frameworks_are_declared_as_they_are() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for value in declared["deltasync.modules"].values():
        module, _, name = value.partition(":")
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
        assigned = [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]
        assert name in assigned


def test_only_config_reads_the_environment_and_one_module_of_the_stores_their_clients_variables() -> None:
    readers = [
        module
        for module, path in _modules("deltasync")
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            for node in ast.walk(_tree(path))
        )
        and not module.startswith(PROGRAMS)
    ]
    assert sorted(readers) == ["deltasync.clouds.environment", "deltasync.config"]


def test_importing_deltasync_loads_nothing_heavy_and_leaves_the_root_logger_alone() -> None:
    code = f"""
import json, logging, sys
import deltasync
package = [name for name in {(*HEAVY, "torch", "numpy")!r} if name in sys.modules]
from deltasync import *
names = [name for name in {HEAVY!r} if name in sys.modules]
print(json.dumps([package, names, len(logging.getLogger().handlers), logging.getLogger().level]))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(found.stdout) == [[], [], 0, logging.WARNING]


def test_all_is_what_is_importable() -> None:
    namespace: dict[str, object] = {}
    exec("from deltasync import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(deltasync.__all__)
    with pytest.raises(ImportError):
        exec("from deltasync import no_such_name", namespace)


def test_completion_shows_the_names() -> None:
    code = "import deltasync; print(*dir(deltasync))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == sorted(deltasync.__all__)


@pytest.mark.parametrize("name", deltasync.__all__)
def test_every_name_in_all_exists_and_is_documented(name: str) -> None:
    assert hasattr(deltasync, name)
    assert name == "__version__" or getattr(deltasync, name).__doc__


def test_a_missing_library_is_named_with_what_installs_it() -> None:
    code = "import sys; sys.modules['transformers'] = None; import importlib.util as u; find = u.find_spec\n"
    code += "u.find_spec = lambda name: None if name == 'transformers' else find(name)\nimport trl_callback"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip().endswith(
        "ModuleNotFoundError: trl_callback needs transformers, and TRL for its trainers: pip install trl."
    )


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deltasync", "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.startswith("Usage: deltasync [OPTIONS] COMMAND")
