"""deltasync inside SGLang.

    DELTASYNC_CHANNEL=s3://bucket/run python -m sglang.launch_server --model-path MODEL

The server then follows the channel, reports under /deltasync/, and keeps its caches apart by version. SGLang
calls `register` in each of its processes, because the package names it as an entry point of
`sglang.srt.plugins`. Without DELTASYNC_CHANNEL nothing in SGLang is changed. With DELTASYNC_ADAPTER the channel
holds an adapter, which the HTTP server's process follows (`sglang_plugin.adapters`).
"""

from __future__ import annotations

import sys
from typing import Any

from deltasync.errors import ConfigError, get_logger

__all__ = ["register"]

logger = get_logger("sglang.deltasync")

SOCKET = "SGLANG_DELTASYNC_SOCKET"
"""Variable of the environment that names the socket at which the first scheduler's process answers the
server's.
"""


def register() -> None:
    """Prepare this process for following, before anything is configured. Options that are refused end the
    start later.

    A variable that is misspelt or cannot be used ends the process at once: SGLang goes on after any other
    exception.
    """
    from deltasync.config import ReplicaSettings
    from deltasync.serve import startup

    try:
        if not startup.is_to_follow():
            return
    except ConfigError as error:
        startup.leave(error)
    has_adapter = ReplicaSettings.from_env().adapter is not None
    if not has_adapter and "sglang.srt.managers.scheduler" in sys.modules:  # where there may be a scheduler
        from sglang_plugin import hooks

        hooks.install()
    from sglang.srt.server_args import ServerArgs

    from deltasync.serve.engine import around

    @around(ServerArgs, "check_server_args")
    def checked(check_server_args: Any, self: Any) -> None:
        from sglang_plugin import refusals

        check_server_args(self)
        refusals.check(self)
        if server := sys.modules.get("sglang.srt.entrypoints.http_server"):
            from sglang_plugin import routes

            routes.install(server)
