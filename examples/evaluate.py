"""Evaluate versions of a run on one vLLM server while training goes on: each in turn, then the newest again.

    DELTASYNC_CHANNEL=s3://bucket/run vllm serve MODEL --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension
    python examples/evaluate.py http://localhost:8000 10 20 30

A score is the mean log probability that a version gives to its own greedy answers; put your own evaluation
there.
"""

from __future__ import annotations

import argparse
import os

import httpx

PROMPTS = ["Once upon a time", "The answer is", "In the beginning"]


def score(server: httpx.Client, version: int) -> float:
    """Mean log probability of the tokens of greedy answers, all of which this version made."""
    logprobs: list[float] = []
    for prompt in PROMPTS:
        asked = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 0}
        reply = server.post("/v1/completions", json=asked, headers={"x-deltasync-version": str(version)})
        reply.raise_for_status()  # 409 if somebody else moved this server
        logprobs += reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    return sum(logprobs) / len(logprobs)


def main() -> None:
    """Pin, ask, and let the server go on in any case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("server", help="its URL")
    parser.add_argument("versions", type=int, nargs="+")
    args = parser.parse_args()
    token = os.environ.get("DELTASYNC_HTTP_TOKEN")
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    with httpx.Client(base_url=args.server, headers=headers, timeout=600) as server:
        try:
            for version in args.versions:
                # Answers as soon as that version is served, older or newer than the last one.
                server.post("/deltasync/pin", json={"pin": str(version), "timeout_s": 300}).raise_for_status()
                print(f"version {version}: {score(server, version):.4f}", flush=True)
        finally:
            server.post("/deltasync/pin", json={"pin": "newest"}).raise_for_status()


if __name__ == "__main__":
    main()
