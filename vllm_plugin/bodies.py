"""What the routes of `vllm_plugin.endpoints` take in the bodies of requests."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from deltasync.channel.documents import Number
from deltasync.errors import ConfigError


class WeightUpdate(msgspec.Struct, kw_only=True):
    """Body of `POST /request_weight_update`; fields of other trainers are ignored."""

    version: Number | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0


class Sync(WeightUpdate, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /deltasync/sync`, where a field that is not one is a mistake."""


_Body = TypeVar("_Body", bound=WeightUpdate)


def parse(data: bytes, kind: type[_Body]) -> _Body:
    """The body of a request; an empty one has no fields.

    Raises:
        ConfigError: it is not what the route takes.
    """
    try:
        return msgspec.json.decode(data if data.strip() else b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"The body is not what this route takes: {error}.") from None
