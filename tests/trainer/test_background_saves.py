"""Checkpoints that are written while the next samples are made: the same numbers, the same files, whole or absent."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_loop import Recorder, config_of, model, registry, run, trainer_of

from rlsdk.interfaces import CheckpointError, ConfigError
from rlsdk.registry import Registry
from rlsdk.trainer.checkpoint import damage

__all__ = ["model", "registry"]

APART = ["--placement.preset", "disaggregated", "--placement.devices_per_node", "2"]
EACH = ["--trainer.save_every_steps", "1"]


def test_a_checkpoint_is_of_its_own_step_whatever_is_trained_while_it_is_written(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """The disk is slow: each is sealed while the next step trains; a resumed run goes on number for number."""
    config = config_of(model, registry, 4, *APART, *EACH)
    whole = run(config, registry, tmp_path / "whole")
    view, during = Recorder(), list[int]()
    with trainer_of(config, registry, tmp_path / "run", view) as (trainer, stage, _):
        trainer.in_background = True
        begin, advance = trainer._begin_save, stage.advance

        def slow(writing: Any) -> Any:
            finish = begin(writing)
            return lambda: (time.sleep(0.2), finish())[1]

        def seen() -> Any:
            metrics = advance()
            during.extend([stage.step] if not trainer._background.is_done else [])
            return metrics

        trainer._begin_save, stage.advance = slow, seen  # type: ignore[method-assign]
        trainer.fit()
        store = trainer.store
    assert during, "no step was made while a checkpoint was written"
    assert view.steps == whole.steps
    assert [step for step, _ in store.whole()] == [2, 3, 4]
    assert all(damage(path) == [] for _, path in store.whole())
    rest = Recorder()
    with trainer_of(config, registry, tmp_path / "run", rest) as (trainer, _, _):
        trainer.restore(store.path_of(2))
        trainer.fit()
    assert rest.steps == whole.steps[2:]


def test_generation_goes_on_while_a_checkpoint_is_written(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 2, *APART, *EACH)
    with trainer_of(config, registry, tmp_path / "run", Recorder()) as (trainer, stage, _):
        trainer.in_background = True
        sampled, begin = threading.Event(), trainer._begin_save

        def until_sampled(writing: Any) -> Any:
            finish, step = begin(writing), stage.step
            return lambda: (step == 2 or sampled.wait(30), finish())[1]

        journal = stage.source._journal
        assert journal is not None
        record = journal.sample
        journal.sample = lambda *args: (stage.step == 1 and sampled.set(), record(*args))[1]  # type: ignore[method-assign]
        trainer._begin_save = until_sampled  # type: ignore[method-assign]
        trainer.fit()
        assert sampled.is_set()
        assert [step for step, _ in trainer.store.whole()] == [1, 2]


def test_one_that_cannot_be_written_ends_the_run_and_leaves_nothing_half(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    config = config_of(model, registry, 4, *APART, *EACH)
    with trainer_of(config, registry, tmp_path / "run", Recorder()) as (trainer, stage, _):
        trainer.in_background = True
        begin = trainer._begin_save

        def full(writing: Any) -> Any:
            finish = begin(writing)

            def fails() -> None:
                if stage.step >= 2:
                    (trainer.store.folder / ".step_00000002.tmp" / "config.yaml").mkdir()
                finish()

            return fails

        trainer._begin_save = full  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step_00000002"):
            trainer.fit()
        assert [step for step, _ in trainer.store.whole()] == [1]


def test_it_is_refused_beside_an_average_of_the_weights(model: str, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.background.*train\.ema_decay"):
        config_of(model, registry, 2, "--checkpoint.background", "true", "--train.ema_decay", "0.9")
