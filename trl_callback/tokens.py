"""Which version made each token that is trained, how old it is by then, and how much that weighs."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from deltasync.channel.documents import TokenLag

logger = logging.getLogger(__name__)

SPANS_HEADER = "x-deltasync-spans"
HEADER = "x-deltasync-versions"

UNKNOWN = 0
"""In place of a version, which begin with 1: no reply told it, or the token is none of the model's."""


def read_versions(headers: Mapping[str, str], token_count: int) -> list[int]:
    """The version that made each token of a reply with one choice.

    `x-deltasync-spans` has it. Without it (vLLM before 0.32) each token counts as made by the oldest version that may have,
    which is the first of `x-deltasync-versions`; without that, versions are `UNKNOWN`.
    """
    try:
        (spans,) = json.loads(headers.get(SPANS_HEADER, ""))
        if sum(tokens for _, tokens in spans) == token_count:
            return [int(version) for version, tokens in spans for _ in range(tokens)]
    except (TypeError, ValueError):
        pass  # none, or not of one choice
    first = re.match(r"[0-9]{1,18}(?=\.\.)", headers.get(HEADER, ""))
    return [int(first[0]) if first else UNKNOWN] * token_count


class VersionedLogProb(float):
    """A token's log probability that remembers the version that made its token, wherever TRL puts it.

    TRL aligns the turns of a conversation token by token and may drop, repeat or overwrite some. What it does to log
    probabilities it does to their versions.
    """

    __slots__ = ("version",)
    version: int

    def __new__(cls, value: float, version: int) -> VersionedLogProb:
        """Of a token that this version made."""
        made = super().__new__(cls, value)
        made.version = version
        return made


class VersionedMetrics(dict[str, float]):
    """A sample's metrics that carry its versions: TRL hands this object on from where it scores to where it trains.

    Attributes:
        versions: int64 of shape (tokens,), in the order of the sample's `input_ids`.
    """

    versions: np.ndarray

    @classmethod
    def of(cls, metrics: Mapping[str, float], log_probs: Iterable[float]) -> VersionedMetrics:
        """Take the versions from log probabilities; those that are no `VersionedLogProb` have none."""
        made = cls(metrics)
        made.versions = np.asarray([getattr(value, "version", UNKNOWN) for value in log_probs], dtype=np.int64)
        return made


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

    It runs in a process of its own: `functools.partial(make_versioned_loop, base)` stands for it in the worker's
    `_loop_cls`, and can be pickled.
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


class TokenAges:
    """Follows the samples of a trainer from its queue to its loss. Only the main process has samples.

    A token's lag is how many times the trainer has synced its weights since the sync that published the token's version.
    That is the unit of TRL's `max_staleness` too. Where each sync is a version, it is the difference of versions. Tokens
    that are older than `max_lag` when the trainer takes their sample are not trained.
    """

    def __init__(self, max_lag: int | None) -> None:
        self.max_lag = max_lag
        self._bound = 0 if max_lag is None else max_lag
        self._now: Callable[[], int] = lambda: 0
        self._syncs: dict[int, int] = {}  # by version, in order
        self._taken: deque[np.ndarray] = deque()  # versions of the trained tokens of each batch that waits for its step
        self._tokens: Counter[int] = Counter()  # by lag, since the last look
        self._of_version: Counter[int] = Counter()  # by lag, since the version before
        self._unknown = 0
        self._masked = 0
        self._weights = np.zeros(3)
        self._warned = False

    def begin(self, now: Callable[[], int], max_staleness: int) -> None:
        """Training begins. `now` is how many times the trainer has synced; `max_staleness` is TRL's."""
        self._now = now
        self._syncs.clear()
        self._bound = max_staleness if self.max_lag is None else self.max_lag
        self._taken.clear()

    def synced(self, version: int, sync: int) -> None:
        """Note that a sync published a version, alone or as the last of several."""
        self._syncs[version] = sync

    def admit(self, sample: Any) -> bool:
        """Prepare a sample that the trainer takes off its queue.

        Sets its `model_version` to the sync of its oldest trained token, which TRL holds to `max_staleness`. With a bound,
        clears `completion_mask` of older tokens, and of those of unknown age; False if that leaves none to be trained.
        """
        trained = np.asarray(sample.completion_mask, dtype=bool)
        versions = getattr(sample.metrics, "versions", np.full(len(trained), UNKNOWN))
        lags = self._lags_of(versions)
        known = lags >= 0
        if self.max_lag is not None:
            old = trained & ~(known & (lags <= self.max_lag))
            for place in np.flatnonzero(old):
                sample.completion_mask[place] = 0
            self._masked += int(old.sum())
            self._warn_of_unknown(trained & ~known)
            trained &= ~old
        if (trained & known).any():
            oldest = self._now() - int(lags[trained & known].max())
            sample.model_version = oldest if known[trained].all() else min(oldest, sample.model_version)
        return self.max_lag is None or bool(trained.any())

    def take(self, samples: Iterable[Any]) -> None:
        """Note a batch that is made: samples as TRL's collator has them. Batches are trained in the order they are made."""
        made = [np.zeros(0, dtype=np.int64)]
        for sample in samples:
            trained = np.asarray(sample["completion_mask"], dtype=bool)
            made.append(getattr(sample["metrics"], "versions", np.full(len(trained), UNKNOWN))[trained])
        self._taken.append(np.concatenate(made))

    def train(self, weights: torch.Tensor | None) -> None:
        """Count the oldest batch, which is being trained now; `weights` are the `weight_sums` of all processes."""
        if self._taken:
            lags = self._lags_of(self._taken.popleft())
            known = lags[lags >= 0].tolist()
            self._unknown += len(lags) - len(known)
            self._tokens.update(known)
            self._of_version.update(known)
        if weights is not None:
            self._weights += weights.cpu().numpy()

    def of_version(self) -> TokenLag | None:
        """Mean, 95th percentile and maximum lag of what was trained since the last call; None if no age was known."""
        told, self._of_version = lag_metrics(self._of_version, self._bound), Counter()
        return (told["token_lag_mean"], told["token_lag_p95"], told["token_lag_max"]) if told else None

    def metrics(self) -> dict[str, float]:
        """What was trained since the last call, for the trainer's logs."""
        tokens, self._tokens = self._tokens, Counter()
        unknown, self._unknown = self._unknown, 0
        masked, self._masked = self._masked, 0
        weights, self._weights = self._weights, np.zeros(3)
        told = lag_metrics(tokens, self._bound)
        if tokens or unknown:
            told["unversioned_token_fraction"] = unknown / (unknown + tokens.total())
        if self.max_lag is not None:
            told["masked_tokens"] = masked
        size = effective_sample_fraction(*weights)
        if size is not None:
            told["effective_sample_fraction"] = size
        return {f"delta_sync/{name}": value for name, value in told.items()}

    def _lags_of(self, versions: np.ndarray) -> np.ndarray:
        """The lag of each version; those from before this process count on backwards.

        Below 0 where it is not known: `UNKNOWN`, and versions that this trainer has not published, of another channel say.
        """
        if not self._syncs:
            return np.where(versions == UNKNOWN, -1, self._now())
        first, first_sync = next(iter(self._syncs.items()))
        distinct, places = np.unique(versions, return_inverse=True)
        syncs = [self._syncs.get(version, first_sync - (first - version)) for version in distinct.tolist()]
        return np.where(versions == UNKNOWN, -1, self._now() - np.asarray(syncs, dtype=np.int64)[places])

    def _warn_of_unknown(self, unknown: np.ndarray) -> None:
        if unknown.any() and not self._warned:
            self._warned = True
            logger.warning(
                "A reply did not say which version of this trainer made its tokens, so max_token_lag masks them. If this "
                "goes on after the start, a server does not follow the channel, or a proxy drops its headers %s and %s.",
                SPANS_HEADER,
                HEADER,
            )


def lag_metrics(tokens: Mapping[int, int], bound: int) -> dict[str, float]:
    """Mean, 95th percentile (by nearest rank) and maximum of lags, and the fraction of tokens with more than `bound`.

    `tokens` has how many there are of each lag. Nothing without tokens.
    """
    count = sum(tokens.values())
    if not count:
        return {}
    lags = sorted(tokens)
    reached = np.cumsum([tokens[lag] for lag in lags])
    return {
        "token_lag_mean": sum(lag * tokens[lag] for lag in lags) / count,
        "token_lag_p95": lags[int(np.searchsorted(reached, math.ceil(0.95 * count)))],
        "token_lag_max": lags[-1],
        "stale_token_fraction": sum(tokens[lag] for lag in lags if lag > bound) / count,
    }


def weight_sums(log_probs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the importance weights of a batch's trained tokens, sum of their squares, and how many there are.

    Float64 of shape (3,), from the trainer's log probabilities at each packed position and TRL's batch: `token_index`, the
    packed position of each trained token or -1, and `old_log_probs`, the server's.
    """
    selected = inputs["token_index"] >= 0
    new, old = log_probs.detach().flatten()[inputs["token_index"][selected]], inputs["old_log_probs"][selected]
    weights = (new.double() - old.double()).exp()
    return torch.stack([weights.sum(), weights.square().sum(), torch.ones_like(weights).sum()])


def effective_sample_fraction(weight_sum: float, square_sum: float, count: float) -> float | None:
    """Kish's effective sample size, as a fraction of the size: (sum w)^2 / (N sum w^2); None without samples."""
    return weight_sum**2 / (count * square_sum) if count and square_sum else None
