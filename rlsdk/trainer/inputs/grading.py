"""Grades of samples, and metrics over many of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlsdk.algorithms import is_verdict, reaches
from rlsdk.interfaces import BatchError, RewardSample
from rlsdk.rewards import OWN_METRICS, RewardResult, Scorer, failures_of
from rlsdk.rollouts import Failure, Grade, Group

if TYPE_CHECKING:
    from rlsdk.trainer.tracking.events import RunView

NO_REWARD = "rewards"
"""Failure source for a sample to which no reward applies."""
ROLLOUT = "rollout"
"""Failure source for a sample that its rollouter could not make."""


class RewardGrader:
    """Satisfies `rlsdk.rollouts.Grader`."""

    def __init__(self, scorer: Scorer, notice: Callable[[str], None], *, failed_score: float | None = None) -> None:
        """`notice` receives errors that were recovered by grading samples again. `failed_score`: see
        `grades_of`."""
        self._scorer = scorer
        self._notice = notice
        self._failed_score = failed_score

    def submit(self, samples: Sequence[RewardSample]) -> Future[Sequence[Grade]]:
        grades: Future[Sequence[Grade]] = Future()

        def done(found: Future[RewardResult]) -> None:
            try:
                result = found.result()
                for text in result.notices:
                    self._notice(f"rewards: {text}")
                grades.set_result(grades_of(result, self._failed_score))
            except BaseException as error:
                grades.set_exception(error)

        self._scorer.submit(samples).add_done_callback(done)
        return grades


def grades_of(result: RewardResult, failed_score: float | None = None) -> list[Grade]:
    """The grade of each sample.

    Args:
        result: result of all rewards.
        failed_score: score for samples without a score; None: these samples are invalid.
    """
    failures = failures_of(result)
    terms: list[dict[str, float]] = [{} for _ in result.scores]
    for name, values in result.by_reward.items():
        for at in np.flatnonzero(result.graded[name]).tolist():
            terms[at][name] = float(values[at])
    return [
        Grade(
            score=score if valid or failed_score is None else failed_score,
            valid=valid or failed_score is not None,
            substituted=not valid and failed_score is not None,
            terms=terms[at],
            token_scores=result.token_scores.get(at),
            metrics=result.metrics.get(at, {}),
            failures=tuple(
                [Failure(kind=kind, source=name or NO_REWARD, message=text) for kind, name, text in failures[at]]
            ),
        )
        for at, (score, valid) in enumerate(zip(result.scores.tolist(), result.valid.tolist(), strict=True))
    ]


@dataclass(frozen=True, kw_only=True)
class CorrectRule:
    """Which samples count as correct."""

    reward: str | None = None
    """Name of the reward that decides; None: the first one that applies to a sample."""
    least: float = 1.0
    """A sample is correct if that reward is at least this value."""

    def share(self, grades: Sequence[Grade], names: Sequence[str]) -> float:
        """Share of the samples that are correct; NaN if the reward that decides does not say what is right."""
        decide = names if self.reward is None else [self.reward]
        graded = [_first_term(grade, decide) for grade in grades if not grade.has_failed]
        if self.reward is None and not is_verdict(graded, self.least):
            return math.nan
        return sum(self.holds(grade, names) for grade in grades) / len(grades) if grades else 0.0

    def holds(self, grade: Grade, names: Sequence[str]) -> bool:
        """Whether a sample is correct; False if it has no score. `names`: of all rewards, in order."""
        decide = names if self.reward is None else [self.reward]
        return not grade.has_failed and reaches(_first_term(grade, decide), self.least)


@dataclass(frozen=True, kw_only=True)
class TermSummary:
    """Statistics of one reward over many samples."""

    mean: float | None
    """Mean over the samples that it gave a number; None if there is none."""
    applied_share: float
    """Share of the finished samples that it gave a number or failed on."""
    failed_share: float
    """Share of the finished samples on which it failed."""
    metrics: Mapping[str, float]
    """Mean of each of its own metrics, over the samples that have it."""


@dataclass(frozen=True, kw_only=True)
class GradeSummary:
    """Statistics of many grades."""

    num_samples: int
    num_failed: int
    """Number of samples without a score, or with the score for failed samples."""
    mean: float
    """Mean score without dropped samples; 0 if all were dropped."""
    std: float
    accuracy: float
    """Share of all samples that are correct (`CorrectRule`); a failed sample counts as incorrect. NaN if no reward says
    what is right."""
    terms: Mapping[str, float]
    """Mean of each reward over the samples that it graded; rewards that graded none are left out."""
    by_reward: Mapping[str, TermSummary]
    failures: Mapping[str, int]
    """Number of failures by kind; each failure is one sample and one reward."""
    example: Failure | None
    """The first failure that has a message."""
    example_row: str = ""
    """The sample of `example`, if known."""

    @classmethod
    def of(
        cls,
        grades: Sequence[Grade],
        names: Sequence[str],
        where: Sequence[str] = (),
        correct: CorrectRule = CorrectRule(),
    ) -> GradeSummary:
        """`names` are the reward names, in order; `where` names the sample of each grade."""
        scores = np.array([grade.score for grade in grades if grade.valid])
        shown = [(at, failure) for at, grade in enumerate(grades) for failure in grade.failures if failure.message]
        by_reward = {name: _term(grades, name) for name in names}
        return cls(
            num_samples=len(grades),
            num_failed=sum(grade.has_failed for grade in grades),
            mean=float(scores.mean()) if len(scores) else 0.0,
            std=float(scores.std()) if len(scores) else 0.0,
            accuracy=correct.share(grades, names),
            terms={name: term.mean for name, term in by_reward.items() if term.mean is not None},
            by_reward=by_reward,
            failures=Counter(failure.kind for grade in grades for failure in grade.failures),
            example=shown[0][1] if shown else None,
            example_row=where[shown[0][0]] if shown and where else "",
        )

    @classmethod
    def of_groups(
        cls,
        groups: Sequence[Group],
        names: Sequence[str],
        correct: CorrectRule = CorrectRule(),
    ) -> GradeSummary:
        """Summary over every sample of the groups; a failure names its row."""
        grades = grades_in(groups)
        if not any(grade.failures for grade in grades):
            return cls.of(grades, names, (), correct)
        where = [f"{group.task.id} sample {at}" for group in groups for at in range(len(group.samples))]
        return cls.of(grades, names, where, correct)

    def metrics(self) -> dict[str, float]:
        """For each reward: `NAME` (its mean), `NAME/applied_share`, `NAME/failed_share`, and `NAME/METRIC`."""
        metrics: dict[str, float] = dict(self.terms)
        for name, term in self.by_reward.items():
            shares = (term.applied_share, term.failed_share)
            metrics |= {f"{name}/{which}": share for which, share in zip(OWN_METRICS, shares, strict=True)}
            metrics |= {f"{name}/{metric}": value for metric, value in term.metrics.items()}
        return metrics

    def text(self, what: str) -> str | None:
        """Text about the failures; None if there are none."""
        if not self.num_failed:
            return None
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.failures.items()))
        first = ""
        if self.example is not None:
            row = f", {self.example_row}" if self.example_row else ""
            first = f"; first: {self.example.kind} in {self.example.source!r}{row}: {self.example.message}"
        return f"{what}: {self.num_failed} of {self.num_samples} samples have no score ({kinds}){first}"


def _first_term(grade: Grade, names: Sequence[str]) -> float:
    """Score of the first reward that applies to this sample; 0 if it failed."""
    if names and names[0] in grade.terms:
        return grade.terms[names[0]]
    failed = {failure.source for failure in grade.failures}
    return next((grade.terms.get(name, 0.0) for name in names if name in grade.terms or name in failed), 0.0)


def _term(grades: Sequence[Grade], name: str) -> TermSummary:
    """Summary of one reward; a sample that its rollouter could not make counts for no reward."""
    values = [grade.terms[name] for grade in grades if name in grade.terms]
    sources = [{failure.source for failure in grade.failures} for grade in grades if grade.failures]
    num_failed = sum(name in failed for failed in sources)
    made = len(grades) - sum(ROLLOUT in failed for failed in sources) or 1
    metrics: dict[str, list[float]] = {}
    for grade in grades:
        for key, value in grade.metrics.items():
            reward, _, metric = key.rpartition("/")
            if reward == name:
                metrics.setdefault(metric, []).append(value)
    return TermSummary(
        mean=float(np.mean(values)) if values else None,
        applied_share=(len(values) + num_failed) / made,
        failed_share=num_failed / made,
        metrics={metric: float(np.mean(failed)) for metric, failed in metrics.items()},
    )


def grades_in(groups: Iterable[Group]) -> list[Grade]:
    """Grades of every sample in the groups."""
    return [sample.grade for group in groups for sample in group.samples]


def check_failures(summary: GradeSummary, max_share: float, view: RunView) -> None:
    """Reports failed rewards: as a notice, or as the error that ends the run.

    Raises:
        BatchError: more samples failed than `max_share` allows.
    """
    text = summary.text("rewards")
    if text is None:
        return
    share = summary.num_failed / summary.num_samples
    if share > max_share:
        raise BatchError(
            f"{text}. That is {share:.0%} of the step, more than reward_limits.max_failure_share {max_share:.0%}"
        )
    view.notice(text)
