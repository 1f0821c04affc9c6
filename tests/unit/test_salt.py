"""Salts of the prefix cache, over vLLM's own requests and its manager of cached blocks; no model and no
engine process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_plugin import salt
from vllm_plugin.salt import Salts


def test_requests_of_one_version_share_a_salt_and_those_of_two_do_not() -> None:
    salts = Salts()
    seen = {salts.of(None)}
    for version in ("1", "2", "1", "default"):
        salts.begin(version)
        now = salts.of(None)
        assert now == salts.of("") == salts.of(None)
        assert now not in seen, (
            "a version that comes back begins anew: blocks may hold keys of the version between"
        )
        seen.add(now)
    assert Salts().of(None) not in seen


def test_a_requests_own_salt_is_combined_with_the_version() -> None:
    salts = Salts()
    assert len({salts.of(None), salts.of("tenant"), salts.of("other")}) == 3
    before = salts.of("tenant")
    salts.begin("2")
    assert salts.of("tenant") != before


def test_a_session_keeps_the_salt_of_its_version_and_its_own() -> None:
    salts = Salts()
    salts.begin("5")
    plain, own = salts.of(None), salts.of("tenant")
    salts.begin("6")
    assert salts.of("deltasync-session:5:") == salts.of("deltasync-session:5") == plain
    assert salts.of("deltasync-session:5:tenant") == own
    assert salts.of("deltasync-session:4:tenant") == salts.of("tenant") != own


def test_after_a_fork_no_session_finds_what_the_lost_version_computed() -> None:
    salts = Salts()
    salts.begin("5")
    lost = salts.of(None)
    salts.begin("5-0123456789ab")
    now = salts.of(None)
    assert now != lost
    assert salts.of("deltasync-session:5:") == now
    salts.begin("6")
    assert salts.of("deltasync-session:5:") == now


def test_only_so_many_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salt, "_SESSIONS", 3)
    salts = Salts()
    for version in range(1, 6):
        salts.begin(str(version))
    assert salts.of("deltasync-session:2:") == salts.of(None)
    assert salts.of("deltasync-session:3:") != salts.of(None)


def test_if_a_salt_cannot_begin_no_two_requests_share_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    salts = Salts()

    def fail(self: Salts) -> str:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Salts, "_next", fail)
        with pytest.raises(ZeroDivisionError):
            salts.begin("2")
    assert salts.of(None) != salts.of(None)
    salts.begin("3")
    assert salts.of(None) == salts.of(None)


_SCRIPT = """
import logging
from types import SimpleNamespace
from unittest import mock
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm_plugin import salt

salt.install()
patched = EngineCore.preprocess_add_request
salt.install()
assert EngineCore.preprocess_add_request is patched

BLOCK = 16
init_none_hash(sha256)
spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
config = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
manager = KVCacheManager(
    config, max_model_len=512, scheduler_block_size=BLOCK, hash_block_size=BLOCK, max_in_flight_tokens=0,
    enable_caching=True, log_stats=True,
)
core = object.__new__(EngineCore)
core.mm_receiver_cache = None
core.request_block_hasher = get_request_block_hasher(BLOCK, sha256)
core.use_mm_embeddings = False
numbers = iter(range(1000))

def add(cache_salt=None, inputs=None):
    request = EngineCoreRequest(
        request_id=str(next(numbers)), prompt_token_ids=list(range(100)), mm_features=inputs,
        sampling_params=SamplingParams(max_tokens=4), pooling_params=None, arrival_time=0.0, lora_request=None,
        cache_salt=cache_salt, data_parallel_rank=None,
    )
    with mock.patch.object(core, "structured_output_manager", SimpleNamespace(), create=True):
        return core.preprocess_add_request(request)[0]

def start(request):
    blocks, hits, *_ = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 100 - hits, hits, blocks)
    request.num_computed_tokens = 100
    return hits

HIT = 96
assert core.deltasync_salts()
core._weight_version = "default"
assert [start(add()), start(add()), start(add("tenant")), start(add("tenant"))] == [0, HIT, 0, HIT]
waiting, own = add(), add("tenant")
core.set_weight_version("1")
assert core.get_weight_version() == "1"
assert [start(waiting), start(add()), start(own), start(add("tenant"))] == [0, HIT, 0, HIT], "a waiting request"
running = add()
assert start(running) == HIT
before = running.cache_salt, list(running.block_hashes)
core.set_weight_version("2")
manager.prefix_cache_lookup_enabled(running)
assert (running.cache_salt, running.block_hashes) == before, "running requests keep their blocks"
assert start(add("deltasync-session:1:")) == HIT
assert start(add()) == 0
manager.free(running)
running.num_computed_tokens, running.num_preemptions = 0, 1
assert start(running) == HIT, "it starts anew, with the keys of version 2"

# Inputs of an encoder: a version's own features, by identifiers that no other version has.
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
encoded = EncoderCacheManager(cache_size=40)
sent = [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(at, 8)) for at, name in ((8, "a"), (40, "b"))]

def see(request):
    # Which inputs are found; the others are computed.
    start(request)
    found = [encoded.check_and_update_cache(request, at) for at in (0, 1)]
    for at in (0, 1):
        if not found[at]:
            assert encoded.can_allocate(request, at, 100, 0)
            encoded.allocate(request, at)
    return found

seeing, same, queued = (add(inputs=sent) for _ in range(3))
assert see(seeing) == [False, False] and see(same) == [True, True]
names = [feature.identifier for feature in seeing.mm_features]
assert [feature.identifier for feature in sent] == ["a", "b"], "what came with the request is left alone"
core.set_weight_version("3")
assert see(queued) == [False, False], "it starts under version 3"
assert see(add(inputs=sent)) == [True, True]
assert [encoded.check_and_update_cache(seeing, at) for at in (0, 1)] == [True, True], "a running request keeps its own"
assert see(session := add("deltasync-session:2:", inputs=sent)) == [True, True]
manager.free(seeing)
seeing.num_computed_tokens, seeing.num_preemptions = 0, 1
start(seeing)
assert [feature.identifier for feature in seeing.mm_features] == names, "workers know them by these"
assert seeing.block_hashes != queued.block_hashes, "whose keys rest on features of version 2"
for request in (seeing, same, session):
    encoded.free(request)
waits = add(inputs=sent)
manager.get_computed_blocks(waits)
assert encoded.check_and_update_cache(waits, 0), "found, but it does not run yet"
core.set_weight_version("4")
manager.get_computed_blocks(waits)
assert not encoded.get_cached_input_ids(waits), "it holds no entry of version 3 any more"
assert see(add(inputs=sent)) == [False, False]
assert set(names) & set(encoded.get_freed_mm_hashes()), "what nobody finds is evicted when space is needed"

# Faults: nothing reaches vLLM, and nothing is shared that should not be.
logging.disable(logging.CRITICAL)
def fail(*_):
    raise ZeroDivisionError
with mock.patch.object(salt.Salts, "of", fail):
    assert [start(add()), start(add("tenant"))] == [0, 0]
with mock.patch.object(salt.Salts, "begin", fail):
    core.set_weight_version("3")
assert core.get_weight_version() == "3"
print("all of it")
"""


def test_vllms_own_cache_finds_blocks_of_the_live_version_only() -> None:
    """In a process of its own, because it changes vLLM's classes."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["all of it"], done.stderr[-3000:]
