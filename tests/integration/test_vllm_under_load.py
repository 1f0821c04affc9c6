"""Commit after commit in a real vLLM under load, each checked bit by bit; COMMITS_UNDER_LOAD says how many."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.integration.vllm_server import complete, save_model, serving

pytestmark = pytest.mark.vllm

COMMITS = int(os.environ.get("COMMITS_UNDER_LOAD", "0"))


@pytest.mark.skipif(not COMMITS, reason="a long run: make test-long")
@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_holds_the_published_bits_after_every_commit_under_load(workers: int, tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[-2:]
    arguments = ["--tensor-parallel-size", str(workers)] if workers > 1 else []
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))} if workers > 1 else {}
    with serving(save_model(tmp_path), *arguments, cores=cores[-workers:], **environ) as server:
        server.assert_serves(server.publish())
        done = threading.Event()
        completed: list[int] = []

        def ask() -> None:
            while not done.is_set():
                completed.append(len(complete(server.url, 200)))

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            for _ in range(COMMITS):
                server.step()
                server.assert_serves(server.publish())
        finally:
            done.set()
            for client in clients:
                client.join()
        commits = server.status()["commits"]
        assert len(commits) == COMMITS
        assert all(commit["changed"] for commit in commits)
        # All four clients may be between two requests for once.
        assert sum(commit["running_requests"] > 0 for commit in commits) > 0.8 * COMMITS
        assert completed and set(completed) == {200}
