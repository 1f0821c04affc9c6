"""The last tests of the server: after them its metrics tell of commits that were rolled back."""

from __future__ import annotations

import pytest

from tests.integration.vllm_server import Server, complete, digests

pytestmark = pytest.mark.vllm


def test_bits_that_are_not_the_published_ones_are_rolled_back_and_the_next_anchor_heals(server: Server) -> None:
    # A record that promises a fingerprint which its own delta does not give: the only fault that reaches the weights.
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    version = server.status()["version"]
    server.step()
    status = server.publish_wrong_bits()
    assert status["version"] == version
    assert server.json("/deltasync/digest") == {"version": version, "sha256": digests(before)}
    assert len(complete(server.url, 5)) == 5
    server.publish_anchor()
    assert server.status()["commits"][-1]["anchor"]
