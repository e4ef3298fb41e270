"""A sample that is cut into several rows trains, counts and is logged like the same sample in one row."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loop import Recorder, config_of, model, registry, session_of

sys.path.insert(0, str(Path(__file__).parents[1] / "rollouts"))
from fakes import read_back

from rlsdk.config import LengthConfig
from rlsdk.config.sections.evaluation import HELD_OUT, EvalSetConfig
from rlsdk.interfaces import (
    BatchError,
    Ended,
    Episode,
    FinishReason,
    PromptView,
    Receipt,
    SamplingParams,
    Span,
    ToolUse,
    Trajectory,
    VersionRun,
)
from rlsdk.registry import Registry
from rlsdk.rollouts import Grade, Group, GroupId, GroupTask, Sample, make_batch
from rlsdk.rollouts.journal.journal import Journal
from rlsdk.rollouts.journal.recorded import read_journal
from rlsdk.rollouts.journal.records import record_of, samples_from
from rlsdk.testing.roles.in_process import close_in_process
from rlsdk.trainer.generation.sampler import compared_scores, scores_of
from rlsdk.trainer.generation.timeline import sampled_tokens
from rlsdk.trainer.inputs.grading import GradeSummary
from rlsdk.trainer.learner.algorithm import build_algorithm
from rlsdk.trainer.learner.learner import LearnerOptions, PolicyLearner
from rlsdk.trainer.learner.metrics import StepClock, batch_metrics, special_share
from rlsdk.trainer.learner.state import TrainerState
from rlsdk.trainer.roles.session import Session
from rlsdk.trainer.stages.evaluation.run import EvalSet, sample_rows, set_figures
from rlsdk.trainer.stages.rl import learn_from, update_figures
from rlsdk.trainer.tracking.samples import SampleLog, shown_samples

__all__ = ["model", "registry"]

VOCABULARY = 64
OF_ROWS = ("policy/micro_batches", "critic/micro_batches")
"""Metrics of the passes over rows, whose number a cut changes."""


def task_of(ordinal: int, num_samples: int, rng: np.random.Generator, *, greedy: bool = False) -> GroupTask:
    prompt = tuple(int(token) for token in rng.integers(1, VOCABULARY, rng.integers(1, 6)))
    return GroupTask(
        id=GroupId(source="train", epoch=0, index=ordinal),
        ordinal=ordinal,
        prompt=PromptView(prompt_ids=prompt, text=f"prompt {ordinal}", answer="a", row={}),
        num_samples=num_samples,
        sampling=SamplingParams(max_tokens=16),
        seed=(0,),
        greedy_baseline=greedy,
    )


def sample_of(task: GroupTask, rng: np.random.Generator, *, scored_tokens: bool = False) -> Sample:
    """A sample of one row: one to three turns, with tool tokens between them."""
    spans = [Span.given(task.prompt.prompt_ids)]
    for turn in range(rng.integers(1, 4)):
        if turn:
            spans.append(Span.given(rng.integers(1, VOCABULARY, rng.integers(1, 3))))
        count = int(rng.integers(1, 5))
        log_probs = -rng.random(count).astype(np.float32) * 4
        runs = (VersionRun(0, count),)
        spans.append(Span(token_ids=rng.integers(1, VOCABULARY, count), log_probs=log_probs, versions=runs))
    reason = FinishReason.LENGTH if rng.random() < 0.3 else FinishReason.STOP
    row = Trajectory(spans=tuple(spans), finish_reason=reason, info={"turns": len(spans) / 2})
    valid = bool(rng.random() < 0.85)
    score = float(rng.choice([0.0, 1.0, 0.5])) if valid else 0.0
    scores = rng.random(len(row.response_ids)) if scored_tokens and valid else None
    grade = Grade(score=score, valid=valid, terms={"r": score} if valid else {}, token_scores=scores)
    return Sample(episode=Episode.of(row), text=f"text of {row.response_ids.tolist()}", grade=grade)


def cut(sample: Sample, rng: np.random.Generator) -> Sample:
    """The same sample in up to four rows: each has everything before it as its context."""
    (row,) = sample.rows
    first = len(row.spans[0])
    inner = np.arange(first + 1, row.num_tokens)
    ends = [first, *sorted(rng.permutation(inner)[: rng.integers(0, 4)].tolist()), row.num_tokens]
    ids = np.concatenate([span.token_ids for span in row.spans])
    rows = []
    for begin, end in pairwise(ends):
        last = end == row.num_tokens
        rows.append(
            Trajectory(
                spans=(Span.given(ids[:begin]), *_between(row, begin, end)),
                finish_reason=row.finish_reason if last else FinishReason.STOP,
                info=row.info if last else {"turns": 0.0},
            )
        )
    return replace(sample, episode=replace(Episode.of(rows[-1]), rows=tuple(rows)))


def _between(row: Trajectory, begin: int, end: int) -> Iterator[Span]:
    """The parts of its spans from one token to another."""
    start = 0
    for span in row.spans:
        low, high = max(begin - start, 0), min(end - start, len(span))
        start += len(span)
        if low < high:
            logs = None if span.log_probs is None else span.log_probs[low:high]
            runs = () if logs is None else (VersionRun(0, high - low),)
            yield Span(token_ids=span.token_ids[low:high], log_probs=logs, versions=runs)


@dataclass(frozen=True)
class Step:
    """The groups of a step, uncut and cut."""

    whole: list[Group]
    cut: list[Group]

    @classmethod
    def of(cls, seed: int, *, greedy: bool = False, scored_tokens: bool = False) -> Step:
        rng = np.random.default_rng(seed)
        groups = []
        for ordinal in (7, 3, 11):
            task = task_of(ordinal, 4, rng, greedy=greedy)
            samples = [sample_of(task, rng, scored_tokens=scored_tokens) for _ in range(4)]
            if rng.random() < 0.3:
                samples[1] = Sample(episode=None, text="", grade=Grade(valid=False))
            baseline = sample_of(task, rng) if greedy else None
            groups.append(Group(task=task, samples=samples, baseline=baseline))
        return cls(
            whole=groups,
            cut=[replace(g, samples=[cut(s, rng) if s.rows else s for s in g.samples]) for g in groups],
        )


# Rows


def test_rows_are_made_in_one_place_in_the_order_of_group_sample_and_row() -> None:
    step = Step.of(3, scored_tokens=True)
    batch = make_batch(step.cut, temperature=1.0).validate()
    expected = [
        (group.task.ordinal, index)
        for group in step.cut
        for index, sample in enumerate(group.samples)
        for _ in sample.rows
    ]
    assert list(zip(batch["uid"].tolist(), batch["sample"].tolist(), strict=True)) == expected
    assert batch["row_id"].tolist() == list(range(len(expected)))
    assert len(set(expected)) < len(expected), "some sample has several rows"
    whole = make_batch(step.whole, temperature=1.0)
    for name in ("rollout_log_probs", "token_scores", "token_versions"):
        assert torch.equal(batch[name][batch["response_mask"]], whole[name][whole["response_mask"]]), name
    last = [sample.rows[-1].finish_reason for group in step.cut for sample in group.samples for _ in sample.rows]
    assert batch["truncated"].tolist() == [reason is FinishReason.LENGTH for reason in last]


def test_two_groups_of_one_ordinal_are_refused() -> None:
    [group, *_] = Step.of(0).whole
    other = replace(group, task=replace(group.task, id=replace(group.task.id, index=9)))
    with pytest.raises(BatchError, match=r"train/0/7 and train/0/9 both have the ordinal 7.*needs its own"):
        make_batch([group, other], temperature=1.0)


# Training


RECIPES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("--algorithm.kl_coef", "0.1", "--train.optim.lr", "1e-3"),
    "dapo": ("--algorithm", "dapo", "--algorithm.lengths.overlong_filter", "true"),
    "gspo": ("--algorithm", "gspo", "--algorithm.loss_options", "{clip_low: 0.1, clip_high: 0.1}"),
    "dr_grpo": ("--algorithm", "dr_grpo", "--algorithm.lengths.penalty", "0.05"),
    "ppo": ("--algorithm", "ppo", "--algorithm.kl_coef", "0.1", "--algorithm.kl_in_reward", "true"),
    "remax": ("--algorithm", "remax"),
    "corrected": (
        "--algorithm.old_log_probs", "decoupled", "--algorithm.correction.mode", "truncate",
        "--algorithm.correction.level", "sequence", "--algorithm.correction.reject", "geometric",
        "--algorithm.correction.reject_upper", "5", "--algorithm.correction.reject_lower", "0.05",
        "--algorithm.loss_aggregation", "prompt_mean", "--algorithm.entropy_share", "0.5",
    ),
}  # fmt: skip


def learned(session: Session, groups: list[Group], config: Any, registry: Registry) -> dict[str, float]:
    """Metrics of a step, and the log-probs of its samples after it."""
    algorithm, state = build_algorithm(config, registry), TrainerState()
    learner = PolicyLearner(session, algorithm, LearnerOptions(parity_threshold=1e9), state, Recorder())
    made = learn_from(groups, learner, state, 0, 1.0, StepClock())
    metrics = {**update_figures(made), **batch_metrics(made.batch, GradeSummary.of_groups(groups, ["r"]))}
    after = learner.forward("actor", made.batch, "log_probs")[made.batch["response_mask"]]
    assert state.samples == sum(bool(sample.rows) for group in groups for sample in group.samples)
    shares = {
        "special": special_share(made.batch, {3, 4, 5}),
        **{f"after/{at}": p for at, p in enumerate(after.tolist())},
    }
    return {name: value for name, value in (metrics | shares).items() if name not in OF_ROWS}


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_gradient_metrics_and_weights_are_those_of_uncut_samples(
    recipe: str, model: str, registry: Registry
) -> None:
    """On real engines, in micro-batches of few tokens; each token's log-prob after two updates is the same."""
    extra = ("--train.micro_batch_tokens", "40", "--critic.micro_batch_tokens", "40") if recipe == "ppo" else (
        "--train.micro_batch_tokens", "40")  # fmt: skip
    config = config_of(model, registry, 1, *RECIPES[recipe], *extra)
    step = Step.of(1, greedy=recipe == "remax", scored_tokens=recipe in ("grpo", "ppo"))
    found = []
    for groups in (step.whole, step.cut):
        session = session_of(config, registry)
        try:
            found.append(learned(session, groups, config, registry))
        finally:
            close_in_process(session.roles.values())
    assert found[0]["policy/grad_norm"] > 0
    assert found[1] == pytest.approx(found[0], rel=2e-4, abs=2e-5, nan_ok=True)


# Figures, samples, journal


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_what_is_said_of_a_step_is_said_of_its_samples(seed: int, scored_tokens: bool) -> None:
    step = Step.of(seed, scored_tokens=scored_tokens)
    assert sampled_tokens(step.cut) == sampled_tokens(step.whole)
    shape = LengthConfig(penalty=0.1, soft_tokens=4, shorter_reward=0.5)
    for whole, cut_one in zip(step.whole, step.cut, strict=True):
        expected = scores_of(whole, shape, max_tokens=8)
        assert scores_of(cut_one, shape, max_tokens=8) == pytest.approx(expected)
    pieces = lambda ids: [f"<{token}>" for token in ids]  # noqa: E731
    logged, trained = [], []
    for groups in (step.whole, step.cut):
        batch = make_batch(groups, temperature=1.0)
        advantages = torch.where(batch["response_mask"], batch["rollout_log_probs"].exp(), 0.0)
        batch = batch.with_tokens(advantages=advantages, old_log_probs=batch["rollout_log_probs"] - 0.1)
        shown = [_rounded(one) for one in shown_samples(groups, batch, SampleLog(count=5, max_tokens=7, pieces=pieces))]
        # The rows of an episode are those that it was cut into; each of its tokens is trained in one of them.
        trained.append([sum(row["trained"] for row in one.pop("episode", {}).get("rows", ())) for one in shown])
        logged.append(shown)
    assert logged[1] == logged[0]
    assert all(cut == whole for whole, cut in zip(*trained, strict=True) if whole and cut), "a plain row has no episode"


def _rounded(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in sample.items()}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_an_evaluation_counts_samples(seed: int) -> None:
    step = Step.of(seed)
    measure = replace(HELD_OUT, config=EvalSetConfig(samples_per_prompt=4))
    sampling = SamplingParams(max_tokens=8)
    part = EvalSet(measure=measure, prompts=(), sampling=sampling, reward_names=["r"], has_entropy=True)
    assert set_figures(step.cut, part) == pytest.approx(set_figures(step.whole, part), nan_ok=True)
    for found, expected in zip(sample_rows(step.cut, part), sample_rows(step.whole, part), strict=True):
        assert _rounded(found) == _rounded(expected)


def test_a_row_that_the_batch_does_not_have_is_named() -> None:
    step = Step.of(5)
    batch = make_batch(step.cut[:1], temperature=1.0)
    batch = batch.with_tokens(advantages=torch.zeros(batch.num_tokens))
    with pytest.raises(BatchError, match=r"no row of sample \d of uid (3|11); every sample that was made has one"):
        shown_samples(step.cut, batch, SampleLog(count=9))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_sample_of_several_rows_comes_back_from_the_journal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    task = task_of(4, 2, rng)
    sample = cut(sample_of(task, rng, scored_tokens=True), rng)
    record = read_back(record_of(sample, task.prompt.prompt_ids))
    records = {("", 1): record}
    back = samples_from(records, task.prompt.prompt_ids, lambda row: f"{row.num_tokens} tokens", VOCABULARY)
    found = back["", 1]
    assert found.text == f"{sample.rows[-1].num_tokens} tokens"
    groups = [[Group(task=task, samples=[one])] for one in (sample, found)]
    whole, back = (make_batch(group, temperature=1.0) for group in groups)
    assert (whole.tokens.keys(), whole.rows.keys()) == (back.tokens.keys(), back.rows.keys())
    assert all(torch.equal(whole[name], back[name]) for name in (*whole.tokens, *whole.rows))
    assert (found.info, found.total) == (sample.info, pytest.approx(sample.total))


def test_an_episode_comes_back_from_the_journal() -> None:
    rng = np.random.default_rng(1)
    task = task_of(4, 2, rng)
    cuts = (cut(sample_of(task, rng), rng) for _ in range(99))
    sample = next(made for made in cuts if len(made.rows) > 1 and made.grade.valid)
    count, sampled = len(sample.rows), sample.num_sampled
    receipt = Receipt(
        sampled=sampled + 5, trained=sampled, not_trained={"abandoned": 3, "auxiliary": 2}, digests=("a",) * count
    )
    made = Episode(
        rows=sample.rows, chains=tuple(range(count)), scales=(0.5,) * count, ended=Ended.TURNS, receipt=receipt,
        info={"calls": 2.0}, chain_rewards={0: 0.1, 1: -3.0},
        tools=(ToolUse(turn=1, name="add", arguments={"a": [1, None]}, result="é", failed=True, seconds=0.5),),
    )  # fmt: skip
    record = read_back(record_of(replace(sample, episode=made), task.prompt.prompt_ids))
    back = samples_from({("", 0): record}, task.prompt.prompt_ids, lambda row: "")["", 0].episode
    assert back is not None
    assert (back.chains, back.scales, back.ended, back.receipt, back.info, back.tools, back.chain_rewards) == (
        made.chains, made.scales, made.ended, made.receipt, made.info, made.tools, made.chain_rewards,
    )  # fmt: skip
    batch = make_batch([Group(task=task, samples=[replace(sample, episode=back)])], temperature=1.0)
    assert batch["chain"].tolist() == list(range(count))
    assert batch["row_scale"].tolist() == [0.5] * count
    own = [0.1, -3.0, *[0.0] * (count - 2)]
    assert batch["chain_scores"].tolist() == [sample.grade.score + one for one in own]
    assert batch["truncated"].all()


def test_dynamic_sampling_compares_chains_where_they_have_scores() -> None:
    """Games that the first and the second player won in turn: equal scores, unlike chains."""
    rng = np.random.default_rng(2)
    task, samples = task_of(4, 2, rng), []
    for won in (0, 1):
        rows = (*sample_of(task, rng).rows, *sample_of(task, rng).rows)
        episode = Episode(rows=rows, chains=(0, 1), chain_rewards={won: 1.0, 1 - won: -1.0})
        samples.append(Sample(episode=episode, text="", grade=Grade(score=0.5)))
    group = Group(task=task, samples=samples)
    assert scores_of(group, LengthConfig(), max_tokens=8) == [0.5, 0.5]
    assert compared_scores(group, LengthConfig(), max_tokens=8) == [[1.5, -0.5], [-0.5, 1.5]]
    plain = Group(task=task, samples=[replace(one, episode=Episode.of(one.rows[0])) for one in samples])
    assert compared_scores(plain, LengthConfig(), max_tokens=8) == [[0.5, 0.5]]


def test_a_sample_of_one_row_is_written_as_that_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    task = task_of(4, 2, rng)
    one, several = sample_of(task, rng), cut(sample_of(task, rng), np.random.default_rng(3))
    assert list(record_of(one, task.prompt.prompt_ids)) == ["spans", "reason", "info", "grade", "arrays"]
    assert list(record_of(several, task.prompt.prompt_ids)) == ["rows", "grade", "arrays"]
    journal = Journal(tmp_path, made_by={}, keep="all")
    journal.open(0)
    journal.write("start", step=1, groups=[4])
    journal.sample(task, "", 0, one)
    journal.sample(task, "", 1, several)
    journal.close()
    found = read_journal(tmp_path, after=0)
    back = samples_from(found.samples[4], task.prompt.prompt_ids, lambda row: "")
    assert [len(back["", at].rows) for at in (0, 1)] == [1, len(several.rows)]
    assert not found.no_newer(-1).samples[4]
