"""The channel, `deltasync/2`: keys, documents, records, signatures; reading and planning; heartbeats. See docs/format.md."""

__all__ = [
    "anchors",
    "checkpoint",
    "documents",
    "heartbeat",
    "keys",
    "nearest",
    "payloads",
    "plan",
    "reading",
    "record",
    "signing",
    "threads",
]
