"""What vLLM computes from before an update came, and what it derives from weights after one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_engine, worker_of
from torch import nn

from rlsdk.interfaces import Box, WeightSyncError
from rlsdk.kit.tracing import Piece
from rlsdk_vllm import loader


def test_without_weights_a_profile_runs_on_small_numbers(tmp_path: Path) -> None:
    from rlsdk.testing.models import write_tiny_model

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
    with pytest.raises(WeightSyncError, match="layer '0': what vLLM derives from weights is of others than are served"):
        loader.check(model, torch.float32)
    loader.served_pieces(model)["kv_b_proj.weight"][0].memory.copy_(torch.arange(12.0).view(4, 3) + 1)
    loader.rebuild(model, torch.float32)
    loader.check(model, torch.float32)
    assert torch.equal(model[0].W_UK_T, torch.arange(12.0).view(4, 3).t() + 1)
    assert model[0].W_UK_T.data_ptr() == place


def test_what_attention_derives_elsewhere_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="layer '0': vLLM moved what it derives from weights"):
        loader.rebuild(latent(moves=True), torch.float32)


def test_a_parameter_that_nothing_reaches_is_still_a_fault() -> None:
    model = latent(moves=False)
    model.stray = nn.Parameter(torch.zeros(2))
    assert loader.faults(model) == [
        "parameter 'stray' of the engine is reached by no canonical tensor, or was repacked"
    ]
