"""What the commands print: every line by `echo` or `echo_json`, every cell of a table by `cell`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from deltasync.printable import printable

if TYPE_CHECKING:
    from rich.text import Text


def echo(line: str, err: bool = False) -> None:
    """Print one line, whatever is in it."""
    click.echo(printable(line), err=err)


def echo_json(document: Any, indent: int | None = None) -> None:
    """Print plain data as JSON, in ASCII: control characters in it are escaped, and read back as they are."""
    click.echo(json.dumps(document, indent=indent).replace("\x7f", "\\u007f"))


def cell(text: object, style: str = "") -> Text:
    """A text for rich, printable and without markup."""
    from rich.text import Text

    return Text(printable(str(text)), style)
