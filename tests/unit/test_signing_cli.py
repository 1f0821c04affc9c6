"""Signatures on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from deltasync import Publisher, open_store
from deltasync.channel import signing
from deltasync.channel.signing import Signer
from deltasync.ops.cli import main


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys `old` and `new`, and a file that trusts both."""
    folder = tmp_path / "keys"
    folder.mkdir()
    lines = [signing.new_key(folder / name, name) for name in ("old", "new")]
    (folder / "both").write_text("".join(lines))
    return folder


def test_every_command_that_reads_a_channel_takes_keys(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.ops.cli.serve.require_vllm", lambda: None)
    url = f"file://{tmp_path}/channel"
    with Publisher(open_store(url), dtype="keep", signing_key=keys / "old") as publisher:
        for value in range(6):
            publisher.publish([("w", torch.full((5, 8), float(value)))]).wait(60)
    commands = {
        "follow": [url, "--once"],
        "check": [url],
        "log": [url],
        "watch": [url, "--once"],
        "export": [url, "2", f"{tmp_path}/export"],
        "relay": [url, f"file://{tmp_path}/copy", "--once"],
        "gc": [url, "--keep-last", "5", "--dry-run"],
    }

    def run(command: str, *more: str) -> Result:
        return CliRunner().invoke(main, [command, *commands[command], *more])

    for command in commands:
        refused = run(command, "--trusted-keys", str(keys / "new.pub"))
        assert refused.exit_code in (3, 4), command
        assert (
            command == "check" or "signed with the key" in refused.output or "is not signed" in refused.output
        )
        taken = run(command, "--trusted-keys", str(keys / "both"))
        assert taken.exit_code == 0, (command, taken.output)
    shown = CliRunner().invoke(main, ["log", url, "latest"]).output
    assert f"{Signer(keys / 'old').public} (not checked)" in shown
    served = CliRunner().invoke(
        main, ["serve", "model", "--channel", url, "--trusted-keys", "keys", "--dry-run"]
    )
    assert f"DELTASYNC_TRUSTED_KEYS={Path.cwd()}/keys " in served.output


def test_keygen_prints_the_public_line(tmp_path: Path) -> None:
    made = CliRunner().invoke(main, ["keygen", str(tmp_path / "trainer")])
    assert (made.exit_code, made.output) == (0, (tmp_path / "trainer.pub").read_text())
    assert made.output.endswith(" trainer\n")
    again = CliRunner().invoke(main, ["keygen", str(tmp_path / "trainer"), "--name", "x"])
    assert again.exit_code == 3 and "left as it is" in again.output
