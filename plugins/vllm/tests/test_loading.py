"""What vLLM computes from before an update came, and what it derives from weights after one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Asynchronous, InProcess, make_engine, worker_of
from torch import nn

from rlsdk.interfaces import Box, WeightSyncError, fingerprint
from rlsdk.kit.weights.weight_tracing import Piece
from rlsdk.testing.process.models import ROUTED_GLM, write_tiny_model
from rlsdk.testing.rollout.lab import whole_shards
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.rollout.worker_updates import largest_difference
from rlsdk_vllm import loader


def test_without_weights_a_profile_runs_on_small_numbers(tmp_path: Path) -> None:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    folder = write_tiny_model(tmp_path / "model", sharpness=2.0)
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        # As memory may be that another model gave back.
        patch.setattr(torch, "empty", poisoned)
        engine = make_engine(folder, load_weights=False)
    try:
        for name, parameter in worker_of(engine).model_runner.get_model().named_parameters():
            assert parameter.abs().max() < 0.01, name
    finally:
        engine.close()


def test_biases_of_routers_are_part_of_an_update(tmp_path: Path) -> None:
    """transformers has them as buffers, vLLM as parameters; they stay in float32."""
    folder = write_tiny_model(tmp_path / "model", architecture="glm4_moe", seed=2, sharpness=2.0, **ROUTED_GLM)
    plain = PlainModel.load(folder)
    (name,) = [name for name in plain.state if name.endswith("e_score_correction_bias")]
    # In a process of its own: vLLM makes groups for experts with the first model of a process alone.
    engine = make_engine(folder, load_weights=False, options=Asynchronous.options)
    try:
        for version, state in ((1, plain.state), (2, {**plain.state, name: -plain.state[name]})):
            receipt = engine.update_weights(whole_shards(state), version)
            expected = {n: fingerprint(t, Box.whole(tuple(t.shape))) for n, t in state.items()}
            assert receipt.fingerprints == expected
            assert largest_difference(plain, state, engine) < InProcess.tolerance
        assert largest_difference(plain, plain.state, engine) > 100 * InProcess.tolerance
        (layout,) = engine.layout()
        assert {meta.name: meta.dtype for meta in layout.tensors}[name] == "float32"
    finally:
        engine.close()


def latent(moves: bool) -> nn.Module:
    """A model of one layer like vLLM's latent attention: it multiplies with a transposed copy of its projection."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.utils import replace_parameter

    class Latent(nn.Module, AttentionLayerBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.kv_b_proj = nn.Linear(3, 4, bias=False)

        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            turned = self.kv_b_proj.weight.detach().to(dtype).t().contiguous()
            replace_parameter(self, "W_UK_T", turned, prefer_copy=not moves)

        def get_kv_cache_spec(self, *_: Any) -> None: ...

        def get_attn_backend(self) -> Any: ...

    model = nn.Sequential(Latent())
    model[0].process_weights_after_loading(torch.float32)
    whole = Piece(box=Box.whole((4, 3)), memory=model[0].kv_b_proj.weight.detach())
    setattr(model, loader.PIECES, {"kv_b_proj.weight": [whole]})
    return model


def test_what_attention_derives_from_weights_follows_an_update_where_it_is() -> None:
    model = latent(moves=False)
    assert loader.faults(model) == []
    place = model[0].W_UK_T.data_ptr()
    loader.served_pieces(model)["kv_b_proj.weight"][0].memory.copy_(torch.arange(12.0).view(4, 3))
    assert not torch.equal(model[0].W_UK_T, model[0].kv_b_proj.weight.t())
    with pytest.raises(WeightSyncError, match="layer '0': tensors that vLLM derives do not match the served weights"):
        loader.check(model, torch.float32)
    loader.served_pieces(model)["kv_b_proj.weight"][0].memory.copy_(torch.arange(12.0).view(4, 3) + 1)
    loader.rebuild(model, torch.float32)
    loader.check(model, torch.float32)
    assert torch.equal(model[0].W_UK_T, torch.arange(12.0).view(4, 3).t() + 1)
    assert model[0].W_UK_T.data_ptr() == place


def test_what_attention_derives_elsewhere_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="layer '0': vLLM moved the tensors that it derives from weights"):
        loader.rebuild(latent(moves=True), torch.float32)


def test_a_parameter_that_nothing_reaches_is_still_a_fault() -> None:
    model = latent(moves=False)
    model.stray = nn.Parameter(torch.zeros(2))
    assert loader.faults(model) == ["no canonical tensor maps to the engine's parameter 'stray', or it was repacked"]
