"""`rlsdk plan --calibration`: a run takes as long as one that was measured, scaled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_cases import config_of, planned

from rlsdk.interfaces import ConfigError
from rlsdk.planning import read_calibration
from rlsdk.planning.calibration import Work, predict
from rlsdk.registry import Registry


def work(**changed: Any) -> Work:
    base = Work(
        num_parameters=1000, actor_devices=2, rollout_devices=2, sync_bytes=4000, samples=8, forward_passes=1,
        epochs=1, longest=100, longest_response=50, backends=("a", "b", "cpu"),
    )  # fmt: skip
    return replace(base, **changed)


def test_times_are_the_rates_of_the_calibrating_run(finished_run: Path, registry: Registry) -> None:
    known = read_calibration(finished_run, registry)
    assert known.num_steps == 3
    same = predict(work(), known, work())
    assert dict(same.seconds) == pytest.approx({"rollout": 2, "update": 4, "sync": 0.5, "log_probs": 1, "other": 0.1})
    assert same.notes == ()
    other = predict(work(actor_devices=4, sync_bytes=8000, samples=16), known, work()).seconds
    assert (other["rollout"], other["update"], other["sync"]) == pytest.approx((4, 4, 1))
    far = predict(work(num_parameters=70_000, backends=("a", "c", "cpu"), forward_passes=0), known, work())
    assert far.seconds["log_probs"] == 0
    assert far.notes == (
        "rollout backend: here 'c', calibrated with 'b'",
        "parameters: here 70,000, calibrated with 1,000",
    )


def test_passes_that_the_calibrating_run_did_not_make_are_taken_from_its_updates(
    finished_run: Path, registry: Registry
) -> None:
    known = read_calibration(finished_run, registry)
    found = predict(work(forward_passes=2), known, work(forward_passes=0, epochs=2))
    assert found.seconds["update"] == pytest.approx(2.0)
    assert found.seconds["log_probs"] == pytest.approx(2 * 2.0 / 3)
    assert "each is taken for a third of its updates' time" in found.notes[0]


@pytest.mark.parametrize(
    ("flags", "passes"),
    [
        ((), 0),
        (("--trainer.updates_per_step", "2"), 1),
        (("--algorithm.old_log_probs", "always"), 1),
        (("--algorithm.old_log_probs", "decoupled"), 1),
        (("--algorithm.old_log_probs", "rollout"), 0),
        (("--algorithm.correction.mode", "mask"), 1),
        (("--algorithm.kl_coef", "0.1"), 1),
        (("--algorithm.kl_coef", "0.1", "--algorithm.kl_in_reward", "true"), 2),
        (("--algorithm.entropy_share", "0.2"), 1),
        (("--algorithm.advantage", "gae"), 1),
        (
            ("--schedule.max_staleness", "1", "--placement.preset", "disaggregated", "--placement.devices_per_node",
             "2", "--placement.devices", "{actor: 1}"),
            1,
        ),
    ],
)  # fmt: skip
def test_log_probs_are_predicted_for_every_pass_of_a_step(
    flags: tuple[str, ...], passes: int, finished_run: Path, registry: Registry, model: str
) -> None:
    """The calibrating run makes two passes, in a second."""
    from rlsdk.config import dump_config

    calibrating = config_of(
        model, "--placement.device", "cpu", "--algorithm.kl_coef", "0.1", "--algorithm.old_log_probs", "always"
    )
    (finished_run / "config.yaml").write_text(dump_config(calibrating))
    known = read_calibration(finished_run, registry)
    plan = planned(registry, model, *flags, hardware="cpu", calibration=known)
    assert plan.prediction is not None
    assert plan.prediction.seconds["log_probs"] == pytest.approx(passes / 2)


def test_a_run_of_the_same_kind_is_predicted_to_take_as_long(
    finished_run: Path, registry: Registry, model: str
) -> None:
    plan = planned(registry, model, hardware="cpu", calibration=read_calibration(finished_run, registry))
    assert plan.prediction is not None
    assert plan.prediction.step_s == pytest.approx(6.6)  # no log-probs in a step of one update
    with pytest.raises(ConfigError, match="two steps or more"):
        read_calibration(finished_run / "nothing", registry)
