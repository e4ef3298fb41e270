"""Buffers that a checkpoint holds, such as the bias of DeepSeek-V3's routers, go where the parameters go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlsdk.interfaces import Box, ModelSpec, RankContext, RolloutSpec, TrainSpec, fingerprint
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine
from rlsdk.testing.process.models import ROUTED, write_tiny_model
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.rollout.worker_updates import largest_difference

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_of_routers_reach_the_rollout_engine_in_float32(dtype: str, tmp_path: Path) -> None:
    model = ModelSpec(path=str(write_tiny_model(tmp_path, architecture="deepseek_v3", **ROUTED)), dtype=dtype)
    train, rollout = TorchTrainEngine(), TransformersRolloutEngine()
    train.initialize(RankContext(role="ref"), TrainSpec(model=model, micro_batch_rows=1))
    # Random weights: all that it serves must come.
    rollout.initialize(RankContext(role="rollout"), RolloutSpec(model=model, load_weights=False))
    for layout in (train.layout(), *rollout.layout()):
        assert {meta.name: meta.dtype for meta in layout.tensors}[BIAS] == "float32"
    receipt = rollout.update_weights(train.shards(), 1)
    plain = PlainModel.load(tmp_path)
    bias = plain.state[BIAS]
    assert receipt.fingerprints[BIAS] == fingerprint(bias, Box.whole(tuple(bias.shape)))
    assert not torch.equal(bias, bias.bfloat16().float())
    if dtype == "float32":
        assert largest_difference(plain, plain.state, rollout) < 1e-4
