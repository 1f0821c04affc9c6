#!/usr/bin/env python
"""Start a router in front of replicas: HAProxy, with the files of deploy/router.

python deploy/router.py https://user-replica-1.hf.space https://user-replica-2.hf.space --port 8080
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import click

from deltasync.errors import ConfigError
from deltasync.ops.cli.output import echo
from deltasync.ops.cli.program import Program
from deltasync.ops.cli.serve import check_port

_FILES = Path(__file__).with_name("router")
_PORTS = {"http": 80, "https": 443}


def servers(urls: Iterable[str], ca_file: str = "@system-ca") -> dict[str, str]:
    """HAProxy's address and options of each replica, by the name that is sent as its Host header.

    `urls` are such as http://10.0.0.5:8000 or https://user-name.hf.space; `ca_file` holds the authorities
    that may certify replicas at https://. Raises ConfigError if a URL has another form, or is given twice.
    """
    found: dict[str, str] = {}
    for url in urls:
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            port = None
        if (
            port is None
            or parts.scheme not in _PORTS
            or parts.hostname is None
            or parts.path not in ("", "/")
        ):
            raise ConfigError(f"A replica is given as http://host:port or https://host, not {url!r}.")
        if parts.netloc in found:
            raise ConfigError(f"The replica {url} is given twice.")
        found[parts.netloc] = f"{parts.hostname}:{port}"
        if parts.scheme == "https":
            tls = f"ca-file {ca_file} sni str({parts.hostname}) check-sni {parts.hostname}"
            found[parts.netloc] += f" ssl verify required {tls}"
    return found


def write(folder: Path, servers: Mapping[str, str]) -> Path:
    """Write HAProxy's files for these replicas to a folder, and return the configuration to start it with."""
    lines = [
        line
        for line in (_FILES / "haproxy.cfg").read_text().splitlines()
        if not line.startswith("    server ")
    ]
    place = lines.index(".endif")
    lines[place:place] = [f"    server {name} {options}" for name, options in servers.items()]
    shutil.copy(_FILES / "replicas.lua", folder)
    path = folder / "haproxy.cfg"
    path.write_text("\n".join(lines) + "\n")
    return path


@click.command("router.py", cls=Program)
@click.argument("replicas", nargs=-1, required=True, metavar="URL...")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, help="Port to listen on.")
@click.option(
    "--ca-file", default="@system-ca", help="Certificates of the authorities for https:// replicas."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write HAProxy's files there; start nothing.",
)
def main(replicas: tuple[str, ...], host: str, port: int, ca_file: str, out: Path | None) -> None:
    """Start HAProxy in front of replicas: URLs such as http://10.0.0.5:8000 or https://user-name.hf.space.

    A request to /v1 goes to a replica that is up. Requests that begin alike go to the same one, and requests
    with the header `x-deltasync-version` (7, >=7 or >=latest) to one that serves such a version.
    /deltasync/replicas lists all replicas.

    \b
      ROUTER_TOKEN   bearer token that requests must present; not set: none
      REPLICA_TOKEN  token for the replicas; not set: the one that the client sent
      ROUTER_WAIT_S  seconds that a request waits for its version; default: 10
    """
    backends = servers(replicas, ca_file)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        echo(str(write(out, backends)))
        return
    if shutil.which("haproxy") is None:
        raise ConfigError("HAProxy is not installed. On Debian or Ubuntu: apt-get install haproxy.")
    check_port(host, port)
    file = write(Path(tempfile.mkdtemp(prefix="deltasync-router-")), backends)
    env = {name: value for name, value in os.environ.items() if name != "ROUTER_REPLICAS"}
    env |= {"ROUTER_BIND": f"{host}:{port}", "ROUTER_PROBES": f"deltasync-router-{host}:{port}"}
    os.execvpe("haproxy", ["haproxy", "-db", "-f", str(file)], env)


if __name__ == "__main__":
    main()
