"""Creates the bucket at the RADOS gateway that is running, says so, and waits: `python -m tests.hosts.bucket
NAME`.
"""

from __future__ import annotations

import os
import signal
import sys

from tests.servers.s3 import RGW_VARIABLE, S3Server

if __name__ == "__main__":
    S3Server(os.environ[RGW_VARIABLE]).client.create_bucket(Bucket=sys.argv[1])
    print("ready", flush=True)
    signal.pause()
