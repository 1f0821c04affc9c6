"""The Hub's API for Spaces, as far as `deltasync deploy` has huggingface_hub call it. Nothing is built."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable

import yaml
from aiohttp import web

from tests.hub.cas import Cas
from tests.hub.faults import Steps, problem


@dataclasses.dataclass
class Space:
    """What is known of one, as `GET /_spaces` tells it.

    Attributes:
        files: Digests by path as the Hub tells them: git's of text, sha256 of what is in the Xet store.
        texts: The content of the former.
        commits: How often `files` changed.
    """

    private: bool
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    secrets: dict[str, str] = dataclasses.field(default_factory=dict)
    hardware: str = "cpu-basic"
    sleep_s: int | None = None
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    commits: int = 0

    def runtime(self) -> dict[str, object]:
        """As the Hub describes it."""
        return {"stage": "BUILDING", "hardware": {"current": None, "requested": self.hardware}, "gcTimeout": self.sleep_s}


class Spaces:
    """Spaces by id."""

    def __init__(self, steps: Steps, cas: Cas, check_token: Callable[[web.Request, bool], None]) -> None:
        self._steps = steps
        self._cas = cas
        self._check_token = check_token
        self.spaces: dict[str, Space] = {}

    def add_routes(self, app: web.Application) -> None:
        """Serve in `app`."""
        api = "/api/spaces/{namespace}/{name}"
        for method, path, step, handler in (
            ("POST", "/api/repos/create", "create_repo", self._create),
            ("POST", "/api/validate-yaml", "validate_yaml", self._validate),
            ("GET", api, "space_info", self._info),
            ("GET", api + "/revision/main", "space_info", self._info),
            ("POST", api + "/variables", "variable", self._add_variable),
            ("POST", api + "/secrets", "secret", self._add_secret),
            ("POST", api + "/hardware", "hardware", self._request_hardware),
            ("POST", api + "/preupload/main", "preupload", self._preupload),
            ("GET", api + "/xet-write-token/main", "write_token", self._write_token),
            ("POST", api + "/commit/main", "commit", self._commit),
        ):
            app.router.add_route(method, path, self._steps.named(step, handler))

    def _space(self, request: web.Request) -> Space:
        self._check_token(request, request.method == "POST")
        found = self.spaces.get(_id(request))
        if found is None:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        return found

    async def _create(self, request: web.Request) -> web.Response:
        self._check_token(request, True)
        settings = await request.json()
        space_id = f"{settings['organization']}/{settings['name']}"
        reply = {"url": f"http://{request.headers['Host']}/spaces/{space_id}"}
        if settings["type"] != "space" or settings["sdk"] != "docker":
            return problem(400, "only Docker Spaces here")
        if space_id in self.spaces:
            return web.json_response(reply | {"error": "You already created this space repo"}, status=409)
        # `private` by older versions of huggingface_hub, `visibility` by newer ones.
        self.spaces[space_id] = Space(settings.get("private") is True or settings.get("visibility") == "private")
        return web.json_response(reply)

    async def _validate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        header = yaml.safe_load(asked["content"].split("---")[1])
        if asked["repoType"] == "space" and not {"title", "sdk"} <= header.keys():
            return web.json_response({"errors": [{"message": "title and sdk are required"}]}, status=400)
        return web.json_response({"errors": [], "warnings": []})

    async def _info(self, request: web.Request) -> web.Response:
        space, space_id = self._space(request), _id(request)
        host = f"https://{space_id.replace('/', '-')}.hf.space"
        sha = hashlib.sha1(str(space.commits).encode()).hexdigest()
        return web.json_response({"id": space_id, "sha": sha, "private": space.private, "sdk": "docker", "host": host})

    async def _add_variable(self, request: web.Request) -> web.Response:
        variables, asked = self._space(request).variables, await request.json()
        variables[asked["key"]] = asked["value"]
        return web.json_response({key: {"value": value} for key, value in variables.items()})

    async def _add_secret(self, request: web.Request) -> web.Response:
        secrets, asked = self._space(request).secrets, await request.json()
        secrets[asked["key"]] = asked["value"]
        return web.json_response({})

    async def _request_hardware(self, request: web.Request) -> web.Response:
        space, asked = self._space(request), await request.json()
        space.hardware, space.sleep_s = asked["flavor"], asked.get("sleepTimeSeconds")
        return web.json_response(space.runtime())

    async def _preupload(self, request: web.Request) -> web.Response:
        space, asked = self._space(request), (await request.json())["files"]
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if b"\0" in base64.b64decode(file["sample"]) else "regular",
                "shouldIgnore": False,
                "oid": space.files.get(file["path"]),
            }
            for file in asked
        ]
        return web.json_response({"files": modes})

    async def _write_token(self, request: web.Request) -> web.Response:
        self._space(request)
        token, expires_s = self._cas.issue_token("write", False)
        url = f"http://{request.headers['Host']}"
        headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires_s)}
        return web.json_response({"casUrl": url, "accessToken": token, "exp": expires_s}, headers=headers)

    async def _commit(self, request: web.Request) -> web.Response:
        space = self._space(request)
        for line in (await request.text()).splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                content = base64.b64decode(value["content"])
                space.files[value["path"]] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                space.texts[value["path"]] = content.decode()
            elif operation["key"] == "lfsFile":
                space.files[value["path"]] = value["oid"]
            elif operation["key"] != "header":
                return problem(400, f"unknown operation {operation['key']}")
        space.commits += 1
        url = f"http://{request.headers['Host']}/spaces/{_id(request)}/commit/{space.commits}"
        return web.json_response({"success": True, "commitOid": f"{space.commits:040}", "commitUrl": url})


def _id(request: web.Request) -> str:
    return f"{request.match_info['namespace']}/{request.match_info['name']}"
