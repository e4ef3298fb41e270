"""Buffers that a checkpoint holds, such as the bias of DeepSeek-V3's routers, are sent to the rollout engine, too."""

from __future__ import annotations

from pathlib import Path

import torch

from rlsdk.interfaces import Box, ModelSpec, RankContext, TrainSpec
from rlsdk.testing.process.models import ROUTED, write_tiny_model
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk_fsdp.engine import FsdpTrainEngine

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_biases_of_routers_are_sent_in_float32(tmp_path: Path) -> None:
    model = ModelSpec(path=str(write_tiny_model(tmp_path, architecture="deepseek_v3", **ROUTED)), dtype="bfloat16")
    engine = FsdpTrainEngine()
    engine.initialize(RankContext(role="ref"), TrainSpec(model=model, micro_batch_rows=1))
    try:
        layout, shards = engine.layout(), {shard.name: shard for shard in engine.shards()}
        expected = PlainModel.load(tmp_path).state[BIAS]
        assert {meta.name: meta.dtype for meta in layout.tensors}[BIAS] == "float32"
        assert dict(layout.boxes)[BIAS] == shards[BIAS].box == Box.whole(tuple(expected.shape))
        assert torch.equal(shards[BIAS].tensor, expected)
        assert not torch.equal(expected, expected.bfloat16().float())
    finally:
        engine.close()
