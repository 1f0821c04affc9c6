"""Servers of other engines that follow a channel, in processes of their own, and a checkpoint for them."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
START_S = 300.0
PATIENCE_S = 300.0


def save(model: Any, directory: Path, **config: Any) -> Path:
    """A checkpoint with a tokenizer of 64 words: w0, w1, ... `config` is what mlx-lm looks for in
    config.json, too.
    """
    model.save_pretrained(directory)
    (directory / "config.json").write_text(
        json.dumps(json.loads((directory / "config.json").read_text()) | config)
    )
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w63", pad_token="w0").save_pretrained(
        directory
    )
    return directory


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return found


def digests(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        own: hashlib.sha256(tensor.view(torch.int16).numpy().tobytes()).hexdigest()
        for own, tensor in weights.items()
    }


class Server:
    """A server by its command, to which `--port` is added."""

    def __init__(self, command: Sequence[str], log: Path, **environ: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        own = {"PYTHONPATH": str(ROOT), "DELTASYNC_POLL_INTERVAL_S": "0.05"}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "--port", str(port)],
                env=os.environ | own | environ,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def request(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"content-type": "application/json"} | headers)
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE_S) as reply:
                return (
                    reply.status,
                    {name.lower(): value for name, value in reply.headers.items()},
                    json.loads(reply.read()),
                )
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), json.loads(error.read())

    def send(self, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> tuple[int, bytes]:
        """Post what urllib does not: repeated headers, in order."""
        with contextlib.closing(
            http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_S)
        ) as connection:
            connection.putrequest("POST", path)
            for name, value in [*headers, ("content-length", str(len(body)))]:
                connection.putheader(name, value)
            connection.endheaders(body)
            reply = connection.getresponse()
            return reply.status, reply.read()

    def first_answer(self, path: str) -> tuple[int, dict[str, str], Any]:
        """Of a server that may not have started yet."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                return self.request(path)
            time.sleep(0.05)
        raise AssertionError(f"It has not started: {self.log.read_text()}")

    def until(self, version: int) -> None:
        self.first_answer("/health")
        served = lambda: self.first_answer("/deltasync/status")[2]["version"] or 0  # noqa: E731
        wait_until(lambda: served() >= version, told=self.log.read_text)

    def digest(self) -> dict[str, str]:
        found: dict[str, str] = self.request("/deltasync/digest")[2]["sha256"]
        return found

    def complete(self, prompt: str, **options: Any) -> tuple[dict[str, str], Any]:
        code, headers, reply = self.request("/v1/completions", {"prompt": prompt, "temperature": 0} | options)
        assert code == 200, reply
        return headers, reply

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def serving(command: Sequence[str], log: Path, **environ: str) -> Iterator[Server]:
    server = Server(command, log, **environ)
    try:
        yield server
    finally:
        server.close()
