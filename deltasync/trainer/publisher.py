"""The publisher of a trainer: of one process that has the whole model, or of ranks that share it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Unpack

import torch.distributed as dist

from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Trusted
from deltasync.config import PublisherOptions, PublisherSettings, Retention
from deltasync.opening.owner import OVERWRITE
from deltasync.opening.resumed import StepCheck
from deltasync.opening.start import ChannelState, Start, check_arguments, open_first, warn_of_growth
from deltasync.ops.compactor import maintains
from deltasync.publish import BasePublisher, Opened
from deltasync.publish.agreement import Alone, attempt
from deltasync.publish.append import Appender
from deltasync.publish.log import Log
from deltasync.publish.upload import Finisher, UploadQueue
from deltasync.stores import Store
from deltasync.trainer.agreement import Agreement
from deltasync.trainer.parts import Answerer
from deltasync.trainer.ranks import connected
from deltasync.trainer.source import Source

_UNKNOWN_TIMEOUT_S = 60.0  # for ranks, where the settings that say it are wrong


class Publisher(BasePublisher):
    """Writes one channel. One of its methods is called at a time, from any thread; other calls are refused
    meanwhile.

    A sharded trainer makes one on each rank, all with the same arguments, and calls each method on all ranks.
    Each rank compares, encodes and uploads what it holds; the version appears when all parts are stored. If
    one rank raises, all do. Only the first rank needs the keys.

    Args:
        channel: URL of the channel, or an opened store.
        model_files: The files beside the weights that make an anchor a checkpoint: a directory with
            config.json, tokenizer and so on, or the bytes by name. Without them anchors hold weights only.
        initial: The checkpoint that trainer and replicas start from: a directory, or a model on the Hub as
            `namespace/name@revision`. The first version of a new channel then is a reference to it and
            uploads no weights; if the first stream has other bits, these follow as a delta, the second
            version. Each rank of a `group` reads it.
        resume: Continue the run that the channel holds; without it a used channel is refused. If the first
            publish has a `step` that the channel has, the bits must be those that it has; "overwrite"
            continues with any.
        owner: The job that publishes, so that it continues the run that it has begun, without `resume`, and
            no other: an id that stays when the job starts again, such as Slurm's, or a `pathlib.Path` of a
            file that stays, which is made with a random id. No secret: channel.json names it.
        retention: How to look after the channel in the background; from the environment if None.
        group: The ranks of a sharded trainer; None if this process has the whole model.
        **options: See `PublisherSettings`.

    Raises:
        ChannelInUseError: the channel holds a run, `resume` was not given, and another owner has begun it.
        ConfigError: a setting is wrong.

    Examples:
        >>> with Publisher("file:///data/run") as publisher:
        ...     receipt = publisher.publish(model.state_dict().items(), step=1)
        ...     receipt.wait(timeout_s=60).version
        1
    """

    def __init__(
        self,
        channel: str | os.PathLike[str] | Store,
        *,
        model_files: str | Path | Mapping[str, bytes] | None = None,
        initial: str | Path | None = None,
        resume: bool | Literal["overwrite"] = False,
        owner: str | os.PathLike[str] | None = None,
        retention: Retention | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Unpack[PublisherOptions],
    ) -> None:
        given, problem = attempt(lambda: check_arguments(channel, model_files, retention, resume, options))
        if group is None and problem is not None:
            raise problem
        timeout_s = _UNKNOWN_TIMEOUT_S if given is None else given[0].peer_timeout_s
        agreement = connected(group, timeout_s, Agreement)
        try:
            agreement.agree(problem)  # so that all ranks know at once what fails at one
            assert given is not None
            settings, chosen, store, files = given
            if retention is None and agreement.rank == 0:
                warn_of_growth(store, chosen)
            super().__init__(_opened(agreement, store, settings, chosen, files, initial, resume, owner))
        except BaseException:
            agreement.close("could not open its publisher")
            raise
        agreement.enter(False)


def _opened(
    agreement: Alone,
    store: Store,
    settings: PublisherSettings,
    retention: Retention,
    files: Mapping[str, bytes],
    initial: str | Path | None,
    resume: bool | Literal["overwrite"],
    owner: str | os.PathLike[str] | None,
) -> Opened:
    log: Log | None = None

    def begin() -> ChannelState:
        nonlocal log
        state, log = open_first(store, settings, bool(resume), files, owner)
        return state

    state = agreement.first(begin, ChannelState)
    agreement.prove_writes(store)
    reader = ChannelReader(store, None if state.trusted is None else Trusted(state.trusted))
    settings = state.settings
    maintenance = maintains(reader, log, retention, files, state.chain, settings.anchor_every, agreement)
    source = Source(agreement, settings.dtype, None if state.channel is None else state.channel.specs)
    start = Start(agreement, source, reader, state, initial, maintenance)
    finisher: Finisher
    if log is not None:
        finisher = Appender(log, maintenance, agreement, files)
    else:
        assert isinstance(agreement, Agreement)
        finisher = Answerer(store, agreement, maintenance)
    return Opened(
        store=store,
        settings=settings,
        run_id=state.run_id,
        version=state.number,
        resumes=bool(state.number) and resume != OVERWRITE,
        agreement=agreement,
        log=log,
        queue=UploadQueue(finisher, settings.codec),
        start=start,
        check_step=StepCheck(agreement, reader, log),
    )
