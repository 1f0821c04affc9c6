"""`--alone` of the examples: all that a run needs, in a new folder, on this machine's CPUs.

A tiny model is made, the channel is a directory, and for trainers that generate on a server a real vLLM
server that follows the channel is started, and ended with the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deltasync import Replica
from demo.model import begin, save_checkpoint, warm_up
from demo.processes import Child, get_json
from demo.run import CATCH_UP_S, HOST, SERVER_START_S, free_port

_TRAINER = ("--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false", "--max_steps", "4")
_SERVER = (
    "--enforce-eager",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "16",
    "--disable-uvicorn-access-log",
)
_ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass
class ScriptArguments:
    """The trained model."""

    model: str
    alone: bool = field(
        default=False, metadata={"help": "Make a tiny model, a channel and a server here, and train on CPUs."}
    )


@contextlib.contextmanager
def alone(server: Sequence[str] = ()) -> Iterator[None]:
    """If this process was given `--alone`, prepare a run, add its options to `sys.argv`, and say at the end
    how to go on. Options that were given as well win.

    Args:
        server: Options of a trainer that generates on a server, but for the server's URL; empty for one
            that does not.
    """
    if "--alone" not in sys.argv:
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="deltasync-alone-"))
    channel, port = f"file://{folder}/channel", free_port()
    print(f"Making a tiny model in {folder} ...", flush=True)
    _, tokenizer, model = begin(0, "counting")
    if server:  # an untrained model gets no rewards, from which GRPO learns nothing
        warm_up(model, tokenizer, 0)
    save_checkpoint(folder / "model", model, tokenizer)
    options = [
        *("--model", f"{folder}/model", "--channel", channel),
        *("--output_dir", f"{folder}/out", *_TRAINER),
    ]
    with contextlib.ExitStack() as running:
        if server:
            url = f"http://{HOST}:{port}"
            print(f"Starting vLLM at {url}, about a minute; its log is {folder}/server.log ...", flush=True)
            command = [sys.executable, "-m", "deltasync", "serve", f"{folder}/model", "--channel", channel]
            command += ["--port", str(port), *_SERVER]
            child = Child("The vLLM server", command, {**os.environ, **_ENVIRON}, folder / "server.log")
            running.enter_context(child).wait_until(
                lambda: get_json(f"{url}/deltasync/status"), SERVER_START_S, "start"
            )
            options += ["--vllm_server_base_url", url, *server]
        sys.argv[1:1] = options
        yield
        newest = Replica(channel).sync()
        print(f"A replica in host memory has checked every bit of version {newest}.")
        if server:
            child.wait_until(
                lambda: get_json(f"{url}/deltasync/status")["version"] == newest, CATCH_UP_S, "catch up"
            )
            print(f"The server serves version {newest}.")
    print(f"The versions: deltasync log {channel}")
