"""What the ranks of a sharded trainer tell each other."""

__all__ = ["peers"]
