"""A model that sees: its tensors have other names in memory than in a checkpoint, and a trainer publishes the
latter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen2VLConfig

from tests.conftest import assert_same_bits
from tests.integration.trainers import SIZES, FlushEachStep, Recorder, make_trainer, published_bits
from trl_callback import DeltaSyncCallback, gather

pytestmark = pytest.mark.trl


def test_every_step_is_published_as_it_would_be_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    tower = {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": SIZES["hidden_size"]}
    config = Qwen2VLConfig(
        text_config={
            **SIZES,
            "rope_parameters": rope,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        vision_config=tower,
        image_token_id=100,
        video_token_id=101,
    )
    model = AutoModelForImageTextToText.from_config(config)
    url = f"file://{tmp_path}/channel"
    sync, recorder = DeltaSyncCallback(url), Recorder(tmp_path / "saved")
    make_trainer(model, tmp_path / "out", sync, FlushEachStep(sync), recorder, max_steps=2).train()

    assert [(record.version, record.step) for record in sync.history] == [(1, 0), (2, 1), (3, 2)]
    for record in sync.history:
        assert_same_bits(published_bits(url, record.version), recorder.bits[record.step])
    published = published_bits(url).keys()
    assert "visual.blocks.1.attn.qkv.weight" in published
    assert published != gather.held_tensors(model).keys()  # else another model belongs here
