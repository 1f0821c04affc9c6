"""Versions of trained tokens: which version made each, how old it is when it is trained, and the importance weights."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from deltasync.channel.documents import Count, TokenLag
from deltasync.channel.keys import LARGEST_VERSION
from deltasync.errors import UNREADABLE_JSON, ConfigError

logger = logging.getLogger(__name__)

SPANS_HEADER = "x-deltasync-spans"
HEADER = "x-deltasync-versions"

_Version = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_VERSION)]
_SPANS = msgspec.json.Decoder(tuple[list[tuple[_Version, Count]]])  # of one choice

UNKNOWN = 0
"""In place of a version (they begin with 1): no reply named it, or the model did not make the token."""

_UNKNOWN_LAG = -1

_MOST_REFUSED = 256
"""Samples in a row whose replies name no version, before training ends."""


def read_versions(headers: Mapping[str, str], token_count: int) -> list[int]:
    """Return the version that made each token of a reply with one choice.

    They are in `x-deltasync-spans`. Without it (vLLM before 0.32) each token counts as made by the oldest possible version,
    which is the first of `x-deltasync-versions`; without that, versions are `UNKNOWN`.
    """
    with contextlib.suppress(*UNREADABLE_JSON):  # no such header, or not of one choice
        (spans,) = _SPANS.decode(headers.get(SPANS_HEADER, ""))
        if sum(tokens for _, tokens in spans) == token_count:
            return [version for version, tokens in spans for _ in range(tokens)]
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
        """Make the log probability of a token that this version made."""
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
        """Take the versions from log probabilities; one that is no `VersionedLogProb` has version `UNKNOWN`."""
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
    """Make a rollout loop, of a subclass of TRL's `_AsyncRolloutLoop`, whose samples carry the versions of their tokens.

    It runs in a process of its own: `functools.partial(make_versioned_loop, base)` takes the place of the class in the
    worker's `_loop_cls`, and can be pickled.
    """

    class VersionedLoop(base):
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
    that are older than `max_lag` when the trainer takes their sample are not trained, nor are those of unknown age unless
    `unversioned` is set.
    """

    def __init__(self, max_lag: int | None, unversioned: bool = False) -> None:
        self.max_lag = max_lag
        self._unversioned = unversioned
        self._refused = 0  # samples in a row of which no token has a version
        self._bound = 0
        self._now: Callable[[], int] = lambda: 0
        self._syncs: dict[int, int] = {}  # by version, in order
        self._taken: deque[np.ndarray] = deque()  # versions of the trained tokens of each batch that waits for its step
        self._tokens: Counter[int] = Counter()  # by lag, since the last `metrics`
        self._of_version: Counter[int] = Counter()  # by lag, since the version before
        self._masked = 0
        self._weights = np.zeros(3)
        self._warned = False

    def begin(self, now: Callable[[], int], max_staleness: int) -> None:
        """Start training. `now` returns how many times the trainer has synced; `max_staleness` is TRL's."""
        self._now = now
        self._syncs.clear()
        self._bound = max_staleness if self.max_lag is None else self.max_lag
        self._taken.clear()

    def synced(self, version: int, sync: int) -> None:
        """Note that a sync published a version, alone or as the last of several."""
        self._syncs[version] = sync

    def admit(self, sample: Any) -> bool:
        """Prepare a sample that the trainer takes off its queue.

        Sets its `model_version` to the sync of its oldest trained token, which TRL holds to `max_staleness`. Clears
        `completion_mask` of tokens older than the bound, and of those of unknown age; False if that leaves none to train.

        Raises:
            ConfigError: no token of many samples in a row had a version.
        """
        given = trained = np.asarray(sample.completion_mask, dtype=bool)
        lags = self._lags_of(_versions_of(sample.metrics, len(trained)))
        known = lags != _UNKNOWN_LAG
        unknown = trained & ~known
        masked = np.zeros_like(trained) if self._unversioned else unknown
        if self.max_lag is not None:
            masked = masked | (trained & (lags > self.max_lag))
        for place in np.flatnonzero(masked):
            sample.completion_mask[place] = 0
        self._masked += int(masked.sum())
        self._note_unknown(unknown, trained)
        trained = trained & ~masked
        if (trained & known).any():
            oldest = self._now() - int(lags[trained & known].max())
            sample.model_version = oldest if known[trained].all() else min(oldest, sample.model_version)
        return bool(trained.any()) or not given.any()

    def _note_unknown(self, unknown: np.ndarray, trained: np.ndarray) -> None:
        """Warn once of tokens of unknown age; raise if there are no others any more."""
        if not unknown.any() or self._unversioned:
            self._refused = 0
            return
        self._refused = self._refused + 1 if unknown.sum() == trained.sum() else 0
        reason = (
            "say which version of this trainer made their tokens: a server does not follow the channel, or a proxy drops "
            f"the headers {SPANS_HEADER} and {HEADER}. To train such tokens, set train_unversioned=True."
        )
        if self._refused >= _MOST_REFUSED:
            raise ConfigError(f"Replies do not {reason}")
        if not self._warned:
            self._warned = True
            logger.warning("A reply's tokens are masked. If it goes on after the start, replies do not %s", reason)

    def take(self, samples: Iterable[Any]) -> None:
        """Note a new batch: its samples as TRL's collator has them. Batches are trained in the order they are made."""
        versions = [np.zeros(0, dtype=np.int64)]
        for sample in samples:
            trained = np.asarray(sample["completion_mask"], dtype=bool)
            versions.append(_versions_of(sample["metrics"], len(trained))[trained])
        self._taken.append(np.concatenate(versions))

    def train(self, weights: torch.Tensor | None) -> None:
        """Count the oldest batch, which is being trained now; `weights` are the `weight_sums` of all processes."""
        if self._taken:
            lags = self._lags_of(self._taken.popleft()).tolist()
            self._tokens.update(lags)
            self._of_version.update(lags)
        if weights is not None:
            self._weights += weights.cpu().numpy()

    def of_version(self) -> TokenLag | None:
        """Return mean, 95th percentile and maximum lag of the tokens trained since the last call; None if none is known."""
        tokens, self._of_version = self._of_version, Counter()
        tokens.pop(_UNKNOWN_LAG, None)
        lags = lag_metrics(tokens, self._bound)
        return (lags["token_lag_mean"], lags["token_lag_p95"], lags["token_lag_max"]) if lags else None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of what was trained since the last call, for the trainer's logs."""
        tokens, self._tokens = self._tokens, Counter()
        masked, self._masked = self._masked, 0
        weights, self._weights = self._weights, np.zeros(3)
        count, unknown = tokens.total(), tokens.pop(_UNKNOWN_LAG, 0)
        metrics = lag_metrics(tokens, self._bound)
        if count:
            metrics["unversioned_token_fraction"] = unknown / count
        if self.max_lag is not None:
            metrics["masked_tokens"] = masked
        size = effective_sample_fraction(*weights)
        if size is not None:
            metrics["effective_sample_fraction"] = size
        return {f"delta_sync/{name}": value for name, value in metrics.items()}

    def _lags_of(self, versions: np.ndarray) -> np.ndarray:
        """The lag of each version; those from before this process count on backwards.

        `_UNKNOWN_LAG` for `UNKNOWN`, and for versions that this trainer has not published, of another channel for example.
        """
        if not self._syncs:
            return np.where(versions == UNKNOWN, _UNKNOWN_LAG, self._now())
        first, first_sync = next(iter(self._syncs.items()))
        distinct, places = np.unique(versions, return_inverse=True)
        syncs = [self._syncs.get(version, first_sync - (first - version)) for version in distinct.tolist()]
        lags = self._now() - np.asarray(syncs, dtype=np.int64)[places]
        return np.where((versions == UNKNOWN) | (lags < 0), _UNKNOWN_LAG, lags)


def _versions_of(metrics: Mapping[str, float], token_count: int) -> np.ndarray:
    """The version of each token of a sample, from its metrics."""
    return getattr(metrics, "versions", np.full(token_count, UNKNOWN))


def lag_metrics(tokens: Mapping[int, int], bound: int) -> dict[str, float]:
    """Return mean, 95th percentile (by nearest rank) and maximum of lags, and the fraction of tokens older than `bound`.

    `tokens` has how many there are of each lag. Empty without tokens.
    """
    if not tokens:
        return {}
    lags, counts = np.array(list(tokens.items())).T
    return {
        "token_lag_mean": float(np.average(lags, weights=counts)),
        "token_lag_p95": int(np.percentile(lags, 95, weights=counts, method="inverted_cdf")),
        "token_lag_max": int(lags.max()),
        "stale_token_fraction": float(counts[lags > bound].sum() / counts.sum()),
    }


def weight_sums(log_probs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the importance weights of a batch's trained tokens, the sum of their squares, and their count.

    Float64 of shape (3,), from the trainer's log probabilities at each packed position and TRL's batch: `token_index`, the
    packed position of each trained token or -1, and `old_log_probs`, the server's.
    """
    selected = inputs["token_index"] >= 0
    new, old = log_probs.detach().flatten()[inputs["token_index"][selected]], inputs["old_log_probs"][selected]
    weights = (new.double() - old.double()).exp()
    return torch.stack([weights.sum(), weights.square().sum(), torch.ones_like(weights).sum()])


def effective_sample_fraction(weight_sum: float, square_sum: float, count: float) -> float | None:
    """Return Kish's effective sample size as a fraction of the size: (sum w)^2 / (N sum w^2); None without samples."""
    return weight_sum**2 / (count * square_sum) if count and square_sum else None
