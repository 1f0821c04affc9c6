"""Caches of the engine's process, kept apart by version: no request uses values that other weights computed.

vLLM finds cached blocks by a hash that covers a request's `cache_salt`, and an encoder's outputs, such as an
image's features, by the `identifier` of the input. In the engine's process each request gets the salt of the
version that is live when its first token is computed, whatever route it came by, combined with a salt of its
own; its inputs' identifiers get that version's salt too. Running requests are not touched, so they keep their
blocks and their features over a commit. Every change of the weight version starts a new salt, also a change
back to an older version: what a request computed that spanned a commit is never found again. An entry that no
request finds any more is evicted first, as vLLM's caches evict the least recently used.

A connector that offloads blocks finds them by the same hash (`compat.KEYED`). Blocks that it has loaded for a
request are dropped if other weights became live before the request begins.

A request that names a session keeps the salt of the version that its conversation began with. So its prefix
is found although the weights have changed, as a running request keeps its blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections import OrderedDict
from typing import Any

from deltasync.serve.engine import around, number_of
from vllm_plugin import logger

SESSION = "deltasync-session:"
"""Prefix of a `cache_salt` that names its session's version and, after another colon, the request's own
salt.
"""

_SESSIONS = 1024
"""How many versions' salts are kept."""


class Salts:
    """The salts of one engine. The scheduling thread calls `begin` and `of`; the thread that takes requests,
    `of`.
    """

    def __init__(self) -> None:
        self._engine = secrets.token_hex(8)  # several engines may share one external cache
        self._numbers = itertools.count()
        self._by_version: OrderedDict[str, str] = OrderedDict()
        self._live: str | None = self._next()

    def _next(self) -> str:
        return f"{self._engine}-{next(self._numbers)}"

    def begin(self, version: str) -> None:
        """Start a salt: from now on other weights, named `version`, are live. Sessions of its number go on
        with it.
        """
        self._live = None  # so that no two requests share blocks if anything fails here
        salt, number = self._next(), str(number_of(version))
        self._by_version[number] = salt
        self._by_version.move_to_end(number)
        while len(self._by_version) > _SESSIONS:
            self._by_version.popitem(last=False)
        self._live = salt

    def of(self, given: str | None) -> str:
        """Return the salt of a request that starts now and came with the `given` one."""
        own, live = given or "", self._live
        if own.startswith(SESSION):
            version, _, own = own.removeprefix(SESSION).partition(":")
            live = self._by_version.get(version, live)
        if live is None:
            live = secrets.token_hex(16)
        return f"deltasync {live} {own}"


def install() -> None:
    """Salt all requests to engines of this process. Call before the first engine is made. A second call does
    nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched import output
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "deltasync_salts"):
        return
    salts = Salts()

    @around(EngineCore, "preprocess_add_request")
    def salt_request(preprocess: Any, self: Any, request: Any) -> Any:
        given = request.cache_salt
        try:
            request.cache_salt = salts.of(given)
        except Exception:  # salted when it is looked up
            logger.exception("deltasync could not salt a request")
        made = preprocess(self, request)
        made[0].deltasync_given = given, made[0].mm_features
        if made[0].mm_features:
            _salt(made[0], salts, inputs=True)
        return made

    @around(KVCacheManager, "prefix_cache_lookup_enabled")
    def salt_again(look_up: Any, self: Any, request: Any) -> bool:
        _salt(request, salts)
        return bool(look_up(self, request))

    @around(RequestOffloadState, "update_offload_keys")
    def key_again(update_keys: Any, self: Any) -> None:
        """Drop the keys that a connector has made of a request's blocks, if the request has another salt
        since.
        """
        request = self.req
        if vars(request).setdefault("deltasync_keyed", request.cache_salt) != request.cache_salt:
            request.deltasync_keyed = request.cache_salt
            for group in self.group_states:
                group.offload_keys.clear()
                group.next_stored_chunk_idx = 0
        update_keys(self)

    @around(Scheduler, "_update_waiting_for_remote_kv")
    def drop_loaded(begin: Any, self: Any, request: Any) -> None:
        """Let a request begin once a connector has loaded its blocks: without them, if other weights are live
        since.
        """
        if request.cache_salt != salts.of(request.deltasync_given[0]):
            request.num_computed_tokens = 0
            self.failed_recving_kv_req_ids.add(request.request_id)
        begin(self, request)

    @around(EngineCore, "set_weight_version")
    def begin_salt(set_version: Any, self: Any, weight_version: str) -> None:
        try:
            salts.begin(weight_version)
        except Exception:  # no two requests share blocks until the next version
            logger.exception("deltasync could not begin a salt")
        set_version(self, weight_version)

    @around(EncoderCacheManager, "check_and_update_cache")
    def note_cache(check_encoded: Any, self: Any, request: Any, input_id: int) -> bool:
        request.deltasync_encoded = self  # in which it may hold entries before it runs
        return bool(check_encoded(self, request, input_id))

    def keep_inputs(mm_features: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep all inputs in what workers are sent, where vLLM drops those whose blocks were found.

        A request that is preempted starts anew with other weights, finds no blocks, and needs its inputs.
        """
        return mm_features

    output.strip_covered_mm_data = keep_inputs
    EngineCore.deltasync_salts = lambda self: True


def _salt(request: Any, salts: Salts, *, inputs: bool = False) -> None:
    """Give a request that is about to start the salt of the live version. If that fails, it reads no cache of
    blocks.

    Args:
        request: One of vLLM's scheduler.
        salts: The engine's.
        inputs: Whether the identifiers of its inputs lack their salt, whatever its own is.
    """
    try:
        own, features = vars(request).setdefault("deltasync_given", (request.cache_salt, request.mm_features))
        salt = salts.of(own)
        if request.num_computed_tokens == 0 and (inputs or request.cache_salt != salt):
            request.cache_salt = salt
            # workers know the inputs of a request that ran before by their identifiers
            if not request.num_preemptions:
                if (encoded := vars(request).pop("deltasync_encoded", None)) is not None:
                    encoded.free(request)
                version = salt.split(" ")[1]
                request.mm_features = [
                    dataclasses.replace(each, identifier=f"{version} {each.identifier}") for each in features
                ]
            request.block_hashes.clear()
            request.update_block_hashes()
    except Exception:  # then it computes its whole prompt
        logger.exception("deltasync could not salt a request; it finds no cached prefix")
        request.skip_reading_prefix_cache = True
