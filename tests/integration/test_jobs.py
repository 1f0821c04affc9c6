"""`deploy/jobs`: the command of the guide starts the job on the local Hub, and the script trains."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from deltasync.stores.hub import hub_store
from tests.hub import fixtures
from tests.hub.fixtures import HubServer

hub_server = fixtures.hub_server
hub = fixtures.hub

ROOT = Path(__file__).parents[2]


def test_the_command_of_the_guide_starts_the_job(hub: HubServer) -> None:
    guide = (ROOT / "docs/guides/deploy.md").read_text()
    found = re.search(r"^hf jobs uv run (?:.*\\\n)*.*", guide, re.MULTILINE)
    assert found is not None
    words = shlex.split(found[0].replace("\\\n", ""))
    tokens = {"REPLICA_TOKEN": "a token", "DELTASYNC_ENVIRONMENT_TOKEN": "another"}
    command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=ROOT, env=hub.env | tokens, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (job,) = hub.ask("GET", "/_jobs")
    script, *arguments = words[words.index("deploy/jobs/train.py") :]
    # The script went to a bucket, which the job sees as a directory.
    (volume,) = job["volumes"]
    assert job["command"] == ["uv", "run", f"{volume['mountPath']}/train.py", *arguments]
    stored = hub_store(f"hf://buckets/{volume['source']}/{volume['path']}").read("train.py")
    assert stored == (ROOT / script).read_bytes()
    assert job["secrets"] == {"HF_TOKEN": hub.env["HF_TOKEN"], **tokens}
    assert (job["flavor"], job["timeoutSeconds"]) == ("l4x1", 4 * 3600)
