"""Faults by the name of a request, and how many requests of each name there were."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(kw_only=True)
class Fault:
    """What goes wrong with the next `times` requests of one name.

    Attributes:
        step: Name of the request, as in the route tables of `hub.py` and `cas.py`.
        path: Only requests whose path contains this.
        skip: This many matching requests pass unharmed first.
        status, headers, message: Answer with this error.
        reset: Break the connection instead of answering.
        after: Do what was asked, and then answer with `status` or `reset`: the reply is lost.
        slow_s: Answer later.
        flip, truncate, empty, cut: Answer with a body that has a bit inverted, its second half missing,
            nothing in it, or that breaks off before its announced length.
        failed: `batch`: report this error for every operation and do none (a 200 with `failed`).
        stale: `tree`, `paths_info`, `resolve`: as it was before the newest change of each file.
        expired: `read_token`, `write_token`: hand out a token that the CAS no longer accepts.
        extra_bytes: `resolve`: announce so many bytes more.
    """

    step: str
    path: str = ""
    times: int = 1
    skip: int = 0
    status: int | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    message: str = "a fault"
    reset: bool = False
    after: bool = False
    slow_s: float = 0.0
    flip: bool = False
    truncate: bool = False
    empty: bool = False
    cut: bool = False
    failed: str | None = None
    stale: bool = False
    expired: bool = False
    extra_bytes: int = 0


@dataclasses.dataclass(kw_only=True)
class Conditions:
    """What holds for all requests until the next reset.

    Attributes:
        limits: Most requests in a window, `api` and `resolvers`; None for no limit.
        window_s: Length of a window.
        negative_s: How long an edge remembers that `resolve` found nothing.
        list_delay_s: How long a listing does not show a new file yet.
        repeat_cursor: Each page of a listing names the same next page.
        token_s, exp_skew_s: How long tokens of the CAS are valid, and how much longer they claim to be.
        log: Whether to keep a line for each request, for `GET /_log`.
    """

    limits: dict[str, int] | None = None
    window_s: float = 300.0
    negative_s: float = 0.0
    list_delay_s: float = 0.0
    repeat_cursor: bool = False
    token_s: float = 3600.0
    exp_skew_s: float = 0.0
    log: bool = False


NO_FAULT = Fault(step="")
FAULT: web.RequestKey[Fault] = web.RequestKey("fault", Fault)


class Steps:
    """Gives every request its name, counts it, and lets it fail as planned."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.armed: list[Fault] = []
        self.conditions = Conditions()
        self.log: list[tuple[float, str, str, str, str, str]] = []
        self._windows: dict[str, tuple[float, int]] = {}
        self._negative: dict[str, float] = {}

    def reset(self) -> None:
        """Forget the counts, the faults and the conditions."""
        self.counts.clear()
        self.armed.clear()
        self._windows.clear()
        self.conditions = Conditions()

    def named(self, step: str, handler: Handler) -> Handler:
        """`handler` as the request called `step`."""

        async def handle(request: web.Request) -> web.StreamResponse:
            self.counts[step] += 1
            fault = request[FAULT] = self._take(step, request.path)
            if self.conditions.log:
                who = (request.headers.get("Authorization", ""), request.headers.get("User-Agent", ""))
                self.log.append((time.time(), step, request.method, request.path_qs, *who))
            refused = self._limited(step, request) or self._remembered(step, request)
            if refused is not None:
                await request.read()
                return refused
            response = await (handler(request) if fault is NO_FAULT else self._fail(fault, request, handler))
            if step == "resolve" and response.status == 404:
                self._negative[request.path] = time.time() + self.conditions.negative_s
            if not response.prepared:
                response.headers.update(self._quota(step, request))
            return response

        return handle

    def _take(self, step: str, path: str) -> Fault:
        for fault in self.armed:
            if fault.step == step and fault.path in path and fault.times > 0:
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return NO_FAULT

    def _limited(self, step: str, request: web.Request) -> web.Response | None:
        """A 429 where the quota of the window is used up, as the Hub words it."""
        limits, window_s = self.conditions.limits, self.conditions.window_s
        kind = _quota_of(step)
        if limits is None or not request.path.startswith(("/api/", "/buckets/")):
            return None
        now = time.time()
        began, used = self._windows.get(kind, (0.0, 0))
        began, used = (now, 1) if now >= began + window_s else (began, used + 1)
        self._windows[kind] = began, used
        if used <= limits[kind]:
            return None
        message = f"We had to rate limit you, you hit the quota of {limits[kind]} {kind} requests per 5 minutes period."
        return problem(429, message, **self._quota(step, request))

    def _quota(self, step: str, request: web.Request) -> dict[str, str]:
        """The headers that say how much of the quota is left, in each reply of the Hub that counts."""
        limits, window_s = self.conditions.limits, self.conditions.window_s
        kind = _quota_of(step)
        if limits is None or kind not in self._windows or not request.path.startswith(("/api/", "/buckets/")):
            return {}
        began, used = self._windows[kind]
        left_s = int(began + window_s - time.time()) + 1
        policy = f'"fixed window";"{kind}";q={limits[kind]};w={window_s:.0f}'
        return {
            "RateLimit": f'"{kind}";r={max(0, limits[kind] - used)};t={left_s}',
            "RateLimit-Policy": policy,
        }

    def _remembered(self, step: str, request: web.Request) -> web.Response | None:
        if step != "resolve" or time.time() >= self._negative.get(request.path, 0.0):
            return None
        return problem(404, "Entry not found", "EntryNotFound")

    @staticmethod
    async def _fail(fault: Fault, request: web.Request, handler: Handler) -> web.StreamResponse:
        await asyncio.sleep(fault.slow_s)
        if fault.reset or fault.status is not None:
            await request.read()
            if fault.after:
                await handler(request)
            if fault.reset:
                return _broken_off(request)
            return problem(fault.status or 500, fault.message, **fault.headers)
        response = await handler(request)
        if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
            return response
        body, middle = response.body, len(response.body) // 2
        if fault.flip:
            response.body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        elif fault.truncate:
            response.body = body[:middle]
        elif fault.empty:
            response.body = b""
        elif fault.cut:
            partial = web.StreamResponse(status=response.status, headers=response.headers)
            partial.content_length = len(body)
            await partial.prepare(request)
            await partial.write(body[:middle])
            _broken_off(request)
            return partial
        return response


def _quota_of(step: str) -> str:
    return "resolvers" if step == "resolve" else "api"


def problem(status: int, message: str, code: str = "", **headers: str) -> web.Response:
    """An error as the Hub tells it: in the body, and in headers for those that only see these."""
    told = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return web.json_response({"error": message}, status=status, headers=told | headers)


def _broken_off(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)
