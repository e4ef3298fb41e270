"""docs/algorithms.md names everything that is registered, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_cases import make_batch

from rlsdk import algorithms
from rlsdk.algorithms import PolicyObjective, loss_weights
from rlsdk.registry import ComponentKind, Registry

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
KINDS = (ComponentKind.ADVANTAGE, ComponentKind.LOSS, ComponentKind.AGGREGATION, ComponentKind.KL_ESTIMATOR)


@pytest.mark.parametrize("kind", KINDS)
def test_every_registered_name_has_a_line(kind: ComponentKind) -> None:
    missing = [name for name in Registry.discover({}).usable(kind) if f"`{name}`" not in TEXT]
    assert missing == []


def test_every_name_in_a_first_column_exists() -> None:
    """Registered, or a function of the package."""
    registry = Registry.discover({})
    known = {name for kind in KINDS for name in registry.usable(kind)} | set(algorithms.__all__)
    modes = {"old_log_probs", "auto", "always", "decoupled", "rollout"}
    columns = re.findall(r"^\| (`[^|]+) \|", TEXT, flags=re.MULTILINE)
    named = {name for column in columns for name in re.findall(r"`(\w+)", column)}
    assert len(named) > 30
    assert named - known - modes == set()


def test_the_example_runs_on_the_fields_that_it_declares() -> None:
    scope: dict[str, Any] = {}
    block = re.search(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert block is not None
    exec(compile(block[1], "docs/algorithms.md", "exec"), scope)
    objective = PolicyObjective(loss=scope["cautious"], loss_options={"bonus": 0.5})
    batch = make_batch([1.0, 0.0], [0, 0], truncated=[False, True]).with_tokens(advantages=torch.ones(6))
    batch = batch.with_tokens(loss_weight=loss_weights(batch)).keep(objective.fields)
    result = objective({"log_probs": torch.full((6,), -1.0), "entropy": torch.full((6,), 2.0)}, batch)
    assert float(result.loss) == pytest.approx((2 * 0.0 + 2 * 1.0) / 4)


def test_the_configuration_knows_which_estimators_compare_the_samples_of_a_prompt() -> None:
    """With one sample a prompt they give 0 throughout: the run is refused before it starts."""
    from rlsdk.config.sections.schema import NEEDS_GROUP

    registry = Registry.discover({})
    alone = make_batch([1.0, 2.0, 0.5], [1, 2, 3], baseline_scores=[0.0] * 3).with_tokens(values=torch.zeros(9))
    silent = {
        name
        for name in registry.usable(ComponentKind.ADVANTAGE)
        if not registry.function(ComponentKind.ADVANTAGE, name)(alone)["advantages"].any()
    }
    assert silent == NEEDS_GROUP
