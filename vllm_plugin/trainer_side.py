"""The backend `deltasync` of vLLM's own trainer side, for trainers that are built on
`WeightTransferTrainerFactory`.

    vllm_plugin.register()
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInit("s3://bucket/run", rank=0), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    engine.send_weights()

The servers run the backend of the same name (`backend`).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from deltasync import Publisher
from deltasync.errors import ConfigError


@dataclasses.dataclass
class TrainerInit(TrainerInitInfo):
    """The channel's URL, and other arguments of [`~deltasync.Publisher`]."""

    backend: ClassVar[str] = "deltasync"

    channel: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


class DeltaSyncTrainerEngine(TrainerWeightTransferEngine):
    """Implements `vllm.distributed.weight_transfer.base.TrainerWeightTransferEngine`. Rank 0 publishes."""

    init_info_cls = TrainerInit

    def __init__(self, publisher: Publisher | None, **sides: Any) -> None:
        super().__init__(**sides)
        self._publisher = publisher

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInit, *, client: Any, source: Any = None
    ) -> DeltaSyncTrainerEngine:
        """Open the channel and send its URL to the servers.

        Raises:
            ConfigError: no source is given, or one that does not gather every tensor on rank 0; or a setting
                is wrong.
        """
        if source is None:
            raise ConfigError(
                "The backend 'deltasync' finds changes by itself, and needs all weights: pass source=."
            )
        # from vLLM 0.33 on: sources may give shards, or some tensors on some ranks
        if hasattr(source, "owned_names"):
            owned = set(source.owned_names(0)) if source.implements_iter_full() else set()
            missing = [meta.name for meta in source.metadata if meta.name not in owned]
            if missing:
                raise ConfigError(
                    f"The backend 'deltasync' publishes from rank 0, and this source gathers {len(missing)} "
                    "tensors not "
                    f"there, such as {missing[0]}: pass one that does, or publish with Publisher(..., "
                    "group=group)."
                )
        publisher = None
        if init_info.is_sender:
            publisher = Publisher(init_info.channel, **init_info.settings)
            client.init_weight_transfer_engine({"channel": init_info.channel})
        return cls(publisher, client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self) -> None:
        """Publish the source and have the servers take that version, on rank 0. Other ranks only take part in
        gathers.

        Raises:
            PublishError: the version did not become visible; nothing was sent to the servers.
        """
        if self._publisher is None:
            deque(_gathered(self.source), maxlen=0)
            return
        receipt = self._publisher.publish(_gathered(self.source))
        receipt.wait()
        self.client.start_weight_update()
        self.client.update_weights({"version": receipt.version})
        self.client.finish_weight_update(str(receipt.version))

    def shutdown(self) -> None:
        """Finish the uploads and close the channel."""
        if self._publisher is not None:
            self._publisher.close()


def _gathered(source: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over whole tensors: by `iter_full` from vLLM 0.33 on, by the source itself before."""
    tensors: Iterator[tuple[str, Any]] = source.iter_full() if hasattr(source, "iter_full") else iter(source)
    return tensors
