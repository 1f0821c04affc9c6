r"""AsyncGRPO: the rollout worker keeps the server busy while the trainer trains, and new weights arrive
between two tokens.

    DELTASYNC_CHANNEL=s3://bucket/run vllm serve Qwen/Qwen3-0.6B --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension
    python examples/async_grpo.py --model Qwen/Qwen3-0.6B --channel s3://bucket/run

The same on CPUs, with a tiny model, a channel in a folder and a vLLM server (`make setup` installs all), in two minutes:

    python examples/async_grpo.py --alone

All options of TRL's AsyncGRPOConfig and of DeltaSyncConfig are options here.
"""

from __future__ import annotations

from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from demo import task, trl_on_cpu
from demo.alone import ScriptArguments, alone
from trl_callback import DeltaSyncCallback, DeltaSyncConfig


def main() -> None:
    """Train on the counting task of the demo."""
    parser = TrlParser(
        (ScriptArguments, AsyncGRPOConfig, DeltaSyncConfig), description=__doc__.partition("\n\n")[0]
    )
    parser.set_defaults(
        output_dir="async-grpo-out",
        vllm_server_base_url="http://localhost:8000",
        max_steps=20,
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=32,
        max_inflight_tasks=32,
        token_budget=-1,  # a fixed number of samples per step
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
    )
    script, training, channel = parser.parse_args_and_config()
    if training.use_cpu:
        trl_on_cpu.prepare()  # TRL supposes a GPU in two places
    trainer = AsyncGRPOTrainer(
        model=script.model,
        reward_funcs=task.counting_reward,
        args=training,
        train_dataset=task.prompt_dataset(training.seed),
        callbacks=[DeltaSyncCallback(channel)],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)


if __name__ == "__main__":  # the rollout worker is another process, which imports this file
    with alone(server=("--num_generations", "4", "--per_device_train_batch_size", "4")):
        main()
