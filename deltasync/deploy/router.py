"""The router's configuration: HAProxy in front of replicas, with the files of `deploy/router`."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from deltasync.errors import ConfigError

_FILES = Path(__file__).with_name("haproxy")
_PORTS = {"http": 80, "https": 443}


def servers(urls: Iterable[str], ca_file: str = "@system-ca") -> dict[str, str]:
    """HAProxy's address and options of each replica, by the name that is sent as its Host header.

    Args:
        urls: Replicas, such as http://10.0.0.5:8000 or https://user-name.hf.space.
        ca_file: File with the authorities that may certify replicas at https://.

    Raises:
        ConfigError: a URL has another form, or is given twice.
    """
    found: dict[str, str] = {}
    for url in urls:
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            port = None
        if port is None or parts.scheme not in _PORTS or parts.hostname is None or parts.path not in ("", "/"):
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
    lines = [line for line in (_FILES / "haproxy.cfg").read_text().splitlines() if not line.startswith("    server ")]
    place = lines.index(".endif")
    lines[place:place] = [f"    server {name} {options}" for name, options in servers.items()]
    shutil.copy(_FILES / "replicas.lua", folder)
    path = folder / "haproxy.cfg"
    path.write_text("\n".join(lines) + "\n")
    return path
