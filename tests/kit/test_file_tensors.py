"""Tensors as files hold them: the names that engines' loaders know, and where each lies in the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlsdk.interfaces import Box, ModelSpec
from rlsdk.kit.model.hf import build_model, canonical_parameters
from rlsdk.kit.weights.file_tensors import file_tensors
from rlsdk.kit.weights.tensor_origins import Source
from rlsdk.testing.process.models import write_tiny_model

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def test_the_parts_of_each_tensor_hold_the_values_that_transformers_writes(tmp_path: Path) -> None:
    """Experts, which transformers joins; read back from the file that it wrote."""
    folder = write_tiny_model(tmp_path / "model", architecture="qwen3_moe", seed=3, **MIXTURE)
    model = build_model(ModelSpec(path=str(folder)))
    state = {name: parameter.detach() for name, parameter in canonical_parameters(model)[0].items()}
    skeleton = build_model(ModelSpec(path=str(folder)), empty=True)
    written = file_tensors(skeleton, {name: tuple(tensor.shape) for name, tensor in state.items()})
    assert written is not None
    on_disk = load_file(folder / "model.safetensors")
    assert {source.name: source.shape for source in written} == {n: tuple(t.shape) for n, t in on_disk.items()}
    assert len(written) > len(state)
    for source in (Source.unpacked(source.packed()) for source in written):
        found = torch.full(source.shape, torch.nan)
        for part in source.parts:
            values = state[part.name][part.origin().slices(Box.whole(tuple(state[part.name].shape)))]
            found[part.box.slices(Box.whole(source.shape))] = values.reshape(part.box.size)
        assert torch.equal(found, on_disk[source.name]), source.name


@pytest.mark.parametrize("tied", [False, True])
def test_models_that_are_written_as_they_are_need_no_other_names(tmp_path: Path, tied: bool) -> None:
    folder = write_tiny_model(tmp_path / "model", tied=tied)
    model = build_model(ModelSpec(path=str(folder)), empty=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in canonical_parameters(model)[0].items()}
    assert file_tensors(model, shapes) is None
