"""The content-addressed store of Xet, as far as hf_xet 1.8 asks: xorbs and shards in, reconstructions and
ranges out.

A xorb is a row of chunks, each `u8 version (0), u24 stored length, u8 compression, u24 length, stored bytes`,
perhaps with a footer. A shard says of which chunks of which xorbs a file consists, in records of 48 bytes:

    header
    per file: hash, u32 flags, u32 term count; the terms: xorb hash, u32 flags, u32 bytes, u32 first chunk, u32 end chunk;
              as many records of verification if flag 31 is set, one record of metadata if flag 30 is set
    32 bytes of 0xFF and 16 more; then the same for xorbs, which nobody asks for here

Nothing is hashed or decompressed: like the real one it hands back what it was given.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import re
import secrets
import struct
import time

from aiohttp import web

from tests.hub.faults import Steps, problem

_RECORD = 48
_BOOKEND = b"\xff" * 32


@dataclasses.dataclass(frozen=True, slots=True)
class Xorb:
    """Bytes, and where its chunks start in them (`stored`) and in what they decompress to (`unpacked`), ends
    included.
    """

    data: bytes
    stored: list[int]
    unpacked: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """A run of chunks of one xorb."""

    xorb: str
    bytes: int
    start: int
    end: int


class Cas:
    """Xorbs and files by hash, and the tokens that open them."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._xorbs: dict[str, Xorb] = {}
        self._files: dict[str, list[Term]] = {}
        self._tokens: dict[str, tuple[str, float]] = {}

    def add_routes(self, app: web.Application) -> None:
        """Serve in `app`. What is not here, the client does without (404)."""
        for method, path, step, handler in (
            ("GET", "/v1/chunks/{prefix}/{hash}", "chunk", self._not_here),
            ("POST", "/v1/xorb-grants/{prefix}/{hash}", "grant", self._not_here),
            ("POST", "/v1/xorbs/{prefix}/{hash}", "xorb", self._put_xorb),
            ("POST", "/v2/shards", "shard", self._put_shard),
            ("GET", "/v2/reconstructions/{hash}", "reconstruction", self._reconstruct),
            ("GET", "/data/{hash}", "data", self._get_data),
            ("POST", "/v1/telemetry", "telemetry", self._ignore),
        ):
            app.router.add_route(method, path, self._steps.named(step, handler))

    def issue_token(self, scope: str, expired: bool, owner: str = "") -> tuple[str, int]:
        """A token for `read` or `write`, which shows the end of its owner's token, and when it expires."""
        token, conditions = f"xet_{owner[-3:]}_{secrets.token_hex(8)}", self._steps.conditions
        expires_s = time.time() + conditions.token_s
        self._tokens[token] = (scope, 0.0 if expired else expires_s)
        return token, int(expires_s + conditions.exp_skew_s)

    def size(self, file_hash: str) -> int | None:
        """Bytes of a file, None if there is none of this hash."""
        terms = self._files.get(file_hash)
        return None if terms is None else sum(term.bytes for term in terms)

    def _check_token(self, request: web.Request, *scopes: str) -> None:
        scope, expires_s = self._tokens.get(
            request.headers.get("Authorization", "").removeprefix("Bearer "), ("", 0.0)
        )
        if scope not in scopes or time.time() >= expires_s:
            raise web.HTTPUnauthorized(text="no, or an expired, token")

    async def _put_xorb(self, request: web.Request) -> web.Response:
        self._check_token(request, "write")
        name, data = request.match_info["hash"], await request.read()
        inserted = name not in self._xorbs
        self._xorbs[name] = _parse_xorb(data)
        return web.json_response({"was_inserted": inserted})

    async def _put_shard(self, request: web.Request) -> web.Response:
        self._check_token(request, "write")
        files = _parse_shard(await request.read())
        if any(term.xorb not in self._xorbs for terms in files.values() for term in terms):
            return problem(400, "the shard names an unknown xorb")
        self._files |= files
        lines = [{"type": "committing", "stage": "syncing"}, {"type": "result", "result": 1}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        return web.Response(text=text, content_type="application/x-ndjson")

    async def _reconstruct(self, request: web.Request) -> web.Response:
        self._check_token(request, "read", "write")
        file_hash = request.match_info["hash"]
        terms, size = self._files.get(file_hash), self.size(file_hash)
        if terms is None or size is None:
            return problem(404, "no such file")
        start, end = _range(request, size)
        if start >= size:
            return problem(416, "beyond the end")
        offset, wanted = self._trimmed(terms, start, end)
        fetch: dict[str, list[dict[str, object]]] = {}
        for term in dict.fromkeys((term.xorb, term.start, term.end) for term in wanted):
            xorb, first, last = term
            bytes_range = {
                "start": self._xorbs[xorb].stored[first],
                "end": self._xorbs[xorb].stored[last] - 1,
            }
            ranges = [{"chunks": {"start": first, "end": last}, "bytes": bytes_range}]
            url = f"{request.scheme}://{request.headers['Host']}/data/{xorb}?X-Signature=secret"
            fetch.setdefault(xorb, []).append({"url": url, "ranges": ranges})
        told = [
            {
                "hash": term.xorb,
                "unpacked_length": term.bytes,
                "range": {"start": term.start, "end": term.end},
            }
            for term in wanted
        ]
        return web.json_response({"offset_into_first_range": offset, "terms": told, "xorbs": fetch})

    def _trimmed(self, terms: list[Term], start: int, end: int) -> tuple[int, list[Term]]:
        """The chunks that hold bytes `start` to `end`, and where `start` is in the first of them."""
        found, position, offset = [], 0, 0
        for term in terms:
            low, high = max(start - position, 0), min(end - position, term.bytes)
            if low < high:
                starts = self._xorbs[term.xorb].unpacked
                base = starts[term.start]
                first = bisect.bisect_right(starts, base + low) - 1
                last = bisect.bisect_left(starts, base + high)
                if not found:
                    offset = base + low - starts[first]
                found.append(Term(term.xorb, starts[last] - starts[first], first, last))
            position += term.bytes
        return offset, found

    async def _get_data(self, request: web.Request) -> web.Response:
        data = self._xorbs[request.match_info["hash"]].data
        start, end = _range(request, len(data))
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        return web.Response(status=206, body=data[start:end], headers=headers)

    async def _not_here(self, request: web.Request) -> web.Response:
        await request.read()
        return problem(404, "not here")

    async def _ignore(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({})


def _range(request: web.Request, size: int) -> tuple[int, int]:
    """First byte and end of the one range that is asked for, or of everything."""
    header = request.headers.get("Range")
    if header is None:
        return 0, size
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", header)
    if match is None:
        raise web.HTTPBadRequest(text="one range, please")
    return int(match[1]), min(size, int(match[2]) + 1) if match[2] else size


def _parse_xorb(data: bytes) -> Xorb:
    stored, unpacked, at = [0], [0], 0
    while at + 8 <= len(data) and data[at] == 0:
        at += 8 + int.from_bytes(data[at + 1 : at + 4], "little")
        stored.append(at)
        unpacked.append(unpacked[-1] + int.from_bytes(data[stored[-2] + 5 : stored[-2] + 8], "little"))
    return Xorb(data, stored, unpacked)


def _parse_shard(data: bytes) -> dict[str, list[Term]]:
    files = {}
    records = (data[at : at + _RECORD] for at in itertools.count(_RECORD, _RECORD))
    for record in records:
        if record[:32] == _BOOKEND:
            return files
        flags, count = struct.unpack_from("<II", record, 32)
        terms = [next(records) for _ in range(count)]
        files[_hex(record)] = [Term(_hex(term), *struct.unpack_from("<III", term, 36)) for term in terms]
        for _ in range((count if flags >> 31 & 1 else 0) + (flags >> 30 & 1)):
            next(records)
    raise AssertionError("unreachable")


def _hex(record: bytes) -> str:
    """A hash as Xet writes it: four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack_from("<4Q", record))
