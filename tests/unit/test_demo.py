from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from deltasync.demo.train import DigestingTransfer
from trl_callback import VersionRecord


class Transfer:
    """Publishes without a look at the stream, as it may: the model has the weights too."""

    history = (
        VersionRecord(
            version=1, step=0, kind="anchor", changed=3, total=3, payload_bytes=6, anchor_bytes=6, encode_s=0.0, ack_s=None
        ),
    )

    def init_weight_transfer(self) -> None: ...

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...


def test_what_the_proof_of_bits_is_held_to_comes_from_the_stream_in_any_case(tmp_path: Path) -> None:
    transfer: Any = Transfer()
    digesting = DigestingTransfer(transfer, tmp_path / "published.jsonl")
    digesting.send_weights(iter([("w", torch.tensor([1.0, -0.0, 3.0]))]))
    digesting.resume()
    bits = torch.tensor([1.0, -0.0, 3.0], dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
    line = json.loads((tmp_path / "published.jsonl").read_text())
    assert line["sha256"] == {"w": hashlib.sha256(bits).hexdigest()}
