"""The Hub's API for buckets, as `huggingface_hub` uses it, over files in memory."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import json
import time
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from tests.hub.cas import Cas
from tests.hub.faults import FAULT, Steps, problem

WRITE, READ, EXPIRED = "hf_good", "hf_readonly", "hf_expired"
"""The tokens it knows; any other is refused. One that begins with `WRITE_` may do the same, for a log by
process.
"""

_PAGE = 1000
_MOST_OPERATIONS = 1000
_KEPT_CHANGES = 1000
_PING_S = 5.0

Change = tuple[int, dict[str, object]]


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """What a path names, and what it named before."""

    xet_hash: str
    size: int
    mtime_ms: int
    uploaded_s: float
    before: File | None = None


class Bucket:
    """Files by path, and who listens to their changes."""

    def __init__(self, private: bool) -> None:
        self.private = private
        self.created_s = time.time()
        self.files: dict[str, File] = {}
        self.sequence = 0
        self.changes: collections.deque[Change] = collections.deque(maxlen=_KEPT_CHANGES)
        self.listeners: set[asyncio.Queue[Change | str | bytes]] = set()

    def put(self, path: str, xet_hash: str, size: int, mtime_ms: int) -> None:
        """Name a file."""
        before = self.files.get(path)
        before = None if before is None else dataclasses.replace(before, before=None)
        self.files[path] = file = File(xet_hash, size, mtime_ms, time.time(), before)
        self._tell({"op": "update" if before else "add", **_described(path, file)})

    def remove(self, path: str) -> None:
        """Forget a file; no error if there is none."""
        if self.files.pop(path, None) is not None:
            self._tell({"op": "delete", "path": path})

    def seen(self, stale: bool) -> Iterable[tuple[str, File]]:
        """The files, or those of a replica that lags behind by one change each."""
        return [
            (path, seen)
            for path, file in self.files.items()
            if (seen := file.before if stale else file) is not None
        ]

    def _tell(self, change: dict[str, object]) -> None:
        self.sequence += 1
        self.changes.append((self.sequence, change))
        for listener in self.listeners:
            listener.put_nowait(self.changes[-1])


class Hub:
    """Buckets by id."""

    def __init__(self, steps: Steps, cas: Cas) -> None:
        self._steps = steps
        self._cas = cas
        self.buckets: dict[str, Bucket] = {}

    def add_routes(self, app: web.Application) -> None:
        """Serve in `app`."""
        api = "/api/buckets/{namespace}/{name}"
        for method, path, step, handler in (
            ("POST", api, "create_bucket", self._create),
            ("GET", api, "info", self._info),
            ("DELETE", api, "delete_bucket", self._delete),
            ("GET", api + "/tree", "tree", self._tree),
            ("GET", api + "/tree/{prefix:.+}", "tree", self._tree),
            ("POST", api + "/paths-info", "paths_info", self._paths_info),
            ("POST", api + "/batch", "batch", self._batch),
            ("GET", api + "/xet-read-token", "read_token", self._read_token),
            ("GET", api + "/xet-write-token", "write_token", self._write_token),
            ("GET", api + "/events", "events", self._events),
            ("HEAD", "/buckets/{namespace}/{name}/resolve/{path:.+}", "resolve", self._resolve),
            ("GET", "/buckets/{namespace}/{name}/resolve/{path:.+}", "resolve", self._resolve),
        ):
            app.router.add_route(method, path, self._steps.named(step, handler))

    def _bucket(self, request: web.Request, writing: bool = False) -> Bucket:
        self.check_token(request, writing)
        found = self.buckets.get(_bucket_id(request))
        if found is None:
            raise _Refused(problem(404, "Bucket not found", "RepoNotFound"))
        return found

    @staticmethod
    def check_token(request: web.Request, writing: bool) -> None:
        """Refuse a request without a token, or one that may not write."""
        header = request.headers.get("Authorization")
        if header is None:
            raise _Refused(problem(401, "Invalid username or password."))
        token = header.removeprefix("Bearer ")
        if token == EXPIRED:
            raise _Refused(problem(401, 'User Access Token "test" is expired'))
        writes = token == WRITE or token.startswith(f"{WRITE}_")
        if not writes and token != READ:
            raise _Refused(problem(401, "Invalid credentials in Authorization header"))
        if writing and not writes:
            raise _Refused(problem(403, "You don't have the required permissions to write to this bucket"))

    async def _create(self, request: web.Request) -> web.Response:
        self.check_token(request, writing=True)
        bucket_id, settings = _bucket_id(request), await request.json()
        reply = {"url": f"{request.scheme}://{request.headers['Host']}/buckets/{bucket_id}"}
        if bucket_id in self.buckets:
            return web.json_response(reply | {"error": "You already created this bucket"}, status=409)
        # `private` by huggingface_hub 1, `visibility` by 2.
        self.buckets[bucket_id] = Bucket(
            settings.get("private") is True or settings.get("visibility") == "private"
        )
        return web.json_response(reply)

    async def _info(self, request: web.Request) -> web.Response:
        bucket = self._bucket(request)
        times = {"createdAt": _iso(bucket.created_s), "updatedAt": _iso(time.time())}
        sizes = {"size": sum(file.size for file in bucket.files.values()), "totalFiles": len(bucket.files)}
        return web.json_response({"id": _bucket_id(request), "private": bucket.private} | times | sizes)

    async def _delete(self, request: web.Request) -> web.Response:
        self._bucket(request, writing=True)
        del self.buckets[_bucket_id(request)]
        return web.json_response({})

    async def _tree(self, request: web.Request) -> web.Response:
        """Pages of what starts with the prefix, in no promised order: here backwards. Folders are listed as
        well, and not what is in them if `recursive` is false.
        """
        bucket, prefix = self._bucket(request), request.match_info.get("prefix", "")
        found: dict[str, dict[str, object]] = {}
        is_deep = request.query.get("recursive") != "false"
        listed_s = time.time() - self._steps.conditions.list_delay_s
        for path, file in bucket.seen(request[FAULT].stale):
            if not path.startswith(prefix) or file.uploaded_s > listed_s:
                continue
            end = -1 if is_deep else path.find("/", len(prefix) + 1)
            folder = path.rpartition("/")[0] if end < 0 else path[:end]
            if end < 0:
                found[path] = {"type": "file", **_described(path, file)}
            if (is_deep or end >= 0) and folder not in found and folder.startswith(prefix):
                found[folder] = {"type": "directory", "path": folder, "uploadedAt": _iso(file.uploaded_s)}
        found.pop("", None)
        first = int(request.query.get("cursor", 0))
        page = sorted(found, reverse=True)[first : first + _PAGE]
        headers = {}
        if first + _PAGE < len(found):
            following = request.url.update_query(
                cursor=first if self._steps.conditions.repeat_cursor else first + _PAGE
            )
            headers["Link"] = f'<{following}>; rel="next"'
        return web.json_response([found[path] for path in page], headers=headers)

    async def _paths_info(self, request: web.Request) -> web.Response:
        files = dict(self._bucket(request).seen(request[FAULT].stale))
        paths = (await request.json())["paths"]
        return web.json_response(
            [{"type": "file", **_described(path, files[path])} for path in paths if path in files]
        )

    async def _batch(self, request: web.Request) -> web.Response:
        bucket = self._bucket(request, writing=True)
        operations = [json.loads(line) for line in (await request.text()).splitlines()]
        kinds = [operation["type"] for operation in operations]
        if len(kinds) > _MOST_OPERATIONS or kinds != sorted(kinds):
            return problem(400, "at most 1000 operations, adds before deletes")
        failed = []
        for operation in operations:
            error = request[FAULT].failed or self._apply(bucket, operation)
            if error is not None:
                failed.append({"path": operation["path"], "error": error})
        done = len(operations) - len(failed)
        reply = {"success": not failed, "processed": len(operations), "succeeded": done, "failed": failed}
        return web.json_response(reply, status=200 if done or request[FAULT].failed else 422)

    def _apply(self, bucket: Bucket, operation: dict[str, Any]) -> str | None:
        path = operation["path"]
        if operation["type"] == "deleteFile":
            if path not in bucket.files:
                return "File not found"
            bucket.remove(path)
            return None
        size = self._cas.size(operation["xetHash"])
        if size is None:
            return "Xet file not found"
        if any(part in ("", ".", "..") for part in path.split("/")):
            return "Invalid path"
        bucket.put(path, operation["xetHash"], size, operation["mtime"])
        return None

    async def _read_token(self, request: web.Request) -> web.Response:
        self._bucket(request)
        return self._token(request, "read")

    async def _write_token(self, request: web.Request) -> web.Response:
        self._bucket(request, writing=True)
        return self._token(request, "write")

    def _token(self, request: web.Request, scope: str) -> web.Response:
        token, expires_s = self._cas.issue_token(
            scope, request[FAULT].expired, request.headers["Authorization"]
        )
        url = f"{request.scheme}://{request.headers['Host']}"
        headers = {
            "X-Xet-Cas-Url": url,
            "X-Xet-Access-Token": token,
            "X-Xet-Token-Expiration": str(expires_s),
        }
        return web.json_response({"casUrl": url, "accessToken": token, "exp": expires_s}, headers=headers)

    async def _resolve(self, request: web.Request) -> web.Response:
        """What a path names, in headers; the redirect leads nowhere, because there is no CDN here."""
        file = dict(self._bucket(request).seen(request[FAULT].stale)).get(request.match_info["path"])
        if file is None:
            return problem(404, "Entry not found", "EntryNotFound")
        origin = f"{request.scheme}://{request.headers['Host']}"
        return web.Response(
            status=302,
            headers={
                "Location": "https://cdn.invalid/" + file.xet_hash,
                "X-Xet-Hash": file.xet_hash,
                "X-Linked-Size": str(file.size + request[FAULT].extra_bytes),
                "X-Linked-Etag": f'"{file.xet_hash}"',
                "Link": f'<{origin}/api/buckets/{_bucket_id(request)}/xet-read-token>; rel="xet-auth"',
            },
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Changes as they happen, after those since the cursor. The cursor is the number of the last one
        told.
        """
        bucket, cursor = self._bucket(request), request.query.get("cursor")
        if cursor is not None and not cursor.isdigit():
            return problem(400, "Invalid cursor")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        listener: asyncio.Queue[Change | str | bytes] = asyncio.Queue()
        bucket.listeners.add(listener)
        try:
            if cursor is not None and int(cursor) + len(bucket.changes) < bucket.sequence:
                await _send(response, "reset", {"reason": "cursor_too_old"})
            elif cursor is not None:
                for change in [change for change in bucket.changes if change[0] > int(cursor)]:
                    await _send_change(response, change)
            await _send(response, "ready", {"cursor": str(bucket.sequence)})
            while True:
                try:
                    told = await asyncio.wait_for(listener.get(), _PING_S)
                except TimeoutError:
                    await response.write(b": ping\n\n")
                    continue
                if told == "drop":
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if isinstance(told, bytes):
                    await response.write(told)
                elif told == "reset":
                    await _send(response, "reset", {"reason": "cursor_too_old"})
                elif told == "reconnect":
                    await _send(response, "reconnect", {"cursor": str(bucket.sequence)})
                    return response
                else:
                    assert not isinstance(told, str)
                    await _send_change(response, told)
        finally:
            bucket.listeners.discard(listener)


class _Refused(web.HTTPException):
    """A finished reply, from within a handler."""

    def __init__(self, reply: web.Response) -> None:
        self.status_code = reply.status
        super().__init__(headers=reply.headers, text=reply.text)


async def _send(response: web.StreamResponse, event: str, data: dict[str, object]) -> None:
    # Unescaped, so that names of files reach the client as they are.
    await response.write(f"event: {event}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode())


async def _send_change(response: web.StreamResponse, change: Change) -> None:
    await _send(response, "changes", {"cursor": str(change[0]), "changes": [change[1]]})


def _bucket_id(request: web.Request) -> str:
    return f"{request.match_info['namespace']}/{request.match_info['name']}"


def _described(path: str, file: File) -> dict[str, object]:
    times = {"mtime": _iso(file.mtime_ms / 1000), "uploadedAt": _iso(file.uploaded_s)}
    return {"path": path, "size": file.size, "xetHash": file.xet_hash, **times}


def _iso(time_s: float) -> str:
    moment = datetime.datetime.fromtimestamp(time_s, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
