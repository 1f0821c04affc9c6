"""sha256 of every tensor of some versions, as a replica in host memory makes them of the channel.

python -m tests.hosts.reread URL FILE VERSION...
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from deltasync import Replica
from deltasync.tensors.bits import bits_of


def main(url: str, target: Path, versions: list[int]) -> None:
    """See the module."""
    replica, found = Replica(url), {}
    for version in sorted(versions):
        replica.sync(version=version)
        state = replica.state_dict()
        found[version] = {
            name: hashlib.sha256(bits_of(tensor).tobytes()).hexdigest() for name, tensor in state.items()
        }
    target.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(version) for version in sys.argv[3:]])
