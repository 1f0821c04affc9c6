"""Messages between the ranks of a sharded trainer."""

__all__ = ["ranks"]
