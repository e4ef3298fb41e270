"""Where a run's numbers go. Each tracker is registered by name and built from a `TrackerContext`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.interfaces import ConfigError, TrackerContext

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JsonlTracker:
    """`metrics.jsonl` and `samples.jsonl` in the run's folder: one object per line, flushed line by line.

    A resumed run appends; where it repeats a step, the later line counts (see `read_metrics`).
    """

    def __init__(self, context: TrackerContext) -> None:
        folder = Path(context.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_lines(folder / METRICS_FILE)
        self._samples = _open_lines(folder / SAMPLES_FILE)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for sample in samples:
            self._samples.write(json.dumps({"step": step, **sample}) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


def _open_lines(path: Path) -> Any:
    """Opens for appending; a last line that a killed process left unfinished is ended first."""
    torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
    file = path.open("a", buffering=1, encoding="utf-8")
    if torn:
        file.write("\n")
    return file


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a torn line of a killed process is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """One object per step, in order; what several lines say of a step is joined, the later one winning."""
    steps: dict[int, dict[str, Any]] = {}
    for line in read_lines(run_dir / METRICS_FILE):
        steps.setdefault(int(line["step"]), {}).update(line)
    return [steps[step] for step in sorted(steps)]


class TensorBoardTracker:
    """Event files under `tensorboard/` of the run's folder."""

    def __init__(self, context: TrackerContext) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(Path(context.run_dir) / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(step=step, wall_time=_now(), summary=Summary(value=values)))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Text is in `samples.jsonl` and the report."""

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases. Options go to `wandb.init`.

    Steps are a metric of their own: the warm start and RL both count from 1, and a resumed run repeats some, where
    wandb's own counter takes none twice.
    """

    def __init__(self, context: TrackerContext) -> None:
        wandb = _import("wandb")
        settings: dict[str, Any] = {"name": context.run_name, "id": context.run_name, "project": "rlsdk"}
        settings |= context.options
        self._run = wandb.init(dir=context.run_dir, config=dict(context.config), resume="allow", **settings)
        self._run.define_metric("*", step_metric="step")
        self._table = wandb.Table

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if samples:
            columns = list(samples[0])
            rows = [[str(sample.get(column)) for column in columns] for sample in samples]
            self._run.log({"step": step, "samples": self._table(columns=columns, data=rows)})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow. Options: `tracking_uri`, `experiment`."""

    def __init__(self, context: TrackerContext) -> None:
        self._mlflow = _import("mlflow")
        if uri := context.options.get("tracking_uri"):
            self._mlflow.set_tracking_uri(uri)
        self._mlflow.set_experiment(str(context.options.get("experiment", "rlsdk")))
        self._mlflow.start_run(run_name=context.run_name)
        self._mlflow.log_dict(dict(context.config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("/", "."): value for name, value in metrics.items()}, step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._mlflow.log_dict({"samples": [dict(s) for s in samples]}, f"samples/step_{step:08d}.json")

    def close(self) -> None:
        self._mlflow.end_run()


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"tracking.trackers: {name!r} is not installed ({error}). Run `pip install 'rlsdk[{name}]'`, or drop it"
        ) from error


def _now() -> float:
    import time

    return time.time()
