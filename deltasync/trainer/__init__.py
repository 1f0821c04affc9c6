"""Models of trainers: streams of sharded and wrapped ones, and the messages between ranks. A wing of the
core.
"""

__all__ = ["ranks", "source", "stream"]
