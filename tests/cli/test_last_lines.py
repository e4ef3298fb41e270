"""What commands that train print at their end, also where nothing was trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.cli.training.pairs import _figures
from rlsdk.cli.training.train import report_lines, tell
from rlsdk.config import PairTraining, RunConfig
from rlsdk.trainer.runs.start import RunResult


def result_in(folder: Path, **fields: object) -> RunResult:
    plain: dict[str, object] = {"steps": 2, "stopped": False, "seconds": 1.0, "first_eval": {}, "last_eval": {}}
    return RunResult(**({"config": RunConfig(), "run_dir": folder, "checkpoint": folder / "step_2"} | plain | fields))  # type: ignore[arg-type]


def test_a_new_folder_of_a_finished_run_has_no_report_and_the_checkpoint_is_still_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b").mkdir()
    tell(result_in(tmp_path / "b", checkpoint=tmp_path / "step_2"))
    said = capsys.readouterr().out
    assert "report      none: no step was made in this folder (metrics.jsonl has no lines)" in said
    assert f"checkpoint  {tmp_path / 'step_2'}" in said
    assert f"--resume {tmp_path / 'step_2'} --steps" in said


def test_a_report_that_cannot_be_written_does_not_end_a_run_that_is_over(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    (line,) = report_lines(tmp_path)
    assert line.startswith("report      none: ")
    assert "is a symbolic link" in line


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ({"eval/accuracy_pairs": 0.25}, {"eval/accuracy_pairs": 0.5}, "accuracy on held-out pairs 25.0% -> 50.0%"),
        ({"eval/accuracy_pairs": 0.25}, {"dpo/accuracy": 0.5}, "accuracy on pairs 50.0%"),
        ({}, {"dpo/accuracy": 0.0}, "accuracy on pairs 0.0%"),
        ({"eval/accuracy_pairs": 0.25}, {}, "nothing was trained"),
    ],
)
def test_accuracies_are_compared_on_the_same_pairs(
    first: dict[str, float], last: dict[str, float], said: str, tmp_path: Path
) -> None:
    assert _figures(PairTraining.DPO, result_in(tmp_path, first_eval=first, last_eval=last)) == said
