"""One run: everything started on its host, watched, checked and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltasync.errors import DeltaSyncError
from demo import report
from demo.processes import Child
from tests.hosts import summary
from tests.hosts.network import (
    HOSTS,
    REPLICAS,
    Loopback,
    Namespaces,
    Network,
    Shape,
    is_refused,
    round_trip_s,
)
from tests.hosts.services import Services

DIGEST_EVERY = 8  # versions between two proofs of bits while the run goes on
START_S = 400.0
CATCH_UP_S = 60.0

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run is.

    Attributes:
        folder: For everything it writes; an earlier run's is replaced.
        model: The checkpoint to start from.
        store: One of `services.STORES`.
        task: `counting` or `wordle`.
        versions: To publish.
        replicas: The vLLM servers, and beyond them replicas in host memory, which join when half of the
            versions are out.
        regions: Whether the fleet is a region of its own, whose replicas follow a copy that a relay keeps
            there.
        shape: How far apart the hosts are; None for not at all.
        refusal: Why there are no namespaces; None if there are.
    """

    folder: Path
    model: Path
    store: str
    task: str
    versions: int
    replicas: int
    regions: bool
    shape: Shape | None
    refusal: str | None


def run(settings: RunSettings, say: Say) -> dict[str, Any]:
    """Do it, and write `summary.json`.

    Returns:
        The summary.

    Raises:
        DeltaSyncError: a process ended or a replica failed, with what it said last.
        RuntimeError: the network could not be made.
    """
    folder = settings.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        network = Loopback() if settings.refusal else stack.enter_context(Namespaces(shape=settings.shape))
        services = stack.enter_context(Services(network, settings.store, folder, settings.model.resolve()))
        found = _Run(settings, folder, network, services, stack, say).measure()
    found["wall_s"] = round(time.monotonic() - began_s, 1)
    (folder / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    return found


class _Run:
    def __init__(
        self,
        settings: RunSettings,
        folder: Path,
        network: Network,
        services: Services,
        stack: contextlib.ExitStack,
        say: Say,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._network = network
        self._services = services
        self._stack = stack
        self._say = say
        self._trust = ssl.create_default_context(cafile=services.authority)
        self._replicas: dict[str, Child] = {}
        self._followers: list[Child] = []
        self._proofs: dict[str, list[dict[str, Any]]] = {host: [] for host in REPLICAS}
        self._uploads: dict[int, int] = {}
        self._joined_at: int | None = None

    def measure(self) -> dict[str, Any]:
        """Start, watch, end; what was found."""
        self._start_services()
        checks = self._check_network()
        self._stack.enter_context(self._services.router())
        self._say(
            "starting AsyncGRPO; it generates on both replicas, and hears of their versions by the bucket "
            "alone"
        )
        trainer = self._stack.enter_context(
            self._services.trainer(self._settings.versions - 1, self._settings.task)
        )
        self._watch(trainer)
        statuses = {host: self._caught_up(host) for host in REPLICAS}
        for host in REPLICAS:
            self._prove(host)
        counters = self._network.counters()
        self._wait_for_followers()
        return summary.summarize(
            self._folder,
            statuses=statuses,
            proofs=self._proofs,
            channel=self._reread(),
            counters=counters,
            uploads=self._uploads,
            joined_at=self._joined_at,
            shape=self._settings.shape,
            checks=checks
            | {
                "store": self._settings.store,
                "task": self._settings.task,
                "replicas": self._settings.replicas,
                "regions": self._settings.regions,
            },
        )

    def _start_services(self) -> None:
        bucket = self._stack.enter_context(self._services.bucket())
        ready = {"s3": lambda line: line == "ready", "hf": str.isdigit}[self._settings.store]
        log = self._folder / "bucket.log"
        bucket.wait_until(lambda: any(map(ready, log.read_text().splitlines())), START_S, "to start")
        if self._settings.task == "wordle":
            environment = self._stack.enter_context(self._services.environment())
            environment.wait_until(
                lambda: self._ask("environment", "/health") is not None, START_S, "to start"
            )
        if self._settings.regions:
            self._stack.enter_context(self._services.relay())
        self._say(
            "the bucket is up; starting two vLLM servers, which are told the channel "
            f"{self._services.channel}"
        )
        self._replicas = {host: self._stack.enter_context(self._services.replica(host)) for host in REPLICAS}
        for host, server in self._replicas.items():
            server.wait_until(lambda host=host: self._ask(host, "/deltasync/status"), START_S, "to start")

    def _check_network(self) -> dict[str, Any]:
        """Distances and refusals, before anything is counted."""
        network = self._network
        checks: dict[str, Any] = {
            "isolated": network.isolated,
            "shaped_by": network.shaped_by,
            "round_trip_ms": round(1e3 * round_trip_s(network, "trainer", "vllm-a"), 2),
        }
        if isinstance(network, Namespaces):
            tried = {
                f"{host} to trainer": is_refused(network, host, "trainer")
                for host in HOSTS
                if host != "trainer"
            }
            noticed = network.counters()
            network.reset_counters()
            counted = all(
                noticed[host]["refused_to_trainer"]["packets"] > 0 for host in HOSTS if host != "trainer"
            )
            checks["refused"] = all(tried.values()) and counted
            verb = "refuses and counts" if checks["refused"] else "does NOT refuse and count"
            self._say(f"the firewall {verb}: {', '.join(tried)}")
        self._say(f"a round trip takes {checks['round_trip_ms']:.1f} ms")
        return checks

    def _watch(self, trainer: Child) -> None:
        """Follow the run until the trainer ends."""
        said, steps = 0, self._settings.versions - 1
        serving: dict[str, int | None] = {}
        while trainer.running():
            self._sample()
            for host, server in self._replicas.items():
                server.check()
                status = self._ask(host, "/deltasync/status?commits=0")
                if status is None:
                    continue
                if status["error"] is not None and status["state"] == "failed":
                    raise DeltaSyncError(f"The replica on {host} failed: {status['error']}")
                version, proven = status["version"], self._proofs[host]
                serving[host] = version
                if version is not None and (not proven or version >= proven[-1]["version"] + DIGEST_EVERY):
                    self._prove(host)
            lines = list(report.read_lines(self._folder / "metrics.jsonl"))
            if len(lines) >= said + 5:
                said = len(lines)
                versions = ", ".join(f"{host} {version}" for host, version in serving.items())
                self._say(f"step {said} of {steps}  reward {lines[-1]['reward']:.3f}  serving: {versions}")
            time.sleep(0.1)
        trainer.check()
        self._sample()

    def _sample(self) -> None:
        """Note the bytes that the trainer has sent to the bucket when a version is out; let the others join
        at half time.
        """
        versions = [line["version"] for line in report.read_lines(self._folder / "published.jsonl")]
        if not versions:
            return
        if versions[-1] not in self._uploads and self._network.isolated:
            self._uploads[versions[-1]] = self._network.counters(["trainer"])["trainer"]["to_bucket"]["bytes"]
        if self._joined_at is None and versions[-1] >= self._settings.versions // 2:
            extra = self._settings.replicas - len(REPLICAS)
            if extra > 0:
                self._joined_at = versions[-1]
                self._say(f"version {versions[-1]} is out; {extra} replicas in host memory join")
                channel = self._services.far_channel if self._settings.regions else self._services.channel
                self._followers = [
                    self._stack.enter_context(self._services.follower(number, channel))
                    for number in range(extra)
                ]

    def _prove(self, host: str) -> None:
        digest = self._ask(host, "/deltasync/digest")
        if digest is not None:
            self._proofs[host].append(digest)

    def _caught_up(self, host: str) -> dict[str, Any]:
        """Status of a replica once it serves the last published version."""
        last = self._settings.versions
        status: dict[str, Any] = {}

        def reached() -> bool:
            status.update(self._ask(host, "/deltasync/status") or {})
            return bool(status.get("version") == last)

        self._replicas[host].wait_until(reached, CATCH_UP_S, f"to serve version {last}")
        return status

    def _wait_for_followers(self) -> None:
        """Each has proven the last version by its fingerprint."""
        wanted = f'"version": {self._settings.versions},'
        for number, follower in enumerate(self._followers):
            log = self._folder / f"replica-{number}.log"
            follower.wait_until(
                lambda log=log: wanted in log.read_text(), CATCH_UP_S, "to reach the last version"
            )

    def _reread(self) -> dict[int, dict[str, str]]:
        """sha256 by version and tensor, of what the channel holds."""
        versions = sorted({proof["version"] for proofs in self._proofs.values() for proof in proofs} - {None})
        with self._services.rereader(versions) as reader:
            reader.wait()
            reader.check()
        found = json.loads((self._folder / "channel.json").read_text())
        return {int(version): sha256 for version, sha256 in found.items()}

    def _ask(self, host: str, path: str) -> Any:
        """What a service tells on its own host, so that nothing of it is counted; None while it does not
        answer.

        Raises:
            DeltaSyncError: it answered with an error.
        """
        request = urllib.request.Request(
            self._services.url(host) + path, headers={"Authorization": f"Bearer {self._services.token(host)}"}
        )
        try:
            with (
                self._network.inside(host),
                urllib.request.urlopen(request, timeout=30, context=self._trust) as reply,
            ):
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise DeltaSyncError(
                f"{request.full_url} answered {error.code}: {error.read()[:300]!r}"
            ) from None
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None
