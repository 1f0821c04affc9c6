"""The files for engines that others run: Ray Serve LLM and vLLM's production stack. test_ray_serve.py runs
the first.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI

from deltasync.config import ReplicaSettings
from vllm_plugin.endpoints import DeltaSyncEndpoints

DEPLOY = Path(__file__).parents[2] / "deploy"
SETTINGS = {f"DELTASYNC_{field.name.upper()}" for field in dataclasses.fields(ReplicaSettings)}


def values(file: str) -> Any:
    return yaml.safe_load((DEPLOY / file).read_text())


def test_ray_serves_by_the_literal_extension() -> None:
    (application,) = values("ray/serve.yaml")["applications"]
    (config,) = application["args"]["llm_configs"]
    assert config["engine_kwargs"] == {"worker_extension_cls": "vllm_plugin.DeltaSyncWorkerExtension"}
    assert set(config["runtime_env"]["env_vars"]) <= SETTINGS
    ReplicaSettings.from_env(config["runtime_env"]["env_vars"])


def test_the_production_stack_serves_by_the_literal_command() -> None:
    engines = values("production-stack/values.yaml")["servingEngineSpec"]
    (model,) = engines["modelSpec"]
    assert model["vllmConfig"]["extraArgs"] == [
        "--worker-extension-cls",
        "vllm_plugin.DeltaSyncWorkerExtension",
    ]
    names = [variable["name"] for variable in model["env"]]
    assert {name for name in names if name.startswith("DELTASYNC_")} <= SETTINGS
    assert "DELTASYNC_REPLICA_ID" in names  # its pods share a hostname
    app = FastAPI()
    DeltaSyncEndpoints().attach_router(app)
    assert engines["readinessProbe"]["httpGet"]["path"] in {
        getattr(route, "path", "") for route in app.routes
    }
