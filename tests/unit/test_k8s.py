"""What is under `deploy/k8s` is valid by Kubernetes' schemas, and its parts name each other rightly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = ("replicas.yaml", "router.yaml")


def documents(file: str) -> dict[str, dict[str, Any]]:
    """By kind; each file has one of each."""
    return {
        document["kind"]: document for document in yaml.safe_load_all((DEPLOY / "k8s" / file).read_text())
    }


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("file", FILES)
def test_schema(file: str, version: str) -> None:
    for document in documents(file).values():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_finds_mistakes() -> None:
    deployment = documents("replicas.yaml")["Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinessprobe"):
        kubernetes_validate.validate(deployment, "1.30", strict=True)


@pytest.mark.parametrize("file", FILES)
def test_the_parts_belong_together(file: str) -> None:
    found = documents(file)
    deployment, service = found["Deployment"]["spec"], found["Service"]["spec"]
    template = deployment["template"]
    assert deployment["selector"]["matchLabels"] == template["metadata"]["labels"] == service["selector"]
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    (container,) = template["spec"]["containers"]
    (port,) = container["ports"]
    assert service["ports"][0].get("targetPort", service["ports"][0]["port"]) in (
        port["name"],
        port["containerPort"],
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in template["spec"]["volumes"]
    }
    probes = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
    assert all(probe["port"] == port["name"] for probe in probes.values())
    assert (
        probes["readinessProbe"]["path"]
        == {"replicas.yaml": "/deltasync/ready", "router.yaml": "/health"}[file]
    )


@pytest.mark.parametrize("file", FILES)
def test_containers_may_do_as_little_as_they_need(file: str) -> None:
    pod = documents(file)["Deployment"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    # nothing is pulled before somebody has filled it in
    assert re.search(r"@sha256:0{64}$", container["image"])
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_what_a_replica_writes_to_is_mounted() -> None:
    pod = documents("replicas.yaml")["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    home = re.search(
        r"^ENV HOME=(\S+)$", (DEPLOY / "spaces" / "vllm" / "Dockerfile").read_text(), re.MULTILINE
    )
    settings = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    assert home is not None
    for path in ("/tmp", "/dev/shm", home[1], settings["DELTASYNC_CACHE_DIR"], settings["HF_HOME"]):
        assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), path
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_replicas_are_what_the_image_takes() -> None:
    found = documents("replicas.yaml")
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    entrypoint = (DEPLOY / "spaces" / "vllm" / "entrypoint.sh").read_text()
    secrets = set(re.findall(r"--from-literal=(\w+)=", (DEPLOY / "k8s" / "replicas.yaml").read_text()))
    given = {variable["name"] for variable in container["env"]} | secrets
    assert set(re.findall(r"\$\{(\w+):\?", entrypoint)) <= given
    assert f"--port {container['ports'][0]['containerPort']} " in entrypoint
    claim = found["Deployment"]["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"][
        "claimName"
    ]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]
    assert found["Deployment"]["spec"]["replicas"] > 1
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_router_finds_the_replicas() -> None:
    service = documents("replicas.yaml")["Service"]
    (container,) = documents("router.yaml")["Deployment"]["spec"]["template"]["spec"]["containers"]
    settings = {variable["name"]: variable["value"] for variable in container["env"]}
    host, port = settings["ROUTER_REPLICAS"].split(":")
    assert (
        host.split(".")[0] == service["metadata"]["name"] and int(port) == service["spec"]["ports"][0]["port"]
    )
    configuration = (DEPLOY / "router" / "haproxy.cfg").read_text()
    assert all(f"${{{name}}}" in configuration for name in settings)
    assert f"presetenv ROUTER_BIND :{container['ports'][0]['containerPort']}\n" in configuration
    mounted = container["volumeMounts"][0]["mountPath"]
    assert container["args"] == ["-f", f"{mounted}/haproxy.cfg"]
