"""What becomes of a warm start whose run is asked to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.trainer.runs.rl import _keep
from rlsdk.trainer.stages.loop import Trainer


@dataclass
class Warmed:
    """As far as it is asked."""

    stage: Any
    store: CheckpointStore
    last_checkpoint: Path | None = None
    saves: list[int] = field(default_factory=list)

    def save(self) -> None:
        self.saves.append(self.stage.step)


@pytest.mark.parametrize(("step", "saved", "saves"), [(0, None, []), (30, None, [30]), (30, 20, [30]), (30, 30, [])])
def test_its_last_step_is_kept_once(step: int, saved: int | None, saves: list[int], tmp_path: Path) -> None:
    """No checkpoint is written of it otherwise, because one of reinforcement learning was to come."""
    store = CheckpointStore(tmp_path, 1)
    warmed = Warmed(SimpleNamespace(step=step), store, None if saved is None else store.path_of(saved))
    _keep(cast(Trainer, warmed))
    assert warmed.saves == saves
