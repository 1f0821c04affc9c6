"""What a commit costs in a real vLLM."""
