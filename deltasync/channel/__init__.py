"""The channel, `deltasync/2`: keys, documents, records, signatures; reading and planning; heartbeats. See docs/format.md."""
