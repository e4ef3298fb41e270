"""Results of grading a batch of samples: arrays per reward, weighted sums, and the builder that collects them."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import RewardSample
from rlsdk.interfaces.settings import RewardLimits
from rlsdk.rewards.scores.definitions import FailureKind, RewardDef
from rlsdk.rewards.scores.outcomes import NonsenseError, check_graded, check_length, check_number
from rlsdk.rewards.scores.routing import applies_to
from rlsdk.system.printable import encodable

EXAMPLES_PER_KIND = 3
"""Maximum number of examples in a result per kind of failure and reward."""


@dataclass(frozen=True, kw_only=True)
class FailureExample:
    """One failure, for display."""

    kind: FailureKind
    reward: str
    """Name of the reward; empty if no reward applies."""
    sample: int
    """Index in the batch."""
    message: str


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Result of grading `B` samples. For a sample, a reward returns a number, fails, or does not apply."""

    scores: NDArray[np.float64]
    """`[B]` float64: weighted sum of the rewards that returned a number; 0 where `valid` is False."""
    valid: NDArray[np.bool_]
    """`[B]`: no reward of non-zero weight failed, and at least one returned a number."""
    weights: Mapping[str, float]
    """Reward's name -> its factor in `scores`."""
    by_reward: Mapping[str, NDArray[np.float64]]
    """Reward's name -> `[B]` float64, not weighted; 0 where it returned no number."""
    graded: Mapping[str, NDArray[np.bool_]]
    """Reward's name -> `[B]`: it returned a number."""
    failed: Mapping[str, NDArray[np.bool_]]
    """Reward's name -> `[B]`: it failed."""
    token_scores: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    """Sample -> `[response tokens]` float64: weighted sum of the token scores; only samples with token scores."""
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Sample -> `REWARD/METRIC` -> number; only samples with metrics."""
    failures: Counter[str] = field(default_factory=Counter)
    """`FailureKind` -> number of failures; each is of one sample and one reward."""
    examples: tuple[FailureExample, ...] = ()
    """The first few failures of each kind and reward."""
    notices: tuple[str, ...] = ()
    """Notices for the run's log: samples that were graded again, missing confinement."""

    @classmethod
    def concat(cls, results: Sequence[RewardResult]) -> RewardResult:
        """Concatenates results of the same rewards for consecutive samples.

        Raises:
            ValueError: there is no result, or the results have different rewards.
        """
        if not results or any(list(result.by_reward) != list(results[0].by_reward) for result in results):
            raise ValueError("expected at least one result, all of the same rewards")
        names = list(results[0].by_reward)
        starts = np.cumsum([0, *(len(result.scores) for result in results)]).tolist()
        placed = list(zip(starts, results, strict=False))
        return cls(
            scores=np.concatenate([result.scores for result in results]),
            valid=np.concatenate([result.valid for result in results]),
            weights=results[0].weights,
            by_reward={name: np.concatenate([result.by_reward[name] for result in results]) for name in names},
            graded={name: np.concatenate([result.graded[name] for result in results]) for name in names},
            failed={name: np.concatenate([result.failed[name] for result in results]) for name in names},
            token_scores={start + at: values for start, r in placed for at, values in r.token_scores.items()},
            metrics={start + at: values for start, r in placed for at, values in r.metrics.items()},
            failures=sum((result.failures for result in results), Counter[str]()),
            examples=first_of_each_kind(
                [replace(one, sample=start + one.sample) for start, r in placed for one in r.examples]
            ),
            notices=tuple(notice for result in results for notice in result.notices),
        )

    def means(self) -> dict[str, float]:
        """Returns the mean of each reward over the samples that it graded; 0 if it graded none."""
        return {
            name: float(values[self.graded[name]].mean()) if self.graded[name].any() else 0.0
            for name, values in self.by_reward.items()
        }


class ResultBuilder:
    """Collects the results of samples. An item is (index of the reward, index of the sample).

    It checks results again, because they come from another process or from the network.
    """

    def __init__(self, rewards: Sequence[RewardDef], samples: Sequence[RewardSample], limits: RewardLimits) -> None:
        self.rewards = rewards
        self.samples = samples
        self.limits = limits
        self.left = sum(
            sum(applies_to(reward.rows, sample.row) for sample in samples) if reward.rows else len(samples)
            for reward in rewards
        )
        """Number of items that have no result yet."""
        self.notices: list[str] = []
        shape = (len(rewards), len(samples))
        self._values = np.zeros(shape)
        self._graded = np.zeros(shape, dtype=np.bool_)
        self._failed = np.zeros(shape, dtype=np.bool_)
        self._tokens: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._failures: Counter[str] = Counter()
        self._examples: dict[tuple[FailureKind, int], list[tuple[int, str]]] = {}
        """(sample, message) of the first few samples of each kind and reward, by sample index."""

    def take(
        self,
        item: tuple[int, int],
        score: object,
        token_scores: object = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Adds the return value of a reward; `score` None: it does not apply. Invalid values become failures."""
        try:
            if token_scores is None and not metrics and score is not None:
                self._values[item] = check_number(score, self.limits)
            else:
                graded = check_graded(score, token_scores, metrics or {}, self.limits)
                if (wrong := check_length(graded, len(self.samples[item[1]].response_ids))) is not None:
                    return self.fail(item, wrong.kind, wrong.message)
                self._note(item, graded.metrics)
                if graded.token_scores is not None:
                    self._tokens[item] = graded.token_scores
                if graded.score is None:
                    self.left -= 1
                    return None
                self._values[item] = graded.score
        except NonsenseError as error:
            return self.fail(item, error.kind, str(error))
        self._graded[item] = True
        self.left -= 1
        return None

    def fail(self, item: tuple[int, int], kind: FailureKind, message: str) -> None:
        """Adds the failure of an item."""
        self.left -= 1
        self._failed[item] = True
        self._failures[kind.value] += 1
        reward, sample = item
        shown = self._examples.setdefault((kind, reward), [])
        bisect.insort(shown, (sample, encodable(message)))
        del shown[EXAMPLES_PER_KIND:]

    def result(self) -> RewardResult:
        """Returns the result, with the weighted sum of all rewards."""
        names = [reward.name for reward in self.rewards]
        weights = {reward.name: reward.weight for reward in self.rewards}
        graded, failed = (dict(zip(names, values, strict=True)) for values in (self._graded, self._failed))
        valid = usable(weights, graded, failed)
        totals = np.array(list(weights.values())) @ self._values
        return RewardResult(
            scores=np.where(valid, totals, 0.0),
            valid=valid,
            weights=weights,
            by_reward=dict(zip(names, self._values, strict=True)),
            graded=graded,
            failed=failed,
            token_scores={at: values for at, values in self._token_sums().items() if valid[at]},
            metrics=self._metrics,
            failures=self._failures,
            examples=self._examples_in_order(),
            notices=tuple(self.notices),
        )

    def _note(self, item: tuple[int, int], metrics: Mapping[str, float]) -> None:
        reward, sample = item
        named = {f"{self.rewards[reward].name}/{name}": value for name, value in metrics.items()}
        if named:
            self._metrics.setdefault(sample, {}).update(named)

    def _token_sums(self) -> dict[int, NDArray[np.float64]]:
        """Returns, for each sample, the weighted sum of the token scores of its rewards."""
        sums: dict[int, NDArray[np.float64]] = {}
        for (reward, sample), scores in sorted(self._tokens.items()):
            if self.rewards[reward].weight == 0:
                continue
            weighed = self.rewards[reward].weight * scores
            sums[sample] = sums[sample] + weighed if sample in sums else weighed
        return sums

    def _examples_in_order(self) -> tuple[FailureExample, ...]:
        ordered = sorted(
            (sample, reward, kind, message)
            for (kind, reward), shown in self._examples.items()
            for sample, message in shown
        )
        return tuple(
            FailureExample(kind=kind, reward=self.rewards[reward].name, sample=sample, message=message)
            for sample, reward, kind, message in ordered
        )


def merge(parts: Sequence[RewardResult], names: Sequence[str]) -> RewardResult:
    """Merges results of different rewards for the same samples; the rewards come in the order of `names`."""
    weights = {name: weight for part in parts for name, weight in part.weights.items()}
    graded = {name: values for part in parts for name, values in part.graded.items()}
    failed = {name: values for part in parts for name, values in part.failed.items()}
    by_reward = {name: values for part in parts for name, values in part.by_reward.items()}
    valid = usable(weights, graded, failed)
    tokens: dict[int, NDArray[np.float64]] = {}
    metrics: dict[int, dict[str, float]] = {}
    for part in parts:
        for at, values in part.token_scores.items():
            tokens[at] = tokens[at] + values if at in tokens else values
        for at, named in part.metrics.items():
            metrics.setdefault(at, {}).update(named)
    total = np.sum([np.float64(weights[name]) * by_reward[name] for name in names], axis=0)
    examples = sorted((one for part in parts for one in part.examples), key=lambda one: one.sample)
    return RewardResult(
        scores=np.where(valid, total, 0.0),
        valid=valid,
        weights={name: weights[name] for name in names},
        by_reward={name: by_reward[name] for name in names},
        graded={name: graded[name] for name in names},
        failed={name: failed[name] for name in names},
        token_scores={at: values for at, values in tokens.items() if valid[at]},
        metrics=metrics,
        failures=sum((part.failures for part in parts), Counter[str]()),
        examples=tuple(examples),
        notices=tuple(notice for part in parts for notice in part.notices),
    )


def usable(
    weights: Mapping[str, float], graded: Mapping[str, NDArray[np.bool_]], failed: Mapping[str, NDArray[np.bool_]]
) -> NDArray[np.bool_]:
    """Returns `[B]`: samples with a valid score from the rewards of non-zero weight; all if there are no such
    rewards."""
    counted = [name for name, weight in weights.items() if weight != 0] or None
    if counted is None:
        return np.ones(len(next(iter(graded.values()))), np.bool_)
    some: NDArray[np.bool_] = np.any([graded[name] for name in counted], axis=0)
    broken: NDArray[np.bool_] = np.any([failed[name] for name in counted], axis=0)
    return some & ~broken


def name_inapplicable(result: RewardResult, *, scored_elsewhere: bool = False) -> RewardResult:
    """Counts samples to which no reward applies as failures.

    Args:
        result: results of all rewards.
        scored_elsewhere: every sample also gets a score from elsewhere (a reward model); then such samples are valid,
            with a score of 0.
    """
    counted = [name for name, weight in result.weights.items() if weight != 0]
    broken = np.any([result.failed[name] for name in counted], axis=0) if counted else np.zeros_like(result.valid)
    left = np.flatnonzero(~result.valid & ~broken)
    if not len(left):
        return result
    if scored_elsewhere:
        return replace(result, valid=result.valid | ~broken)
    message = (
        f"no reward applies to this sample: each of {counted} is for other rows, or returned None "
        "(a function without `return` also returns None)"
    )
    shown = [
        FailureExample(kind=FailureKind.INAPPLICABLE, reward="", sample=int(at), message=message)
        for at in left[:EXAMPLES_PER_KIND]
    ]
    counts = Counter(result.failures)
    counts[FailureKind.INAPPLICABLE.value] += len(left)
    examples = tuple(sorted([*result.examples, *shown], key=lambda one: one.sample))
    return replace(result, failures=counts, examples=examples)


def first_of_each_kind(examples: Sequence[FailureExample]) -> tuple[FailureExample, ...]:
    """Returns at most `EXAMPLES_PER_KIND` examples of each kind and reward, in order."""
    shown = Counter[tuple[str, str]]()
    kept = []
    for example in examples:
        shown[example.kind, example.reward] += 1
        if shown[example.kind, example.reward] <= EXAMPLES_PER_KIND:
            kept.append(example)
    return tuple(kept)


def failures_of(result: RewardResult) -> Sequence[Sequence[tuple[str, str, str]]]:
    """Returns, for each sample, (kind, reward, message) of each failure; the reward is empty if none applies.

    Only the first few failures of each kind and reward have a message; for the others it is empty.
    """
    if not result.failures and bool(result.valid.all()):
        return [_NONE] * len(result.scores)
    failures: list[list[tuple[str, str, str]]] = [[] for _ in result.scores]
    kinds = Counter(result.failures)
    shown = {(example.sample, example.reward): example for example in result.examples}
    for example in shown.values():
        kinds[example.kind] -= 1
    rest = kinds.elements()
    for name, failed in result.failed.items():
        for at in np.flatnonzero(failed).tolist():
            known = shown.get((at, name))
            kind = str(known.kind) if known else next(rest, "unknown")
            failures[at].append((kind, name, known.message if known else ""))
    for at in np.flatnonzero(~result.valid).tolist():
        known = shown.get((at, ""))
        if not failures[at] or known is not None:
            failures[at].append((FailureKind.INAPPLICABLE.value, "", known.message if known else ""))
    return failures


_NONE: tuple[tuple[str, str, str], ...] = ()
"""Shared empty value, because thousands of samples have no failure."""
