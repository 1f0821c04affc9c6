"""A real vLLM server for tests, as a replica of a channel that the test publishes to."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from deltasync import Publisher, Retention
from deltasync.channel import keys
from deltasync.channel.documents import Record
from deltasync.channel.record import StoredRecord
from deltasync.codec.base import Encoded
from deltasync.stores import Store, open_store
from deltasync.tensors.bits import bits_of, cast
from demo import model as demo_model
from demo.processes import Child, get_json
from demo.run import free_port
from tests.builders import finish_maintenance

Weights = dict[str, torch.Tensor]

PATIENCE_S = 180.0  # for what takes a fraction of a second: a busy machine is no failure
NO_COMPACTIONS = Retention(compact_every=0)
"""Of a server that tests share: no version can be reached by another way, however many there were before
it.
"""


def start(
    checkpoint: Path,
    channel: str,
    port: int,
    log: Path,
    *arguments: str,
    cores: list[int] | None = None,
    module: str = "vllm.entrypoints.openai.api_server",
    **environ: str,
) -> Child:
    """A server by the README's command, on one core, the last: vLLM's processes spin while they wait, and
    starve others.
    """
    command = [
        sys.executable,
        "-m",
        module,
        "--model",
        str(checkpoint),
        "--worker-extension-cls",
        "vllm_plugin.DeltaSyncWorkerExtension",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enforce-eager",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "8",
        *arguments,
    ]
    settings = {
        "DELTASYNC_CHANNEL": channel,
        "DELTASYNC_POLL_INTERVAL_S": "0.05",
        "DELTASYNC_REPLICA_ID": "test-server",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",  # TRL, imported by another test, lowers it in this environment
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /weight_info
    }
    if cores is None:
        cores = [max(os.sched_getaffinity(0))]
    variables = {name: value for name, value in {**os.environ, **settings, **environ}.items() if value}
    return Child("The vLLM server", command, variables, log, cores)


# The build for CPUs is called vllm-cpu, and the command looks its own version up as vllm's.
_VLLM = """
import importlib.metadata, sys
version = importlib.metadata.version
importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
sys.argv[0] = "vllm"
from vllm.entrypoints.cli.main import main
main()
"""


def serve(checkpoint: Path, log: Path, *arguments: str, **environ: str) -> Child:
    """A server by `vllm serve`; without a channel it does not follow."""
    command = [
        sys.executable,
        "-c",
        _VLLM,
        "serve",
        str(checkpoint),
        "--enforce-eager",
        "--max-model-len",
        "512",
    ]
    if environ.get("DELTASYNC_CHANNEL"):
        command += ["--worker-extension-cls", "vllm_plugin.DeltaSyncWorkerExtension"]
    command += arguments
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Child("vLLM", command, {**os.environ, **settings, **environ}, log)


@dataclasses.dataclass
class Server:
    url: str
    channel: str
    weights: Weights
    token: str | None = None
    publisher: Publisher | None = None
    rng: torch.Generator = dataclasses.field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def store(self) -> Store:
        return open_store(self.channel)

    def open(self, path: str, body: object = None, **headers: str) -> http.client.HTTPResponse:
        """The reply to a GET, or with a body to a POST; errors raise. Underscores in names of headers are
        dashes.
        """
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json", **headers}
        )
        reply: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=PATIENCE_S)
        return reply

    def json(self, path: str, body: object = None, **headers: str) -> Any:
        with self.open(path, body, **headers) as reply:
            return json.load(reply)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.json("/deltasync/status")
        return status

    def wait(
        self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if condition(status):
                return status
            assert status["state"] != "refused", status
            assert time.monotonic() < deadline, {**status, "commits": status["commits"][-3:]}
            time.sleep(0.02)

    def wait_for_requests(self, count: int, state: str = "running") -> None:
        """Until vLLM works on so many; or so many are `waiting`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self.open("/metrics") as reply:
                found = re.search(
                    rf"^vllm:num_requests_{state}{{.*}} (.*)$", reply.read().decode(), re.MULTILINE
                )
            if found is not None and float(found[1]) >= count:
                return
            assert time.monotonic() < deadline, found
            time.sleep(0.02)

    def step(self, size: float = 2e-5) -> None:
        """Change the weights, by default as an optimizer step does: a little, everywhere; few bf16 bits
        follow.
        """
        for tensor in self.weights.values():
            tensor += size * torch.randn(tensor.shape, generator=self.rng)

    def publish(self, step: int | None = None) -> int:
        if self.publisher is None:
            self.publisher = Publisher(self.channel, retention=NO_COMPACTIONS)
        return self.publisher.publish(self.weights.items(), step=step).wait(PATIENCE_S).version

    @contextlib.contextmanager
    def publishing_a_wrong_fingerprint(self) -> Iterator[None]:
        """Versions published meanwhile promise a fingerprint of the model that their own delta does not
        give.
        """
        assert self.publisher is not None
        log = self.publisher._opened.log
        append = log.append

        def lying_append(record: Record, payload: Encoded | None) -> StoredRecord:
            assert record.fingerprint is not None
            wrong = f"{int(record.fingerprint, 16) ^ 1:016x}"
            return append(dataclasses.replace(record, fingerprint=wrong), payload)

        with mock.patch.object(log, "append", lying_append):
            yield

    @contextlib.contextmanager
    def publishing_as(self, change: Callable[[str, bytes], bytes]) -> Iterator[Callable[[], None]]:
        """Records published meanwhile are stored as `change` makes them; yields what puts the right bytes in
        their place.
        """
        honest: dict[str, bytes] = {}
        kind = type(self.store)
        create = kind.create

        def changing_create(store: Any, key: str, data: bytes) -> None:
            if key.startswith(keys.VERSIONS):
                honest[key], data = data, change(key, data)
            create(store, key, data)

        def repair() -> None:
            for key, data in honest.items():
                self.store.put(key, data)

        with mock.patch.object(kind, "create", changing_create):
            yield repair

    def publish_anchor(self) -> None:
        """Publish a version with full weights, after a first one, and see it served."""
        if self.publisher is None:
            self.assert_serves(self.publish())
        assert self.publisher is not None
        maintenance = self.publisher._uploader.finisher.maintenance  # type: ignore[union-attr]
        every, maintenance._anchor_every = maintenance._anchor_every, 1
        self.step()
        self.assert_serves(self.publish())
        self.settle()
        maintenance._anchor_every = every

    def settle(self) -> None:
        """Wait for what follows a version in the background: its anchor, if one is due."""
        assert self.publisher is not None
        finish_maintenance(self.publisher)

    def assert_serves(self, version: int) -> None:
        self.wait(lambda status: status["version"] == version)
        found = self.json("/deltasync/digest")
        assert (found["version"], found["sha256"]) == (version, digests(self.weights))

    def publish_wrong_bits(self) -> dict[str, Any]:
        """Publish the weights as a version that promises other bits; the status once they were rolled
        back.
        """
        with self.publishing_a_wrong_fingerprint():
            self.publish()
        return self.wait(lambda status: tells_of_wrong_bits(status["error"]))


def tells_of_wrong_bits(error: str | None) -> bool:
    """Of the commit that was rolled back, or of every later look at the version."""
    return "did not give the published bits" in (error or "")


def digests(weights: Weights) -> dict[str, str]:
    return {
        name: hashlib.sha256(bits_of(cast(w, "bfloat16")).tobytes()).hexdigest()
        for name, w in weights.items()
    }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """No thread here waits at a barrier for another: a server's steps may keep every core busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def save_model(folder: Path, config: type[PretrainedConfig] | None = None, **fields: Any) -> Path:
    """A checkpoint with random weights and a tokenizer.

    Args:
        folder: Where to put it, as `model`.
        config: Class of its configuration; the demo's model if None.
        **fields: Of the configuration, beside those of a tiny model, which `text_config` takes of a model
            that sees.
    """
    torch.manual_seed(0)
    tokenizer = demo_model.build_tokenizer()
    model = demo_model.build_model(tokenizer)
    if config is not None:
        tiny = {
            "vocab_size": 64,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        }
        if "text_config" in fields:
            fields["text_config"] = {**tiny, **fields["text_config"]}
            model = AutoModelForImageTextToText.from_config(config(**fields))
        else:
            model = AutoModelForCausalLM.from_config(config(**{**tiny, **fields}))
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def save_vision_model(folder: Path) -> Path:
    """A checkpoint of a tiny model that sees images of 56 by 56 pixels, of four tokens each; in `model`.

    Idefics 3, because neither vLLM nor transformers needs torchvision for it, of which there is no build
    here.
    """
    # Imported late: the alternative image processors of transformers say at import that torchvision is
    # missing.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Idefics3Config, Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    torch.manual_seed(0)
    image_tokens = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    words = ["<unk>", "<pad>", "<|im_end|>", *image_tokens, *map(chr, range(32, 127))]
    letters = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=image_tokens,
        chat_template="{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'text' %}{{ c.text }}{% else %}<image>{% endif %}{% endfor %}{% endif %}{% endfor "
        "%}",
    )
    shape = {"intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.15}
    tower = {"hidden_size": 64, "num_attention_heads": 2, "image_size": 56, "patch_size": 14, **shape}
    text = {"model_type": "llama", "vocab_size": 128, "hidden_size": 128, "num_attention_heads": 4, **shape}
    text |= {
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    config = Idefics3Config(
        vision_config=tower,
        text_config={**text, "pad_token_id": 1},
        image_token_id=words.index("<image>"),
        pad_token_id=1,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    edge = {"longest_edge": 56}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)
    processor.save_pretrained(folder / "model")
    return folder / "model"


@contextlib.contextmanager
def serving(
    checkpoint: Path,
    *arguments: str,
    token: str | None = None,
    cores: list[int] | None = None,
    **environ: str,
) -> Iterator[Server]:
    """A server of this checkpoint that follows an empty channel beside it, or none if that is "", once it
    answers.
    """
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    channel, port = f"file://{checkpoint.parent}/channel", free_port()
    server = Server(f"http://127.0.0.1:{port}", channel, weights, token)
    log = checkpoint.parent / "server.log"
    with one_thread(), start(checkpoint, channel, port, log, *arguments, cores=cores, **environ) as child:
        path = "deltasync/status" if environ.get("DELTASYNC_CHANNEL", channel) else "v1/models"
        child.wait_until(lambda: get_json(f"{server.url}/{path}"), 2 * PATIENCE_S, "to start")
        yield server
        if server.publisher is not None:
            server.publisher.close()
