"""The status of replicas, as seen by a trainer: heartbeats in the channel, or replies of servers whose URLs
are known.

Correctness never depends on them: a lost or stale heartbeat only makes a replica look late. Their age is by
the store's clock (`StoreClock`), or by how long they were seen not to change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from deltasync import limits
from deltasync.channel import keys
from deltasync.channel.clock import StoreClock
from deltasync.channel.documents import Boot, Epoch, Number, Sha256, VersionId
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    UNREADABLE_JSON,
    AckTimeoutError,
    ConfigError,
    DeltaSyncError,
    FormatError,
    ObjectMissingError,
    TransientStoreError,
    describe,
)
from deltasync.stores.base import ObjectInfo, Store
from deltasync.threads import each

LIVE_S = 60.0  # a replica counts as live until its heartbeat is this old
EXPIRED_S = 3600.0  # a heartbeat that is older than this is not read, unless somebody asks for older ones
STOPPED = "stopped"
"""State in the last heartbeat of a replica that ended in order. It serves nothing, and nobody waits for
it.
"""
UNKNOWN = "unknown"  # state of a server that answers 404 when it is asked for its status: it does not follow

_FIRST_POLL_S, _LONGEST_POLL_S = 0.01, 0.5
_ANSWER_S = 5.0
_CONFIRM_S = 3.0  # how long a server has to answer 404, which a proxy may do while the server starts
_REFRESH_S = 1.0  # least time for one refresh of all heartbeats, also for the last one
_COARSE_S = 2.0  # stores report times in whole seconds
_SAMPLE = 20  # heartbeats that are read at once, where one that lags is reason enough to wait
_NAMED = 20  # replicas that an error names
_STATUS = "deltasync/status?commits=0"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The status of a replica, as it writes it to the channel.

    Attributes:
        version, epoch, sha256: Identity of the version that it serves, None before the first.
        boot: Identifies one life of the replica: names, hosts and process numbers are the same in many
            containers.
        state_s: Seconds for which it had been in this state, by its own count.
        followed_s_ago: Seconds since it could last follow the channel, by its own count; None before the
            first time.
        time_s: Time of writing, in seconds since 1970, by the replica's clock. In a heartbeat that was read:
            when it was stored, by the reader's clock; its age is by the store's.
    """

    replica_id: str
    run_id: str | None  # the run that it follows, None while it does not know
    version: Number | None
    state: str  # `waiting`, `staging`, `committing`, `serving`, `stale`, `sleeping`, `failed` or `stopped`
    epoch: Epoch | None = None
    sha256: Sha256 | None = None
    newest_version: Number | None = None
    # the versions that it takes, None for the newest. Nobody waits for a pinned replica.
    pin: str | None = None
    error: str | None = None
    boot: Boot | None = None
    state_s: float | None = None
    followed_s_ago: float | None = None
    time_s: float = dataclasses.field(default_factory=lambda: time.time())  # a clock may be replaced

    @property
    def serving(self) -> VersionId | None:
        """Identity of the version that it serves, None if it serves none or gives only a number."""
        if self.version is None or self.epoch is None or self.sha256 is None:
            return None
        return VersionId(self.version, self.epoch, self.sha256)


describe(Heartbeat)


def encode(heartbeat: Heartbeat) -> bytes:
    """Return the bytes of a heartbeat, with an error that is cut where it is too long."""
    if heartbeat.error is not None and len(heartbeat.error) > limits.ERROR_CHARACTERS:
        heartbeat = dataclasses.replace(
            heartbeat, error=f"{heartbeat.error[: limits.ERROR_CHARACTERS - 4]} ..."
        )
    return msgspec.json.encode(heartbeat)


def write(store: Store, heartbeat: Heartbeat) -> None:
    """Replace the replica's heartbeat, of this boot, in the store."""
    store.put(keys.replica(heartbeat.replica_id, heartbeat.boot), encode(heartbeat))


def read_all(store: Store, run_id: str) -> list[Heartbeat]:
    """Read the heartbeats of one run's replicas, see `FleetHeartbeats.refresh`."""
    return FleetHeartbeats(store, run_id).refresh()


_State = tuple[int, float, str | None]


@dataclasses.dataclass(slots=True)
class _Known:
    """An object that holds a heartbeat. Times are by `time.monotonic`."""

    info: ObjectInfo
    since_s: float  # when this state was first seen
    until_s: float = -math.inf  # when another one, or none, was last seen there
    read: _State | None = None  # the state in which it need not be read again
    beats: list[Heartbeat] | None = None  # empty if it is unreadable; None until it was read


class FleetHeartbeats:
    """The heartbeats of one run in a store. Each look lists them and reads those that have changed, however
    many there are.

    Args:
        store: The store.
        run_id: The run.
        clock: The store's clock; one of its own by default.
        decides: Whether something is waited for or deleted by what is seen here. The first look then measures
            the clock. Otherwise that is done only if no heartbeat is recent by this machine's clock, which
            may be wrong.

    Attributes:
        run_id: The run.
    """

    def __init__(
        self, store: Store, run_id: str, clock: StoreClock | None = None, *, decides: bool = False
    ) -> None:
        self._store = store
        self.run_id = run_id
        self._clock = StoreClock(store) if clock is None else clock
        self._decides = decides
        self._known: dict[str, _Known] = {}
        self._looked_s = -math.inf
        self._measures = False  # whether a thread measures the clock, which may hang
        self._guesses = False  # whether this machine's clock is all there is

    def refresh(
        self,
        deadline: float | None = None,
        enough: Callable[[Heartbeat], bool] = lambda _: False,
        ends: Callable[[Heartbeat], bool] | None = None,
    ) -> list[Heartbeat]:
        """Return the heartbeats that are not expired, sorted by their keys. See `boots` for the arguments and
        errors.

        Each boot is a replica of its own while it is live. Live ones of the same name have the boot in their
        `replica_id`; of others only the newest heartbeat of a name is returned.
        """
        return _told_apart(self.boots(EXPIRED_S, deadline, enough, ends))

    def boots(
        self,
        within_s: float,
        deadline: float | None = None,
        enough: Callable[[Heartbeat], bool] = lambda _: False,
        ends: Callable[[Heartbeat], bool] | None = None,
    ) -> list[Heartbeat]:
        """Return the last heartbeat of each boot that was heard of within a time, sorted by their keys.

        Those not read by the deadline (`time.monotonic`) have the state `unread`. One that was `enough`
        before is not read again. One that a listing lacks, which may be incomplete, stays until it is too
        old. Where one `ends` the look, at most `_SAMPLE` others are read with it, or after it; the rest stay as
        they were read last, or are `unread`.

        Raises:
            TransientStoreError: they could not even be listed by the deadline.
        """
        self._look(deadline)
        recent = {key: known for key, known in sorted(self._known.items()) if self._age_s(known) <= within_s}
        new, is_over = {}, False
        for key, known in recent.items():
            is_read = known.read == _state(known.info) and known.info.modified_s > 0
            if not is_read and not any(map(enough, known.beats or ())):
                new[key] = known
            elif ends is not None:
                is_over = is_over or any(map(ends, self._found(key, known)))
        if ends is None:
            self._read([*new.values()], deadline)
        else:
            self._read_until(ends, new, deadline, is_over=is_over)
        found = [beat for key, known in recent.items() for beat in self._found(key, known)]
        for key in self._known.keys() - recent.keys():
            self._known[key].beats = self._known[key].read = None
        return [beat for beat in found if beat.run_id == self.run_id]

    def _read_until(
        self,
        ends: Callable[[Heartbeat], bool],
        new: Mapping[str, _Known],
        deadline: float | None,
        *,
        is_over: bool,
    ) -> None:
        """Read new heartbeats, some at once, until one of them `ends` the look, or once if that `is_over`. Those
        that ended the last look come first.
        """

        def is_end(key: str) -> bool:
            return new[key].beats is not None and any(map(ends, self._found(key, new[key])))

        names = sorted(new, key=lambda key: not is_end(key))
        for first in range(0, len(names), _SAMPLE):
            some = names[first : first + _SAMPLE]
            self._read([new[key] for key in some], deadline)
            if is_over or any(map(is_end, some)):
                return

    def _read(self, new: Sequence[_Known], deadline: float | None) -> None:
        infos = [known.info for known in new]
        for known, beats in zip(new, each(infos, self._read_one, deadline), strict=True):
            # Times are too coarse to show that it was stored again at once; so it is read until it has not
            # for a while.
            lasting = time.monotonic() - known.since_s > _COARSE_S
            known.beats, known.read = beats, _state(known.info) if lasting and beats is not None else None

    def _look(self, deadline: float | None) -> None:
        """List the heartbeats, and note which have changed."""
        (listed,) = each([keys.REPLICAS], lambda prefix: list(self._store.list(prefix)), deadline)
        if listed is None:
            raise TransientStoreError(f"The heartbeats in {self._store.url} could not be listed in time.")
        now_s = time.monotonic()
        self._clock.note(listed)
        for info in listed:
            known = self._known.get(info.key)
            if known is None:
                self._known[info.key] = _Known(info, now_s)
            elif _state(known.info) != _state(info):
                known.info, known.since_s, known.until_s = info, now_s, self._looked_s
        self._looked_s = now_s
        newest_s = max((info.modified_s for info in listed), default=math.inf)
        seems_old = time.time() - newest_s > LIVE_S
        if (self._decides or seems_old) and not self._clock.is_measured and not self._store.is_scarce:
            self._measure()
        self._guesses = seems_old and not self._decides and not self._clock.is_measured
        for key in self._known.keys() - {info.key for info in listed}:  # deleted, or left out of this listing
            if self._age_s(self._known[key]) > LIVE_S:
                del self._known[key]

    def _measure(self) -> None:
        """Measure the store's clock, in a thread, because the store may hang."""

        def measure(_: None) -> None:
            with contextlib.suppress(DeltaSyncError):
                self._clock.measure()
            self._measures = False

        if not self._measures:
            self._measures = True
            each([None], measure, time.monotonic() + _REFRESH_S)

    def _age_s(self, known: _Known) -> float:
        """Return the age of a heartbeat: at least as long as it was seen, at most since something else was
        seen there.
        """
        now_s, modified_s = time.monotonic(), known.info.modified_s
        age_s = time.time() - modified_s if self._guesses and modified_s else self._clock.age_s(modified_s)
        return max(now_s - known.since_s, min(age_s, now_s - known.until_s))

    def _found(self, key: str, known: _Known) -> list[Heartbeat]:
        time_s = time.time() - self._age_s(known)
        if known.beats is not None:
            return [dataclasses.replace(beat, time_s=time_s) for beat in known.beats]
        name = key.removeprefix(keys.REPLICAS).removesuffix(".json")  # it may be of this run
        error = "its heartbeat could not be read in time"
        unread = Heartbeat(
            replica_id=name, run_id=self.run_id, version=None, state="unread", error=error, time_s=time_s
        )
        return [unread]

    def _read_one(self, info: ObjectInfo) -> list[Heartbeat]:
        for _ in range(2):  # one reply may be damaged, and a replica that is left out is waited for by nobody
            with contextlib.suppress(*UNREADABLE_JSON, FormatError, ObjectMissingError):
                return [msgspec.json.decode(self._store.read(info.key, limits.SMALL_BYTES), type=Heartbeat)]
        return []


def _state(info: ObjectInfo) -> _State:
    return info.bytes, info.modified_s, info.content


def _told_apart(beats: Iterable[Heartbeat]) -> list[Heartbeat]:
    named: dict[str, list[Heartbeat]] = {}
    for beat in beats:
        named.setdefault(beat.replica_id, []).append(beat)
    found: list[Heartbeat] = []
    for name, same in named.items():
        live = [beat for beat in same if is_live(beat)]
        if len(live) > 1:
            found += (dataclasses.replace(beat, replica_id=f"{name} (boot {beat.boot})") for beat in live)
        else:
            found.append(live[0] if live else max(same, key=lambda beat: beat.time_s))
    return found


def others(store: Store, replica_id: str, boot: str) -> dict[str, ObjectInfo]:
    """Return the heartbeats of other boots of a replica's name, by the boot."""
    listed = ((keys.boot_of(info.key), info) for info in store.list(keys.boots_folder(replica_id)))
    return {other: info for other, info in listed if other not in (None, boot)}


def ask(urls: Sequence[str], run_id: str, deadline: float | None = None) -> list[Heartbeat]:
    """Ask servers for their heartbeats (`GET /deltasync/status`). One out of reach, or of another run, serves
    nothing.

    A server has until the deadline (`time.monotonic`) to answer, by default ten seconds.
    """

    def ask_one(url: str) -> Heartbeat:
        answer, error, code = _call(f"{url}/{_STATUS}")
        if error is None:
            return heartbeat_of(url, answer, run_id)
        return dataclasses.replace(_unreachable(url, error), state=UNKNOWN if code == 404 else "unreachable")

    answers = each(urls, ask_one, time.monotonic() + 2 * _ANSWER_S if deadline is None else deadline)
    return [
        found or _unreachable(url, f"{url} does not answer in time")
        for url, found in zip(urls, answers, strict=True)
    ]


def ask_status(url: str) -> dict[str, Any] | None:
    """Ask a server for its status without the commits, with `DELTASYNC_HTTP_TOKEN`. Empty if the answer is
    not a JSON object; None if the server does not answer, or with an error of its own (5xx).
    """
    answer, _, code = _call(f"{url}/{_STATUS}")
    return None if code is None or code >= 500 else _json_object(answer)


def ask_models(url: str) -> list[str]:
    """Ask a server for the names of the models that it serves (`GET /v1/models`); empty if it does not
    say.
    """
    found = _json_object(_call(f"{url}/v1/models")[0]).get("data")
    return (
        [str(model.get("id")) for model in found if isinstance(model, dict)]
        if isinstance(found, list)
        else []
    )


def post(url: str, route: str, body: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
    """Post `body` to a server's route `sync` or `pin`, wait until it serves the version that is asked for,
    and return its answer.

    Raises AckTimeoutError if it does not serve the version in time, DeltaSyncError if it does not answer, or
    refuses.
    """
    url = url.rstrip("/")
    request = msgspec.json.encode({**body, "timeout_s": timeout_s})
    answer, error, code = _call(f"{url}/deltasync/{route}", request, timeout_s + _ANSWER_S)
    found = _json_object(answer)
    if error is None and "version" in found:
        return found
    reason = (
        f"{found.get('error', '')} {found.get('cause') or ''}".strip()
        or error
        or "the answer is not deltasync's."
    )
    raise (AckTimeoutError if code == 504 else DeltaSyncError)(f"{url}: {reason}")


def digests(url: str, timeout_s: float) -> tuple[int, dict[str, str]]:
    """Return the version that a server serves, and the sha256 of each tensor that it computes with, by the
    channel's names.

    The server reads all its weights between two steps. Raises DeltaSyncError if it does not answer with them
    in time.
    """
    url = url.rstrip("/")
    answer, error, _ = _call(f"{url}/deltasync/digest", timeout_s=timeout_s, most_bytes=limits.DIGEST_BYTES)
    found = _json_object(answer)
    version, sha256 = found.get("version"), found.get("sha256")
    if error is not None or not isinstance(version, int) or not isinstance(sha256, dict):
        reason = (
            found.get("error")
            or error
            or "the answer has no version with digests. Wait until the server serves one."
        )
        raise DeltaSyncError(f"{url}: {reason}")
    return version, {str(name): str(digest) for name, digest in sha256.items()}


def wake(urls: Sequence[str], version: int) -> None:
    """Make servers poll for a version now. One that does not answer is ignored."""
    # The time-out is too short for a wait: a server polls as soon as it is asked for a version.
    body = msgspec.json.encode({"version": version, "timeout_s": 0.001})
    each(urls, lambda url: _call(f"{url}/deltasync/sync", body), time.monotonic() + _ANSWER_S)


def wait_for(
    store: Store,
    run_id: str,
    version: int,
    published: Mapping[int, str],
    timeout_s: float,
    urls: Sequence[str] = (),
    known: FleetHeartbeats | None = None,
    required: bool = False,
) -> list[Heartbeat]:
    """Block until every live replica serves a version or a later one, at least one, and return their
    heartbeats.

    Pinned replicas do not count. Wait for the version's upload first (`Receipt.wait`): a failed one never
    arrives.

    Args:
        store: The channel's store.
        run_id: The run whose replicas count.
        version: The version's number.
        published: Digests of the records that the caller published, by number; may grow during the call. A
            replica counts only if it serves one of these, by the digest.
        timeout_s: How long to wait. The last refresh may take a second more.
        urls: Servers to ask instead of reading heartbeats, each of which has to serve it.
        known: The heartbeats of the last call, so that only changed ones are read.
        required: Whether the caller needs each of `urls`: one that follows nothing then ends the wait.

    Raises:
        AckTimeoutError: time is up; it names the live replicas that lag, with their errors.
        ConfigError: a required server does not follow, or follows another run, and has said so for three
            seconds.
    """
    deadline = time.monotonic() + timeout_s
    poll_s = _FIRST_POLL_S
    known = FleetHeartbeats(store, run_id, decides=True) if known is None else known
    followed_s = time.monotonic()

    def serves(beat: Heartbeat) -> bool:
        return _serves(beat, version, published)

    def lags(beat: Heartbeat) -> bool:
        return beat.run_id == run_id and is_live(beat) and beat.pin is None and not serves(beat)

    while True:
        refresh_until = max(deadline, time.monotonic() + _REFRESH_S)
        try:
            if urls:
                heartbeats = ask(urls, run_id, refresh_until)
            else:
                # one that lags is enough to wait on; in the end all that lag are named
                ends = lags if time.monotonic() < deadline else None
                heartbeats = known.refresh(refresh_until, serves, ends)
        except TransientStoreError:
            if time.monotonic() >= deadline:
                raise
        else:
            lost = [
                problem for beat in heartbeats if required and (problem := _lost(beat, run_id, store.url))
            ]
            followed_s = followed_s if lost else time.monotonic()
            if time.monotonic() - followed_s > _CONFIRM_S:
                raise ConfigError(f"{lost[0]} Version {version} is published, and not served there.")
            live = [beat for beat in heartbeats if is_live(beat) and beat.pin is None]
            lagging = [beat for beat in live if not serves(beat)]
            if live and not lagging:
                return live
            if time.monotonic() >= deadline:
                reason = _explain(lagging, heartbeats)
                raise AckTimeoutError(
                    f"Version {version} is published to {store.url}, but after {timeout_s:g} s {reason}."
                )
        time.sleep(max(0.0, min(poll_s, deadline - time.monotonic())))
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def _lost(beat: Heartbeat, run_id: str, channel: str) -> str | None:
    """Why a server will never serve the run: it follows nothing, or another run. None if it may."""
    if beat.state == UNKNOWN:
        return follows_nothing(beat.replica_id)
    if beat.run_id in (None, run_id):
        return None
    return (
        f"The server at {beat.replica_id} follows another run, {beat.run_id}, and this trainer publishes run "
        f"{run_id} to "
        f"{channel}. Restart the server with DELTASYNC_CHANNEL set to this URL."
    )


def follows_nothing(url: str) -> str:
    """Say that a vLLM server does not follow, and what to do."""
    return (
        f"The vLLM server at {url} does not follow a channel, so it would go on to answer with the weights "
        "that it has: "
        "GET /deltasync/status is not answered as deltasync does. Start the server with DELTASYNC_CHANNEL "
        "and "
        "--worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension, let that path through proxies, and "
        "send no wrong "
        "DELTASYNC_HTTP_TOKEN."
    )


def is_live(heartbeat: Heartbeat) -> bool:
    """Whether a replica counts as live: its heartbeat is recent, or in the future, and not its last one."""
    return heartbeat.state != STOPPED and _age_s(heartbeat) < LIVE_S


def _serves(heartbeat: Heartbeat, version: int, published: Mapping[int, str]) -> bool:
    serving = heartbeat.serving
    if serving is None or serving.version < version or heartbeat.state in ("failed", STOPPED):
        return False
    return published.get(serving.version) == serving.sha256


def _age_s(heartbeat: Heartbeat) -> float:
    return time.time() - heartbeat.time_s


def _explain(lagging: list[Heartbeat], heartbeats: list[Heartbeat]) -> str:
    if not heartbeats:
        return (
            "no replica has ever reported to this run. Start one that follows the channel, or check that its "
            "channel URL is "
            "this one"
        )
    if lagging:
        more = "" if len(lagging) <= _NAMED else f"; and {len(lagging) - _NAMED:,} more"
        return f"these replicas lag: {'; '.join(_describe(beat) for beat in lagging[:_NAMED])}{more}"
    heartbeats = sorted(heartbeats, key=_age_s)
    ages = ", ".join(
        f"{beat.replica_id} ({'stopped ' if beat.state == STOPPED else ''}{_age_s(beat):.0f} s ago"
        f"{'' if beat.pin is None else f', pinned: {beat.pin}'})"
        for beat in heartbeats[:_NAMED]
    )
    more = "" if len(heartbeats) <= _NAMED else f" and {len(heartbeats) - _NAMED:,} more"
    return f"no replica is live. Last heard of: {ages}{more}. Restart them"


def _describe(heartbeat: Heartbeat) -> str:
    serves = (
        "no version" if heartbeat.version is None else f"version {heartbeat.serving or heartbeat.version}"
    )
    error = "" if heartbeat.error is None else f", error: {heartbeat.error}"
    works = heartbeat.state in ("staging", "committing") and heartbeat.state_s is not None
    state = f"{heartbeat.state} for {heartbeat.state_s:.0f} s" if works else heartbeat.state
    if (heartbeat.followed_s_ago or 0.0) > _COARSE_S and not works:
        state += f", could last follow {heartbeat.followed_s_ago:.0f} s before"
    return f"{heartbeat.replica_id} (serves {serves}, {state}, {_age_s(heartbeat):.0f} s ago{error})"


def _unreachable(url: str, error: str) -> Heartbeat:
    return Heartbeat(replica_id=url, run_id=None, version=None, state="unreachable", error=error)


def heartbeat_of(url: str, answer: bytes, run_id: str) -> Heartbeat:
    """The heartbeat in a server's answer. One that is invalid, or of another run, serves nothing."""
    try:
        status = msgspec.json.decode(answer, type=dict[str, Any])
        fields = {"run_id": None, "version": None, **status, "replica_id": url, "time_s": time.time()}
        found = msgspec.convert(fields, Heartbeat)
    except UNREADABLE_JSON as unreadable:
        return _unreachable(url, f"{url} does not answer as deltasync does: {unreadable}")
    if found.state == STOPPED:  # a server that is named by its URL is waited for, also while it is restarted
        return dataclasses.replace(found, version=None, state="unreachable", error=f"{url} is stopping")
    if found.run_id == run_id or (found.run_id, found.version) == (None, None):
        return found
    channel = f" of {status['channel']}" if "channel" in status else ""  # without the token it is not told
    return dataclasses.replace(found, version=None, error=f"it follows run {found.run_id}{channel}")


def _json_object(answer: bytes) -> dict[str, Any]:
    """The JSON object in a server's answer, empty if there is none."""
    with contextlib.suppress(*UNREADABLE_JSON):
        return msgspec.json.decode(answer, type=dict[str, Any])
    return {}


def _call(
    url: str, body: bytes | None = None, timeout_s: float = _ANSWER_S, most_bytes: int = limits.ANSWER_BYTES
) -> tuple[bytes, str | None, int | None]:
    """GET, or with a body POST. Returns the answer, the error, and the HTTP status if there was an answer."""
    headers = {} if body is None else {"Content-Type": "application/json"}
    settings = ReplicaSettings.from_env()
    if settings.http_token is not None:
        headers["Authorization"] = f"Bearer {settings.http_token}"
    # Without handlers for proxies, which are for the world outside, and for redirects: both would get the
    # token.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    try:
        with opener.open(urllib.request.Request(url, body, headers), timeout=timeout_s) as reply:
            return reply.read(most_bytes), None, reply.status
    except urllib.error.HTTPError as error:
        why = ", a redirect, which is not followed: name the server itself" if 300 <= error.code < 400 else ""
        why = ": set DELTASYNC_HTTP_TOKEN to the server's" if error.code == 401 else why
        answer = b""
        with contextlib.suppress(OSError, http.client.HTTPException), error:
            answer = error.read(limits.ANSWER_BYTES)
        return answer, f"{url} answered {error.code}{why}", error.code
    except (OSError, ValueError, http.client.HTTPException) as error:
        return b"", f"{url} does not answer: {error}", None
