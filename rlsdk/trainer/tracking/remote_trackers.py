"""Trackers that send a run's metrics to a third-party server."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlsdk.interfaces import ConfigError, TrackerContext
from rlsdk.system.atomic import atomic_write_json
from rlsdk.system.files import read_regular
from rlsdk.trainer.tracking.samples import plain_columns
from rlsdk.trainer.tracking.trackers import is_warm_start


class _Repeats:
    """Skips steps that a server already has: a resumed run repeats them with the same metrics, and servers cannot
    delete them. An additional metric per phase holds the step, since steps of the warm start and of RL both count from
    1."""

    MARKS: ClassVar[Mapping[bool, str]] = {True: "sft/step", False: "rl/step"}
    """Metric that holds the step, by whether the phase is the warm start."""

    def __init__(self, last: Mapping[str, float | None]) -> None:
        self._last = last

    def mark(self, metrics: Mapping[str, float], step: int) -> Mapping[str, float] | None:
        """Returns the metrics with their mark; None if the server already has this step."""
        mark = self.MARKS[is_warm_start(metrics)]
        last = self._last.get(mark)
        return None if last is not None and step <= last else {mark: step, **metrics}


class WandbTracker:
    """Weights & Biases. Options go to `wandb.init`.

    Steps are logged as a metric: the warm start and RL both count from 1, but wandb's own counter accepts no step
    twice. A resumed run continues its wandb run and leaves out the steps that are already there. Offline, the server
    cannot be queried for its steps: the file `LAST_STEPS` in the run's folder records what was logged.
    """

    LAST_STEPS = "wandb_steps.json"
    """File with the wandb run and the last step of each phase that was logged to it."""

    def __init__(self, context: TrackerContext) -> None:
        wandb = _import("wandb")
        settings: dict[str, Any] = {"name": context.run_name, "id": context.run_name, "project": "rlsdk"}
        settings |= context.options
        try:
            self._run = wandb.init(dir=context.run_dir, config=dict(context.config), resume="allow", **settings)
        except Exception as error:  # wandb's own errors: no key, no such project, no network
            raise ConfigError(
                f"tracking.trackers: 'wandb' cannot start: {type(error).__name__}: {error}. Run `wandb login` or set "
                "WANDB_API_KEY; WANDB_MODE=offline keeps everything here; or leave 'wandb' out of tracking.trackers"
            ) from error
        self._run.define_metric("*", step_metric="step")
        self._file = Path(context.run_dir, self.LAST_STEPS)
        self._logged: dict[str, float] = {}
        if context.resume_step is not None:
            there = self._run.summary if self._run.resumed else self._read_file()
            self._logged = {mark: there[mark] for mark in _Repeats.MARKS.values() if there.get(mark) is not None}
        self._repeats = _Repeats(dict(self._logged))
        self._table = wandb.Table

    def _read_file(self) -> Mapping[str, float]:
        """The last steps that were logged to this wandb run; empty if the file belongs to another run."""
        try:
            content = json.loads(read_regular(self._file))
            known = content["run"] == self._name()
            return {str(mark): int(step) for mark, step in content["steps"].items()} if known else {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def _name(self) -> str:
        return f"{self._run.project}/{self._run.id}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if (fresh := self._repeats.mark(metrics, step)) is not None:
            self._run.log({"step": step, **fresh})
            self._logged |= {mark: step for mark in _Repeats.MARKS.values() if mark in fresh}
            atomic_write_json(self._file, {"run": self._name(), "steps": self._logged})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if samples and self._repeats.mark({}, step) is not None:
            plain = plain_columns(samples)
            columns = list(plain[0])
            rows = [[str(sample.get(column)) for column in columns] for sample in plain]
            self._run.log({"step": step, "samples": self._table(columns=columns, data=rows)})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow. Options: `tracking_uri`, `experiment`.

    A resumed run continues its MLflow run, which it finds by its folder, and leaves out the steps that are already
    there.
    """

    option_names: Collection[str] = ("tracking_uri", "experiment")
    FOLDER = "rlsdk.run_dir"
    """Tag of an MLflow run that holds the run's folder."""

    def __init__(self, context: TrackerContext) -> None:
        self._mlflow = _import("mlflow")
        if uri := context.options.get("tracking_uri"):
            self._mlflow.set_tracking_uri(uri)
        experiment = self._mlflow.set_experiment(str(context.options.get("experiment", "rlsdk")))
        folder = str(Path(context.run_dir).absolute())
        earlier = None if context.resume_step is None else self._find(experiment.experiment_id, folder)
        self._repeats = _Repeats({} if earlier is None else self._last_steps(earlier))
        self._mlflow.start_run(run_id=earlier, run_name=context.run_name, tags={self.FOLDER: folder})
        self._mlflow.log_dict(dict(context.config), "config.json")

    def _find(self, experiment_id: str, folder: str) -> str | None:
        """Id of the newest MLflow run with this folder."""
        runs = self._mlflow.MlflowClient().search_runs([experiment_id], order_by=["attributes.start_time DESC"])
        return next((str(run.info.run_id) for run in runs if run.data.tags.get(self.FOLDER) == folder), None)

    def _last_steps(self, run_id: str) -> dict[str, float | None]:
        client = self._mlflow.MlflowClient()
        marks = {mark: client.get_metric_history(run_id, _mlflow_name(mark)) for mark in _Repeats.MARKS.values()}
        return {mark: max((point.step for point in history), default=None) for mark, history in marks.items()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if (fresh := self._repeats.mark(metrics, step)) is not None:
            self._mlflow.log_metrics({_mlflow_name(name): value for name, value in fresh.items()}, step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._mlflow.log_dict({"samples": plain_columns(samples)}, f"samples/step_{step:08d}.json")

    def close(self) -> None:
        self._mlflow.end_run()


def _mlflow_name(name: str) -> str:
    """Replaces characters that MLflow does not accept in metric names, such as `@` in `pass@4`."""
    return name.replace("/", ".").replace("@", "_at_")


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"tracking.trackers: {name!r} is not installed ({error}). Run `pip install 'rlsdk[{name}]'`, or drop it"
        ) from error
