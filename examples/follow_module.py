"""A transformers model that follows a run while it generates; any `torch.nn.Module` does.

python examples/follow_module.py s3://bucket/run Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import deltasync


def main() -> None:
    """Answer the same prompt with each version that comes."""
    channel, name = sys.argv[1:3]
    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16").eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    prompt = tokenizer("The answer is", return_tensors="pt")
    with deltasync.follow(model, channel) as following:
        newest = following.wait(timeout_s=3600)
        while True:
            with following.hold() as version:  # without it, each token is made with the newest weights
                tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)
            print(f"version {version}: {tokenizer.decode(tokens[0])!r}", flush=True)
            newest = following.wait(newest + 1, timeout_s=3600)


if __name__ == "__main__":
    main()
