"""The parts of an opened channel, as its publisher is handed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from deltasync.channel.documents import Channel, Reference
from deltasync.config import PublisherSettings
from deltasync.publish.agreement import Alone, StreamReader
from deltasync.publish.detect import Difference
from deltasync.publish.log import Log
from deltasync.publish.ranges import Stream
from deltasync.publish.shadow import Shadow
from deltasync.publish.upload import UploadQueue
from deltasync.stores import Store


class Beginning(Protocol):
    """The base of the first stream: the version that is resumed, a checkpoint, or nothing.

    Attributes:
        channel: The channel's description, once a stream was compared.
        source: Reads the streams.
        shadow: The bits that a first stream was compared with, or its own.
        is_resumed: Whether they are those of the version that is resumed.
        reference: The reference to a checkpoint that the first version is, if it is one.
        begins_again: Whether a first version that was lost may be a reference again.
    """

    channel: Channel | None
    source: StreamReader
    shadow: Shadow | None
    is_resumed: bool
    reference: Reference | None
    begins_again: bool

    def compare(self, named_tensors: Stream, *, may_refer: bool) -> Difference:
        """Compare the first stream, and set the attributes."""


class Opened(NamedTuple):
    """The parts of a publisher of an opened channel; `deltasync.trainer.Publisher` puts it together.

    Attributes:
        log: None where another process appends.
        version: The newest version, 0 if there is none.
        resumes: Whether the next publish is the first of a resumed run.
        check_step: Raises if a first publish has other bits of its step than the channel, or has failed.
    """

    store: Store
    settings: PublisherSettings
    run_id: str
    version: int
    resumes: bool
    agreement: Alone
    log: Log | None
    queue: UploadQueue
    start: Beginning
    check_step: Callable[[int | None, Shadow | None, Difference | None, BaseException | None], None]
