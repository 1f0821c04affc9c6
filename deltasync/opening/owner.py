"""The owner of a channel: an id by which a job that starts again knows the run that it has begun.

It is no secret and proves nothing. It keeps a job from continuing another one's run by mistake.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path
from typing import Final

from deltasync.errors import ConfigError

OVERWRITE: Final = "overwrite"
"""The value of `resume` that continues a run whatever weights it has of the resumed step."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
_MOST_BYTES = 1000


def owner_of(owner: str | os.PathLike[str] | None) -> str | None:
    """Return the id of an owner: the text itself, or what a file says, which is made with a random id if it
    is missing.

    After return the file is on the disk. Several processes that make it at once may return different ids;
    then one of them begins the channel, and the others are refused.

    Raises:
        ConfigError: it is no id, or the file cannot be read or made.
    """
    if owner is None:
        return None
    if isinstance(owner, str):
        if _ID.fullmatch(owner) is None:
            raise ConfigError(
                "owner must be 1 to 100 letters, digits, '.', '_', ':' or '-', such as a job's id, not "
                f"{owner!r:.99}. "
                "To keep a random id in a file, give its pathlib.Path."
            )
        return owner
    if not isinstance(owner, os.PathLike):
        raise ConfigError(f"owner must be a text or a path, not {owner!r:.120}.")
    path = Path(os.fsdecode(os.fspath(owner)))
    try:
        return _read(path) or _made(path)
    except OSError as error:
        raise ConfigError(
            f"The owner's file {path} cannot be {'read' if path.exists() else 'made'}: "
            f"{error.strerror or error}. Give a "
            "path that this process may write, or the id of the job as owner=."
        ) from error


def _read(path: Path) -> str | None:
    """Return the id in a file, None if there is none, as where its first write was cut off."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    if _ID.fullmatch(text) is not None:
        return text
    if text:
        raise ConfigError(
            f"{path} holds no owner's id. Delete it if it is another program's, or give another path as "
            "owner=."
        )
    return None


def _made(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with made.open("xb") as file:
            file.write(f"{uuid.uuid4().hex}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
    found = _read(path)  # another process may have made it, too
    if found is None:
        raise OSError(f"{path} is empty after it was written")
    return found


def check_resume(resume: object) -> None:
    """Raise ConfigError if this is no value of the argument `resume`."""
    if resume not in (False, True, OVERWRITE):
        raise ConfigError(f"resume must be True, False or {OVERWRITE!r}, not {resume!r:.120}.")
