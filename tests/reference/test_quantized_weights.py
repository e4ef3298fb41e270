"""Linear layers served as float8 with block scales (`weights: fp8_block`): quantized exactly, computed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_cases import ask, assert_exact, halves, make_engine, plain_with, run
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    ConfigError,
    ModelSpec,
    RankContext,
    RolloutSpec,
    WeightSyncError,
    Workload,
    fingerprint,
)
from rlsdk.reference.forecast import forecast_rollout
from rlsdk.reference.options import TransformersOptions
from rlsdk.testing.process.models import write_tiny_model

BLOCK = 48
"""No tensor of the tiny model is a multiple of it."""
FP8 = TransformersOptions(weights="fp8_block", block_size=BLOCK)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("quantized") / "model", tied=request.param)


def fp8_engine(folder: Path, **more: Any) -> Any:
    return make_engine(folder, **{"options": FP8, **more})


def stands_for(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(float8, scales, what they stand for) of a whole matrix, block by block."""
    found, scales = values.float().clone(), torch.zeros([-(-n // BLOCK) for n in values.shape])
    rounded = torch.zeros(values.shape, dtype=torch.float8_e4m3fn)
    for row in range(0, values.shape[0], BLOCK):
        for column in range(0, values.shape[1], BLOCK):
            where = slice(row, row + BLOCK), slice(column, column + BLOCK)
            scale = values[where].float().abs().max().clamp(1e-4) / 448
            rounded[where] = (values[where].float() * (1 / scale)).to(torch.float8_e4m3fn)
            scales[row // BLOCK, column // BLOCK] = scale
            found[where] = rounded[where].float() * scale
    return rounded, scales, found.to(values.dtype)


def canonical(engine: Any, seed: int = 0) -> dict[str, Tensor]:
    """Other weights for an engine whose own are quantized."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in engine.shapes.items()}


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def test_an_update_serves_float8_and_samples_with_what_it_stands_for(folder: Path) -> None:
    engine = fp8_engine(folder, load_weights=False)
    state = canonical(engine)
    receipt = engine.update_weights(iter(halves(state)), 3)
    expected: dict[str, Tensor] = {}
    served: dict[str, Tensor] = {}
    for name, tensor in state.items():
        served[name] = expected[name] = tensor
        if is_quantized(name):
            served[name], served[f"{name}_scale_inv"], expected[name] = stands_for(tensor)
    assert receipt.num_tensors == len(state)
    assert receipt.fingerprints == {n: fingerprint(t, Box.whole(tuple(t.shape))) for n, t in served.items()}
    plain = plain_with(folder, expected)
    for output in run(engine, [ask("x", [5, 9, 12], 4, max_tokens=12)]):
        assert_exact(plain, [5, 9, 12], output)
        assert output.policy_version == 3
    unquantized = plain_with(folder, state)
    with pytest.raises(AssertionError):
        assert_exact(unquantized, [5, 9, 12], output)


def test_the_checkpoint_is_quantized_as_an_update_would_be(folder: Path) -> None:
    engine, plain = fp8_engine(folder), make_engine(folder)
    state = {name: parameter.detach().clone() for name, parameter in plain.parameters.items()}
    before = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
    engine.update_weights(iter(halves(state)), 1)
    for name, parameter in engine.parameters.items():
        assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name


def test_the_layout_names_the_scales_and_the_forecast_counts_the_bytes(folder: Path) -> None:
    engine = fp8_engine(folder, dtype="bfloat16")
    (layout,) = engine.layout()
    quantized = {meta.name for meta in layout.tensors if meta.scales is not None}
    assert quantized == set(filter(is_quantized, engine.shapes))
    for meta in layout.tensors:
        assert meta.dtype == ("float8_e4m3fn" if meta.name in quantized else "bfloat16")
        if meta.scales is not None:
            assert (meta.scales.name, meta.scales.taken_as) == (f"{meta.name}_scale_inv", "bfloat16")
            assert meta.scales.block == (BLOCK, BLOCK)
            assert meta.scales.name in engine.parameters
    spec = RolloutSpec(model=ModelSpec(path=str(folder), dtype="bfloat16"), options=FP8)
    work = Workload(row_tokens=32, update_rows=1, running_rows=1)
    forecast = forecast_rollout([RankContext(role="rollout")], spec, work)
    held = sum(parameter.numel() * parameter.element_size() for parameter in engine.parameters.values())
    assert forecast.memory[0].weights_bytes == held
    assert forecast.layouts[0][0].tensors == layout.tensors


def test_sleep_and_damage(folder: Path) -> None:
    engine = fp8_engine(folder)
    state = canonical(engine)
    engine.update_weights(iter(halves(state)), 1)
    before = [o.token_ids.tolist() for o in run(engine, [ask("x", [5, 6], 3)])]
    engine.sleep(2)
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine.parameters.values()) == 0
    engine.wake()
    engine.update_weights(iter(halves(state)), 2)
    assert sorted(o.token_ids.tolist() for o in run(engine, [ask("x", [5, 6], 3)])) == sorted(before)
    name = next(filter(is_quantized, state))
    with pytest.raises(WeightSyncError, match=r"1 of [0-9]+ tensors were not covered"):
        engine.update_weights((s for s in halves(state) if s.name != name or s.box.offset[0] == 0), 3)
    state[name][0, 0] = float("nan")
    with pytest.raises(WeightSyncError, match="values that are not finite: they cannot be quantized"):
        engine.update_weights(iter(halves(state)), 4)


def test_options_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="block_size is 0: expected 1 or more"):
        fp8_engine(folder, options=TransformersOptions(weights="fp8_block", block_size=0))
    with pytest.raises(ConfigError, match=r"RolloutSpec.options is a dict; expected TransformersOptions"):
        fp8_engine(folder, options={})
