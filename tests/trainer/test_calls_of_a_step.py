"""How often a step calls each worker: a number of its own, whatever the batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_loop import Recorder, config_of, model, registry, trainer_of

from rlsdk.registry import Registry
from rlsdk.testing.roles.in_process_group import InProcessGroup

__all__ = ["model", "registry"]


def calls_of_a_step(config: Any, registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """ROLE.METHOD -> calls of one worker in the third step."""
    seen: Counter[str] = Counter()
    call = InProcessGroup._call

    def counted(self: InProcessGroup, rank: int, spec: Any, method: str, *rest: Any) -> Any:
        if rank == 0:
            seen[f"{self.role}.{method}"] += 1
        return call(self, rank, spec, method, *rest)

    by_step: list[Counter[str]] = []

    class View(Recorder):
        def step(self, *_: Any) -> None:
            by_step.append(Counter(seen))

    with trainer_of(config, registry, folder, View()) as (trainer, _, _):
        monkeypatch.setattr(InProcessGroup, "_call", counted)
        trainer.fit()
    return by_step[2] - by_step[1]


def test_the_learners_workers_are_called_once_for_each_thing_that_a_step_does(
    model: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KL penalty to a reference, two optimizer steps, weights to the rollout engine; no save."""
    extra = ["--algorithm.kl_coef", "0.01", "--trainer.save_every_steps", "null"]
    small = config_of(model, registry, 3, *extra)
    large = config_of(model, registry, 3, *extra, "--trainer.prompts_per_step", "12")
    found = calls_of_a_step(small, registry, tmp_path / "small", monkeypatch)
    again = calls_of_a_step(large, registry, tmp_path / "large", monkeypatch)
    trained = {name: count for name, count in found.items() if not name.startswith("rollout.")}
    assert trained["actor.update"] == 2
    assert trained["ref.forward"] == 1
    assert sum(trained.values()) <= 6
    assert {name: count for name, count in again.items() if not name.startswith("rollout.")} == trained
    assert found["rollout.pull_weights"] == again["rollout.pull_weights"] == 1
