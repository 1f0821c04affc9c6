"""The cost of a commit in a real vLLM."""
