"""The requirement `sync.quantized` fails managers that do otherwise, and not those that refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlsdk.interfaces import LayoutError, ReshardPlan, WeightLayout
from rlsdk.sharding import GenericShardingManager
from rlsdk.testing.sharding.requirements.quantized import QuantizedRequirements
from rlsdk.testing.suites.requirements import Measured


class TakesTheScalesOnTrust(GenericShardingManager):
    """Proves the values only."""

    def _quantized_fingerprints(self, task: Any) -> dict[str, int]:
        found = super()._quantized_fingerprints(task)
        return {name: value for name, value in found.items() if not name.endswith("_scale")}

    def _now(self, expected: Any) -> dict[str, int]:
        return {name: value for values in expected for name, value in values.items()}


class SendsFloat32(GenericShardingManager):
    """Does not see that bfloat16 is what is quantized."""

    def plan(self, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> ReshardPlan:
        wider = [
            replace(
                layout,
                tensors=tuple(
                    replace(meta, scales=meta.scales and replace(meta.scales, taken_as="float32"))
                    for meta in layout.tensors
                ),
            )
            for layout in target
        ]
        return super().plan(source, wider)


class Refuses(GenericShardingManager):
    def plan(self, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> ReshardPlan:
        raise LayoutError("no scales, please")


@pytest.mark.parametrize(
    ("manager", "fault"),
    [
        (GenericShardingManager, None),
        (Refuses, None),
        (TakesTheScalesOnTrust, "accepted.*a scale|all were doubled"),
        (SendsFloat32, "came in torch.float32, not torch.bfloat16"),
    ],
)
def test_it_fails_who_does_otherwise(manager: type[GenericShardingManager], fault: str | None) -> None:
    lab: Any = SimpleNamespace(manager_class=manager, suite=SimpleNamespace(arguments={}))
    if fault is None:
        QuantizedRequirements().test_quantized(lab, Measured([]))
        return
    with pytest.raises(AssertionError, match=fault):
        QuantizedRequirements().test_quantized(lab, Measured([]))
