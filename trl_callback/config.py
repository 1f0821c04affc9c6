"""Settings of the callback: a dataclass that `TrlParser` and `HfArgumentParser` can turn into a command
line.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, Self

from deltasync.config import CODECS, PublisherSettings, TrainerSettings, check_names
from deltasync.errors import ConfigError
from deltasync.opening.owner import check_resume, owner_of
from deltasync.stores import open_store


@dataclass
class DeltaSyncConfig:
    r"""Configuration class for [`DeltaSyncCallback`].

    Its fields share no name with [`~trl.experimental.async_grpo.AsyncGRPOConfig`], so that
    `TrlParser((AsyncGRPOConfig, DeltaSyncConfig))` parses both.

    Parameters:
        > Parameters that control the published data

        channel (`str`):
            URL of the channel, e.g. `file:///data/run`. One run, one writer.
        codec (`str`, *optional*):
            Encoding of the changes, `"context"`, `"packed"` or `"raw"`. If `None`, `DELTASYNC_CODEC` or
            deltasync's default decides.
        anchor_every (`int`, *optional*):
            Write full weights at least every N versions. If `None`, `DELTASYNC_ANCHOR_EVERY` or deltasync's default decides.
        served_dtype (`str`, *optional*):
            Dtype that floating-point weights are cast to before they are compared and published: `"auto"` for the model's
            own where it is float16 or bfloat16, and bfloat16 for float32 masters; `"bfloat16"`, `"float16"`, `"float32"`,
            `"fp8"` for float8_e4m3fn with a scale for each block of 128 by 128 weights, or `"keep"` for no cast. Patterns
            of names with their own dtypes may follow, as in `"auto,*.router.*=float32"`; the last matching pattern decides.
            Replicas should serve the same dtype. If `None`, `DELTASYNC_DTYPE` or `"auto"` decides. (Not called `dtype`,
            which TRL's configs use for the dtype of training.)
        adapter_only (`bool` or `str`, *optional*, defaults to `False`):
            Whether to publish the adapter of a PEFT model instead of the merged weights, for servers started with
            `deltasync serve --adapter`, whose adapter TRL's rollouts then ask for. `True` is the active
            adapter, and the only one that is trained; a name is one of several, each with a callback and a channel.
        initial (`str`, *optional*):
            The checkpoint that training starts from and the replicas have loaded: a model on the Hub, optionally with `@`
            and a revision, or a directory that the replicas can read too. `"auto"` is the checkpoint that the model was
            loaded from. The first version then refers to it, and no full weights are uploaded at the start. If `None`, the
            first version has full weights.
        signing_key (`str`, *optional*):
            File of the private key to sign the channel with, see `deltasync keygen`. If `None`, `DELTASYNC_SIGNING_KEY`
            decides.
        resume (`bool` or `"overwrite"`, *optional*, defaults to `False`):
            Whether to continue the run in the channel, whoever has begun it. Otherwise a used channel is refused, unless
            this trainer has begun it: it resumes from a checkpoint of that run, or has its `owner`. Where the channel has
            the step of the checkpoint that the trainer resumes from, the weights must be those that it has, or nothing is
            published; `"overwrite"` goes on with any.
        owner (`str`, *optional*):
            Id of the job, such as Slurm's, which stays the same when the job starts again, so that it continues its own run
            before it has a checkpoint. If `None`, a random id in the file `deltasync_owner` of the trainer's `output_dir`,
            which is written before the first version. The channel names it; it is no secret.

        > Parameters that control when to publish

        publish_steps (`int`, *optional*, defaults to `1`):
            Publish every N optimizer steps. Not used when TRL decides when to sync: with `AsyncGRPOTrainer` (see
            `weight_sync_steps`) and with trainers that generate on a vLLM server.

        > Parameters that control the replicas that TRL waits for

        max_behind (`int`, *optional*): Number of versions that replicas may be behind the newest one while
            TRL continues to train; 0 to wait for each version. All live replicas count, except pinned ones,
            and the server that TRL generates on, which is polled over HTTP. Training always waits for the
            first version. If `None`, `DELTASYNC_MAX_BEHIND` decides, else it is 1 with `AsyncGRPOTrainer` and
            `AsyncDistillationTrainer`, whose rollouts know the served version, and 0 with trainers that
            generate on a vLLM server, which are on-policy and support no other value. Not used with other
            trainers.
        max_token_lag (`int`, *optional*): With `AsyncGRPOTrainer`: largest lag of trained tokens, in
            versions, when the trainer receives their sample. Older tokens are masked, and samples without
            other tokens are dropped. The unit is that of `max_staleness`, which drops samples whose oldest
            token is too old. vLLM ends an answer with a token of a larger lag, and another request continues
            it with the newest version. If `None`, no token is masked, and no answer ended.
        train_unversioned (`bool`, *optional*, defaults to `False`): With `AsyncGRPOTrainer`: whether to train
            tokens whose replies do not name their version. Otherwise they are masked, because their age is
            unknown, and training ends if no reply names versions.
        ack_timeout_s (`float`, *optional*, defaults to `600.0`): Seconds that training waits for upload and
            acknowledgement before it fails, and for uploads at its end. Before training, the wait for the
            store is at most a minute.
        replicas (`list[str]`, *optional*): URLs of the servers to wait for, e.g. `["http://10.0.0.5:8000"]`,
            instead of all live replicas. They are polled over HTTP, with `DELTASYNC_HTTP_TOKEN` if it is set.
            If `None`, replicas are known from their heartbeats in the channel.
    """  # noqa: D406, D407 - the section of TRL's configs

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuse other names than those of the fields."""
        check_names(given, [each.name for each in fields(cls)])
        return super().__new__(cls)

    channel: str
    codec: str | None = field(default=None, metadata={"choices": [*CODECS]})
    anchor_every: int | None = None
    served_dtype: str | None = None
    adapter_only: bool | str = False
    initial: str | None = None
    signing_key: str | None = None
    resume: Literal[False, True, "overwrite"] = field(default=False, metadata={"nargs": "?", "const": True})
    owner: str | None = None
    publish_steps: int = 1
    max_behind: int | None = None
    max_token_lag: int | None = None
    train_unversioned: bool = False
    ack_timeout_s: float = 600.0
    replicas: list[str] | None = None

    def __post_init__(self) -> None:
        # Both calls raise ConfigError, and neither sends a request to the store.
        open_store(self.channel)
        if self.initial is not None and self.adapter_only:
            raise ConfigError("An adapter has no initial checkpoint. Leave out initial or adapter_only.")
        settings = PublisherSettings.from_env(
            codec=self.codec, anchor_every=self.anchor_every, dtype=self.served_dtype
        )
        if settings.dtype == "fp8" and self.adapter_only:
            raise ConfigError("An adapter cannot be served in FP8. Leave out served_dtype or adapter_only.")
        if settings.dtype == "fp8" and self.initial == "auto":
            raise ConfigError(
                "The trained checkpoint differs from the served FP8 one. Name the FP8 checkpoint as initial."
            )
        TrainerSettings.from_env(max_behind=self.max_behind)
        owner_of(self.owner)
        check_resume(self.resume)
        if self.publish_steps < 1:
            raise ConfigError(f"publish_steps must be at least 1, not {self.publish_steps}.")
        for url in self.replicas or ():
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"replicas must be URLs such as http://10.0.0.5:8000, not {url!r}.")
        if self.max_token_lag is not None and self.max_token_lag < 0:
            raise ConfigError(f"max_token_lag must not be negative, not {self.max_token_lag}.")
        if self.ack_timeout_s <= 0:
            raise ConfigError(f"ack_timeout_s must be positive, not {self.ack_timeout_s}.")


# A parser shows a field's `help`, which is its part of the docstring.
_TEXTS = re.findall(
    r"^ {4}(\w+) \(.*\):\n((?: {8}.*\n)+)", inspect.cleandoc(DeltaSyncConfig.__doc__ or "") + "\n", re.M
)
_HELP = {name: " ".join(text.replace("`", "").split()) for name, text in _TEXTS}
for _field in fields(DeltaSyncConfig):
    _field.metadata = MappingProxyType({**_field.metadata, "help": _HELP.get(_field.name)})
