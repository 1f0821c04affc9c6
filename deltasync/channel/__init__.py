"""The format `deltasync/2` (docs/format.md): keys, documents, records, signatures; reading and planning; heartbeats."""

__all__ = [
    "adapter_base",
    "anchors",
    "checkpoint",
    "clock",
    "documents",
    "failover",
    "heartbeat",
    "keys",
    "payloads",
    "plan",
    "ranges",
    "reading",
    "record",
    "signing",
]
