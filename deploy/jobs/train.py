# /// script
# requires-python = ">=3.11"
# dependencies = ["aiohttp>=3.9", "datasets>=3.0", "trl==1.16.0", "transformers<5.18"]
# ///
r"""AsyncGRPO on Wordle as a Hugging Face Job, with the replicas and the environment in Spaces.

    make dist
    hf jobs uv run --detach --flavor l4x1 --timeout 4h \
        --secrets HF_TOKEN --secrets REPLICA_TOKEN --secrets DELTASYNC_ENVIRONMENT_TOKEN \
        --volume deploy:/deploy --volume dist:/dist --with /dist/deltasync-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl \
        --with git+https://huggingface.co/spaces/user/wordle \
        deploy/jobs/train.py --model Qwen/Qwen3-0.6B --channel hf://buckets/user/run/a \
        --servers https://user-replica-1.hf.space https://user-replica-2.hf.space \
        --environment https://user-wordle.hf.space --deploy /deploy

deltasync is the wheel that `make dist` builds; the Hub mounts the folders `dist` and `deploy` in the job. TRL
knows one server and no token, so the job starts a router: it shares the requests among the replicas and
presents REPLICA_TOKEN, which is their DELTASYNC_HTTP_TOKEN, to them. All options of TRL's AsyncGRPOConfig and
of DeltaSyncConfig are options here too. The environment's Space is a package, from which its client is
installed. Elsewhere than in a job, with HAProxy installed: `PYTHONPATH=examples python deploy/jobs/train.py
--model MODEL ...`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from trl_callback import DeltaSyncCallback, DeltaSyncConfig
from wordle.client import WordleEnvironment
from wordle.game import GUESSES

PROMPT = f"""Play Wordle: find the secret word of five letters in {GUESSES} guesses, each by a call of the tool `guess`.
Its answer tells for each letter of your guess: G it is right, Y the word has it elsewhere, X the word does not have it."""


@dataclass
class ScriptArguments:
    """The trained model, and the servers of its rollouts."""

    model: str
    environment: str = field(metadata={"help": "URL of the Wordle environment."})
    servers: list[str] = field(metadata={"help": "URLs of the replicas, for the router."})
    deploy: Path = field(
        default=Path(__file__).resolve().parents[1],
        metadata={"help": "The folder deploy of a checkout, for its router."},
    )
    router_port: int = 8080


@contextlib.contextmanager
def routing(script: Path, replicas: Sequence[str], port: int) -> Iterator[None]:
    """Run the router until the block ends. Installs HAProxy if it is not there."""
    if shutil.which("haproxy") is None:  # a job runs as root, in Debian
        for command in (["update", "-qq"], ["install", "-qq", "--no-install-recommends", "haproxy"]):
            subprocess.run(["apt-get", *command], check=True)
    with subprocess.Popen([sys.executable, script, *replicas, "--port", str(port)]) as router:
        try:
            yield
        finally:
            router.terminate()


def main() -> None:
    """Train on Wordle."""
    parser = TrlParser((ScriptArguments, AsyncGRPOConfig, DeltaSyncConfig))
    parser.set_defaults(
        output_dir="wordle-out",
        max_steps=200,
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=1024,
        max_tool_calling_iterations=GUESSES,
        max_inflight_tasks=32,
        token_budget=-1,  # a fixed number of samples per step
        learning_rate=1e-6,
        logging_steps=1,
        report_to="none",
        initial="auto",
        # No replica is ready before the first version is published; a Space that sleeps, or is being built,
        # takes its time.
        vllm_server_timeout=3600.0,
    )
    script, training, channel = parser.parse_args_and_config()
    if training.use_cpu:
        from demo import trl_on_cpu  # of examples/

        trl_on_cpu.prepare()  # TRL supposes a GPU in two places
    training.vllm_server_base_url = f"http://127.0.0.1:{script.router_port}"
    token = os.environ.get("DELTASYNC_ENVIRONMENT_TOKEN")
    prompts = [[{"role": "user", "content": PROMPT}]] * 1000
    with routing(script.deploy / "router.py", script.servers, script.router_port):
        trainer = AsyncGRPOTrainer(
            model=script.model,
            args=training,
            environment_factory=functools.partial(WordleEnvironment, script.environment, token),
            train_dataset=Dataset.from_dict({"prompt": prompts, "seed": list(range(1000))}),
            callbacks=[DeltaSyncCallback(channel)],
        )
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)


if __name__ == "__main__":  # the rollout worker is another process, which imports this file
    main()
