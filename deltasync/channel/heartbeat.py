"""Heartbeats: small objects by which people and the publisher see replicas; servers whose URL is known can be asked instead.

Never needed for correctness: a lost or stale heartbeat only makes a replica look late.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deltasync.channel import keys
from deltasync.channel.documents import SMALL_BYTES, Epoch, Number, Sha256, Version
from deltasync.channel.threads import each
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    UNREADABLE_JSON,
    AckTimeoutError,
    ConfigError,
    DeltaSyncError,
    FormatError,
    ObjectMissingError,
    TransientStoreError,
)
from deltasync.stores.base import ObjectInfo, Store

LIVE_S = 60.0
"""A replica whose heartbeat is older than this no longer counts as live."""

EXPIRED_S = 3600.0
"""A heartbeat that was stored longer ago than this is not read: it neither counts nor is shown any more."""

STOPPED = "stopped"
"""State of the last heartbeat of a replica that ended in order. It serves nothing, and nobody waits for it."""

_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 0.5
_ANSWER_S = 5.0
_LOOK_S = 1.0  # at least for each look, also for the one at the end

_MOST_BYTES = 1 << 20  # of a server's answer
_ERROR = 500  # characters
_MOST_HEARTBEATS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What a replica says of itself.

    Attributes:
        run_id: The run it follows, None before it knows.
        version, epoch, sha256: Identity of the version that it serves, None before the first.
        state: `waiting`, `staging`, `committing`, `serving`, `stale`, `sleeping`, `failed` or `stopped`.
        newest_version: Newest version it has seen.
        pin: Which versions it takes, None for the newest. Nobody waits for a replica that is pinned.
        time_s: Seconds since the epoch, by the replica's clock.
    """

    replica_id: str
    run_id: str | None
    version: Number | None
    state: str
    epoch: Epoch | None = None
    sha256: Sha256 | None = None
    newest_version: Number | None = None
    pin: str | None = None
    error: str | None = None
    time_s: float = dataclasses.field(default_factory=time.time)

    @property
    def serving(self) -> Version | None:
        """The version that it serves; None before the first, and where it does not say which of that number."""
        if self.version is None or self.epoch is None or self.sha256 is None:
            return None
        return Version(self.version, self.epoch, self.sha256)


def write(store: Store, heartbeat: Heartbeat) -> None:
    """Overwrite the replica's heartbeat."""
    if heartbeat.error is not None and len(heartbeat.error) > _ERROR:
        heartbeat = dataclasses.replace(heartbeat, error=f"{heartbeat.error[: _ERROR - 4]} ...")
    store.put(keys.replica(heartbeat.replica_id), msgspec.json.encode(heartbeat))


def read_all(store: Store, run_id: str, deadline: float | None = None) -> list[Heartbeat]:
    """Heartbeats of the replicas of one run, by replica id: at most the newest 4,096, without unreadable and expired ones.

    What was not read by the deadline, by `time.monotonic`, has state `unread`.

    Raises:
        TransientStoreError: not even the names of the heartbeats are known at the deadline.
        StoreError: the heartbeats cannot be read.
    """
    (listed,) = each([keys.REPLICAS], lambda prefix: list(store.list(prefix)), deadline)
    if listed is None:
        raise TransientStoreError(f"The heartbeats in {store.url} could not be listed in time.")
    expired_s = time.time() - EXPIRED_S
    recent = [info for info in listed if not 0 < info.modified_s < expired_s]  # 0 where the store does not tell
    recent = sorted(recent, key=lambda info: info.modified_s, reverse=True)[:_MOST_HEARTBEATS]
    recent.sort(key=lambda info: info.key)
    read = each(recent, lambda info: (_read_one(store, info),), deadline)
    found = []
    for info, result in zip(recent, read, strict=True):
        heartbeat = _unread(info, run_id) if result is None else result[0]
        if heartbeat is not None and heartbeat.run_id == run_id:
            found.append(heartbeat)
    return found


def _read_one(store: Store, info: ObjectInfo) -> Heartbeat | None:
    with contextlib.suppress(*UNREADABLE_JSON, FormatError, ObjectMissingError):
        return msgspec.json.decode(store.read(info.key, SMALL_BYTES), type=Heartbeat)
    return None


def _unread(info: ObjectInfo, run_id: str) -> Heartbeat:
    """In the place of a heartbeat that may be of this run and may not serve the version: nobody is taken to serve it."""
    name = info.key.removeprefix(keys.REPLICAS).removesuffix(".json")
    error = "its heartbeat could not be read in time"
    time_s = info.modified_s or time.time()
    return Heartbeat(replica_id=name, run_id=run_id, version=None, state="unread", error=error, time_s=time_s)


def ask(urls: Sequence[str], run_id: str, deadline: float | None = None) -> list[Heartbeat]:
    """What servers say of themselves at `GET /deltasync/status`. One out of reach, or with another run, serves nothing.

    Who has not answered by the deadline, by `time.monotonic`, counts as out of reach; None for a few seconds.
    """

    def ask_one(url: str) -> Heartbeat:
        answer, error, _ = _call(f"{url}/deltasync/status?commits=0")
        return heartbeat_of(url, answer, run_id) if error is None else _unreachable(url, error)

    answers = each(urls, ask_one, time.monotonic() + 2 * _ANSWER_S if deadline is None else deadline)
    late = "does not answer in time"
    return [_unreachable(url, f"{url} {late}") if found is None else found for url, found in zip(urls, answers, strict=True)]


def ask_status(url: str) -> dict[str, Any] | None:
    """A server's status as it tells it to who has `DELTASYNC_HTTP_TOKEN`, without its commits.

    Empty if it has none for us; None if it does not answer, or is not up.
    """
    answer, _, code = _call(f"{url}/deltasync/status?commits=0")
    if code is None or code >= 500:
        return None
    return _object(answer)


def tell(url: str, route: str, body: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
    """Have a server go to a version, and wait until it serves that.

    The route, `sync` or `pin`, takes `body`. Returns what the server answers, with the `version` that it serves.

    Raises:
        AckTimeoutError: it does not serve it in time.
        DeltaSyncError: it does not answer, or refuses, and why.
    """
    url = url.rstrip("/")
    whole = msgspec.json.encode({**body, "timeout_s": timeout_s})
    answer, error, code = _call(f"{url}/deltasync/{route}", whole, timeout_s + _ANSWER_S)
    found = _object(answer)
    if error is None and "version" in found:
        return found
    said = f"{found.get('error', '')} {found.get('cause') or ''}".strip() or error or "the answer is not deltasync's."
    raise (AckTimeoutError if code == 504 else DeltaSyncError)(f"{url}: {said}")


def wake(urls: Sequence[str], version: int) -> None:
    """Have servers look for a version now instead of at their next poll; one that does not answer is left alone."""
    # Too short to wait for anything: a server looks as soon as it is asked for a version.
    body = msgspec.json.encode({"version": version, "timeout_s": 0.001})
    each(urls, lambda url: _call(f"{url}/deltasync/sync", body), time.monotonic() + _ANSWER_S)


def check_ack(ack: str | int) -> int | None:
    """How many replicas `any` or a number asks for, None for `all`.

    Raises:
        ConfigError: it is neither of these, or a number below 1.
    """
    if ack == "all":
        return None
    try:
        needed = 1 if ack == "any" else int(ack)
    except ValueError:
        needed = 0
    if needed < 1:
        raise ConfigError(f"ack must be any, all or a number of replicas from 1 on, not {ack!r}.")
    return needed


def wait_for(
    store: Store,
    run_id: str,
    version: int,
    published: Mapping[int, str],
    ack: str | int,
    timeout_s: float,
    urls: Sequence[str] = (),
) -> list[Heartbeat]:
    """Block until the fleet serves a version. Wait for its upload first (`Receipt.wait`): a failed one never arrives.

    Args:
        store: The channel's.
        run_id: The run whose replicas count.
        version: Its number; a replica that serves a later one counts too.
        published: Digests of the records that the caller published, by number; later ones may come in meanwhile. A replica
            counts by its version's digest, never by the number alone.
        ack: `any`: at least one live replica serves it. A number: at least so many do. `all`: at least one replica is live
            and every live one serves it.
        timeout_s: How long to wait. The last look may take a second more; what is not answered then is not waited for.
        urls: Servers to ask instead of reading heartbeats; `all` then means each of them.

    Returns:
        The heartbeats of the replicas that serve it.

    Raises:
        AckTimeoutError: time is up; names the live replicas that lag, with their errors.
        StoreError: the heartbeats cannot be read; a transient error is tried again until time is up.
    """
    needed = check_ack(ack)
    deadline = time.monotonic() + timeout_s
    poll_s = _FIRST_POLL_S
    while True:
        look_until = max(deadline, time.monotonic() + _LOOK_S)
        try:
            heartbeats = ask(urls, run_id, look_until) if urls else read_all(store, run_id, look_until)
        except TransientStoreError:
            if time.monotonic() >= deadline:
                raise
        else:
            live = [beat for beat in heartbeats if is_live(beat) and beat.pin is None]
            serving = [beat for beat in live if _serves(beat, version, published)]
            lagging = [beat for beat in live if not _serves(beat, version, published)]
            if len(serving) >= (needed or 1) and not (needed is None and lagging):
                return serving
            if time.monotonic() >= deadline:
                raise AckTimeoutError(_explain(store, version, timeout_s, needed, serving, lagging, heartbeats))
        time.sleep(max(0.0, min(poll_s, deadline - time.monotonic())))
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def is_live(heartbeat: Heartbeat) -> bool:
    """Whether it is recent, by our clock, and not the last one; a replica whose clock is ahead is taken as live."""
    return heartbeat.state != STOPPED and _age_s(heartbeat) < LIVE_S


def _serves(heartbeat: Heartbeat, version: int, published: Mapping[int, str]) -> bool:
    serving = heartbeat.serving
    if serving is None or serving.version < version or heartbeat.state in ("failed", STOPPED):
        return False
    return published.get(serving.version) == serving.sha256


def _age_s(heartbeat: Heartbeat) -> float:
    return time.time() - heartbeat.time_s


def _explain(
    store: Store,
    version: int,
    timeout_s: float,
    needed: int | None,
    serving: list[Heartbeat],
    lagging: list[Heartbeat],
    heartbeats: list[Heartbeat],
) -> str:
    published = f"Version {version} is published to {store.url}, but after {timeout_s:g} s"
    if not heartbeats:
        return (
            f"{published} no replica has ever reported to this run. Start one that follows the channel, check that its "
            "channel URL is this one, or do not ask for an acknowledgement."
        )
    if lagging:
        return f"{published} these replicas lag: {'; '.join(_describe(beat) for beat in lagging)}."
    if needed is not None and serving:
        names = ", ".join(beat.replica_id for beat in serving)
        return f"{published} {len(serving)} of the {needed} replicas asked for serve it ({names}), and no other one is live."
    ages = ", ".join(
        f"{beat.replica_id} ({'stopped ' if beat.state == STOPPED else ''}{_age_s(beat):.0f} s ago"
        f"{'' if beat.pin is None else f', pinned: {beat.pin}'})"
        for beat in heartbeats
    )
    return f"{published} no replica is live. Last heard of: {ages}. Restart them, or set their clocks right."


def _describe(heartbeat: Heartbeat) -> str:
    serves = "no version" if heartbeat.version is None else f"version {heartbeat.serving or heartbeat.version}"
    error = "" if heartbeat.error is None else f", error: {heartbeat.error}"
    return f"{heartbeat.replica_id} (serves {serves}, {heartbeat.state}, {_age_s(heartbeat):.0f} s ago{error})"


def _unreachable(url: str, error: str) -> Heartbeat:
    return Heartbeat(replica_id=url, run_id=None, version=None, state="unreachable", error=error)


def heartbeat_of(url: str, answer: bytes, run_id: str) -> Heartbeat:
    """What a server's answer says. Invalid replies, or those of another run, count as not serving."""
    try:
        status = msgspec.json.decode(answer, type=dict[str, Any])
        whole = {"run_id": None, "version": None, **status, "replica_id": url, "time_s": time.time()}
        found = msgspec.convert(whole, Heartbeat)
    except UNREADABLE_JSON as unreadable:
        return _unreachable(url, f"{url} does not answer as deltasync does: {unreadable}")
    if found.state == STOPPED:  # who names a server's URL waits for that one, also while it is being restarted
        return dataclasses.replace(found, version=None, state="unreachable", error=f"{url} is stopping")
    if "run_id" not in status:  # which it leaves out to who has no token
        error = "it tells its run only to who has its token: set DELTASYNC_HTTP_TOKEN here too"
    elif found.run_id in (None, run_id):
        return found
    else:
        error = f"it follows run {found.run_id} of {status.get('channel')}"
    return dataclasses.replace(found, version=None, error=error)


def _object(answer: bytes) -> dict[str, Any]:
    """The JSON object that a server answered; empty if it is none."""
    with contextlib.suppress(*UNREADABLE_JSON):
        return msgspec.json.decode(answer, type=dict[str, Any])
    return {}


def _call(url: str, body: bytes | None = None, timeout_s: float = _ANSWER_S) -> tuple[bytes, str | None, int | None]:
    """What a GET, or with a body a POST, returns; what went wrong; the HTTP status of the answer, if there was one."""
    token = ReplicaSettings.from_env().http_token
    headers = {} if body is None else {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(urllib.request.Request(url, body, headers), timeout=timeout_s) as reply:
            return reply.read(_MOST_BYTES), None, reply.status
    except urllib.error.HTTPError as error:
        redirect = ", a redirect, which is not followed: name the server itself" if 300 <= error.code < 400 else ""
        return _said(error), f"{url} answered {error.code}{redirect}", error.code
    except (OSError, ValueError, http.client.HTTPException) as error:
        return b"", f"{url} does not answer: {error}", None


def _said(error: urllib.error.HTTPError) -> bytes:
    """The body of a refusal, empty if it cannot be read."""
    with contextlib.suppress(OSError, http.client.HTTPException), error:
        return error.read(_MOST_BYTES)
    return b""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would take the token along to whatever host a redirect names."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """None: the redirect becomes an error."""
