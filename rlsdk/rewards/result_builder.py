"""Collects values and failures of samples, in any order, into one result."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.definitions import FailureKind, RewardDef, RewardLimits
from rlsdk.rewards.outcomes import NonsenseError, check_graded, check_length, check_number
from rlsdk.rewards.results import EXAMPLES_PER_KIND, FailureExample, RewardResult, usable
from rlsdk.rewards.routing import applies_to
from rlsdk.system.printable import encodable


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
        graded, failed = (dict(zip(names, found, strict=True)) for found in (self._graded, self._failed))
        valid = usable(weights, graded, failed)
        totals = np.array(list(weights.values())) @ self._values
        return RewardResult(
            scores=np.where(valid, totals, 0.0),
            valid=valid,
            weights=weights,
            by_reward=dict(zip(names, self._values, strict=True)),
            graded=graded,
            failed=failed,
            token_scores={at: found for at, found in self._token_sums().items() if valid[at]},
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
        for (reward, sample), found in sorted(self._tokens.items()):
            if self.rewards[reward].weight == 0:
                continue
            weighed = self.rewards[reward].weight * found
            sums[sample] = sums[sample] + weighed if sample in sums else weighed
        return sums

    def _examples_in_order(self) -> tuple[FailureExample, ...]:
        found = sorted(
            (sample, reward, kind, message)
            for (kind, reward), shown in self._examples.items()
            for sample, message in shown
        )
        return tuple(
            FailureExample(kind=kind, reward=self.rewards[reward].name, sample=sample, message=message)
            for sample, reward, kind, message in found
        )
