"""The format `deltasync/2` (docs/format.md): keys, documents, records, signatures; reading and planning."""

__all__ = [
    "anchors",
    "clock",
    "documents",
    "failover",
    "keys",
    "payloads",
    "plan",
    "reading",
    "record",
    "shortcuts",
    "signing",
]
