r"""GRPO that rolls out on an SGLang server, which follows the trainer through a channel.

    DELTASYNC_CHANNEL=s3://bucket/run python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --port 30000
    python examples/grpo_sglang.py --model Qwen/Qwen3-0.6B --channel s3://bucket/run --server http://localhost:30000

The callback publishes the weights after each optimizer step. Each rollout waits until the server serves that
step, and prints which versions made its tokens. All options of TRL's GRPOConfig and of DeltaSyncConfig are
options here.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from dataclasses import dataclass
from typing import Any

from trl import GRPOConfig, GRPOTrainer, TrlParser

from demo import task
from trl_callback import DeltaSyncCallback, DeltaSyncConfig


@dataclass
class ScriptArguments:
    """The trained model, and the server of its rollouts."""

    model: str
    server: str = "http://localhost:30000"


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the JSON that a POST answers."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


class SGLangRollout:
    """TRL's `rollout_func`, by the SGLang server at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Return the completions of these prompts by the weights of the trainer's last step."""
        step = trainer.state.global_step  # 0 is the first version, whatever it is
        post(f"{self.url}/receive_weight_update", {"version": step} if step else {})
        tokenizer, args = trainer.processing_class, trainer.args
        chats = [each if isinstance(each, list) else [{"role": "user", "content": each}] for each in prompts]
        prompt_ids = [
            tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)
            for each in chats
        ]
        sampling = {
            "max_new_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "stop_token_ids": [tokenizer.eos_token_id],
        }
        body = {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True}
        replies = post(f"{self.url}/generate", body)
        versions: Counter[str] = Counter()
        for span in (span for reply in replies for span in reply["meta_info"]["weight_versions"]):
            versions[span["version"]] += span["end"] - span["start"]
        print(f"step={step} tokens_by_version={dict(versions)}")
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [reply["output_ids"] for reply in replies],
            "logprobs": [
                [logprob for logprob, *_ in reply["meta_info"]["output_token_logprobs"]] for reply in replies
            ],
        }


def main() -> None:
    """Train on the counting task of the demo."""
    parser = TrlParser((ScriptArguments, GRPOConfig, DeltaSyncConfig))
    parser.set_defaults(
        output_dir="grpo-sglang-out",
        max_steps=20,
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=32,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
    )
    script, training, channel = parser.parse_args_and_config()
    trainer = GRPOTrainer(
        model=script.model,
        reward_funcs=task.counting_reward,
        args=training,
        train_dataset=task.prompt_dataset(training.seed),
        rollout_func=SGLangRollout(script.server),
        callbacks=[DeltaSyncCallback(channel)],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)


if __name__ == "__main__":
    main()
