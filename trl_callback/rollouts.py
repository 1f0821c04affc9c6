"""TRL's rollout loop, which runs in a process of its own: it keeps the versions that the server's replies tell."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from typing import Any

from trl_callback.tokens import VersionedLogProb, VersionedMetrics, read_versions

_headers: ContextVar[Mapping[str, str]] = ContextVar("deltasync_headers")  # of the last reply in this conversation


class _NotingSession:
    """An aiohttp session that notes the headers of replies."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    @contextlib.asynccontextmanager
    async def post(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with self._session.post(*args, **kwargs) as reply:
            _headers.set(reply.headers)
            yield reply


def make_versioned_loop(base: type, **settings: Any) -> Any:
    """Make a rollout loop of a subclass of TRL's `_AsyncRolloutLoop` whose samples carry the versions of their tokens.

    `functools.partial(make_versioned_loop, base)` stands for the subclass in the worker's `_loop_cls`: it can be pickled.
    """

    class VersionedLoop(base):
        """Everything but the versions is the base class's."""

        session: Any

        async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
            if not isinstance(self.session, _NotingSession):
                self.session = _NotingSession(self.session)
            _headers.set({})
            ids, log_probs = await super()._generate_one_turn(prompt_ids)
            versions = read_versions(_headers.get(), len(ids))
            return ids, [VersionedLogProb(*pair) for pair in zip(log_probs, versions, strict=True)]

        async def _score_group(self, group: Any) -> list[Any]:
            samples = await super()._score_group(group)
            # One sample for each sequence, in their order.
            sequences = itertools.chain.from_iterable(group.completions_sequences)
            for sample, sequence in zip(samples, sequences, strict=True):
                sample.metrics = VersionedMetrics.of(sample.metrics, sequence.old_log_probs)
            return samples

    return VersionedLoop(**settings)
