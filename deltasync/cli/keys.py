"""Options for keys, as every command that reads or adds to a channel has them."""

from __future__ import annotations

import click

trusted_keys = click.option(
    "--trusted-keys",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Take only what one of the public keys in FILE has signed. Default: DELTASYNC_TRUSTED_KEYS, or take everything.",
)

signing_key = click.option(
    "--signing-key",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Private key, for a signed channel. Default: DELTASYNC_SIGNING_KEY.",
)
