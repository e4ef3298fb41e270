"""Trackers of other makers, for real and without a network."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsdk.interfaces import ComponentSpec, TrackerContext
from rlsdk.registry.checks import component_state
from rlsdk.registry.row import State
from rlsdk.trainer.tracking.remote_trackers import MlflowTracker, WandbTracker

SAMPLES = [{"prompt": "crane>", "response": "enarc", "score": 1.0}]


def context(folder: Path, resume_step: int | None = None, **options: Any) -> TrackerContext:
    return TrackerContext(
        run_dir=str(folder),
        run_name="run-1",
        config={"trainer": {"steps": 5}},
        options=options,
        resume_step=resume_step,
    )


def test_mlflow_has_every_step_the_samples_and_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    tracker = MlflowTracker(context(tmp_path, tracking_uri=(tmp_path / "mlruns").as_uri(), experiment="words"))
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": step / 10, "eval/gsm8k/pass@4": 0.5})
    tracker.log_samples(3, SAMPLES)
    tracker.close()
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("words").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward.mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert len(client.get_metric_history(run.info.run_id, "eval.gsm8k.pass_at_4")) == 3
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"config.json", "samples"}
    assert run.info.status == "FINISHED"


def test_a_resumed_run_goes_on_in_its_run_of_mlflow_and_no_step_stands_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began another run of MLflow each time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    where = {"tracking_uri": (tmp_path / "mlruns").as_uri(), "experiment": "words"}
    other = MlflowTracker(context(tmp_path / "other", **where))
    other.log(9, {"reward/mean": 9.0})
    other.close()
    for resume_step, lines in (
        (None, [("sft/loss", 1), ("sft/loss", 2), ("sft/loss", 3), ("reward/mean", 1), ("reward/mean", 2)]),
        (1, [("reward/mean", 2), ("reward/mean", 3)]),
        (2, [("reward/mean", 3), ("reward/mean", 4)]),
    ):
        tracker = MlflowTracker(context(tmp_path / "mine", resume_step, **where))
        for name, step in lines:
            tracker.log(step, {name: step / 10})
        tracker.close()
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("words").experiment_id])
    [mine] = [run.info.run_id for run in runs if run.data.tags[MlflowTracker.FOLDER].endswith("mine")]
    assert len(runs) == 2
    history = client.get_metric_history(mine, "reward.mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert [point.step for point in client.get_metric_history(mine, "sft.loss")] == [1, 2, 3]


@pytest.mark.parametrize("resumed", [True, False])
def test_steps_that_wandb_has_are_left_out_by_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """Its server says what is there; offline it says nothing, and here nothing was logged before."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    import wandb

    begin = wandb.init

    def as_the_server_would(**settings: Any) -> Any:
        run = begin(**settings)
        logged: list[dict[str, Any]] = []
        known = {"rl/step": 2, "sft/step": 3} if resumed else {}
        return SimpleNamespace(
            resumed=resumed, summary=known, define_metric=run.define_metric, log=logged.append, logged=logged,
            project=run.project, id=run.id,
            finish=run.finish,
        )  # fmt: skip

    monkeypatch.setattr(wandb, "init", as_the_server_would)
    tracker = WandbTracker(context(tmp_path, resume_step=1))
    for name, step in (("sft/loss", 3), ("sft/loss", 4), ("reward/mean", 2), ("reward/mean", 3)):
        tracker.log(step, {name: 1.0})
    found = [line["step"] for line in tracker._run.logged]
    tracker.close()
    assert found == ([4, 3] if resumed else [3, 4, 2, 3])


def test_steps_of_an_offline_run_of_wandb_are_not_logged_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    import wandb

    logged: list[tuple[str, int]] = []
    begin = wandb.init

    def noted(**settings: Any) -> Any:
        run = begin(**settings)
        log = run.log

        def both(line: dict[str, Any]) -> None:
            logged.append((next(name for name in line if name not in ("step", "rl/step", "sft/step")), line["step"]))
            log(line)

        run.log = both
        return run

    monkeypatch.setattr(wandb, "init", noted)
    for resume_step, options, lines in (
        (None, {}, [("sft/loss", 1), ("sft/loss", 2), ("reward/mean", 1), ("reward/mean", 2)]),
        (1, {}, [("reward/mean", 2), ("reward/mean", 3)]),
        (1, {"project": "another"}, [("reward/mean", 2)]),
    ):
        tracker = WandbTracker(context(tmp_path, resume_step, **options))
        for name, step in lines:
            tracker.log(step, {name: 1.0})
        tracker.close()
    assert logged == [
        ("sft/loss", 1), ("sft/loss", 2), ("reward/mean", 1), ("reward/mean", 2), ("reward/mean", 3),
        ("reward/mean", 2),
    ]  # fmt: skip


def summary_with(tracker: WandbTracker, wanted: dict[str, Any]) -> dict[str, Any]:
    """The run's summary once it has these entries: another process of wandb's makes it, in its own time."""
    end = time.monotonic() + 60
    while not wanted.items() <= (found := dict(tracker._run.summary)).items():
        assert time.monotonic() < end, f"{wanted} are not in {found}"
        time.sleep(0.02)
    return found


def test_wandb_keeps_steps_that_begin_anew_after_the_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(context(tmp_path, project="words"))
    logged: list[dict[str, Any]] = []
    for step, metrics in ((1, {"sft/loss": 3.0}), (2, {"sft/loss": 2.0}), (1, {"reward/mean": 0.1})):
        tracker.log(step, metrics)
        logged.append(summary_with(tracker, {"step": step, **metrics}))
    tracker.log_samples(1, SAMPLES)
    assert tracker._run.id == "run-1"
    tracker.close()
    assert [entry["step"] for entry in logged] == [1, 2, 1]
    assert logged[2]["reward/mean"] == 0.1
    assert logged[2]["sft/loss"] == 2.0
    [written] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    # By a process of wandb's own, which may be a moment behind.
    deadline = time.monotonic() + 60
    while b"reward/mean" not in written.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"reward/mean" in written.read_bytes()


def test_a_component_whose_library_is_absent_says_how_to_get_it() -> None:
    spec = ComponentSpec(
        name="x", target="a.b:C", requires="no-such-thing|nor-this", install_hint="pip install no-such-thing"
    )
    state, reason = component_state(spec)
    assert state is State.ENGINE_MISSING
    assert reason == "needs no-such-thing or nor-this, not installed; run `pip install no-such-thing`"
