"""Samples to be looked at: a few of a step, with their text, and all of an evaluation."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.interfaces import Batch
from rlsdk.kit.atomic import atomic_write_bytes
from rlsdk.kit.printable import json_line
from rlsdk.rollouts import Group

EVAL_FOLDER = "eval_samples"
"""Of a run: `step_N/SET.jsonl.gz`, every sample of each evaluation."""


def eval_folder(run_dir: Path, step: int) -> Path:
    """Where the samples of the evaluation after a step are."""
    return run_dir / EVAL_FOLDER / f"step_{step:08d}"


def later_eval_folders(run_dir: Path, step: int) -> list[Path]:
    """Folders of evaluations after `step`."""
    return [
        folder
        for folder in sorted((run_dir / EVAL_FOLDER).glob("step_*"))
        if folder.is_dir() and (digits := folder.name.removeprefix("step_")).isdecimal() and int(digits) > step
    ]


def write_eval_samples(
    folder: Path, step: int | None, samples: Mapping[str, Sequence[Mapping[str, Any]]], *, compress: bool
) -> list[Path]:
    """A file for each set, one JSON object a line; each is whole or absent. Returns them.

    Raises:
        OSError: the disk refuses.
    """
    written = []
    for name, rows in samples.items():
        text = "".join(json_line({"step": step, **row}) + "\n" for row in rows)
        path = folder / (f"{name}.jsonl.gz" if compress else f"{name}.jsonl")
        # No time in the header: equal samples are equal files.
        atomic_write_bytes(path, gzip.compress(text.encode(), mtime=0) if compress else text.encode())
        written.append(path)
    return written


def shown_samples(groups: Sequence[Group], batch: Batch, count: int) -> list[Mapping[str, Any]]:
    """Up to `count` samples, one from each of several prompts. `batch` holds a row for each sample that was made."""
    made = [(group, sample) for group in groups for sample in group.samples if sample.trajectory is not None]
    stride = max(len(made) // max(count, 1), 1)
    rows = list(range(0, len(made), stride))[:count]
    picked = batch.select(rows)
    tokens = picked.row_sum(picked["response_mask"].long()).clamp(min=1)
    advantages = (picked.row_sum(picked["advantages"]) / tokens).tolist()
    return [
        {
            "prompt": made[row][0].task.prompt.text,
            "response": made[row][1].text,
            "answer": made[row][0].task.prompt.answer,
            "score": made[row][1].total,
            **{f"reward/{name}": value for name, value in made[row][1].grade.terms.items()},
            "advantage": advantage,
        }
        for row, advantage in zip(rows, advantages, strict=True)
    ]
