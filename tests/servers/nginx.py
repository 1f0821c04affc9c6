"""The HTTP cache of docs/guides/cache.md: the real nginx with the page's configuration, before a server that the
test names.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from demo.processes import Child
from demo.run import free_port

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "cache.md"
PATIENCE_S = 30.0


def require_nginx() -> str:
    """The program. Skips the test where there is none."""
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        pytest.skip("no nginx here; on Debian or Ubuntu, apt-get install nginx")
    return found


def configuration(origin: str, port: int, folder: Path) -> str:
    """The page's configuration before `origin`, an http:// URL, with its files in a folder."""
    match = re.search(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert match is not None
    text = match[1]
    for old, new in (
        ("server bucket.example.com:443;", f"server {urlsplit(origin).netloc};"),
        ("bucket.example.com", urlsplit(origin).netloc),
        ("https://bucket", "http://bucket"),
        ("listen 8080", f"listen 127.0.0.1:{port}"),
        ("/var/cache/deltasync", f"{folder}/cache"),
        ("/run/deltasync-cache.pid", f"{folder}/nginx.pid"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""  # whose folders are those of the tests
    return f"{user}daemon off;\n{text.replace('access_log off;', f'access_log off;{temporary}')}"


@contextlib.contextmanager
def cache_before(origin: str, folder: Path) -> Iterator[str]:
    """The URL of a cache before a server, once it answers."""
    program, port = require_nginx(), free_port()
    file = folder / "nginx.conf"
    file.write_text(configuration(origin, port, folder))
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    command = [program, "-e", "stderr", "-p", str(folder), "-c", str(file)]
    with Child("The cache", command, dict(os.environ), folder / "nginx.log") as child:
        child.wait_until(answers, PATIENCE_S, "to start")
        yield url
