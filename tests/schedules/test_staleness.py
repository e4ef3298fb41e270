"""Schedules past staleness 0 on real reference engines in this process: pools of their own, real time, real threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from test_loop import Recorder, config_of, model, registry, run, trainer_of

from rlsdk.config import RunConfig, check_run
from rlsdk.interfaces import CheckpointError, ConfigError, WeightSyncError
from rlsdk.registry import Registry
from rlsdk.rollouts.journal.recorded import account
from rlsdk.rollouts.journal.segments import segments
from rlsdk.trainer.generation.recorded_groups import replay
from rlsdk.trainer.runs.replay import replay_parts
from rlsdk.trainer.runs.run_inputs import build_run_inputs
from rlsdk.trainer.stages.rl import RlStage

__all__ = ["model", "registry"]

APART = ["--placement.preset", "disaggregated", "--placement.devices_per_node", "2"]
Change = Callable[[RlStage], None]


def stale(staleness: int, *extra: str) -> list[str]:
    return [*APART, "--schedule.max_staleness", str(staleness), *extra]


def slow_learner(stage: RlStage) -> None:
    learn = stage.learner.learn

    def slow(*args: Any) -> Any:
        time.sleep(0.15)
        return learn(*args)

    stage.learner.learn = slow  # type: ignore[method-assign]


def engines_of(stage: RlStage) -> list[Any]:
    hosts = stage.learner.session.rollout.group.hosts  # type: ignore[attr-defined]
    return [host.engine.engine for host in hosts]


def slow_engine(stage: RlStage) -> None:
    for engine in engines_of(stage):
        step = engine.decoder.step
        engine.decoder.step = lambda version, step=step: (time.sleep(0.01), step(version))


def slow_publish(stage: RlStage) -> None:
    """Weights are under way for longer than an update takes, which goes on meanwhile."""
    manager = stage.learner.session.weights()
    sync = manager.sync

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return sync(*args, **kwargs)

    manager.sync = slow  # type: ignore[method-assign]


def slow_grades(stage: RlStage) -> None:
    """Every sample is graded long after it was sampled."""

    def late(found: Future[Any]) -> None:
        time.sleep(0.1)

    grade_behind(stage, late)


def grade_behind(stage: RlStage, wait: Callable[[Future[Any]], None]) -> None:
    """Grades are given when `wait`, which takes them, has come back."""
    grading = stage.source._stream._grading
    submit = grading._grader.submit

    def give(found: Future[Any], later: Future[Any]) -> None:
        wait(found)
        later.set_result(found.result())

    def behind(samples: Any) -> Future[Any]:
        later: Future[Any] = Future()
        threading.Thread(target=give, args=(submit(samples), later), daemon=True).start()
        return later

    grading._grader.submit = behind


def run_with(config: RunConfig, registry: Registry, folder: Path, change: Change, **more: Any) -> Recorder:
    view = Recorder()
    with trainer_of(config, registry, folder, view, **more) as (trainer, stage, _):
        change(stage)
        trainer.fit()
    return view


def test_staleness_0_on_separate_pools_is_the_synchronous_run(model: str, registry: Registry, tmp_path: Path) -> None:
    extra = ["--eval.every_steps", "2"]
    together = run(config_of(model, registry, 3, *extra), registry, tmp_path / "a")
    apart = run(config_of(model, registry, 3, *extra, *APART), registry, tmp_path / "b")
    assert apart.steps == together.steps
    assert apart.evals == together.evals
    assert [step["schedule/staleness_max"] for step in apart.steps] == [0.0] * 3


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_stale_run_in_the_order_of_prompts_does_not_depend_on_the_time(
    staleness: int, model: str, registry: Registry, tmp_path: Path
) -> None:
    """Whether training, generation or the weights' way is slow: the same numbers, evaluations included."""
    config = config_of(model, registry, 6, *stale(staleness, "--eval.every_steps", "3"))
    runs = [
        run_with(config, registry, tmp_path / change.__name__, change)
        for change in (slow_learner, slow_engine, slow_publish, slow_grades)
    ]
    for other in runs[1:]:
        assert other.steps == runs[0].steps
        assert other.evals == runs[0].evals
    steps = runs[0].steps
    assert [step["schedule/staleness_max"] for step in steps] == [min(at, staleness) for at in range(6)]
    assert [step["schedule/staleness_mean"] for step in steps] == [min(at, staleness) for at in range(6)]
    assert [step["schedule/length_bias"] for step in steps] == [0.0] * 6
    assert len({step["policy/grad_norm"] for step in steps}) == 6


def test_grades_that_are_on_their_way_do_not_keep_the_replicas_from_newer_weights(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """Those of the second step are given when the weights of the first one's update are served: a slow reward hides
    behind the generation of the third step."""
    config = config_of(model, registry, 4, *stale(1))
    whole, view = run(config, registry, tmp_path / "whole"), Recorder()
    served, seen, in_time = threading.Event(), list[int](), list[bool]()

    def wait(found: Future[Any]) -> None:
        seen.append(len(found.result()))
        if 16 < sum(seen) <= 32:
            in_time.append(served.wait(20))

    with trainer_of(config, registry, tmp_path / "run", view) as (trainer, stage, _):
        manager, synced = stage.learner.session.weights(), list[int]()
        sync = manager.sync

        def told(version: int, **kwargs: Any) -> Any:
            found = sync(version, **kwargs)
            synced.append(version)
            if len(synced) == 2:
                served.set()
            return found

        manager.sync = told  # type: ignore[method-assign]
        grade_behind(stage, wait)
        trainer.fit()
    assert in_time
    assert all(in_time)
    assert view.steps == whole.steps


def test_engines_are_not_said_to_differ_where_it_is_the_weights(model: str, registry: Registry, tmp_path: Path) -> None:
    """Samples that are a step old have other log-probs under the weights of now, however alike the engines are."""
    strict = ["--trainer.parity_threshold", "1e-4", "--trainer.parity_action", "error", "--train.optim.lr", "1e-2"]
    view = run(config_of(model, registry, 3, *stale(1, *strict)), registry, tmp_path / "run")
    assert view.steps[0]["parity/log_prob_diff_mean"] < 1e-4 < view.steps[1]["parity/log_prob_diff_mean"]


def test_stale_runs_differ_from_the_synchronous_one(model: str, registry: Registry, tmp_path: Path) -> None:
    fresh = run(config_of(model, registry, 3), registry, tmp_path / "a")
    old = run(config_of(model, registry, 3, *stale(1)), registry, tmp_path / "b")
    assert old.steps[0]["reward/mean"] == fresh.steps[0]["reward/mean"]
    assert old.steps[1]["policy/grad_norm"] != fresh.steps[1]["policy/grad_norm"]


@pytest.mark.parametrize("how", ["recompute", "keep", "abort"])
@pytest.mark.parametrize("order", ["prompt", "finish"])
def test_one_slow_group_holds_nothing_up_and_nothing_older_than_the_bound_is_trained(
    how: str, order: str, model: str, registry: Registry, tmp_path: Path
) -> None:
    """Its samples are decoded fifty times as long as the others'."""
    mode = "recompute" if how == "abort" else how
    extra = stale(2, "--schedule.order", order, "--schedule.on_new_weights", mode, "--rollout.max_running_samples", "8")
    config = config_of(model, registry, 6, *extra, "--rollout.max_response_tokens", "100")
    assert check_run(config, registry) == []
    view, batches, trained = Recorder(), [], []
    with trainer_of(config, registry, tmp_path / "slow", view) as (trainer, stage, _):
        if how == "abort":
            for replica in stage.source._stream._replicas:
                object.__setattr__(replica, "keeps_unfinished", False)
        task, learn = stage.source._task, stage.learner.learn

        def with_lengths(ordinal: int, step: int) -> Any:
            from dataclasses import replace

            made = task(ordinal, step)
            return replace(made, sampling=replace(made.sampling, max_tokens=100 if ordinal == 1 else 2))

        def seen(batch: Any, *args: Any) -> Any:
            batches.append(batch)
            trained.extend(sorted(set(batch["uid"].tolist())))
            return learn(batch, *args)

        stage.source._task = with_lengths  # type: ignore[method-assign]
        stage.learner.learn = seen  # type: ignore[method-assign]
        slow_engine(stage)
        trainer.fit()
    assert len(view.steps) == 6
    assert sorted(trained) == list(range(24))
    assert max(step["schedule/staleness_max"] for step in view.steps) <= 2
    if order == "finish":
        assert 1 not in trained[:4]  # It is trained, later, and nobody waited for it before.
        mixed = [b for b in batches if bool((b["policy_version"] != b["last_policy_version"]).any())]
        assert mixed
    for batch in batches:
        mask = batch["response_mask"]
        assert (batch["token_versions"][mask] >= 0).all()
        assert (batch["rollout_log_probs"][mask] < 0).all()


def test_weights_that_do_not_change_end_a_stale_run(model: str, registry: Registry, tmp_path: Path) -> None:
    """What goes wrong while a step trains is told where the next groups are asked for."""
    with trainer_of(config_of(model, registry, 5, *stale(1)), registry, tmp_path / "stuck", Recorder()) as made:
        trainer, stage, _ = made
        source = stage.learner.session.actor.group.hosts[0].source  # type: ignore[attr-defined]
        hold = source.hold
        source.hold = lambda keep=1: hold(keep) if not source._copies else setattr(source, "_holds", True)
        with pytest.raises(WeightSyncError, match="no tensor changed"):
            trainer.fit()


def test_no_checkpoint_is_written_where_groups_of_older_weights_are_lost(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """A resumed run would begin them with newer weights. The groups of step 3, which weights 1 begin, are lost."""
    config, view = config_of(model, registry, 4, *stale(1, "--trainer.save_every_steps", "1")), Recorder()
    with trainer_of(config, registry, tmp_path / "lost", view) as (trainer, stage, _):
        for engine in engines_of(stage):
            step = engine.decoder.step

            def failing(version: int, step: Any = step) -> Any:
                if version:
                    raise RuntimeError("out of memory")
                return step(version)

            engine.decoder.step = failing
        with pytest.raises(Exception, match="out of memory"):
            trainer.fit()
        newest = trainer.store.newest()
        assert newest is None or newest.name == "step_00000001"


def test_a_stale_run_that_is_resumed_goes_on_number_for_number(model: str, registry: Registry, tmp_path: Path) -> None:
    """What was begun under older weights is in the journal, and the rest of the run is number for number the same. One
    sample is decoded at a time: which ones share a decoding step would depend on when the run was stopped."""
    config = config_of(model, registry, 5, *stale(2, "--rollout.max_running_samples", "1"))
    whole = run(config, registry, tmp_path / "whole")
    first, rest, trained = Recorder(), Recorder(), list[list[int]]()

    def watch(stage: RlStage) -> None:
        learn = stage.learner.learn

        def seen(batch: Any, *args: Any) -> Any:
            trained.append(sorted(set(batch["uid"].tolist())))
            return learn(batch, *args)

        stage.learner.learn = seen  # type: ignore[method-assign]

    with trainer_of(config, registry, tmp_path / "r", first, stop=lambda: len(first.steps) == 2) as (trainer, stage, _):
        watch(stage)
        trainer.fit()
    with trainer_of(config, registry, tmp_path / "r", rest) as (trainer, stage, _):
        checkpoint = trainer.store.newest()
        assert checkpoint is not None
        trainer.restore(checkpoint)
        watch(stage)
        trainer.fit()
    assert trained == [list(range(at * 4, at * 4 + 4)) for at in range(5)]
    assert [*first.steps, *rest.steps] == whole.steps


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--schedule.max_staleness", "1"], r"placement gives the rollout the devices of every other role"),
        (["--schedule.order", "finish"], r"at schedule.max_staleness 0 a step trains all that it started"),
        (["--schedule.on_new_weights", "keep"], r"no sample runs when weights come"),
        (stale(1, "--schedule.order", "finish"), r"waits for the slowest sample"),
        (stale(1, "--algorithm.old_log_probs", "always"), r"forgets which weights sampled"),
    ],
)
def test_schedules_that_cannot_be_are_refused_with_the_reason(
    extra: list[str], said: str, model: str, registry: Registry
) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(model, registry, 2, *extra)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--schedule.uncorrected", "true"], "because algorithm.old_log_probs 'auto' corrects stale samples"),
        (["--schedule.uncorrected", "true", "--algorithm.old_log_probs", "decoupled"], "'decoupled' corrects"),
        (["--schedule.uncorrected", "true", "--algorithm.old_log_probs", "rollout"], "log-probs in the ratio"),
        (["--algorithm.old_log_probs", "rollout", "--algorithm.loss", "reinforce"], "has no ratio"),
    ],
)
def test_a_correction_that_is_not_what_was_asked_for_is_refused(
    extra: list[str], said: str, model: str, registry: Registry
) -> None:
    [problem] = check_run(config_of(model, registry, 2, *stale(1, *extra)), registry)
    assert said in problem.message


def test_what_was_asked_for_by_name_is_allowed(model: str, registry: Registry) -> None:
    always, uncorrected = ["--algorithm.old_log_probs", "always"], ["--schedule.uncorrected", "true"]
    no_ratio = ["--algorithm.loss", "reinforce"]
    for more in (
        [*always, *uncorrected],
        [*always, "--algorithm.correction.mode", "truncate"],
        no_ratio,
        [*no_ratio, "--algorithm.old_log_probs", "rollout", *uncorrected],
    ):
        assert check_run(config_of(model, registry, 2, *stale(1, *more)), registry) == []


@pytest.mark.parametrize(
    "extra",
    [
        [],
        stale(1),
        stale(2, "--schedule.order", "finish", "--schedule.on_new_weights", "recompute"),
        ["--algorithm", "dapo", "--algorithm.dynamic_sampling.min_spread", "0.25"],
        ["--algorithm", "remax"],
    ],
    ids=["synchronous", "one_step_off", "finish", "dapo", "remax"],
)
def test_a_replay_of_the_journal_makes_the_same_updates(
    extra: list[str], model: str, registry: Registry, tmp_path: Path
) -> None:
    config = config_of(model, registry, 4, *extra, "--schedule.journal", "all", "--rollout.max_response_tokens", "12")
    first = run(config, registry, tmp_path / "run")
    with (
        closing(build_run_inputs(config, registry, tmp_path / "run", Recorder(), rewarded=False)) as run_inputs,
        trainer_of(config, registry, tmp_path / "other", Recorder()) as (_, stage, _),
    ):
        found, learn = replay_parts(run_inputs.config, registry, run_inputs, stage.learner.session)
        steps = list(replay(found, learn))
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [step.difference for step in steps] == [0.0] * 4
    assert [step.figures["policy/grad_norm"] for step in steps] == [step["policy/grad_norm"] for step in first.steps]
    assert "waiting" not in {fate for at, fate in account(tmp_path / "run" / "journal").items() if at < 16}


def test_a_journal_without_its_beginning_is_not_replayed(model: str, registry: Registry, tmp_path: Path) -> None:
    config = config_of(model, registry, 2)
    run(config, registry, tmp_path / "run")
    for segment in segments(tmp_path / "run" / "journal")[:1]:
        segment.path.unlink()
    with (
        closing(build_run_inputs(config, registry, tmp_path / "run", Recorder(), rewarded=False)) as run_inputs,
        trainer_of(config, registry, tmp_path / "other", Recorder()) as (_, stage, _),
        pytest.raises(CheckpointError, match=r"schedule\.journal all"),
    ):
        replay_parts(run_inputs.config, registry, run_inputs, stage.learner.session)
