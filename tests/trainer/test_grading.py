"""From what rewards gave to grades, figures, and a batch: scores of tokens reach the advantages."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "rollouts"))
from fakes import FakeReplica, read_back

from rlsdk.algorithms import grpo, reinforce, token_level_rewards
from rlsdk.config import LengthConfig
from rlsdk.interfaces import (
    BatchError,
    Episode,
    FinishReason,
    PromptView,
    RewardSample,
    SamplingParams,
    Span,
    Trajectory,
    VersionRun,
)
from rlsdk.interfaces.settings import RewardLimits
from rlsdk.rewards import RewardDef, RewardResult, RewardRunner
from rlsdk.rewards.grading.protocol import encode_graded, take_records
from rlsdk.rewards.scores.definitions import FailureKind
from rlsdk.rewards.scores.results import ResultBuilder
from rlsdk.rollouts import (
    Grade,
    Group,
    GroupId,
    GroupTask,
    RolloutStream,
    Sample,
    StreamOptions,
    make_batch,
    single_turn,
)
from rlsdk.rollouts.journal.records import grade_from, record_of
from rlsdk.trainer.generation.sampler import scores_of
from rlsdk.trainer.inputs.grading import CorrectRule, GradeSummary, RewardGrader, check_failures, grades_of
from rlsdk.trainer.learner.metrics import batch_metrics
from rlsdk.trainer.tracking.events import RunView

RECORDING = Path(__file__).parents[1] / "rewards" / "recording.py"
REWARDS = [
    RewardDef(name="right", target="m:f"),
    RewardDef(name="steps", target="m:g", weight=0.5),
    RewardDef(name="seen", target="m:h", weight=0.0),
]
SAMPLES = [
    RewardSample(prompt="p", response="r", answer=None, row={}, truncated=False, response_ids=(1, 2, 3))
    for _ in range(5)
]


def booked() -> RewardResult:
    """Right; right with steps; failed; for no reward; not right."""
    builder = ResultBuilder(REWARDS, SAMPLES, RewardLimits())
    for at, score in enumerate([1.0, 1.0, None, None, 0.0]):
        if at == 2:
            builder.fail((0, at), FailureKind.TIMEOUT, "took more than 10 s")
        else:
            builder.take((0, at), score)
    for at in range(5):
        if at == 1:
            builder.take((1, at), 4.0, token_scores=[2.0, 4.0, 6.0], metrics={"count": 3})
        elif at == 4:
            builder.take((1, at), -2.0, metrics={"count": 1})
        else:
            builder.take((1, at), None)
        builder.take((2, at), float(at))
    assert builder.left == 0
    return builder.result()


def test_grades_say_what_each_reward_gave() -> None:
    grades = grades_of(booked())
    assert [grade.score for grade in grades] == [1.0, 3.0, 0.0, 0.0, -1.0]
    assert [grade.valid for grade in grades] == [True, True, False, False, True]
    assert dict(grades[1].terms) == {"right": 1.0, "steps": 4.0, "seen": 1.0}
    assert grades[1].token_scores is not None
    assert grades[1].token_scores.tolist() == [1.0, 2.0, 3.0]
    assert dict(grades[2].terms) == {"seen": 2.0}
    assert [(f.kind, f.source) for f in grades[2].failures] == [("timeout", "right")]
    assert [(f.kind, f.source) for f in grades[3].failures] == [("inapplicable", "rewards")]


def test_every_reward_is_a_figure_by_its_name() -> None:
    summary = GradeSummary.of(grades_of(booked()), [reward.name for reward in REWARDS])
    assert summary.metrics() == {
        "right": pytest.approx(2 / 3),
        "right/applied_share": 0.8,
        "right/failed_share": 0.2,
        "steps": 1.0,
        "steps/applied_share": 0.4,
        "steps/failed_share": 0.0,
        "steps/count": 2.0,
        "seen": 2.0,
        "seen/applied_share": 1.0,
        "seen/failed_share": 0.0,
    }
    assert (summary.num_failed, summary.accuracy, summary.mean) == (2, 0.4, 1.0)
    assert summary.failures == {"timeout": 1, "inapplicable": 1}


class Noted(RunView):
    def __init__(self) -> None:
        self.said: list[str] = []

    def notice(self, text: str) -> None:
        self.said.append(text)


def test_failed_samples_get_the_score_that_is_asked_for_and_stay_failures() -> None:
    grades = grades_of(booked(), failed_score=-1.0)
    assert [grade.score for grade in grades] == [1.0, 3.0, -1.0, -1.0, -1.0]
    assert all(grade.valid for grade in grades)
    assert [grade.substituted for grade in grades] == [False, False, True, True, False]
    summary = GradeSummary.of(grades, ["right"])
    assert (summary.num_failed, summary.accuracy) == (2, 0.4)
    view = Noted()
    with pytest.raises(BatchError, match=r"2 of 5 samples have no score .* more than reward_limits.max_failure_share"):
        check_failures(summary, 0.3, view)
    assert view.said == [], "the error says it"
    check_failures(summary, 0.5, view)
    assert len(view.said) == 1


def test_the_accuracy_is_that_of_the_first_reward_that_is_for_a_sample() -> None:
    """With rewards for different rows, the first one of the list is not for most of them."""
    builder = ResultBuilder(REWARDS, SAMPLES[:3], RewardLimits())
    given: list[list[float | None]] = [[1.0, None, None], [0.0, 1.0, 0.5], [1.0, 1.0, 1.0]]
    for reward, values in enumerate(given):
        for at, value in enumerate(values):
            builder.take((reward, at), value)
    summary = GradeSummary.of(grades_of(builder.result()), [reward.name for reward in REWARDS])
    assert summary.accuracy == pytest.approx(2 / 3)


def trajectory(spans: Sequence[tuple[int, bool]]) -> Trajectory:
    made = [Span.given([9, 9])]
    for length, sampled in spans:
        ids, zeros = np.arange(length), np.zeros(length, np.float32)
        made.append(
            Span(token_ids=ids, log_probs=zeros, versions=(VersionRun(0, length),)) if sampled else Span.given(ids)
        )
    return Trajectory(spans=tuple(made), finish_reason=FinishReason.STOP)


def group_of(samples: Sequence[Sample]) -> Group:
    task = GroupTask(
        id=GroupId(source="train", epoch=0, index=7), ordinal=0,
        prompt=PromptView(prompt_ids=(9, 9), text="p", answer=None, row={}), num_samples=len(samples),
        sampling=SamplingParams(max_tokens=6), seed=(0,),
    )  # fmt: skip
    return Group(task=task, samples=samples)


def graded(spans: Sequence[tuple[int, bool]], score: float, tokens: Sequence[float] | None) -> Sample:
    made = trajectory(spans)
    sample = RewardSample(
        prompt="p", response="r", answer=None, row={}, truncated=False, response_ids=made.response_ids
    )
    builder = ResultBuilder([RewardDef(name="steps", target="m:f")], [sample], RewardLimits())
    builder.take((0, 0), score, token_scores=tokens)
    return Sample(episode=Episode.of(made), text="r", grade=grades_of(builder.result())[0])


def test_scores_of_tokens_reach_returns_and_group_advantages() -> None:
    """Where a tool spoke nothing counts, whatever the reward said of those tokens."""
    turns = graded([(2, True), (1, False), (2, True)], 0.5, [1.0, 2.0, 99.0, 3.0, 4.0])
    plain = graded([(3, True)], 0.5, None)
    group = group_of([turns, plain])
    batch = token_level_rewards(make_batch([group], temperature=1.0).validate())
    assert batch["token_level_rewards"].tolist() == [0, 0, 1, 2, 0, 3, 4.5, 0, 0, 0, 0, 0.5]
    returns = reinforce(batch)["returns"]
    assert returns[batch["response_mask"]].tolist() == [10.5, 9.5, 7.5, 4.5, 0.5, 0.5, 0.5]
    advantages = grpo(batch, normalize_std=False)["advantages"]
    assert advantages[batch["response_mask"]].tolist() == [5.0] * 4 + [-5.0] * 3
    summary = GradeSummary.of_groups([group], ["steps"])
    metrics = batch_metrics(batch.with_tokens(advantages=advantages), summary)
    assert (metrics["reward/mean"], metrics["reward/groups_with_signal"]) == (5.5, 1.0)
    assert (turns.total, plain.total) == (10.5, 0.5)
    assert scores_of(group, LengthConfig(), max_tokens=9) == [10.5, 0.5]


def test_a_batch_without_scores_of_tokens_has_no_such_field() -> None:
    assert "token_scores" not in make_batch([group_of([graded([(3, True)], 0.5, None)])], temperature=1.0)


def test_a_failure_names_the_reward_the_row_and_what_was_returned() -> None:
    builder = ResultBuilder([RewardDef(name="steps", target="m:f")], SAMPLES[:2], RewardLimits())
    builder.take((0, 0), 1.0)
    builder.take((0, 1), 1.0, token_scores=[1.0])
    made = trajectory([(3, True)])
    samples = [Sample(episode=Episode.of(made), text="r", grade=grade) for grade in grades_of(builder.result())]
    text = GradeSummary.of_groups([group_of(samples)], ["steps"]).text("rewards")
    assert text is not None
    assert text.startswith(
        "rewards: 1 of 2 samples have no score (1 type); first: type in 'steps', train/0/7 sample 1: the record has 1 "
        "token_scores; expected 3"
    )


class LetterCodec:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(map(chr, token_ids))

    def decode_all(self, token_ids: Sequence[Any]) -> list[str]:
        return [self.decode(ids) for ids in token_ids]


def test_through_the_stream_and_a_grading_process_a_reward_sees_tokens_and_scores_them() -> None:
    reward = RewardDef(name="by_token", target=f"{RECORDING}:by_token")
    with RewardRunner([reward]) as runner:
        stream = RolloutStream(
            [FakeReplica()], LetterCodec(), StreamOptions(rollout=single_turn, max_model_tokens=40),
            grader=RewardGrader(runner, print),
        )  # fmt: skip
        try:
            task = group_of([]).task
            prompt = PromptView(prompt_ids=(4,), text="p", answer=None, row={})
            stream.start([GroupTask(**{**vars(task), "prompt": prompt, "num_samples": 2})])
            group = stream.take(30)
        finally:
            stream.close()
    batch = make_batch([group], temperature=1.0).validate()
    mask = batch["response_mask"]
    tokens = batch["input_ids"][mask]
    assert len(tokens)
    assert torch.allclose(batch["token_scores"][mask], tokens.double() / 100)
    assert Counter(name for s in group.samples for name in s.grade.metrics) == {
        "by_token/tokens": 2,
        "by_token/prompt.chars": 2,
    }


def test_scores_and_scores_of_tokens_are_float64_from_the_reward_to_the_batch() -> None:
    """By way of the record of a grading process and of a line of the journal. In float32 1e8 + 1 is 1e8."""
    score, tokens = 1e8 + 1, [0.1, 16_777_217.0, -1e9 - 1]
    sent = encode_graded(score, np.array(tokens), {})
    (record,) = take_records(bytearray(sent))
    assert record.body is not None
    assert (record.body["score"], record.body["token_scores"].tolist()) == (score, tokens)
    sample = graded([(3, True)], score, tokens)
    again = grade_from(read_back(record_of(sample, (9, 9))))
    assert again.token_scores is not None
    assert (again.score, again.terms, again.token_scores.tolist()) == (score, {"steps": score}, tokens)
    batch = make_batch([group_of([sample, sample])], temperature=1.0).validate()
    assert batch["scores"].tolist() == [score, score]
    assert batch["token_scores"][batch["response_mask"]].tolist() == tokens * 2


@pytest.mark.parametrize("threshold", [0.7, 0.8, 1.0])
def test_a_score_that_reaches_the_threshold_up_to_rounding_is_correct(threshold: float) -> None:
    """In float32, 0.7 was less than 0.7; 0.1 + 0.7 is less than 0.8."""
    score = {0.7: 0.7, 0.8: 0.1 + 0.7, 1.0: sum([0.1] * 10)}[threshold]
    rule = CorrectRule(least=threshold)
    summary = GradeSummary.of([graded([(1, True)], score, None).grade], ["steps"], correct=rule)
    assert summary.accuracy == 1.0
    assert summary.mean == score


def test_the_reward_that_decides_what_is_correct_decides_it_in_training_too() -> None:
    grade = Grade(score=1.2, terms={"format": 1.0, "steps": 0.2})
    names = ["format", "steps"]
    assert GradeSummary.of([grade], names).accuracy == 1.0
    assert GradeSummary.of([grade], names, correct=CorrectRule(reward="steps")).accuracy == 0.0
    assert GradeSummary.of([grade], names, correct=CorrectRule(reward="steps", least=0.2)).accuracy == 1.0


def test_samples_of_a_cut_distribution_show_no_entropy() -> None:
    """Minus the mean log-prob of tokens that are the likely ones is not the entropy."""
    group = group_of([graded([(2, True)], 0.5, None)] * 2)
    batch, summary = make_batch([group], temperature=1.0), GradeSummary.of_groups([group], ["steps"])
    batch = batch.with_tokens(advantages=torch.zeros(batch.num_tokens))
    whole, cut = (batch_metrics(batch, summary, has_entropy=has) for has in (True, False))
    assert "policy/sample_nll" not in whole
    assert "policy/entropy" not in cut
    assert whole["policy/entropy"] == cut["policy/sample_nll"]


def test_a_reward_with_several_values_above_the_threshold_says_nothing_about_what_is_right() -> None:
    """`0.1 * len(response)` counted every response of ten characters as right."""
    grades = [Grade(score=score, terms={"length": score}) for score in (0.4, 1.0, 1.3)]
    assert math.isnan(GradeSummary.of(grades, ["length"]).accuracy)
    named = GradeSummary.of(grades, ["length"], correct=CorrectRule(reward="length"))
    assert named.accuracy == pytest.approx(2 / 3), "somebody said that it does"
