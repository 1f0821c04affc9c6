"""Full snapshots of two consecutive steps, uploaded with Hugging Face's own Xet client to a store in a
directory.

Xet cuts files into chunks of about 64 kB where their content says so, and uploads the chunks that the store
lacks. A chunk survives a step if none of its 32,768 weights changed: with probability (1 - p) ** 32768, if
changes are scattered.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import timed

CHUNK_ELEMENTS = 1 << 15  # bfloat16 elements of a chunk of 64 kB


def measure(old: Path, new: Path, changed_fraction: float) -> dict[str, Any]:
    """Upload the file `old`, then `new`. Return chunks and bytes of the second upload, and how many chunks
    were known.
    """
    import hf_xet

    session = hf_xet.XetSession()
    with tempfile.TemporaryDirectory() as folder:
        for path in (old, new):
            commit = session.new_upload_commit(endpoint=f"local://{folder}")
            commit.start_upload_file(str(path), sha256=hf_xet.SKIP_SHA256)
            seconds, report = timed(commit.wait_to_finish)
    found = report.dedup_metrics
    return {
        "chunks": found.total_chunks,
        "known_chunks": found.deduped_chunks,
        "expected_known_share": (1 - changed_fraction) ** CHUNK_ELEMENTS,
        "file_bytes": found.total_bytes,
        "uploaded_bytes": found.total_bytes_uploaded,
        "upload_s": seconds,
    }
