"""Limits of what is taken from a store or a client, and of what is held for it: one constant for each.
Sizes of working buffers are constants of the modules that fill them (`..._BYTES`).

docs/reference/limits.md shows them with their units.
"""

from __future__ import annotations

# Objects of a channel, by the most bytes that are read
CHANNEL_BYTES = 32 << 20
"""channel.json."""
SMALL_BYTES = 4 << 10
"""head.json, an epoch's document, a heartbeat."""
RECORD_FILES = 65_536
"""Parts or weight files that one record names."""
COMPANION_FILES = 1_024
"""Files beside the weights of an anchor: config, tokenizer and templates."""
COMPANION_BYTES = 256 << 20
"""Bytes of these together."""
EVENT_BYTES = 16 << 20
"""Bytes of one line of the Hub's feed of changes."""
DAMAGED_RECORDS = 64
"""Missing or damaged records that one search passes over."""
ERROR_CHARACTERS = 500
"""Characters of the error in a heartbeat."""

# Reading ahead
RECORDS_AHEAD = 8
"""Records that are read while one of a chain is checked."""
CHAIN_BYTES = 1 << 28
"""Bytes of a chain's records that are kept for staging; larger ones are read again."""
PARTS_AHEAD = 4
"""Parts of a version that are fetched while one is decoded."""
FILES_AHEAD = 2
"""Weight files that are fetched and checked while one is used."""
FETCHED_AHEAD = 4
"""Records whose payloads are fetched while one is decoded."""
PIECE_BYTES = 4 << 20
"""Bytes of a tensor in one request, where a rank reads a part of a weight file."""
PIECES_AHEAD = 2
"""Such requests under way while a piece is used."""
PREFETCHED_BYTES = 1 << 28
"""Bytes of parts that are fetched before their record exists."""
PREFETCHES_AT_ONCE = 4
"""Such requests at once."""
STREAM_BYTES = 8 << 20
"""Bytes in one piece of a reply of an object store."""
REQUESTS_AT_ONCE = 32
"""Threads of one call that reads several objects at once."""

# A replica
BATCH_RECORDS = 64
"""Records that are merged into one commit."""
BATCH_BYTES = 1 << 28
"""Bytes of their payloads. The decoded changes are held in memory."""
UNMERGED = 4
"""Changes that are held before they are merged, as a multiple of the model's elements."""
ANNOUNCED_RECORDS = 64
"""Records that a store announced, and that wait for a step."""
HANDED_BYTES = 8 << 20
"""Bytes of records, or of a tensor, in one call, which goes to each process of an engine."""
HISTORY = 4096
"""Commits that a status keeps."""

# A publisher
WEIGHT_FILE_BYTES = 1 << 26
"""Bytes of a weight file of its anchors, unless one tensor is larger."""
SHARD_BYTES = 1 << 30
"""The same of a file that a command writes."""

# The machine
CACHE_FILES = 4096
"""Files in the node's cache. `DELTASYNC_CACHE_BYTES` limits their bytes."""
HUB_SMALL_BYTES = 64 << 10
"""Bytes of an object of a bucket that is kept while it does not change."""
HUB_SMALL_OBJECTS = 64
"""Such objects."""

# Clients and servers
BODY_BYTES = 4 << 20
"""Bytes of a request's body. PipelineRL's trainer names every tensor in it."""
WAITING_REQUESTS = 64
"""Requests that wait for a version at once."""
REPLY_THREADS = 4
"""Threads that do for requests what a store may hold up."""
ANSWER_BYTES = 1 << 20
"""Bytes of a server's answer."""
DIGEST_BYTES = 1 << 26
"""Bytes of a server's answer with the digest of each tensor."""
