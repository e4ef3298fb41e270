"""Evaluation on rows that are never trained on: samples every evaluation set, grades the samples, computes metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsdk.algorithms import is_verdict, reaches
from rlsdk.config import Measure
from rlsdk.config.sections.evaluation import MAX_VOTES, powers_of_two
from rlsdk.data import Prompt
from rlsdk.interfaces import SamplingParams
from rlsdk.rewards.text.answer import final_answer, parse_number
from rlsdk.rollouts import Group, RolloutStream, Sample, request_seed
from rlsdk.trainer.generation.sampler import Draw, sample_all
from rlsdk.trainer.inputs.grading import GradeSummary
from rlsdk.trainer.stages.evaluation.metrics import (
    Vote,
    best_at_k,
    clustered_error,
    majority_at_k,
    pass_at_k,
)

Judge = Callable[[Sequence[Group]], Sequence[Sequence[float]]]
"""Scores each sample of each group."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """The prompts of one evaluation measure, and how the answers are judged."""

    measure: Measure
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    reward_names: Sequence[str]
    """Names of its rewards, in order."""
    has_whole_score: bool = True
    """Whether its rewards are all that scores a sample in training: no reward model does."""
    has_entropy: bool
    """Whether its samples' log-probs are those of the sampling distribution."""

    @property
    def name(self) -> str:
        return self.measure.name

    @property
    def correct_rewards(self) -> Sequence[str]:
        """Rewards that decide correctness: the first one that applies to a sample."""
        named = self.measure.config.correct_reward
        return self.reward_names if named is None else [named]

    def says_what_is_right(self, graded: Sequence[Sample]) -> bool:
        """Whether the reward that decides correctness, of samples with a verdict, is one that can; see `is_verdict`."""
        config = self.measure.config
        return config.correct_reward is not None or is_verdict(map(self._deciding, graded), config.correct_from)

    @property
    def rule(self) -> str:
        """Text of the rule for what counts as correct."""
        return f"{next(iter(self.correct_rewards), '')} >= {self.measure.config.correct_from:g}"

    @property
    def draw(self) -> Draw:
        return Draw(
            source=f"eval/{self.name}", num_samples=self.measure.config.samples_per_prompt, sampling=self.sampling
        )

    def verdict(self, sample: Sample) -> bool | None:
        """Whether a sample is correct; None if it was not graded."""
        grade = sample.grade
        failed = {failure.source for failure in grade.failures}
        name = next((name for name in self.correct_rewards if name in grade.terms or name in failed), None)
        if grade.has_failed or name is None or name in failed:
            return None
        return reaches(grade.terms[name], self.measure.config.correct_from)

    def _deciding(self, sample: Sample) -> float:
        """The reward that decides whether a graded sample is correct."""
        terms = sample.grade.terms
        return next(terms[name] for name in self.correct_rewards if name in terms)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Result of an evaluation."""

    metrics: Mapping[str, float]
    notices: Sequence[str] = ()
    """Notices about samples without a grade, one per set."""
    failure: str | None = None
    """Set if too many samples have no grade for the metrics to mean anything; says how many, and why."""
    samples: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    """All samples by name of the measure, in the form of `sample_rows`."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Samples responses to the prompts of every set and grades them. Samples are drawn with the same seeds every time,
    so two evaluations differ only by the weights."""

    stream: RolloutStream
    sets: Sequence[EvalSet]
    seed: int
    max_failure_share: float
    """Largest allowed share of a set's samples without a grade."""
    judge: Judge | None = None
    """Scores all samples of groups, to choose the best of several; None: nothing is chosen."""

    def run(self, stop: Callable[[], bool] = lambda: False) -> Evaluated:
        """Evaluates the weights that are served now.

        Raises:
            EvaluationStoppedError: `stop` returned True before all samples were finished.
        """
        metrics: dict[str, float] = {}
        samples: dict[str, Sequence[Mapping[str, Any]]] = {}
        notices, failures = [], []
        for part in self.sets:
            groups = sample_all(self.stream, part.prompts, part.draw, seed=(self.seed, "eval", part.name), stop=stop)
            figures = set_figures(groups, part)
            if self.judge is not None and part.reward_names and part.draw.num_samples > 1:
                figures |= _best_at_k(groups, self.judge(groups), part)
            metrics |= {part.measure.metric(name): value for name, value in figures.items()}
            samples[part.name] = sample_rows(groups, part)
            summary = GradeSummary.of_groups(groups, part.reward_names)
            text = summary.text(f"evaluation ({part.name})")
            if text is None:
                continue
            if summary.num_failed > self.max_failure_share * summary.num_samples:
                failures.append(f"{text}. {self._too_many(summary)}")
            else:
                notices.append(f"{text}; they are in no figure but {part.measure.metric('invalid_share')}")
        return Evaluated(metrics=metrics, notices=notices, failure="; ".join(failures) or None, samples=samples)

    def _too_many(self, summary: GradeSummary) -> str:
        share = summary.num_failed / summary.num_samples
        return f"That is {share:.0%} of the set, more than reward_limits.max_failure_share {self.max_failure_share:.0%}"


def set_figures(groups: Sequence[Group], part: EvalSet) -> dict[str, float]:
    """Metrics of one set, named as in `rlsdk.config.sections.evaluation.FIGURES`.

    Metrics of grades leave out samples without a grade; `invalid_share` is their share. A metric without samples is
    NaN, not 0.
    """
    summary = GradeSummary.of_groups(groups, part.reward_names)
    graded = [[(sample, correct) for sample in group.samples if (correct := part.verdict(sample)) is not None]
              for group in groups]  # fmt: skip
    if not part.says_what_is_right([sample for members in graded for sample, _ in members]):
        graded = [[] for _ in graded]
    verdicts = [[float(correct) for _, correct in members] for members in graded]
    scores = [[sample.total for sample in group.samples if not sample.grade.has_failed] for group in groups]
    # If only reward models score a run, nothing is graded here.
    judged = _mean_and_error("accuracy", verdicts) if part.reward_names else {}
    if part.reward_names and part.has_whole_score:
        judged |= _mean_and_error("reward", scores)
    figures = {
        **judged,
        **{f"reward/{name}": value for name, value in summary.terms.items()},
        **_lengths(groups),
        **_log_probs(groups, part),
        **rollout_info(groups),
    }
    if summary.num_failed:
        figures["invalid_share"] = summary.num_failed / summary.num_samples
    if part.reward_names and part.measure.config.samples_per_prompt > 1:
        figures |= _at_k(graded, part.measure.config.samples_per_prompt)
    return figures


def _best_at_k(groups: Sequence[Group], scores: Sequence[Sequence[float]], part: EvalSet) -> dict[str, float]:
    """best@k: means over the prompts with at least k graded samples."""
    graded = [
        [(score, known) for score, sample in zip(own, group.samples, strict=True)
         if (known := part.verdict(sample)) is not None]
        for own, group in zip(scores, groups, strict=True)
    ]  # fmt: skip
    figures = {}
    for k in powers_of_two(part.draw.num_samples):
        chosen = [best_at_k(members, k) for members in graded if len(members) >= k]
        if chosen:
            figures[f"best@{k}"] = math.fsum(chosen) / len(chosen)
    return figures


def rollout_info(groups: Sequence[Group]) -> dict[str, float]:
    """Mean of each number in the samples' info, as `rollout/NAME`, over the samples that have it."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for sample in group.samples:
            for name, value in sample.info.items():
                values.setdefault(name, []).append(float(value))
    return {f"rollout/{name}": sum(numbers) / len(numbers) for name, numbers in values.items()}


def answer_key(response: str) -> str | None:
    """Key that is equal for equal answers: the number after the final-answer mark, or the text there without whitespace
    and case. None: no marked answer was found.
    """
    answer = final_answer(response)
    if not answer:
        return None
    number = parse_number(answer)
    return "".join(answer.split()).casefold() if number is None else str(number)


def sample_rows(groups: Sequence[Group], part: EvalSet) -> list[dict[str, Any]]:
    """Every sample as a JSON-compatible row for the samples file."""
    return [
        _sample_row(group, at, sample, part) for group in groups for at, sample in enumerate(group.samples)
    ]  # fmt: skip


def _sample_row(group: Group, at: int, sample: Sample, part: EvalSet) -> dict[str, Any]:
    prompt, grade = group.task.prompt, sample.grade
    versions = [run.version for row in sample.rows for run in row.versions]
    made = {} if not sample.rows else {
        "tokens": sample.num_sampled,
        "truncated": sample.truncated,
        "log_prob": _total_log_prob(sample) / max(sample.num_sampled, 1),
        "policy_version": versions[-1] if versions else None,
        "info": dict(sample.info),
    }  # fmt: skip
    return {
        "set": part.name,
        "index": group.task.id.index,
        "sample": at,
        "seed": request_seed(*group.task.seed),
        "prompt": prompt.text,
        "response": sample.text,
        "reference": prompt.answer,
        "answer": final_answer(sample.text),
        "correct": part.verdict(sample),
        "score": sample.total if part.reward_names and part.has_whole_score and not grade.has_failed else None,
        "rewards": dict(grade.terms),
        "failures": [{"kind": f.kind, "reward": f.source, "message": f.message} for f in grade.failures],
        **made,
    }


def _mean_and_error(name: str, groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean of all values and, with at least two prompts, its standard error."""
    values = [value for group in groups for value in group]
    if not values:
        return {name: math.nan}
    error = clustered_error(groups)
    return {name: math.fsum(values) / len(values)} | ({} if error is None else {f"{name}_se": error})


def _lengths(groups: Sequence[Group]) -> dict[str, float]:
    made = [sample for group in groups for sample in group.samples if sample.rows]
    if not made:
        return {"tokens": math.nan}
    lengths = [sample.num_sampled for sample in made]
    return {
        "tokens": sum(lengths) / len(made),
        "tokens_max": float(max(lengths)),
        "truncated_share": sum(sample.truncated for sample in made) / len(made),
    }


def _log_probs(groups: Sequence[Group], part: EvalSet) -> dict[str, float]:
    """Mean log-prob of a sampled token, in nats, and the entropy estimate if the log-probs allow one."""
    samples = [sample for group in groups for sample in group.samples]
    tokens = sum(sample.num_sampled for sample in samples)
    if not tokens:
        return {}
    mean = math.fsum(_total_log_prob(sample) for sample in samples) / tokens
    return {"log_prob": mean} | ({"entropy": -mean} if part.has_entropy else {})


def _total_log_prob(sample: Sample) -> float:
    spans = [span for row in sample.rows for span in row.spans]
    return math.fsum(float(span.log_probs.sum(dtype="float64")) for span in spans if span.log_probs is not None)


def _at_k(graded: Sequence[Sequence[tuple[Sample, bool]]], num_samples: int) -> dict[str, float]:
    """pass@k and, where answers are marked, maj@k: means over the prompts with at least k graded samples."""
    votes = [[Vote(correct=known, answer=answer_key(sample.text)) for sample, known in members] for members in graded]
    cast = [vote.answer is not None for group in votes for vote in group]
    figures = {"answered_share": sum(cast) / len(cast)} if any(cast) else {}
    for k in powers_of_two(num_samples):
        enough = [group for group in votes if len(group) >= k]
        if not enough:
            continue
        passed = [pass_at_k(len(group), sum(vote.correct for vote in group), k) for group in enough]
        figures[f"pass@{k}"] = math.fsum(passed) / len(enough)
        if any(cast) and (k == num_samples or num_samples <= MAX_VOTES):
            won = [majority_at_k(group, k) for group in enough if len(group) == k or len(group) <= MAX_VOTES]
            if won:
                figures[f"maj@{k}"] = math.fsum(won) / len(won)
    return figures
