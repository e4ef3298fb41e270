"""What evaluations add up to: the best value so far, and when a run that gets no better is over."""

from __future__ import annotations

import json
import math

import pytest

from rlsdk.config import EarlyStoppingConfig, WatchConfig
from rlsdk.interfaces import CheckpointError
from rlsdk.trainer.stages.evaluation.progress import Best, Progress, after_evaluation, unmeasured, why_ended

OFF = WatchConfig()
HIGH = WatchConfig(metric="eval/a/accuracy")
LOW = EarlyStoppingConfig(metric="sft/eval_loss", mode="min", patience=2, min_delta=0.1)


def after(
    values: list[float], best: WatchConfig, stopping: EarlyStoppingConfig, progress: Progress | None = None
) -> Progress:
    progress = progress or Progress()
    for step, value in enumerate(values):
        progress = after_evaluation(progress, step, {"eval/a/accuracy": value, "sft/eval_loss": value}, best, stopping)
    return progress


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([0.9, 0.2, 0.5, 0.4], 2),  # before the first step there is no checkpoint
        ([0.1, 0.5, 0.5], 1),  # equal is not better
        ([0.1, math.nan, 0.3, math.nan], 2),
        ([0.1, 0.2, 0.3, 0.4], 3),
    ],
)
def test_the_best_value_so_far(values: list[float], step: int) -> None:
    found = after(values, HIGH, EarlyStoppingConfig()).best
    assert found == Best(metric="eval/a/accuracy", mode="max", value=values[step], step=step)


def test_nothing_is_best_where_nothing_was_measured() -> None:
    assert after([0.5], HIGH, EarlyStoppingConfig()).best is None
    assert after([0.5, math.nan], HIGH, EarlyStoppingConfig()).best is None
    assert after([0.5, 0.6], OFF, EarlyStoppingConfig()).best is None


@pytest.mark.parametrize(
    ("values", "waited", "ended"),
    [
        ([2.0, 1.0, 0.5], 0, False),
        ([2.0, 1.95, 1.9], 2, True),  # less than min_delta better each, and no more than that in all
        ([2.0, 1.95, 1.85], 0, False),  # measured against the best value, not the last
        ([2.0, 3.0, 1.0, 1.0], 1, False),
        ([math.nan, math.nan], 2, True),
        ([2.0, math.nan, 1.0], 0, False),
    ],
)
def test_a_run_is_over_when_it_gets_no_better(values: list[float], waited: int, ended: bool) -> None:
    progress = after(values, OFF, LOW)
    assert progress.waited == waited
    assert (why_ended(progress, LOW) is not None) is ended
    assert why_ended(progress, EarlyStoppingConfig()) is None


def test_the_reason_names_metric_value_step_and_setting() -> None:
    told = why_ended(after([2.0, 1.5, 1.45, 1.6], OFF, LOW), LOW)
    assert told == (
        "stopped early: 2 evaluations in a row without a better sft/eval_loss than 1.5 (after step 1) by more than "
        "0.1 (eval.early_stopping.patience is 2)"
    )


def test_what_is_kept_in_a_checkpoint_reads_back_and_forgets_other_metrics() -> None:
    progress = after([2.0, 1.0, 1.5], HIGH, LOW)
    saved = json.loads(json.dumps(progress.dump()))
    assert Progress.load(saved, HIGH, LOW) == progress
    other = Progress.load(saved, WatchConfig(metric="eval/b/accuracy"), LOW)
    assert (other.best, other.waited) == (None, progress.waited)
    turned = EarlyStoppingConfig(metric="sft/eval_loss", mode="max", patience=2)
    assert (Progress.load(saved, HIGH, turned).leader, Progress.load(saved, HIGH, turned).waited) == (None, 0)
    for spoilt in (
        {},
        {"best": 3, "leader": None, "waited": 0},
        {"best": {"metric": "x"}, "leader": None, "waited": 0},
    ):
        with pytest.raises(CheckpointError, match="record of evaluations"):
            Progress.load(spoilt, HIGH, LOW)


def test_an_evaluation_without_the_metric_is_said_and_counts_for_nothing() -> None:
    watch = EarlyStoppingConfig(metric="eval/maj@4_sampled", patience=1)
    before = after_evaluation(Progress(), 1, {"eval/maj@4_sampled": 0.5}, HIGH, watch)
    assert after_evaluation(before, 2, {"eval/accuracy_sampled": 1.0}, HIGH, watch) == before
    assert list(unmeasured({"eval/accuracy_sampled": 1.0}, HIGH, watch)) == [
        "checkpoint.best.metric 'eval/a/accuracy' is not among the figures of this evaluation, so no checkpoint of "
        "this step can be the best",
        "eval.early_stopping.metric 'eval/maj@4_sampled' is not among the figures of this evaluation, so it does not "
        "count for early stopping (no response marks an answer)",
    ]
    assert list(unmeasured({"eval/a/accuracy": 1.0}, HIGH, OFF)) == []
