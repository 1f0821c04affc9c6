"""Opening a channel to write: acquiring it, the first version, what it begins from, whose it is. A wing of
the core.
"""

__all__ = ["acquire", "adapter_base", "checkpoint", "owner", "ranges", "references", "resumed", "start"]
