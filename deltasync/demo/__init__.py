"""The demo: a tiny model learns a verifiable task while a real vLLM server follows its weights, all on CPU."""

TASKS = ("counting", "wordle")
"""What the model can learn."""
