"""A run as an object: its metrics, its files, and how to resume it."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.api.chart import Chart, draw
from rlsdk.api.table import Table
from rlsdk.interfaces import ConfigError
from rlsdk.system.files import read_regular_text
from rlsdk.system.printable import printable
from rlsdk.system.quantities import counted
from rlsdk.trainer.checkpoints.checkpoint import is_model

if TYPE_CHECKING:
    from rlsdk.data.rows import Messages
    from rlsdk.trainer.runs.start import RunResult
    from rlsdk.views.report.notes import Note


class Run:
    """The folder of a run of this or another process; everything is read on access.

    `rlsdk.Run("runs/NAME")` opens an existing run, finished or not.
    """

    def __init__(self, path: str | os.PathLike[str], *, result: RunResult | None = None) -> None:
        """Opens a run.

        Args:
            path: of its folder.
            result: its result, if this process ran it.

        Raises:
            ConfigError: there is no such folder, or it contains no run.
        """
        self.path = Path(path).absolute()
        self.result = result
        if result is None and not (self.path / "config.yaml").is_file():
            raise ConfigError(f"{str(path)!r} holds no run: there is no config.yaml; give a run's folder (runs/NAME)")

    @property
    def metrics(self) -> Table:
        """One row per step, with metrics by name (`reward/mean`, ...); see docs/metrics.md for their meaning."""
        from rlsdk.trainer.tracking.trackers import read_metrics

        return Table(read_metrics(self.path))

    @property
    def samples(self) -> Table:
        """The logged samples: step, prompt, response, answer, score, advantage."""
        from rlsdk.trainer.tracking.trackers import SAMPLES_FILE, read_lines

        return Table(read_lines(self.path / SAMPLES_FILE))

    @property
    def config(self) -> Mapping[str, Any]:
        """All settings, as in `config.yaml`."""
        from rlsdk.config.loading.yaml_text import read_yaml

        file = self.path / "config.yaml"
        data, _ = read_yaml(read_regular_text(file), str(file))
        return data if isinstance(data, Mapping) else {}

    @property
    def checkpoints(self) -> list[Path]:
        """Folders of the complete checkpoints, oldest first."""
        from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore

        return [path for _, path in CheckpointStore(self.path / self._training.checkpoints, 1).whole()]

    @property
    def model(self) -> Path:
        """Folder of the newest model in Hugging Face format, or of the newest adapter in PEFT's.

        Raises:
            ConfigError: nothing was saved, or the train backend cannot export.
        """
        if is_model(self.path / "model") and not self.checkpoints:
            return self.path / "model"
        found = [path / "model" for path in self.checkpoints if is_model(path / "model")]
        if self._training.value != "train" and (self.path / "model").is_dir():
            return self.path / "model"
        if not found:
            raise ConfigError(f"{str(self.path)!r} has no model: nothing was saved (trainer.save_every_steps)")
        return found[-1]

    @property
    def steps(self) -> int:
        """Number of finished steps."""
        if self.result is not None:
            return self.result.steps
        mark = "reward/mean" if self._training.value == "train" else "step"  # the warm start counts its own steps
        return max((int(row["step"]) for row in self.metrics if mark in row), default=0)

    @property
    def stopped(self) -> bool:
        """Whether it was asked to end early; it then has saved its state."""
        return self.result is not None and self.result.stopped

    @property
    def seconds(self) -> float:
        """Duration in this process; 0 for a run that was opened."""
        return self.result.seconds if self.result is not None else 0.0

    @property
    def before(self) -> Mapping[str, float]:
        """Metrics of the first evaluation; empty if there was none."""
        return self.result.first_eval if self.result is not None else self._evaluations()[0]

    @property
    def after(self) -> Mapping[str, float]:
        """Metrics of the last evaluation; empty if there was none."""
        return self.result.last_eval if self.result is not None else self._evaluations()[-1]

    def plot(self, *metrics: str) -> Chart:
        """Plots metrics over steps; by default reward, evaluation and lengths."""
        return draw(self.metrics, metrics)

    def report(self) -> Path:
        """Writes `report.html`, one page about the run, into its folder; returns its path."""
        from rlsdk.views.report import write_report

        return write_report(self.path)[0]

    def note(self, text: str) -> None:
        """Writes a line about the run, which its pages show.

        Raises:
            ConfigError: it is empty or too long.
        """
        from rlsdk.views.report.notes import add_note

        add_note(self.path, text)

    @property
    def notes(self) -> Sequence[Note]:
        """The lines that were written about the run, each with `text`, `time` and `step`."""
        from rlsdk.views.report.notes import read_notes

        return read_notes(self.path)

    def resume(self, *, steps: int | None = None, trust_run: bool = False, **fields: Any) -> Run:
        """Resumes from the newest checkpoint, in the same folder.

        Args:
            steps: of the whole run, including those before the resume; None: as configured.
            trust_run: also run the code that the run's own `config.yaml` names. Code of a run that this process created
                is trusted.
            fields: other settings, as for `rlsdk.train`.

        Raises:
            ConfigError: there is nothing to resume from, or the run names code without `trust_run`.
        """
        from rlsdk.api.in_process import run_here
        from rlsdk.api.settings import from_keywords

        training = self._training
        more = dict(fields)
        view = more.pop("view", None)
        of_steps = {"train": "trainer__steps", "sft": "sft__steps"}.get(training.value, "preferences__steps")
        settings = from_keywords(
            more,
            training.reader,
            config=self.path / "config.yaml",
            trust_run=trust_run or self._is_own,
            trainer__run_dir=self.path.parent,
            trainer__run_name=self.path.name,
            trainer__resume="auto",
            **{of_steps: steps},
        )
        result = run_here(training, settings, view)
        return Run(result.run_dir, result=result)

    def evaluate(self, *, trust_run: bool = False, **fields: Any) -> dict[str, float]:
        """Evaluates the newest model on held-out prompts; see `rlsdk.evaluate`."""
        from rlsdk.api.inference import evaluate

        return evaluate(self.path, trust_run=trust_run or self._is_own, **fields)

    def generate(self, *prompts: str | Messages, trust_run: bool = False, **fields: Any) -> Table:
        """Generates responses of the newest model to texts or conversations; see `rlsdk.generate`."""
        from rlsdk.api.inference import generate, given_prompts

        return generate(self.path, given_prompts(prompts), trust_run=trust_run or self._is_own, **fields)

    @property
    def _is_own(self) -> bool:
        return self.result is not None

    @property
    def _training(self) -> Any:
        """Kind of training, by the content of its folder."""
        from rlsdk.config.checks.training import Training

        for training in (one for one in Training if one.pairs is not None or one is Training.DISTILL):
            if (self.path / training.checkpoints).is_dir():
                return training
        config = self.config
        supervised = (self.path / Training.SFT.checkpoints).is_dir() or (self.path / "model").is_dir()
        graded = config.get("rewards") or config.get("reward_models") or config.get("teachers")
        return Training.SFT if supervised and not graded else Training.RL

    def _evaluations(self) -> list[Mapping[str, float]]:
        rows = self.metrics
        found = [{k: v for k, v in row.items() if k.startswith("eval/")} for row in rows]
        return [row for row in found if row] or [{}]

    def _changes(self) -> dict[str, tuple[str, str]]:
        """What people call a figure -> its first and its last value: of evaluations, then of training steps."""
        from rlsdk.views.figures import named, named_step

        old, new = named(self.before, self.after), named(self.after, self.before)
        found = {name: (old.get(name, "-"), new.get(name, "-")) for name in {**old, **new}}
        first: dict[str, str] = {}
        last: dict[str, str] = {}
        for step in map(named_step, self.metrics):  # those of a warm start have other figures
            first, last = {**step, **first}, {**last, **step}
        return found | {f"{name}, in training": (value, last[name]) for name, value in first.items()}

    def __repr__(self) -> str:
        state = "stopped after" if self.stopped else "after"
        shown = "".join(f", {name} {' -> '.join(dict.fromkeys(pair))}" for name, pair in self._changes().items()
                        if name.startswith(("accuracy", "reward")))  # fmt: skip
        return printable(f"Run({str(self.path)!r}, {state} {counted(self.steps, 'step')}{shown})")

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(printable(name))}</th><td>{html.escape(old)}</td><td>{html.escape(new)}</td></tr>"
            for name, (old, new) in self._changes().items()
        )
        rows = f"<tr><th></th><th>first</th><th>last</th></tr>{rows}" if rows else ""
        state = f"{'stopped after ' if self.stopped else ''}{counted(self.steps, 'step')}"
        try:
            chart = self.plot().svg
        except ConfigError:
            chart = ""
        return f"<p><code>{html.escape(printable(str(self.path)))}</code>, {state}</p><table>{rows}</table>{chart}"
