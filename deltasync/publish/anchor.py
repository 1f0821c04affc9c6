"""Store full weights as an anchor."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from deltasync.channel import anchors, keys
from deltasync.channel.documents import Anchor, File
from deltasync.publish.log import Log
from deltasync.publish.snapshot import Weights
from deltasync.threads import Workers

STORED_AT_ONCE = 2
"""Large files that are stored at once, so that the disk or link never idles between two."""

_MOST_BESIDE_BYTES = 1 << 27
"""A larger weight file is stored before the next one is made."""


def store_anchor(log: Log, weights: Weights, version: int, model_files: Mapping[str, bytes]) -> Anchor:
    """Store the weight files of a version, two at a time, while the next one is made, and the `model_files`
    beside them, by name.

    Raises:
        CorruptDataError: the weights in memory are damaged.
        FencedError, StoreError, OSError: as `Log.put_file`, or the local disk failed.
    """
    stored = list[Future[File]]()
    folder = keys.anchor_folder(version, log.epoch, log.attempt(version))
    extra = [log.put_file(folder, name, data) for name, data in model_files.items()]
    workers = Workers(STORED_AT_ONCE, "upload")
    for name, data in weights.files:
        if len(stored) >= STORED_AT_ONCE:
            stored[-STORED_AT_ONCE].result()  # so that no more are in memory
        stored.append(workers.submit(log.put_file, folder, name, data))
        if len(data) > _MOST_BESIDE_BYTES:
            stored[-1].result()
        del data  # before the next one is made
    files = [future.result() for future in stored]
    if files[-1].key.endswith(anchors.INDEX):
        extra.append(files.pop())
    return Anchor(directory=folder, files=files, model_files=extra)
