"""Latent attention: what SGLang makes of its weights after loading follows every update, and the receipt covers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import make_engine
from torch import nn

from rlsdk.interfaces import Box, RlsdkError, WeightSyncError, fingerprint
from rlsdk.kit.weights.staging import batches
from rlsdk.sharding import GenericShardingManager
from rlsdk.testing.process.models import ROUTED, write_tiny_model
from rlsdk.testing.rollout.lab import whole_shards
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.rollout.worker_updates import BUCKET_BYTES, largest_difference, row_ranks
from rlsdk.testing.sharding.local_groups import LocalGroup, RolloutHost
from rlsdk_sglang import derived

LATENT = {
    "kv_lora_rank": 48,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "moe_layer_freq": 1,
    # SGLang on a CPU takes no other rotary embedding in latent attention.
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 256},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    },
}
TOLERANCE = 1e-4
"""Of log-probs."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PlainModel, Any]]:
    folder: Path = write_tiny_model(
        tmp_path_factory.mktemp("latent") / "model", architecture="deepseek_v2", seed=2, sharpness=2.0, **LATENT
    )
    engine = make_engine(folder)
    yield PlainModel.load(folder), engine
    engine.close()


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PlainModel, Any]]:
    """A DeepSeek-V3 with a layer of experts."""
    shape = {**ROUTED, "rope_parameters": LATENT["rope_parameters"]}
    folder: Path = write_tiny_model(
        tmp_path_factory.mktemp("routed") / "model", architecture="deepseek_v3", seed=2, sharpness=2.0, **shape
    )
    engine = make_engine(folder)
    yield PlainModel.load(folder), engine
    engine.close()


class Attention(nn.Module):
    """One layer's parts of latent attention that SGLang's loader reads."""

    qk_nope_head_dim, v_head_dim = 3, 2

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(4, 2 * (3 + 2), bias=False)
        self.w_kc: Any = None
        self.w_vc: Any = None


def latent() -> Any:
    """A model of one layer, with SGLang's own way of deriving."""
    from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin

    class Model(DeepseekV2WeightLoaderMixin, nn.Module):  # type: ignore[misc]
        config, quant_config = SimpleNamespace(num_hidden_layers=1, architectures=None), None

        def __init__(self) -> None:
            super().__init__()
            layer = nn.Module()
            layer.self_attn = Attention()
            self.model = nn.Module()
            self.model.layers = nn.ModuleList([layer])
            self.model.start_layer, self.model.end_layer = 0, 1

    model = Model()
    with torch.no_grad():
        model.post_load_weights()
    return model


def test_derived_tensors_are_made_again_where_they_are() -> None:
    """By SGLang's own function, on a layer of ours."""
    model = latent()
    attention = model.model.layers[0].self_attn
    places = attention.w_kc.data_ptr(), attention.w_vc.data_ptr()
    derived.check(model)
    with torch.no_grad():
        attention.kv_b_proj.weight.add_(1.0)
    with pytest.raises(WeightSyncError, match=r"self_attn\.w_kc', which SGLang derives .* does not match"):
        derived.check(model)
    with torch.no_grad():
        attention.kv_b_proj.weight.mul_(2.0)
    derived.rebuild(model)
    derived.check(model)
    keys, values = attention.kv_b_proj.weight.detach().unflatten(0, (2, 5)).split([3, 2], dim=1)
    assert torch.equal(attention.w_kc, keys)
    assert torch.equal(attention.w_vc, values.transpose(1, 2))
    assert (attention.w_kc.data_ptr(), attention.w_vc.data_ptr()) == places


def test_derived_tensors_that_move_are_an_error() -> None:
    """Captured graphs read where they were."""
    model = latent()
    make = model.post_load_weights

    def elsewhere() -> None:
        attention = model.model.layers[0].self_attn
        attention.w_kc = attention.w_vc = None
        make()

    model.post_load_weights = elsewhere
    with pytest.raises(WeightSyncError, match="SGLang moved the tensors that it derives"):
        derived.rebuild(model)


@pytest.mark.parametrize(
    ("prompt", "cached"), [((5, 6, 9, 30, 7), "nothing"), ((5, 6, 9, 30, 8, 11), "a part"), ((5, 6, 9, 30, 7), "all")]
)
def test_log_probs_are_those_of_transformers(
    served: tuple[PlainModel, Any], prompt: tuple[int, ...], cached: str
) -> None:
    """Whatever of the prompt is in the prefix cache."""
    plain, engine = served
    assert largest_difference(plain, plain.state, engine, prompt) < TOLERANCE


def test_what_latent_attention_derives_follows_updates(served: tuple[PlainModel, Any]) -> None:
    """Both prompts and responses are computed with derived tensors only."""
    plain, engine = served
    changed = {name: tensor + 0.1 if "kv_b_proj" in name else tensor for name, tensor in plain.state.items()}
    rollout = LocalGroup([RolloutHost(engine)])
    for version, state in ((1, changed), (2, plain.state)):
        GenericShardingManager(row_ranks(state), rollout, bucket_bytes=BUCKET_BYTES).sync(version)
        assert largest_difference(plain, state, engine) < TOLERANCE
    rollout.hosts[0].target.close()
    # And where whole tensors come.
    for version, state in ((3, changed), (4, plain.state)):
        engine.update_weights(whole_shards(state), version)
        assert largest_difference(plain, state, engine) < TOLERANCE


def test_biases_of_routers_are_part_of_an_update(routed: tuple[PlainModel, Any]) -> None:
    """DeepSeek-V3 has them as buffers, SGLang as parameters; the other way round, other experts would be chosen."""
    plain, engine = routed
    (name,) = [name for name in plain.state if name.endswith("e_score_correction_bias")]
    changed = {**plain.state, name: -plain.state[name]}
    receipt = engine.update_weights(whole_shards(changed), 5)
    assert receipt.fingerprints[name] == fingerprint(changed[name], Box.whole(tuple(changed[name].shape)))
    assert largest_difference(plain, changed, engine) < TOLERANCE
    assert largest_difference(plain, plain.state, engine) > 100 * TOLERANCE


def test_latent_keys_and_values_sleep(served: tuple[PlainModel, Any]) -> None:
    """Each layer keeps one tensor for both."""
    plain, engine = served
    engine.sleep(2)
    weights = sum(4 * tensor.numel() for tensor in plain.state.values())
    assert engine.engine.released_bytes >= (60 << 20) + weights
    engine.wake(("weights",))
    engine.update_weights(whole_shards(plain.state), 5)
    engine.wake(("kv_cache",))
    assert largest_difference(plain, plain.state, engine) < TOLERANCE


def test_weights_behind_which_nothing_was_made_again_get_no_receipt(served: tuple[PlainModel, Any]) -> None:
    plain, engine = served
    engine.update_weights(whole_shards(plain.state), 6)
    inside = engine.engine.engine
    changed = {name: tensor + 0.5 for name, tensor in plain.state.items() if "kv_b_proj" in name}
    with inside._session():
        for block in batches(whole_shards(changed), 1 << 20):
            inside._command("write", block=block.name, entries=block.entries)
    with pytest.raises(
        (RlsdkError, WeightSyncError),
        match=r"self_attn\.w_kc', which SGLang derives .* does not match",
    ):
        inside.fingerprints()
