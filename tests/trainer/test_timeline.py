"""Figures that say whether overlap pays: on a clock of the test's, and of real runs with one slow part each."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_loop import Recorder, config_of, model, registry, trainer_of

sys.path.insert(0, str(Path(__file__).parents[1] / "schedules"))
from test_staleness import engines_of, slow_publish, stale

from rlsdk.interfaces import Batch
from rlsdk.registry import Registry
from rlsdk.rollouts import Group
from rlsdk.trainer.generation import timeline as timelines
from rlsdk.trainer.generation.timeline import Lengths, Timeline, staleness_metrics
from rlsdk.trainer.stages.rl import RlStage
from rlsdk.trainer.tracking.step_times import phase_names

__all__ = ["model", "registry"]


class Clock:
    """Stands in for `time` in the timeline."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def group(ordinal: int, *lengths: int) -> Group:
    """Samples of these lengths."""
    samples = [SimpleNamespace(rows=(None,), num_sampled=length) for length in lengths]
    return cast(Group, SimpleNamespace(task=SimpleNamespace(ordinal=ordinal), samples=samples))


def test_shares_waits_and_the_lag_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy, controller = Clock(), [0.0], [0.0]
    monkeypatch.setattr(timelines, "time", clock)
    timeline = Timeline(lambda: busy[0], Lengths(1), lambda: 8.0, lambda: controller[0])
    with timeline.waiting():
        clock.now += 3.0
    timeline.updated(4)
    clock.now += 0.5
    with timeline.holding():
        clock.now += 1.5
    timeline.published(4)
    clock.now += 5.0
    busy[0], controller[0] = 4.0, 0.25
    assert timeline.metrics(0.75) == {
        "time/wait_prev_gen_s": 3.0,
        "time/publish_s": 0.75,
        "time/hold_s": 1.5,
        "time/controller_cpu_s": 0.25,
        "time/publish_lag_s": 2.0,
        "rollout/concurrency": 8.0,
        "time/train_idle_share": 0.3,
        "time/rollout_idle_share": 0.6,
    }
    clock.now += 4.0  # The next step waits for nothing, while the rollout is busy all the time.
    busy[0] = 8.0
    following = timeline.metrics(0.75)
    assert (following["time/train_idle_share"], following["time/rollout_idle_share"]) == (0.0, 0.0)
    assert following["time/publish_lag_s"] == 2.0, "the newest that is known"


@given(data=st.data())
def test_the_histogram_of_staleness_is_that_of_every_token_looked_at(data: st.DataObject) -> None:
    """Against a loop over tokens, for any versions and masks; an update may be published under any number."""
    step, most = 7, 3
    step_of = {version: behind for behind, version in enumerate(data.draw(st.permutations(range(20, 28))))}
    alive = [version for version, made in step_of.items() if step - most <= made]
    rows = data.draw(
        st.lists(st.lists(st.tuples(st.sampled_from(alive), st.booleans()), min_size=1, max_size=6), max_size=5)
    )
    lengths = [len(row) for row in rows]
    batch = Batch(
        lengths=torch.tensor(lengths, dtype=torch.long),
        tokens={
            "token_versions": torch.tensor([version for row in rows for version, _ in row], dtype=torch.long),
            "response_mask": torch.tensor([sampled for row in rows for _, sampled in row], dtype=torch.bool),
        },
    )
    found = staleness_metrics(batch, step, step_of, most)
    behind = [step - step_of[version] for row in rows for version, sampled in row if sampled]
    assert found["schedule/staleness_max"] == max(behind, default=0)
    assert found["schedule/staleness_mean"] == pytest.approx(sum(behind) / max(len(behind), 1))
    for steps in range(most + 1):
        share = sum(1 for one in behind if one == steps) / max(len(behind), 1)
        assert found[f"schedule/staleness_share_{steps}"] == pytest.approx(share)


def test_the_length_bias_compares_what_was_trained_with_what_was_generated_first() -> None:
    """Two groups a step. The long one of the first two finishes last, so that the first step trains a short one."""
    lengths = Lengths(2)
    lengths.started([0, 1, 2, 3])
    short, slow, third, fourth = group(0, 2, 2), group(1, 50, 50), group(2, 4, 4), group(3, 6, 6)
    for made in (short, third, fourth):
        lengths.made(made, accepted=True)
    lengths.trained([short, third])
    assert lengths.bias() is None, "the second group of the first step's worth is still under way"
    lengths.made(slow, accepted=True)
    assert lengths.bias() == pytest.approx((2 + 4) / (2 + 50) - 1)
    lengths.trained([slow, fourth])
    assert lengths.bias() == 0.0, "all that was generated was trained on"


def test_groups_that_are_not_accepted_are_not_counted_as_generated() -> None:
    lengths = Lengths(1)
    lengths.started([0, 1])
    lengths.made(group(0, 90), accepted=False)
    lengths.made(group(1, 3), accepted=True)
    lengths.trained([group(1, 3)])
    assert lengths.bias() == 0.0


class Whole(Recorder):
    """With the metrics of time."""

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(dict(metrics))


PATIENCE_S = 20.0


def slow_learner(stage: RlStage) -> None:
    """Trains when all groups that may be made are made, and some time later: however busy the machine is."""
    learn, schedule = stage.learner.learn, stage.source._driver.schedule

    def slow(*args: Any) -> Any:
        end = time.monotonic() + PATIENCE_S
        while schedule.running and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.4)
        return learn(*args)

    stage.learner.learn = slow  # type: ignore[method-assign]


def slow_engine(stage: RlStage) -> None:
    """Decodes when the trainer waits for it, and some time later."""
    timeline = stage.source.timeline
    waiting, waits = timeline.waiting, threading.Event()

    @contextmanager
    def noted() -> Iterator[None]:
        waits.set()
        with waiting():
            yield
        waits.clear()

    timeline.waiting = noted  # type: ignore[method-assign]
    for engine in engines_of(stage):

        def slow(version: int, step: Callable[[int], None] = engine.decoder.step) -> None:
            waits.wait(PATIENCE_S)
            time.sleep(0.1)
            step(version)

        engine.decoder.step = slow


def slow_hold(stage: RlStage) -> None:
    """The copy of the weights takes as long as an update."""
    weights = cast(Any, stage.publisher).weights
    snapshot = weights.snapshot

    def slow() -> None:
        time.sleep(0.2)
        snapshot()

    weights.snapshot = slow


@pytest.mark.parametrize(
    ("slow", "holds"),
    [
        (slow_learner, lambda m: m["time/rollout_idle_share"] > m["time/train_idle_share"]),
        (slow_engine, lambda m: m["time/train_idle_share"] > m["time/rollout_idle_share"]),
        (slow_publish, lambda m: m["time/publish_s"] >= 0.3 and m["time/publish_lag_s"] >= 0.3),
        (slow_hold, lambda m: m["time/hold_s"] >= 0.2 and m["time/publish_lag_s"] >= 0.2),
    ],
)
def test_the_metrics_of_a_run_say_which_part_is_slow(
    slow: Callable[[RlStage], None],
    holds: Callable[[Mapping[str, float]], bool],
    model: str,
    registry: Registry,
    tmp_path: Path,
) -> None:
    view = Whole()
    # A checkpoint would wait for the groups of older weights.
    config = config_of(model, registry, 4, *stale(1, "--trainer.save_every_steps", "null"))
    with trainer_of(config, registry, tmp_path / "run", view) as (trainer, stage, _):
        slow(stage)
        trainer.fit()
    middle = view.steps[2:3]  # Behind the first groups, before the last ones.
    assert all(holds(metrics) for metrics in middle), [
        {name: round(value, 3) for name, value in metrics.items() if name.startswith("time/")} for metrics in middle
    ]


def test_a_step_whose_samples_come_from_the_journal_has_no_negative_seconds(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    """Killed behind its second step, with a checkpoint of the first: the resume makes no sample of the second."""
    extra = ["--trainer.save_every_steps", "1"]
    with trainer_of(config_of(model, registry, 4, *extra), registry, tmp_path / "run", Whole()) as (trainer, stage, _):
        trainer.stop = lambda: stage.step == 1
        trainer.fit()
        stage.advance()
    view = Whole()
    with trainer_of(config_of(model, registry, 4, *extra), registry, tmp_path / "run", view) as (trainer, _, _):
        time.sleep(1.0)  # as the start of engines does, between the stream and the first step
        checkpoint = trainer.store.newest()
        assert checkpoint is not None
        trainer.restore(checkpoint)
        trainer.fit()
    again, fresh, *_ = view.steps
    assert again["throughput/reused_samples"] > 0
    assert "throughput/reused_samples" not in fresh
    for metrics in view.steps:
        seconds = {name: metrics[name] for name in phase_names(metrics) if name != "time/eval_s"}
        assert min(seconds.values()) >= 0.0
        assert sum(seconds.values()) <= metrics["time/step_s"] * (1 + 1e-9)
    assert again["time/reward_s"] == 0.0
