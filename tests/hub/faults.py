"""Faults by the name of a request, and how many requests of each name there were."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
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
        flip, truncate, empty, cut: Answer with a body that has a bit inverted, its second half missing, nothing in it, or
            that breaks off before its announced length.
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


NO_FAULT = Fault(step="")
FAULT: web.RequestKey[Fault] = web.RequestKey("fault", Fault)


class Steps:
    """Gives every request its name, counts it, and lets it fail as planned."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.armed: list[Fault] = []

    def named(self, step: str, handler: Handler) -> Handler:
        """`handler` as the request called `step`."""

        async def handle(request: web.Request) -> web.StreamResponse:
            self.counts[step] += 1
            fault = request[FAULT] = self._take(step, request.path)
            if fault is NO_FAULT:
                return await handler(request)
            return await self._fail(fault, request, handler)

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


def problem(status: int, message: str, code: str = "", **headers: str) -> web.Response:
    """An error as the Hub tells it: in the body, and in headers for those that only see these."""
    told = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return web.json_response({"error": message}, status=status, headers=told | headers)


def _broken_off(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)
