"""Checkpoints that are written while the next samples are made: the same numbers, the same files, whole or absent."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_loop import Recorder, config_of, model, registry, run, trainer_of

from rlsdk.interfaces import CheckpointError
from rlsdk.registry import Registry
from rlsdk.trainer.checkpoints.checkpoint import damage

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

        journal = stage.source._history._journal
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


def test_the_average_of_the_weights_is_that_of_its_own_step(model: str, registry: Registry, tmp_path: Path) -> None:
    """The files wait until the next step has changed the average; they are those of a run that waits for them."""
    settings = [*APART, *EACH, "--train.ema_decay", "0.5", "--train.optim.lr", "1e-2"]
    config = config_of(model, registry, 3, *settings, "--checkpoint.background", "true")
    with trainer_of(config_of(model, registry, 3, *settings), registry, tmp_path / "whole", Recorder()) as (plain, *_):
        plain.fit()
    with trainer_of(config, registry, tmp_path / "run", Recorder()) as (trainer, stage, _):
        trainer.in_background = True
        begin, late = trainer._begin_save, list[int]()

        def slow(writing: Any) -> Any:
            finish, step = begin(writing), stage.step

            def waits() -> None:
                end = time.monotonic() + 30
                while step < 3 and stage.step == step and time.monotonic() < end:
                    time.sleep(0.01)
                late.extend([step] if stage.step > step else [])
                finish()

            return waits

        trainer._begin_save = slow  # type: ignore[method-assign]
        trainer.fit()
    assert late == [1, 2]
    for step in (1, 2, 3):
        mine, theirs = trainer.store.path_of(step), plain.store.path_of(step)
        assert damage(mine) == []
        names = {str(path.relative_to(theirs)) for path in theirs.rglob("*average*/*")}
        assert {str(path.relative_to(mine)) for path in mine.rglob("*average*/*")} == names
        assert {Path(name).parts[0] for name in names} == {"actor_average", "model_average"}
        for name in names:
            assert (mine / name).read_bytes() == (theirs / name).read_bytes(), f"step {step}: {name}"


def test_an_average_that_cannot_be_written_leaves_no_checkpoint(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 2, *APART, *EACH, "--train.ema_decay", "0.5")
    with trainer_of(config, registry, tmp_path / "run", Recorder()) as (trainer, stage, _):
        trainer.in_background = True
        begin = stage.begin_save_parts

        def full(draft: Path) -> Any:
            finish = begin(draft)
            if stage.step == 2:
                (draft / "model_average").mkdir()
            return finish

        stage.begin_save_parts = full  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step_00000002"):
            trainer.fit()
        assert [step for step, _ in trainer.store.whole()] == [1]
