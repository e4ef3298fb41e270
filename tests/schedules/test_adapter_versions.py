"""Asynchronous runs with an adapter: each group is sampled whole under the version that its step names, while newer
ones are published, and no replica is paused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_staleness import (
    Change,
    Recorder,
    config_of,
    model,
    registry,
    run_with,
    slow_grades,
    slow_learner,
    slow_publish,
    stale,
    trainer_of,
)

from rlsdk.registry import Registry
from rlsdk.trainer.stages.rl import RlStage

__all__ = ["model", "registry"]

UPDATES = 2
"""Of a step: by so much its version is higher than the previous one's."""
LORA = ("--model.lora.rank", "4", "--train.optim.lr", "1e-2", "--model.lora.sync", "adapter")


def samples_wait_for_newer_adapters(stage: RlStage) -> None:
    """After the first step nothing is decoded under the newest adapter, unless nothing newer comes without it."""
    driver = stage.source._driver

    def are_needed() -> bool:
        first = stage.source._current.step < 1
        return first or driver.starts_are_paused or driver.schedule._needs_no_weights()

    for engine in engines_of(stage):
        lanes = engine._lanes

        def held(engine: Any = engine, lanes: Any = lanes) -> Any:
            if are_needed():
                return lanes()
            return [lane for lane in lanes() if lane.version < engine.version]

        engine._lanes = held


def engines_of(stage: RlStage) -> list[Any]:
    return [host.engine.engine for host in stage.learner.session.rollout.group.hosts]  # type: ignore[attr-defined]


class Versions:
    """Notes the versions of all samples of each step, and how many ran when an adapter came."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self.of_step: list[set[int]] = []
        self.running: list[int] = []

    def __call__(self, stage: RlStage) -> None:
        take = stage.source.next

        def noted() -> Any:
            groups = take()
            rows = [row for group in groups for sample in group.samples for row in sample.rows]
            self.of_step.append({run.version for row in rows for span in row.spans for run in span.versions})
            return groups

        stage.source.next = noted  # type: ignore[method-assign]
        for engine in engines_of(stage):
            update = engine.update_adapter

            def updated(*args: Any, engine: Any = engine, update: Any = update) -> Any:
                self.running.append(sum(len(decoder.jobs) for decoder in engine.decoders))
                return update(*args)

            engine.update_adapter = updated
        self.change(stage)


def without_syncs(view: Recorder) -> list[dict[str, float]]:
    """Metrics of each step, without those of the newest sync: the time decides whose that is."""
    return [{k: v for k, v in step.items() if not k.startswith("sync/")} for step in view.steps]


CASES = [
    (1, (slow_learner, samples_wait_for_newer_adapters, slow_publish)),
    (2, (samples_wait_for_newer_adapters, slow_grades)),
]


@pytest.mark.parametrize(("staleness", "slow"), CASES)
def test_a_step_is_sampled_under_its_version_whatever_is_slow(
    staleness: int, slow: Sequence[Change], model: str, registry: Registry, tmp_path: Path
) -> None:
    rare = ("--eval.every_steps", "4", "--trainer.save_every_steps", "9")
    config = config_of(model, registry, 6, *LORA, *stale(staleness, *rare))
    changes = {change: Versions(change) for change in slow}
    runs = [run_with(config, registry, tmp_path / change.__name__, noted) for change, noted in changes.items()]
    for noted in changes.values():
        assert noted.of_step == [{UPDATES * max(0, step - 1 - staleness)} for step in range(1, 7)]
    for other in runs[1:]:
        assert without_syncs(other) == without_syncs(runs[0])
        assert other.evals == runs[0].evals
    assert [step["schedule/staleness_max"] for step in runs[0].steps] == [min(at, staleness) for at in range(6)]
    running = changes[samples_wait_for_newer_adapters].running
    assert any(running[2:]), "every adapter waited until no samples ran"


def test_a_run_that_is_resumed_goes_on_number_for_number(model: str, registry: Registry, tmp_path: Path) -> None:
    """A checkpoint waits until the groups of older versions are made: what a new process begins has the newest one."""
    config = config_of(model, registry, 4, *LORA, *stale(2))
    whole = run_with(config, registry, tmp_path / "whole", lambda stage: None)
    first, rest = Recorder(), Recorder()
    with trainer_of(config, registry, tmp_path / "part", first, stop=lambda: len(first.steps) == 2) as (trainer, _, _):
        trainer.fit()
    with trainer_of(config, registry, tmp_path / "part", rest) as (trainer, stage, _):
        checkpoint = trainer.store.newest()
        assert checkpoint is not None
        trainer.restore(checkpoint)
        assert stage.step == 2
        trainer.fit()
    assert [*without_syncs(first), *without_syncs(rest)] == without_syncs(whole)
