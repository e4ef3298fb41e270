"""A run that cannot keep what it measures says so and stops, with its last step saved where that can be done."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_loop import Recorder, config_of, trainer_of

from rlsdk.interfaces import WorkerError
from rlsdk.kit.files.write_errors import DISK, OutputError, disk_errors
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.checkpoints.checkpoint import faults
from rlsdk.trainer.stages.loop import Trainer
from rlsdk.trainer.tracking.run_output import RunOutput

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


class Preempted(Recorder):
    """The machine is reclaimed after the first step, and its journal takes nothing more."""

    def __init__(self, journal: Path) -> None:
        super().__init__()
        self.journal = journal
        self.trainer: Trainer | None = None

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        super().step(step, steps, metrics)
        assert self.trainer is not None
        self.trainer.preempted = lambda: True
        (segment,) = self.journal.iterdir()
        (opened,) = (fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and fd.resolve() == segment)
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), int(opened.name))
        self.journal.rename(self.journal.with_name("away"))
        self.journal.write_text("a file where a folder must be")


def test_a_preempted_run_whose_journal_cannot_be_written_still_saves_its_step(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    config, view = config_of(model, registry, 4, *JSONL), Preempted(tmp_path / "run" / "journal")
    with trainer_of(config, registry, tmp_path / "run", view) as (trainer, stage, _):
        view.trainer = trainer
        with pytest.raises(OutputError, match="journal"):
            trainer.fit()
        assert stage.step == 1
        assert trainer.last_checkpoint == trainer.store.path_of(1)
        assert faults(trainer.last_checkpoint) == []


def test_a_run_whose_folder_is_deleted_stops_at_the_next_step(model: str, registry: Registry, tmp_path: Path) -> None:
    view = Deleter(tmp_path / "run")
    config = config_of(model, registry, 20, *JSONL)
    with trainer_of(config, registry, tmp_path / "run", view) as (trainer, stage, _):
        with pytest.raises(OutputError, match=r"the run's folder .* is gone .* figures of step 3"):
            trainer.fit()
        assert stage.step == 3
    assert not (tmp_path / "run").exists(), "what somebody deleted is not made again"


class Limit(Recorder):
    """Allows no file to grow once the first step is over; the next samples do not fit into the journal."""

    def __init__(self, journal: Path) -> None:
        super().__init__()
        self.journal = journal
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        super().step(step, steps, metrics)
        largest = max(path.stat().st_size for path in self.journal.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 100, self.before[1]))


def test_a_journal_at_the_limit_of_its_size_ends_the_run_with_what_to_do(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    config, view = config_of(model, registry, 4, *JSONL), Limit(tmp_path / "run" / "journal")
    try:
        with trainer_of(config, registry, tmp_path / "run", view) as (trainer, stage, _):
            with pytest.raises(OutputError, match=r"File too large\. Raise the limit .*`ulimit -f unlimited`.* again"):
                trainer.fit()
            assert stage.step == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, view.before)
    notices = [notice for notice in view.notices if notice.startswith("no checkpoint of step 1: cannot write")]
    assert notices, "the model is larger than that too, and said so"
    assert "ulimit -f unlimited" in notices[0]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("number", DISK)
def test_what_a_worker_or_a_library_reports_of_the_disk_has_the_same_way_out(number: int, tmp_path: Path) -> None:
    def run_with(error: Exception) -> str:
        with pytest.raises(OutputError, match="run the same command again") as found, disk_errors(tmp_path):
            raise error
        return str(found.value)

    assert "way out" not in run_with(WorkerError(f"actor rank 0: {os.strerror(number)} (os error {number})"))
    assert str(tmp_path / "x") in run_with(OSError(number, os.strerror(number), str(tmp_path / "x")))
    with pytest.raises(WorkerError, match="died"), disk_errors(tmp_path):
        raise WorkerError("actor rank 0 died")
    with pytest.raises(FileNotFoundError), disk_errors(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "no such file", "x")


class Refusing:
    """A tracker whose server refuses."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ValueError("quota exceeded")

    def log_samples(self, step: int, samples: object) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_tracker_that_fails_is_named(tmp_path: Path) -> None:
    output = RunOutput(run_dir=tmp_path, view=Recorder(), trackers=[Refusing()])
    with pytest.raises(OutputError, match=r"Refusing cannot log step 3: ValueError: quota .*tracking\.trackers"):
        output.track(3, {"a": 1.0})
