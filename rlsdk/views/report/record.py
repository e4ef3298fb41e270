"""Reads a run's folder for a page. Its content is untrusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsdk.config.loading.yaml_text import read_yaml
from rlsdk.interfaces import ConfigError
from rlsdk.system.files import check_inside, read_json_lines, read_regular_text
from rlsdk.trainer.checkpoints.run_end import is_locked
from rlsdk.trainer.checkpoints.run_folder import CONFIG_FILE, END_FILE, HISTORY_FILE
from rlsdk.trainer.tracking.pool_times import FILE as TIMELINE_FILE
from rlsdk.trainer.tracking.trackers import METRICS_FILE, SAMPLES_FILE, read_lines, read_metrics
from rlsdk.views.report.markup import number_of
from rlsdk.views.report.notes import NOTES_FILE, Note, notes_of

FILES = (METRICS_FILE, SAMPLES_FILE, CONFIG_FILE, HISTORY_FILE, TIMELINE_FILE, END_FILE, NOTES_FILE)
"""Files of a run that a page shows. The page may be shared, so it shows nothing that such a file only links to."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The data of a run's files."""

    folder: Path
    metrics: Sequence[Mapping[str, float]]
    """One for each step, in order, with `step`; numbers only."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Samples in the order in which they were generated."""
    config_text: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    starts: Sequence[Mapping[str, Any]] = ()
    """Each accepted start, the first one first: `time`, `step`, and `surroundings` (command, machine, versions)."""

    end: Mapping[str, Any] = field(default_factory=dict)
    """How it ended; empty while it runs, and if its process was killed."""
    notes: Sequence[Note] = ()
    """What its user wrote about it."""
    is_locked: bool | None = False
    """Whether a process is writing to it; None: unknown."""
    updated: float = 0.0
    """Time of the newest metrics, in seconds since the epoch."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def steps(self) -> list[int]:
        return [int(line["step"]) for line in self.metrics]

    def values(self, metric: str) -> list[float | None]:
        """Values of a metric at every step; None if it was not measured."""
        return [line.get(metric) for line in self.metrics]

    @property
    def names(self) -> list[str]:
        """All metrics, in the order in which they first appear."""
        return [name for name in dict.fromkeys(name for line in self.metrics for name in line) if name != "step"]


def read_run(run_dir: Path) -> RunRecord:
    """Reads a run's folder.

    Raises:
        ConfigError: the folder holds no metrics.
        UnfitFileError: one of its files is a link, is not a regular file, or is too large.
    """
    for name in FILES:
        check_inside(run_dir, run_dir / name)
    metrics = [numbers for line in read_metrics(run_dir) if "step" in (numbers := _numbers(line))]
    if not metrics:
        raise ConfigError(
            f"{str(run_dir)!r} holds no {METRICS_FILE} with lines in it. Give a run's folder (runs/NAME), "
            "and keep 'jsonl' among tracking.trackers"
        )
    file = run_dir / CONFIG_FILE
    text = read_regular_text(file, errors="replace") if file.exists() else ""
    return RunRecord(
        folder=run_dir,
        metrics=metrics,
        samples=read_lines(run_dir / SAMPLES_FILE),
        config_text=text,
        settings=settings_of(text),
        starts=read_json_lines(run_dir / HISTORY_FILE),
        end=next(iter(read_json_lines(run_dir / END_FILE)), {}),
        notes=notes_of(read_json_lines(run_dir / NOTES_FILE)),
        is_locked=is_locked(run_dir),
        updated=(run_dir / METRICS_FILE).stat().st_mtime,
    )


def settings_of(text: str) -> Mapping[str, Any]:
    """The settings of a run's `config.yaml`; empty if it cannot be read."""
    try:
        found, _ = read_yaml(text, CONFIG_FILE)
    except ConfigError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line; other values are dropped, as files are untrusted."""
    return {str(name): number for name, value in line.items() if (number := number_of(value)) is not None}
