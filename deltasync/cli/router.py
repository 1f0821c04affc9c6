"""`deltasync router`: HAProxy in front of replicas."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import click

from deltasync.cli.output import echo
from deltasync.errors import ConfigError


@click.command("router")
@click.argument("replicas", nargs=-1, required=True, metavar="URL...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True)
@click.option("--ca-file", default="@system-ca", show_default=True, help="Who may certify replicas at https://.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write HAProxy's files there, start nothing.")
def command(replicas: tuple[str, ...], host: str, port: int, ca_file: str, out: Path | None) -> None:
    """Start HAProxy in front of replicas: URLs such as http://10.0.0.5:8000 or https://user-name.hf.space.

    Requests to /v1 go to one that is up, those that begin alike to the same one, and those with the header
    `x-deltasync-min-version: N` to one that serves version N or a later one. /deltasync/replicas tells about all.

    \b
      ROUTER_TOKEN   what requests must present as a bearer token; not set: nothing
      REPLICA_TOKEN  what the replicas are presented with; not set: what the client sent
      ROUTER_WAIT_S  how long a request waits for its version, by default 10
    """
    from deltasync.deploy.router import servers, write
    from deltasync.deploy.serving import check_port

    found = servers(replicas, ca_file)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        echo(str(write(out, found)))
        return
    if shutil.which("haproxy") is None:
        raise ConfigError("HAProxy is not installed. On Debian or Ubuntu: apt-get install haproxy.")
    check_port(host, port)
    file = write(Path(tempfile.mkdtemp(prefix="deltasync-router-")), found)
    env = {name: value for name, value in os.environ.items() if name != "ROUTER_REPLICAS"}
    env |= {"ROUTER_BIND": f"{host}:{port}", "ROUTER_PROBES": f"deltasync-router-{host}:{port}"}
    os.execvpe("haproxy", ["haproxy", "-db", "-f", str(file)], env)
