"""The version that a replica stays at, if any."""

from __future__ import annotations

import re

from deltasync.config import PIN
from deltasync.errors import ConfigError

Pin = int | None
"""The version that a replica stays at; None to take every new one."""


def parse_pin(text: str) -> Pin:
    """Parse `newest` or a version's number. Raises ConfigError for anything else."""
    if re.fullmatch(PIN, text.strip()) is None:
        raise ConfigError(f"A pin is newest or a version's number, not {text!r}.")
    return None if text.strip() == "newest" else int(text)


def pin_text(pin: Pin) -> str:
    """Return the text that `parse_pin` parses."""
    return "newest" if pin is None else str(pin)
