r"""GRPO on a vLLM server that follows the trainer through a channel: no NCCL, no CUDA needed.

    DELTASYNC_CHANNEL=s3://bucket/run vllm serve Qwen/Qwen3-0.6B --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension
    python examples/grpo.py --model Qwen/Qwen3-0.6B --channel s3://bucket/run

The same on CPUs, with a tiny model, a channel in a folder and a vLLM server (`make setup` installs all), in two minutes:

    python examples/grpo.py --alone

All options of TRL's GRPOConfig and of DeltaSyncConfig are options here.
"""

from __future__ import annotations

from trl import GRPOConfig, GRPOTrainer, TrlParser

from demo import task
from demo.alone import ScriptArguments, alone
from trl_callback import DeltaSyncCallback, DeltaSyncConfig


def main() -> None:
    """Train on the counting task of the demo."""
    parser = TrlParser(
        (ScriptArguments, GRPOConfig, DeltaSyncConfig), description=__doc__.partition("\n\n")[0]
    )
    parser.set_defaults(
        output_dir="grpo-out",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url="http://localhost:8000",
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
        callbacks=[DeltaSyncCallback(channel)],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)


if __name__ == "__main__":
    with alone(server=("--num_generations", "4", "--per_device_train_batch_size", "4")):
        main()
