"""Rewards of a run: which functions, in which processes, and what came of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlsdk.config import RewardConfig, RewardLimitsConfig
from rlsdk.interfaces import BatchError, ConfigError, RewardSample
from rlsdk.registry import ComponentKind, Registry
from rlsdk.rewards import RewardDef, RewardLimits, RewardResult, RewardRunner
from rlsdk.rollouts import Failure, Grade, Group

if TYPE_CHECKING:
    from rlsdk.trainer.events import RunView


def resolve_rewards(rewards: Sequence[RewardConfig], registry: Registry) -> list[RewardDef]:
    """Registered names become import strings; everything else is a path to a function, looked up now so that a typo
    shows before any device is taken.

    Raises:
        ConfigError: no reward at all, or one that cannot be found.
    """
    if not rewards:
        names = registry.usable(ComponentKind.REWARD)
        raise ConfigError(
            f"rewards: expected at least one; give --reward NAME with one of {names}, or file.py:function"
        )
    found = []
    for reward in rewards:
        target = reward.name
        if ":" not in target:
            registered = registry.target(ComponentKind.REWARD, target)
            if not isinstance(registered, str):
                raise ConfigError(
                    f"rewards: {target!r} was registered as an object; it must be named as 'package.module:function', "
                    "because rewards run in a process of their own"
                )
            target = registered
        found.append(RewardDef(name=reward.name, target=target, weight=reward.weight, options=dict(reward.options)))
    return found


def start_rewards(
    rewards: Sequence[RewardConfig], limits: RewardLimitsConfig, registry: Registry, log_dir: Path
) -> RewardRunner:
    """The grading processes; their imports go on in the background."""
    log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    runner = RewardRunner(
        resolve_rewards(rewards, registry),
        _limits(limits),
        num_workers=limits.num_workers or max(1, min(8, (os.cpu_count() or 1) // 2)),
        log_path=log_dir / "rewards.log",
    )
    runner.start()
    return runner


def _limits(asked: RewardLimitsConfig) -> RewardLimits:
    return RewardLimits(
        timeout_s=asked.timeout_s,
        memory_mb=asked.memory_mb,
        start_timeout_s=asked.start_timeout_s,
        batched_timeout_s=asked.batched_timeout_s,
        batch_timeout_s=asked.batch_timeout_s,
        max_losses_in_a_row=asked.max_losses_in_a_row,
        allow_network=asked.allow_network,
        allow_writes=asked.allow_writes,
        isolation=asked.isolation,
        environment=asked.environment,
    )


class RewardGrader:
    """Satisfies `rlsdk.rollouts.Grader`."""

    def __init__(self, runner: RewardRunner, notice: Callable[[str], None]) -> None:
        """`notice` receives what went wrong and was put right: samples that were graded again."""
        self._runner = runner
        self._notice = notice

    def submit(self, samples: Sequence[RewardSample]) -> Future[Sequence[Grade]]:
        grades: Future[Sequence[Grade]] = Future()

        def done(found: Future[RewardResult]) -> None:
            try:
                result = found.result()
                for text in result.notices:
                    self._notice(f"rewards: {text}")
                grades.set_result(grades_of(result))
            except BaseException as error:
                grades.set_exception(error)

        self._runner.submit(samples).add_done_callback(done)
        return grades


def grades_of(result: RewardResult) -> list[Grade]:
    """What became of each sample."""
    failures: list[list[Failure]] = [[] for _ in result.scores]
    kinds = Counter(result.failures)
    shown = {(example.sample, example.reward): example for example in result.examples}
    for example in shown.values():
        kinds[example.kind] -= 1
    rest = kinds.elements()
    for name, graded in result.graded.items():
        for at in np.flatnonzero(~graded).tolist():
            known = shown.get((at, name))
            kind = known.kind if known else next(rest, "unknown")
            failures[at].append(Failure(kind=str(kind), source=name, message=known.message if known else ""))
    terms: list[dict[str, float]] = [{} for _ in result.scores]
    for name, values in result.by_reward.items():
        for at in np.flatnonzero(result.graded[name]).tolist():
            terms[at][name] = float(values[at])
    return [
        Grade(score=score, valid=valid, terms=terms[at], failures=tuple(failures[at]))
        for at, (score, valid) in enumerate(zip(result.scores.tolist(), result.valid.tolist(), strict=True))
    ]


@dataclass(frozen=True, kw_only=True)
class GradeSummary:
    """Figures of many grades."""

    num_samples: int
    num_failed: int
    """Samples without a score."""
    mean: float
    """Of the scores, failed samples left out; 0 where all failed."""
    std: float
    accuracy: float
    """Share of all samples to which the first reward gave 1 or more; a failed sample is not right."""
    terms: Mapping[str, float]
    """Mean of each reward over the samples that it graded; rewards that graded none are left out."""
    failures: Mapping[str, int]
    """By kind: each a sample and a reward."""
    example: Failure | None
    """The first failure that has a message."""

    @classmethod
    def of(cls, grades: Sequence[Grade], names: Sequence[str]) -> GradeSummary:
        """`names` are those of the rewards, in order."""
        scores = np.array([grade.score for grade in grades if grade.valid], np.float32)
        first = names[0] if names else ""
        right = [grade.valid and grade.terms.get(first, 0.0) >= 1.0 for grade in grades]
        values = {name: [g.terms[name] for g in grades if name in g.terms] for name in names}
        failures = [failure for grade in grades for failure in grade.failures]
        return cls(
            num_samples=len(grades),
            num_failed=sum(not grade.valid for grade in grades),
            mean=float(scores.mean()) if len(scores) else 0.0,
            std=float(scores.std()) if len(scores) else 0.0,
            accuracy=sum(right) / len(right) if right else 0.0,
            terms={name: float(np.mean(found)) for name, found in values.items() if found},
            failures=Counter(failure.kind for failure in failures),
            example=next((failure for failure in failures if failure.message), None),
        )

    def text(self, what: str) -> str | None:
        """What went wrong, in words; None where nothing did."""
        if not self.num_failed:
            return None
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.failures.items()))
        first = (
            f"; first: {self.example.kind} in {self.example.source!r}: {self.example.message}" if self.example else ""
        )
        return f"{what}: {self.num_failed} of {self.num_samples} samples have no score ({kinds}){first}"


def grades_in(groups: Iterable[Group]) -> list[Grade]:
    """Of every sample."""
    return [sample.grade for group in groups for sample in group.samples]


def check_failures(summary: GradeSummary, max_share: float, view: RunView) -> None:
    """Shows what went wrong with rewards.

    Raises:
        BatchError: more samples failed than `max_share` allows.
    """
    text = summary.text("rewards")
    if text is None:
        return
    view.notice(text)
    share = summary.num_failed / summary.num_samples
    if share > max_share:
        raise BatchError(
            f"{text}. That is {share:.0%} of the step, more than reward_limits.max_failure_share {max_share:.0%}"
        )
