"""The demo: a tiny model learns a verifiable task while a real vLLM server follows its weights, all on
CPU.
"""

__all__ = ["model", "processes", "report", "run"]
