"""A Hub with buckets and a Xet CAS in one process, for the real clients: `python -m tests.hub.server --port
0`.

Prints its port. Keeps everything in memory. Besides what it imitates it answers

    GET  /_requests              requests by name since the last reset
    POST /_reset                 forget the counts, the faults and the conditions
    POST /_faults                arm a fault: the fields of `Fault` as JSON
    POST /_set                   change `Conditions`: its fields as JSON
    GET  /_log                   requests since the last call, while `log` is set: time, name, method, path, token, client
    POST /_raw/{bucket id}       {"text": ...} to all who listen, as it is
    POST /_events/{bucket id}    {"do": "drop" | "reset" | "reconnect"} to all who listen; the reply says to how many
    POST /_fill/{bucket id}      {"paths": [...], "like": path}: give many paths the content of one
    GET  /_spaces                every Space, its secrets included
    GET  /_jobs                  every job that was started, its secrets included
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import ssl

from aiohttp import web

from tests.hub.cas import Cas
from tests.hub.faults import Fault, Steps
from tests.hub.hub import Hub
from tests.hub.spaces import Spaces

_LARGEST_BODY = 1 << 30


def application() -> web.Application:
    """All of it, empty."""
    steps = Steps()
    cas = Cas(steps)
    hub = Hub(steps, cas)
    spaces = Spaces(steps, cas, hub.check_token)

    async def requests(_: web.Request) -> web.Response:
        return web.json_response(steps.counts)

    async def reset(_: web.Request) -> web.Response:
        steps.reset()
        return web.json_response({})

    async def set_conditions(request: web.Request) -> web.Response:
        steps.conditions = dataclasses.replace(steps.conditions, **await request.json())
        return web.json_response({})

    async def log(_: web.Request) -> web.Response:
        lines, steps.log = steps.log, []
        return web.json_response(lines)

    async def raw(request: web.Request) -> web.Response:
        listeners, text = hub.buckets[request.match_info["bucket"]].listeners, (await request.json())["text"]
        for listener in listeners:
            listener.put_nowait(text.encode())
        return web.json_response(len(listeners))

    async def arm(request: web.Request) -> web.Response:
        steps.armed.append(Fault(**await request.json()))
        return web.json_response({})

    async def events(request: web.Request) -> web.Response:
        listeners = hub.buckets[request.match_info["bucket"]].listeners
        for listener in listeners:
            listener.put_nowait((await request.json())["do"])
        return web.json_response(len(listeners))

    async def fill(request: web.Request) -> web.Response:
        bucket, order = hub.buckets[request.match_info["bucket"]], await request.json()
        like = bucket.files[order["like"]]
        for path in order["paths"]:
            bucket.put(path, like.xet_hash, like.size, like.mtime_ms)
        return web.json_response({})

    async def all_spaces(_: web.Request) -> web.Response:
        return web.json_response({name: dataclasses.asdict(space) for name, space in spaces.spaces.items()})

    async def all_jobs(_: web.Request) -> web.Response:
        return web.json_response(spaces.jobs)

    app = web.Application(client_max_size=_LARGEST_BODY)
    cas.add_routes(app)
    hub.add_routes(app)
    spaces.add_routes(app)
    app.router.add_get("/_requests", requests)
    app.router.add_post("/_reset", reset)
    app.router.add_post("/_set", set_conditions)
    app.router.add_get("/_log", log)
    app.router.add_post("/_raw/{bucket:.+}", raw)
    app.router.add_post("/_faults", arm)
    app.router.add_post("/_events/{bucket:.+}", events)
    app.router.add_post("/_fill/{bucket:.+}", fill)
    app.router.add_get("/_spaces", all_spaces)
    app.router.add_get("/_jobs", all_jobs)
    return app


async def serve(host: str, port: int, tls: ssl.SSLContext | None) -> None:
    """Serve until cancelled."""
    runner = web.AppRunner(application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port, ssl_context=tls)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="A Hub with buckets and a Xet CAS, in memory.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument(
        "--certificate", metavar="FILE", help="serve HTTPS, with the chain and the key in this file"
    )
    arguments = parser.parse_args()
    tls = None
    if arguments.certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(arguments.certificate)
    asyncio.run(serve(arguments.host, arguments.port, tls))


if __name__ == "__main__":
    main()
