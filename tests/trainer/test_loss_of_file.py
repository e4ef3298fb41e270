"""A loss of a file keeps what its function declares on its way to the workers."""

from __future__ import annotations

import pickle
from pathlib import Path

from rlsdk.algorithms import PolicyObjective
from rlsdk.trainer.learner.algorithm import LossOfFile

LOSS = """
from rlsdk.interfaces import reads

@reads("truncated", outputs=("entropy",))
def loss(inputs):
    return inputs.entropy, {}

loss.whole_groups = True
"""


def test_its_fields_outputs_and_whole_groups_reach_the_objective(tmp_path: Path) -> None:
    """They were dropped: only `zero_without_advantage` was passed on."""
    file = tmp_path / "own.py"
    file.write_text(LOSS, encoding="utf-8")
    objective = pickle.loads(pickle.dumps(PolicyObjective(loss=LossOfFile(f"{file}:loss"))))
    assert "truncated" in objective.fields
    assert "uid" in objective.fields
    assert tuple(objective.outputs) == ("log_probs", "entropy")
    assert objective.whole_groups
    assert not objective.zero_without_advantage
