"""Versions of trained tokens, and their age when they are trained."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Annotated, Any

import msgspec
import numpy as np

from deltasync.channel.documents import Count, TokenLag
from deltasync.channel.keys import LARGEST_VERSION
from deltasync.errors import UNREADABLE_JSON, ConfigError
from deltasync.serve.constraint import MAX_LAG_HEADER, VERSION_HEADER
from deltasync.serve.replies import SPANS_HEADER, VERSIONS_HEADER

logger = logging.getLogger(__name__)

_Version = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_VERSION)]
_SPANS = msgspec.json.Decoder(tuple[list[tuple[_Version, Count]]])  # one choice
# stands for a version (which begin with 1) that no reply named, or for a token that the model did not make
UNKNOWN = 0

_UNKNOWN_LAG = -1

_MOST_REFUSED = 256  # training ends after this number of consecutive samples whose replies name no version


def read_versions(headers: Mapping[str, str], token_count: int) -> list[int]:
    """Return the version that made each token of a reply with one choice.

    The versions are in `x-deltasync-spans`. Without this header, which is left out where it would be too
    long, each token counts as made by the oldest possible version, the first of `x-deltasync-versions`.
    Without both, they are `UNKNOWN`.
    """
    with contextlib.suppress(*UNREADABLE_JSON):  # the header is missing, or has several choices
        (spans,) = _SPANS.decode(headers.get(SPANS_HEADER, ""))
        if sum(tokens for _, tokens in spans) == token_count:
            return [version for version, tokens in spans for _ in range(tokens)]
    first = re.match(r"[0-9]{1,18}(?=\.\.)", headers.get(VERSIONS_HEADER, ""))
    return [int(first[0]) if first else UNKNOWN] * token_count


class VersionedLogProb(float):
    """A token's log probability that carries the version that made the token.

    TRL aligns the turns of a conversation token by token, and may drop, repeat or overwrite some. Versions
    attached to log probabilities stay aligned.
    """

    __slots__ = ("version",)
    version: int

    def __new__(cls, value: float, version: int) -> VersionedLogProb:
        """Attach a version to a log probability."""
        made = super().__new__(cls, value)
        made.version = version
        return made


class VersionedMetrics(dict[str, float]):
    """A sample's metrics with its `versions`: int64 of shape (tokens,), in the order of the sample's
    `input_ids`.

    TRL passes this object from scoring to training.
    """

    versions: np.ndarray

    @classmethod
    def of(cls, metrics: Mapping[str, float], log_probs: Iterable[float]) -> VersionedMetrics:
        """Add the versions of log probabilities to metrics. Plain floats have version `UNKNOWN`."""
        made = cls(metrics)
        made.versions = np.asarray(
            [getattr(value, "version", UNKNOWN) for value in log_probs], dtype=np.int64
        )
        return made


# headers of this conversation's last reply
_headers: ContextVar[Mapping[str, str]] = ContextVar("deltasync_headers")


async def _record_headers(session: Any, context: Any, params: Any) -> None:
    """Record the headers of a reply; a signal of aiohttp."""
    _headers.set(params.response.headers)


def make_versioned_loop(base: type, demanded: Any, max_lag: int | None, **settings: Any) -> Any:
    """Make a rollout loop whose samples carry the versions of their tokens. Its class extends TRL's
    `_AsyncRolloutLoop`.

    The loop runs in another process: `functools.partial(make_versioned_loop, base, demanded, max_lag)`, which
    can be pickled, replaces the class in the worker's `_loop_cls`. Requests demand at least the version of
    `demanded`, a shared number. The server ends a request whose oldest token is more than `max_lag` versions
    old, and another one goes on from its tokens with the newest version.
    """
    from aiohttp import TraceConfig

    trace = TraceConfig()
    trace.on_request_end.append(_record_headers)
    trace.freeze()

    class VersionedLoop(base):
        session: Any

        async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
            if trace not in self.session.trace_configs:
                self.session.trace_configs.append(trace)
            if demanded.value:
                self.session.headers[VERSION_HEADER] = f">={demanded.value}"
            if max_lag is not None:
                self.session.headers[MAX_LAG_HEADER] = str(max_lag)
            return await super()._generate_one_turn(prompt_ids)

        async def _post(self, path: str, payload: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            """As TRL's, for one whole answer, in as many requests as it takes."""
            ids, log_probs, asked = list[int](), list[float](), payload
            while True:
                _headers.set({})
                output = await super()._post(path, asked, *args, **kwargs)
                (choice,) = output["choices"]
                versions = read_versions(_headers.get(), len(choice["token_ids"]))
                made = (choice["logprobs"] or {}).get("token_logprobs", ())  # none of no token
                log_probs += [VersionedLogProb(*pair) for pair in zip(made, versions, strict=True)]
                ids += choice["token_ids"]
                if choice["finish_reason"] != "abort" or len(ids) == payload["max_tokens"]:
                    choice |= {"token_ids": ids, "logprobs": {"token_logprobs": log_probs}}
                    return output
                asked = payload | {
                    "prompt": payload["prompt"] + ids,
                    "max_tokens": payload["max_tokens"] - len(ids),
                    "seed": random.SystemRandom().getrandbits(63),  # not the noise of the first tokens again
                }

        async def _score_group(self, group: Any) -> list[Any]:
            samples = await super()._score_group(group)
            # There is one sample for each sequence, in the same order.
            sequences = itertools.chain.from_iterable(group.completions_sequences)
            for sample, sequence in zip(samples, sequences, strict=True):
                sample.metrics = VersionedMetrics.of(sample.metrics, sequence.old_log_probs)
            return samples

    return VersionedLoop(**settings)


class TokenAges:
    """Tracks the samples of a trainer from its queue to its loss. Only the main process has samples.

    A token's lag is the number of the trainer's weight syncs since the sync that published the token's
    version, the unit of TRL's `max_staleness`. If each sync is a version, the lag is the difference of
    versions. Tokens older than `max_lag` when the trainer receives their sample are not trained. Tokens of
    unknown age are trained only with `unversioned`.

    Attributes:
        demanded: The oldest version that the rollouts take, as `value`, shared with their process; None
            without one.
    """

    def __init__(self, max_lag: int | None, unversioned: bool = False) -> None:
        self.max_lag = max_lag
        self.demanded: Any = None
        self._unversioned = unversioned
        self._unversioned_count = 0  # consecutive samples without any version
        self._bound = 0
        self._now: Callable[[], int] = lambda: 0
        self._syncs: dict[int, int] = {}  # number of the sync of each version, ascending
        # versions of the trained tokens of each batch that waits for its step
        self._batches: deque[np.ndarray] = deque()
        self._tokens: Counter[int] = Counter()  # tokens by lag, since the last `metrics`
        self._of_version: Counter[int] = Counter()  # tokens by lag, since the previous version
        self._masked = 0
        self._warned = False

    def begin(self, now: Callable[[], int], max_staleness: int) -> None:
        """Start training. `now` returns the number of the trainer's syncs; `max_staleness` is TRL's."""
        self._now = now
        self._syncs.clear()
        self._bound = max_staleness if self.max_lag is None else self.max_lag
        self._batches.clear()

    def synced(self, version: int, sync: int) -> None:
        """Record the sync that published a version, alone or as the last of several syncs."""
        self._syncs[version] = sync

    def admit(self, sample: Any) -> bool:
        """Prepare a sample that the trainer receives from its queue. Return False if no token is left to
        train.

        Sets its `model_version` to the sync of its oldest trained token, which TRL compares with
        `max_staleness`. Clears `completion_mask` of tokens older than the bound, and of those of unknown age.
        Raises ConfigError after many consecutive samples without versions.
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
        self._report_unknown(unknown, trained)
        trained = trained & ~masked
        if (trained & known).any():
            oldest = self._now() - int(lags[trained & known].max())
            sample.model_version = oldest if known[trained].all() else min(oldest, sample.model_version)
        return bool(trained.any()) or not given.any()

    def _report_unknown(self, unknown: np.ndarray, trained: np.ndarray) -> None:
        """Warn once about tokens of unknown age; raise if there are no others any more."""
        if not unknown.any() or self._unversioned:
            self._unversioned_count = 0
            return
        self._unversioned_count = self._unversioned_count + 1 if unknown.sum() == trained.sum() else 0
        reason = (
            "name the version of this trainer that made their tokens: a server does not follow the channel, "
            "or a proxy "
            f"drops the headers {SPANS_HEADER} and {VERSIONS_HEADER}. To train such tokens, set "
            "train_unversioned=True."
        )
        if self._unversioned_count >= _MOST_REFUSED:
            raise ConfigError(f"Replies do not {reason}")
        if not self._warned:
            self._warned = True
            logger.warning(
                "A reply's tokens are masked. If this continues after the start, replies do not %s", reason
            )

    def add_batch(self, samples: Iterable[Any]) -> None:
        """Add a batch of samples from TRL's collator. Batches are trained in the same order."""
        versions = [np.zeros(0, dtype=np.int64)]
        for sample in samples:
            trained = np.asarray(sample["completion_mask"], dtype=bool)
            versions.append(_versions_of(sample["metrics"], len(trained))[trained])
        self._batches.append(np.concatenate(versions))

    def train(self) -> None:
        """Count the oldest batch, which is being trained."""
        if self._batches:
            lags = self._lags_of(self._batches.popleft()).tolist()
            self._tokens.update(lags)
            self._of_version.update(lags)

    def of_version(self) -> TokenLag | None:
        """Return mean, 95th percentile and maximum lag of tokens trained since the last call; None if no lag
        is known.
        """
        tokens, self._of_version = self._of_version, Counter()
        tokens.pop(_UNKNOWN_LAG, None)
        lags = lag_metrics(tokens, self._bound)
        return (lags["token_lag_mean"], lags["token_lag_p95"], lags["token_lag_max"]) if lags else None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the tokens trained since the last call, for the trainer's logs."""
        tokens, self._tokens = self._tokens, Counter()
        masked, self._masked = self._masked, 0
        count, unknown = tokens.total(), tokens.pop(_UNKNOWN_LAG, 0)
        metrics = lag_metrics(tokens, self._bound)
        if count:
            metrics["unversioned_token_fraction"] = unknown / count
        if self.max_lag is not None:
            metrics["masked_tokens"] = masked
        return {f"delta_sync/{name}": value for name, value in metrics.items()}

    def _lags_of(self, versions: np.ndarray) -> np.ndarray:
        """Return the lag of each version. Versions from before this process are extrapolated backwards.

        `UNKNOWN` versions, and versions that this trainer has not published, have the lag `_UNKNOWN_LAG`.
        """
        if not self._syncs:
            return np.where(versions == UNKNOWN, _UNKNOWN_LAG, self._now())
        first, first_sync = next(iter(self._syncs.items()))
        distinct, places = np.unique(versions, return_inverse=True)
        syncs = [self._syncs.get(version, first_sync - (first - version)) for version in distinct.tolist()]
        lags = self._now() - np.asarray(syncs, dtype=np.int64)[places]
        return np.where((versions == UNKNOWN) | (lags < 0), _UNKNOWN_LAG, lags)


def _versions_of(metrics: Mapping[str, float], token_count: int) -> np.ndarray:
    """Return the version of each token of a sample, from its metrics."""
    return getattr(metrics, "versions", np.full(token_count, UNKNOWN))


def lag_metrics(tokens: Mapping[int, int], bound: int) -> dict[str, float]:
    """Return mean, 95th percentile (nearest rank) and maximum of lags, and the fraction of tokens older than
    `bound`.

    `tokens` maps each lag to its number of tokens. The result is empty without tokens.
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
