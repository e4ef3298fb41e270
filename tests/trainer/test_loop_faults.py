"""A run that cannot keep what it measures says so and stops, with its last step saved where that can be done."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_loop import Recorder, config_of, trainer_of

from rlsdk.kit.output import OutputError
from rlsdk.registry import Registry
from rlsdk.testing.models import write_tiny_model

JSONL = ("--tracking.trackers", "[jsonl]", "--trainer.save_every_steps", "50")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


def test_a_full_disk_at_a_line_of_metrics_ends_the_run_with_an_error_and_a_checkpoint(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    config = config_of(model, registry, 4, *JSONL)
    with trainer_of(config, registry, tmp_path / "run", Recorder()) as (trainer, stage, _):
        with pytest.raises(OutputError, match=r"figures of step 1 cannot be written .* No space left on device"):
            trainer.fit()
        assert stage.step == 1
        newest = trainer.store.newest()
        assert newest is not None
        assert newest.name == "step_00000001"
        assert list((tmp_path / "run" / "checkpoints").glob(".*")) == []


def test_a_full_disk_for_the_checkpoint_too_is_one_error_and_one_notice(
    model: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    (tmp_path / "run" / "checkpoints").write_text("a file where a folder must be")
    config, view = config_of(model, registry, 4, *JSONL), Recorder()
    with trainer_of(config, registry, tmp_path / "run", view) as (trainer, _, _), pytest.raises(OutputError):
        trainer.fit()
    assert any("no checkpoint of step 1: cannot write checkpoint" in notice for notice in view.notices)


class Deleter(Recorder):
    """Deletes the run's folder behind its second step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        super().step(step, steps, metrics)
        if step == 2:
            shutil.rmtree(self.folder)


def test_a_run_whose_folder_is_deleted_stops_at_the_next_step(model: str, registry: Registry, tmp_path: Path) -> None:
    view = Deleter(tmp_path / "run")
    config = config_of(model, registry, 20, *JSONL)
    with trainer_of(config, registry, tmp_path / "run", view) as (trainer, stage, _):
        with pytest.raises(OutputError, match=r"the run's folder .* is gone .* figures of step 3"):
            trainer.fit()
        assert stage.step == 3
    assert not (tmp_path / "run").exists(), "what somebody deleted is not made again"
