"""A run that cannot learn says so, once, with what it probably is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rlsdk.algorithms import losses
from rlsdk.config import RunConfig, TrainerConfig
from rlsdk.registry import Registry
from rlsdk.trainer.learner.watch import (
    ADVANTAGES,
    LearningWatch,
    off_policy_warning,
    quantized_notice,
    rate_notices,
    repeated_notice,
    setting_notices,
    supervised_symptoms,
    uneven_notice,
)

WELL = {
    "reward/groups_with_signal": 0.5,
    "reward/mean": 0.4,
    "reward/std": 0.3,
    "reward/accuracy": 0.4,
    "reward/invalid_share": 0.0,
    "response/truncated_share": 0.1,
    "response/tokens_max": 64.0,
    "policy/grad_norm": 1.0,
    "policy/loss": 0.1,
    "policy/skipped_updates": 0.0,
}
NOTHING = {"reward/groups_with_signal": 0.0, "policy/grad_norm": 0.0}


SUPERVISED = {"dpo/loss": 0.69, "dpo/grad_norm": 1.0, "dpo/lr": 1.0}


@pytest.mark.parametrize(
    ("metrics", "steps", "text"),
    [
        (
            {"dpo/grad_norm": 0.0},
            1,
            "warning: in step 1, the gradient is exactly 0, and the loss is not (dpo/loss 0.69)",
        ),
        ({"dpo/grad_norm": 0.0}, 1, "start from scratch with a lower one, such as `--preferences.lr 1e-5`"),
        ({"dpo/grad_norm": 0.0, "dpo/loss": 0.0}, 3, "there is nothing left to learn here"),
        ({"dpo/grad_norm": float("nan")}, 3, "loss or gradient are not finite"),
    ],
)
def test_supervised_training_that_cannot_learn_says_so(metrics: dict[str, float], steps: int, text: str) -> None:
    watch = LearningWatch(supervised_symptoms("dpo", "preferences.lr"))
    found = [list(watch.step(step, {**SUPERVISED, **metrics})) for step in range(1, 4)]
    (said,) = found[steps - 1]
    assert text in said
    assert [len(lines) for lines in found] == [int(step == steps) for step in range(1, 4)]
    assert not list(LearningWatch(supervised_symptoms("dpo", "preferences.lr")).step(1, SUPERVISED))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


def said(*steps: Mapping[str, float]) -> list[str]:
    watch = LearningWatch()
    return [text for step, metrics in enumerate(steps, 1) for text in watch.step(step, {**WELL, **metrics})]


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (
            {**NOTHING, "reward/std": 0.0, "reward/mean": 0.0},
            "every sample got the same score (mean 0), so there is no gradient",
        ),
        (NOTHING, "every sample of a prompt got the same score (mean 0.4)"),
        (
            {**NOTHING, "policy/grad_norm": 0.1},
            "so scores give no gradient; what moves the weights are other terms (a KL, the entropy, a critic)",
        ),
        ({**NOTHING, "policy/grad_norm": 0.1, "reward/std": 1e-17, ADVANTAGES: 1.0}, "every sample got the same score"),
        ({**NOTHING, "reward/std": 0.0, "reward/mean": 1.0, "reward/accuracy": 1.0}, "every sample is correct"),
        ({"policy/skipped_updates": 1.0}, "gradients are not finite"),
        ({"policy/grad_norm": float("nan")}, "gradients are not finite"),
        ({"policy/loss": float("inf")}, "gradients are not finite"),
        ({"response/truncated_share": 1.0}, "every response was cut at its limit (64 tokens)"),
    ],
)
def test_each_way_of_learning_nothing_is_said_after_three_steps(metrics: Mapping[str, float], text: str) -> None:
    assert said(metrics, metrics) == []
    (line,) = said(metrics, metrics, metrics, metrics, metrics)
    assert line.startswith("warning: for 3 steps in a row, up to step 3, ")
    assert text in line


def test_a_gradient_of_nothing_although_scores_differ_is_said_at_once() -> None:
    """After an update at `train.optim.lr 1e3` the probabilities of all tokens were equal, whatever the weights."""
    (line,) = said({"policy/grad_norm": 0.0, "policy/entropy": 4.85203, "policy/lr": 1e3}, {})
    assert line.startswith("warning: in step 1, scores differ, and yet the gradient is exactly 0")
    assert "policy/entropy 4.852 nats" in line
    assert "policy/lr 1e+03, train.optim.lr" in line
    assert "`--train.optim.lr 1e-6`" in line
    assert not said({"policy/grad_norm": 0.0, **NOTHING}), "no signal has its own words"


def test_learning_rates_that_train_nothing_or_destroy_the_model_are_said_before_the_run() -> None:
    config = RunConfig.model_validate({"train": {"optim": {"lr": 1e3}}, "sft": {"lr": 1e-30}})
    high, low = rate_notices(config, ["train.optim.lr", "sft.lr"])
    assert high.startswith("warning: train.optim.lr 1000: AdamW changes every weight by about this much")
    assert low.startswith("warning: sft.lr 1e-30: too small to change a weight")
    assert not list(rate_notices(RunConfig(), ["train.optim.lr", "critic.optim.lr", "sft.lr", "preferences.lr"]))


def test_it_is_said_again_when_it_comes_back() -> None:
    assert len(said(*[NOTHING] * 3, {}, *[NOTHING] * 3)) == 2


def test_a_run_that_learns_is_left_alone() -> None:
    assert said(*[{}] * 10) == []
    assert said(NOTHING, {}, NOTHING, {}, NOTHING) == []


def test_rewards_that_fail_are_no_rewards_that_are_alike() -> None:
    """They have a message of their own."""
    assert said(*[{**NOTHING, "reward/invalid_share": 1.0}] * 5) == []


def test_an_estimator_that_compares_no_samples_of_a_prompt_learns_without_groups_that_differ() -> None:
    """PPO with one sample a prompt was said to have no gradient, in every run."""
    assert said(*[{**NOTHING, "policy/grad_norm": 0.1, ADVANTAGES: 1.0}] * 5) == []


def test_a_distribution_that_is_cut_is_said(registry: Registry) -> None:
    config = RunConfig.model_validate({"rollout": {"top_p": 0.9, "min_p": 0.1}})
    (line,) = setting_notices(config, registry)
    assert line.startswith("rollout.top_p 0.9 and rollout.min_p 0.1: tokens are sampled from a part of the policy's")
    assert list(setting_notices(RunConfig(), registry)) == []


def test_updates_of_unlike_size_are_said() -> None:
    said = uneven_notice(TrainerConfig(prompts_per_step=7, samples_per_prompt=8, updates_per_step=3))
    assert said is not None
    assert said.startswith("trainer.updates_per_step 3: 56 samples a step (trainer.prompts_per_step 7 x ")
    assert uneven_notice(TrainerConfig(prompts_per_step=7, samples_per_prompt=8, updates_per_step=4)) is None


def test_updates_without_a_ratio_are_warned_of_from_the_second_one_on() -> None:
    twice = TrainerConfig(updates_per_step=2, epochs_per_step=3)
    said = off_policy_warning("gpg", losses.policy_gradient, twice)
    assert said is not None
    assert said.startswith("warning: algorithm.loss 'gpg' has no ratio and no clip")
    assert "trainer.updates_per_step 2 and trainer.epochs_per_step 3 makes 6 updates" in said
    assert "--trainer.updates_per_step 1 --trainer.epochs_per_step 1" in said
    assert off_policy_warning("gpg", losses.policy_gradient, TrainerConfig(updates_per_step=1)) is None
    for loss in (losses.ppo_clip, losses.gspo, losses.cispo, losses.sapo):
        assert off_policy_warning("other", loss, twice) is None


def test_a_step_that_takes_every_row_many_times_is_said() -> None:
    """1,000 prompts a step of 64 rows trained without a word."""
    said = repeated_notice(TrainerConfig(prompts_per_step=1000), 64)
    assert said is not None
    assert "trainer.prompts_per_step 1000 is more than the 64 training rows" in said
    assert "each row about 16 times" in said
    assert "`--trainer.prompts_per_step 64`" in said
    assert repeated_notice(TrainerConfig(prompts_per_step=64), 64) is None


def test_samples_of_quantized_weights_are_named_and_what_corrects_them() -> None:
    assert quantized_notice(0, 9, {}) is None
    bare = quantized_notice(7, 9, {"parity/log_prob_diff_mean": 0.0123})
    assert bare is not None
    assert "7 of 9 tensors are sampled from as float8" in bare
    assert "0.012 nats" in bare
    assert "--algorithm.correction.mode truncate" in bare
    corrected = quantized_notice(7, 9, {"parity/log_prob_diff_mean": 0.0123, "mismatch/kl_k1": 0.001})
    assert corrected is not None
    assert "--algorithm" not in corrected
    accounted = quantized_notice(7, 9, {"parity/log_prob_diff_mean": 0.0123}, accounted=True)
    assert accounted is not None
    assert accounted.endswith("; it is in the ratio")
