"""Real RL runs, kept as channels: what their steps change, and what each encoding of them costs."""
