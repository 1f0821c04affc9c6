"""The programs of a run: who is told what, and started how. Everything speaks HTTPS and wants a token.

What trusts the throw-away authority is told by its environment, as with any private authority: SSL_CERT_FILE
is read by obstore, hf_xet, huggingface_hub and Python's own clients, AWS_CA_BUNDLE by boto3.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from demo.processes import Child
from demo.run import free_port
from deploy import router
from tests.hosts.authority import Authority
from tests.hosts.network import REPLICAS, ROOT, Network
from tests.hub.hub import READ, WRITE
from tests.servers import radosgw, s3
from wordle.protocol import TOKEN_VARIABLE

STORES = ("s3", "hf")
_BUCKET = "runs"


def why_not_runnable(store: str) -> str | None:
    """Which programs are missing, None if none is."""
    programs = ("haproxy", *(radosgw.PROGRAMS if store == "s3" else ()))
    missing = [program for program in programs if shutil.which(program) is None]
    return (
        f"not installed: {', '.join(missing)} (Debian: haproxy, ceph-mon, ceph-osd, radosgw)"
        if missing
        else None
    )


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What requests must present, made anew for each run."""

    completions: str = dataclasses.field(default_factory=secrets.token_hex)
    routes: str = dataclasses.field(default_factory=secrets.token_hex)
    environment: str = dataclasses.field(default_factory=secrets.token_hex)


class Services:
    """Makes the processes of one run. Use as a `with` block.

    Args:
        network: Where they run.
        store: One of `STORES`.
        folder: For their logs and files.
        model: The checkpoint that trainer and replicas start from.
    """

    def __init__(self, network: Network, store: str, folder: Path, model: Path) -> None:
        self._network = network
        self._store = store
        self._folder = folder
        self._model = model
        # Short, because there will be sockets in it; and gone afterwards, because it will be large.
        self._scratch = tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True)
        authority = Authority(folder)
        self.tokens = Tokens()
        self.authority = authority.certificate
        self._certificates = {
            host: authority.issue(host, network.place(host)[0])
            for host in ("bucket", "environment", *REPLICAS)
        }
        self._router_port = free_port()
        cores = sorted(os.sched_getaffinity(0))
        half = max(1, len(cores) // 2)
        # vLLM's processes spin while they wait, and would take the trainer's core too.
        self._serving, self._training = cores[:half], cores[-half:]

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    @property
    def channel(self) -> str:
        """URL of the run's channel."""
        if self._store == "hf":
            return f"hf://buckets/user/{_BUCKET}/run"
        return f"s3://{_BUCKET}/run?endpoint={self.url('bucket')}&region={s3.REGION}"

    @property
    def far_channel(self) -> str:
        """URL of its copy in the far region."""
        return f"file://{self._scratch.name}/far"

    def url(self, host: str) -> str:
        """Of a host's service."""
        address, port = self._network.place(host)
        return f"https://{address}:{port}"

    def token(self, host: str) -> str:
        """Of a host's service: the environment's, or of a replica's own routes."""
        return self.tokens.environment if host == "environment" else self.tokens.routes

    def bucket(self) -> Child:
        """The object store; once it is ready, its log has a line that is `ready`, or the Hub's port."""
        address, port = self._network.place("bucket")
        certificate = str(self._certificates["bucket"])
        if self._store == "hf":
            command = [sys.executable, "-m", "tests.hub.server", "--host", address, "--port", str(port)]
            command += ["--certificate", certificate]
        else:
            command = [sys.executable, "-m", "tests.servers.radosgw", f"{self._scratch.name}/ceph"]
            command += ["--https", f"{address}:{port}", certificate, "--"]
            command += [sys.executable, "-m", "tests.hosts.bucket", _BUCKET]
        return self._child("bucket", "The bucket", command, self.store_env(WRITE), self._training)

    def environment(self) -> Child:
        """The Wordle service."""
        address, port = self._network.place("environment")
        command = [sys.executable, "-m", "wordle", "--host", address, "--port", str(port)]
        command += ["--tls-cert", str(self._certificates["environment"])]
        env = {TOKEN_VARIABLE: self.tokens.environment}
        return self._child("environment", "The environment", command, env, self._training)

    def replica(self, host: str) -> Child:
        """A vLLM server that follows the channel and knows nobody else."""
        address, port = self._network.place(host)
        certificate = str(self._certificates[host])
        command = [sys.executable, "-m", "deltasync", "serve", str(self._model), "--channel", self.channel]
        command += ["--host", address, "--port", str(port), "--enforce-eager", "--max-model-len", "512"]
        command += ["--max-num-seqs", "16", "--disable-uvicorn-access-log"]
        command += ["--ssl-certfile", certificate, "--ssl-keyfile", certificate]
        env = self.store_env(WRITE) | {
            "DELTASYNC_HTTP_TOKEN": self.tokens.routes,
            "DELTASYNC_POLL_INTERVAL_S": "0.05",
            "DELTASYNC_REPLICA_ID": host,
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_API_KEY": self.tokens.completions,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return self._child(host, f"vLLM on {host}", command, env, self._serving)

    def router(self) -> Child:
        """The router, on the trainer's host: TRL knows one URL and no token; here are the replicas, and the
        key for them.
        """
        servers = {
            host: "{}:{} ssl verify required ca-file {} sni str({}) check-sni {}".format(
                *self._network.place(host), self.authority, host, host
            )
            for host in REPLICAS
        }
        config = router.write(self._folder, servers)
        env = {
            "REPLICA_TOKEN": self.tokens.completions,
            "ROUTER_BIND": f"127.0.0.1:{self._router_port}",
            "ROUTER_PROBES": f"deltasync-router-{self._router_port}",
        }
        command = ["haproxy", "-db", "-f", str(config)]
        return self._child("trainer", "The router", command, env, self._training, "router")

    def trainer(self, steps: int, task: str) -> Child:
        """TRL; learns of the replicas' versions from their heartbeats in the channel alone."""
        command = [sys.executable, "-m", "demo.train", "--model", str(self._model), "--channel", self.channel]
        command += [
            "--server-url",
            f"http://127.0.0.1:{self._router_port}",
            "--steps",
            str(steps),
            "--seed",
            "0",
        ]
        command += [
            "--metrics",
            str(self._folder / "metrics.jsonl"),
            "--published",
            str(self._folder / "published.jsonl"),
        ]
        if task == "wordle":
            command += ["--task", "wordle", "--environment-url", self.url("environment")]
        env = self.store_env(WRITE) | {
            "CI": "1",
            TOKEN_VARIABLE: self.tokens.environment,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        return self._child("trainer", "The trainer", command, env, self._training)

    def relay(self) -> Child:
        """Copies the channel to a store of the far region, which is the fleet's host."""
        command = [sys.executable, "-m", "deltasync", "relay", self.channel, self.far_channel, "--json"]
        env = self.store_env(READ) | {"DELTASYNC_POLL_INTERVAL_S": "0.2", "OMP_NUM_THREADS": "1"}
        return self._child("fleet", "The relay", command, env, self._training, "relay")

    def follower(self, number: int, channel: str) -> Child:
        """A replica in host memory; one JSON line for each version in its log."""
        command = [sys.executable, "-m", "deltasync", "follow", channel, "--json"]
        env = self.store_env(READ) | {"DELTASYNC_POLL_INTERVAL_S": "0.2", "OMP_NUM_THREADS": "1"}
        return self._child(
            "fleet", f"Replica {number} in host memory", command, env, self._serving, f"replica-{number}"
        )

    def rereader(self, versions: list[int]) -> Child:
        """Reads versions from the channel, on the bucket's own host, into `channel.json`."""
        command = [
            sys.executable,
            "-m",
            "tests.hosts.reread",
            self.channel,
            str(self._folder / "channel.json"),
        ]
        command += map(str, versions)
        return self._child("bucket", "Reading the channel", command, self.store_env(READ), None, "reread")

    def store_env(self, hub_token: str) -> dict[str, str]:
        """What the clients of the bucket need to know."""
        trust = {"SSL_CERT_FILE": str(self.authority), "AWS_CA_BUNDLE": str(self.authority)}
        if self._store == "s3":
            return trust | s3.KEYS | {"HF_HUB_OFFLINE": "1"}
        return trust | {
            "HF_ENDPOINT": self.url("bucket"),
            "HF_TOKEN": hub_token,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_XET_CACHE": f"{self._scratch.name}/xet",
            "HF_XET_TELEMETRY_ENABLED": "0",
        }

    def _child(
        self,
        host: str,
        name: str,
        command: list[str],
        env: Mapping[str, str],
        cores: list[int] | None,
        log: str = "",
    ) -> Child:
        environ = {
            variable: value for variable, value in os.environ.items() if not variable.startswith(_OURS)
        }
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH")])
        )
        path = self._folder / f"{log or host}.log"
        return Child(name, self._network.on(host, command), environ | env, path, cores)


_OURS = ("AWS_", "DELTASYNC_", "HF_", "SSL_", "VLLM_")
