"""Folders with the samples of a run's evaluations."""

from __future__ import annotations

from pathlib import Path

EVAL_FOLDER = "eval_samples"
"""Folder in a run's folder: `step_N/SET.jsonl.gz` has every sample of each evaluation."""


def eval_folder(run_dir: Path, step: int) -> Path:
    """Folder with the samples of the evaluation after a step."""
    return run_dir / EVAL_FOLDER / f"step_{step:08d}"


def later_eval_folders(run_dir: Path, step: int) -> list[Path]:
    """Folders of evaluations after `step`."""
    return [
        folder
        for folder in sorted((run_dir / EVAL_FOLDER).glob("step_*"))
        if folder.is_dir() and (digits := folder.name.removeprefix("step_")).isdecimal() and int(digits) > step
    ]
