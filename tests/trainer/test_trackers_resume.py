"""A resumed run logs the steps past its checkpoint again; nobody reads them twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rlsdk.interfaces import Tracker, TrackerContext
from rlsdk.trainer.tracking.trackers import JsonlTracker, TensorBoardTracker, read_lines


def context(folder: Path, resume_step: int | None = None) -> TrackerContext:
    return TrackerContext(run_dir=str(folder), run_name="run", config={}, resume_step=resume_step)


def train(tracker: Tracker, steps: range, value: float) -> None:
    for step in steps:
        tracker.log(step, {"reward/mean": value})
        tracker.log_samples(step, [{"response": str(value)}])


def warm_up(tracker: Tracker, steps: range, value: float) -> None:
    for step in steps:
        tracker.log(step, {"sft/loss": value})


def logged(folder: Path, name: str, of: str) -> list[tuple[int, float]]:
    return [(line["step"], line[of]) for line in read_lines(folder / name) if of in line]


def test_lines_past_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    first = JsonlTracker(context(tmp_path))
    warm_up(first, range(1, 9), 1.0)
    train(first, range(1, 6), 1.0)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward/me')
    again = JsonlTracker(context(tmp_path, resume_step=3))
    train(again, range(4, 8), 2.0)
    again.close()
    whole = [(step, 1.0 if step <= 3 else 2.0) for step in range(1, 8)]
    assert logged(tmp_path, "metrics.jsonl", "reward/mean") == whole
    assert [step for step, _ in logged(tmp_path, "samples.jsonl", "response")] == list(range(1, 8))
    assert logged(tmp_path, "metrics.jsonl", "sft/loss") == [(step, 1.0) for step in range(1, 9)]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_warm_start_that_goes_on_drops_all_of_rl(tmp_path: Path) -> None:
    first = JsonlTracker(context(tmp_path))
    warm_up(first, range(1, 9), 1.0)
    train(first, range(1, 4), 1.0)
    first.close()
    again = JsonlTracker(context(tmp_path, resume_step=4))
    warm_up(again, range(5, 9), 2.0)
    train(again, range(1, 3), 2.0)
    again.close()
    assert logged(tmp_path, "metrics.jsonl", "sft/loss") == [(s, 1.0 if s <= 4 else 2.0) for s in range(1, 9)]
    assert logged(tmp_path, "metrics.jsonl", "reward/mean") == [(1, 2.0), (2, 2.0)]


def test_a_run_that_is_refused_before_its_first_line_changes_nothing(tmp_path: Path) -> None:
    first = JsonlTracker(context(tmp_path))
    train(first, range(1, 6), 1.0)
    first.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    JsonlTracker(context(tmp_path, resume_step=2)).close()
    TensorBoardTracker(context(tmp_path, resume_step=2)).close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def scalars(folder: Path, tag: str) -> Mapping[int, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[int, list[float]] = {}
    for event in events.Scalars(tag):
        found.setdefault(event.step, []).append(event.value)
    return found


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    first = TensorBoardTracker(context(tmp_path))
    warm_up(first, range(1, 9), 1.0)
    train(first, range(1, 6), 1.0)
    first.close()
    again = TensorBoardTracker(context(tmp_path, resume_step=3))
    train(again, range(4, 8), 2.0)
    again.close()
    assert scalars(tmp_path / "tensorboard", "reward/mean") == {s: [1.0 if s <= 3 else 2.0] for s in range(1, 8)}
    assert sorted(scalars(tmp_path / "tensorboard" / "sft", "sft/loss")) == list(range(1, 9))


def test_tensorboard_forgets_all_of_rl_where_the_warm_start_goes_on(tmp_path: Path) -> None:
    first = TensorBoardTracker(context(tmp_path))
    warm_up(first, range(1, 5), 1.0)
    train(first, range(1, 6), 1.0)
    first.close()
    again = TensorBoardTracker(context(tmp_path, resume_step=2))
    warm_up(again, range(3, 5), 2.0)
    train(again, range(1, 3), 2.0)
    again.close()
    assert scalars(tmp_path / "tensorboard", "reward/mean") == {1: [2.0], 2: [2.0]}
    assert scalars(tmp_path / "tensorboard" / "sft", "sft/loss") == {1: [1.0], 2: [1.0], 3: [2.0], 4: [2.0]}
