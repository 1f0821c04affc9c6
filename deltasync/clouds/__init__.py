"""Stores that are services: buckets of S3, GCS and Azure, and those of the Hugging Face Hub. A wing of the
stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltasync.stores.base import Store

__all__ = ["OPEN", "cloud", "environment", "hub"]

OPEN = {
    **dict.fromkeys(("s3", "gs", "az"), "deltasync.clouds.cloud:CloudStore"),
    "hf": "deltasync.clouds:open_hub",
}
"""Factories of stores by scheme, as `module:name`. `stores.open_store` looks here for schemes that it lacks."""


def open_hub(url: str) -> Store:
    """Return a bucket of the Hub. Its variables are checked first: huggingface_hub reads them at import.

    Raises:
        ConfigError: a variable cannot work, or the URL has another form.
    """
    from deltasync.clouds.environment import check_hub

    check_hub()
    from deltasync.clouds.hub import HubStore

    return HubStore(url)
