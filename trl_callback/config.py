"""Settings of the callback: a dataclass that `TrlParser` and `HfArgumentParser` can turn into a command line."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from deltasync.channel import heartbeat
from deltasync.config import AUTO, CODECS, PublisherSettings, TrainerSettings
from deltasync.errors import ConfigError
from deltasync.stores import open_store


@dataclass
class DeltaSyncConfig:
    r"""Configuration class for [`DeltaSyncCallback`].

    Its fields share no name with [`~trl.experimental.async_grpo.AsyncGRPOConfig`], so that
    `TrlParser((AsyncGRPOConfig, DeltaSyncConfig))` parses both.

    Parameters:
        > Parameters that control what is written

        channel (`str`):
            URL of the channel, e.g. `file:///data/run`. One run, one writer.
        codec (`str`, *optional*):
            Encoding of the changes, `"auto"`, `"packed"`, `"context"` or `"raw"`. If `None`, `DELTASYNC_CODEC` or
            deltasync's default decides.
        anchor_every (`int`, *optional*):
            Full weights accompany at least every N-th version. If `None`, `DELTASYNC_ANCHOR_EVERY` or deltasync's default
            decides.
        served_dtype (`str`, *optional*):
            Dtype that floating-point weights are cast to before they are compared and published: `"bfloat16"`, `"float16"`,
            `"float32"`, `"fp8"` for float8_e4m3fn with a scale for each block of 128 by 128 weights, or `"keep"` for the
            dtype they have. Patterns of names with dtypes of their own may follow, `"bfloat16,*.router.*=float32"`; the
            last that matches decides. It should be what the replicas serve. If `None`, `DELTASYNC_DTYPE` or deltasync's
            default decides. (Not called `dtype`, which TRL's configs use for the dtype of training.)
        adapter_only (`bool`, *optional*, defaults to `False`):
            Whether to publish the adapter of a PEFT model instead of the merged weights, for servers started with
            `deltasync serve --adapter`. Not for trainers that stream merged weights.
        initial (`str`, *optional*):
            The checkpoint that training starts from and the replicas have loaded: a model on the Hub, with `@` and a
            revision or without, or a directory that they reach too. `"auto"` is what the model was loaded from. The first
            version then refers to it, and no full weights are uploaded at the start. If `None`, they are.
        signing_key (`str`, *optional*):
            File of the private key to sign the channel with, see `deltasync keygen`. If `None`, `DELTASYNC_SIGNING_KEY`
            decides.
        resume (`bool`, *optional*, defaults to `False`):
            Whether to continue the run that the channel holds. Otherwise a used channel is refused, unless the trainer
            resumes from a checkpoint of that very run.

        > Parameters that control when it is written

        publish_steps (`int`, *optional*, defaults to `1`):
            Publish every N optimizer steps. Not used where TRL asks for the weights: with `AsyncGRPOTrainer` (see
            `weight_sync_steps`) and with trainers that generate on a vLLM server.

        > Parameters that control what TRL waits for

        ack (`str`, *optional*):
            Which replicas must serve a version before TRL goes on with it: `"all"` that are live, `"any"` of them, a
            number of them, or `"none"`: do not wait, not even for the upload. If `None`, `"any"` with `AsyncGRPOTrainer`
            and `"all"` with trainers that generate on a vLLM server, which are on-policy and cannot have `"none"`. Not
            used with other trainers. The server that TRL generates on must serve it in any case, and is asked over HTTP.
        max_behind (`int`, *optional*):
            Training goes on while the replicas that `ack` asks for are at most so many versions behind the newest one; 0
            waits for each version. The first one is always waited for. If `None`, `DELTASYNC_MAX_BEHIND` decides, else it
            is 1 with `AsyncGRPOTrainer` and `AsyncDistillationTrainer`, whose rollouts are told the version that is served,
            and 0 with trainers that generate on a vLLM server, which are on-policy and cannot have another. Not used with
            other trainers.
        max_token_lag (`int`, *optional*):
            With `AsyncGRPOTrainer`: tokens made by a version that is further behind the trainer's, when it takes their
            sample, are masked, and samples without other tokens dropped. It counts as `max_staleness` does, which drops
            samples by their oldest token. If `None`, no token is masked.
        train_unversioned (`bool`, *optional*, defaults to `False`):
            With `AsyncGRPOTrainer`: whether to train tokens of replies that do not say which version made them. Otherwise
            they are masked, as their age is unknown, and training ends if no reply says it.
        ack_timeout_s (`float`, *optional*, defaults to `600.0`):
            Seconds that training waits for upload and acknowledgement before it fails, and for uploads at its end; before
            training, at most a minute for the store.
        replicas (`list[str]`, *optional*):
            URLs of the servers to wait for, e.g. `["http://10.0.0.5:8000"]`. They are asked over HTTP, with
            `DELTASYNC_HTTP_TOKEN` if it is set. If `None`, replicas are known from their heartbeats in the channel.
    """  # noqa: D406, D407 - the section of TRL's configs

    channel: str
    codec: str | None = field(default=None, metadata={"choices": [*CODECS, AUTO]})
    anchor_every: int | None = None
    served_dtype: str | None = None
    adapter_only: bool = False
    initial: str | None = None
    signing_key: str | None = None
    resume: bool = False
    publish_steps: int = 1
    ack: str | None = None
    max_behind: int | None = None
    max_token_lag: int | None = None
    train_unversioned: bool = False
    ack_timeout_s: float = 600.0
    replicas: list[str] | None = None

    def __post_init__(self) -> None:
        # Both raise ConfigError, and neither touches the store.
        open_store(self.channel)
        if self.initial is not None and self.adapter_only:
            raise ConfigError("An adapter has no initial checkpoint; leave initial or adapter_only.")
        settings = PublisherSettings.from_env(codec=self.codec, anchor_every=self.anchor_every, dtype=self.served_dtype)
        if settings.dtype == "fp8" and self.adapter_only:
            raise ConfigError("An adapter is not served in FP8; leave served_dtype or adapter_only.")
        if settings.dtype == "fp8" and self.initial == "auto":
            raise ConfigError("The checkpoint that is trained is not the FP8 one that is served; name that as initial.")
        TrainerSettings.from_env(max_behind=self.max_behind)
        if self.publish_steps < 1:
            raise ConfigError(f"publish_steps must be at least 1, not {self.publish_steps}.")
        if self.ack is not None:
            self.ack = str(self.ack)
            if self.ack != "none":
                heartbeat.check_ack(self.ack)
        for url in self.replicas or ():
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"A replica is named by its URL, such as http://10.0.0.5:8000, not by {url!r}.")
        if self.max_token_lag is not None and self.max_token_lag < 0:
            raise ConfigError(f"max_token_lag must not be negative, not {self.max_token_lag}.")
        if self.ack_timeout_s <= 0:
            raise ConfigError(f"ack_timeout_s must be positive, not {self.ack_timeout_s}.")


# A parser shows a field's `help`: what the docstring says about it.
_TEXTS = re.findall(r"^ {4}(\w+) \(.*\):\n((?: {8}.*\n)+)", inspect.cleandoc(DeltaSyncConfig.__doc__ or "") + "\n", re.M)
_HELP = {name: " ".join(text.replace("`", "").split()) for name, text in _TEXTS}
for _field in fields(DeltaSyncConfig):
    _field.metadata = MappingProxyType({**_field.metadata, "help": _HELP.get(_field.name)})
