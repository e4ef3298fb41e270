"""What only a GPU's optimizer asks of a checkpoint, shown without one: on torch's meta device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlsdk.interfaces import Box
from rlsdk_fsdp.checkpoint import _fresh_moments


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_finds_its_step_beside_the_parameter(fused: bool) -> None:
    """`torch.optim.adam` takes `step` on the parameter's device where it is fused; on the CPU otherwise, and a step on
    the wrong side ends the first update after a resume."""
    held = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
    piece = SimpleNamespace(name="w", held=held, box=Box((0, 0), (2, 3)), like=lambda tensor: tensor)
    optimizer = torch.optim.AdamW([held])
    optimizer.param_groups[0]["fused"] = fused
    _fresh_moments(optimizer, [piece], {"w": 7.0})  # type: ignore[list-item]
    assert optimizer.state[held]["step"].device.type == ("meta" if fused else "cpu")
    assert optimizer.state[held]["exp_avg"].device.type == "meta"
