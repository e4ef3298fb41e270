"""Plain data around grading: what is graded by what, under which limits, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import ConfigError

EXAMPLES_PER_KIND = 3
"""Of each kind of failure and reward, that a result shows."""


class FailureKind(StrEnum):
    """Why a sample has no reward."""

    EXCEPTION = "exception"
    """The function raised."""
    TIMEOUT = "timeout"
    """It took longer than `RewardLimits.timeout_s`, or the batch longer than `batch_timeout_s`."""
    MEMORY = "memory"
    """It wanted more than `RewardLimits.memory_mb`."""
    NAN = "nan"
    """It gave NaN or an infinity."""
    NONE = "none"
    """It gave None: most often a missing `return`."""
    TYPE = "type"
    """It gave something that is no number."""
    CRASH = "crash"
    """The grading process died under it, or could not be kept alive."""


@dataclass(frozen=True, kw_only=True)
class RewardDef:
    """One term of the reward."""

    name: str
    """Of the term, in metrics; unique within a run."""
    target: str
    """`pkg.mod:fn` or `path/file.py:fn` of a `RewardFn` or `BatchRewardFn`."""
    weight: float = 1.0
    """Factor in a sample's score; 0: measured, not rewarded, and its failures cost no sample."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function: JSON types."""


@dataclass(frozen=True, kw_only=True)
class RewardLimits:
    """What grading may cost. Past a limit the sample has no reward; nothing else happens."""

    timeout_s: float = 10.0
    """Seconds per sample and reward."""
    memory_mb: int = 1024
    """MiB of address space that grading may add to what the loaded functions take."""
    start_timeout_s: float = 120.0
    """Seconds to start a grading process: imports of reward modules and their `prepare`."""
    batched_timeout_s: float = 60.0
    """Seconds for one call of a batched function. Past it, its samples are tried one by one."""
    batch_timeout_s: float = 600.0
    """Seconds for all samples of one `score` call; what is not graded then counts as timed out."""
    max_losses_in_a_row: int = 5
    """Grading processes lost one after the other without a single sample graded in between; what is not graded then
    counts as crashed."""

    allow_network: bool = False
    """Sockets, for rewards that ask a server."""
    allow_writes: bool = False
    """File writes outside the folder for temporary files."""
    isolation: Literal["auto", "always", "never"] = "auto"
    """Whether every call runs in a forked process of its own, which costs milliseconds and keeps nothing from call to
    call. auto: of the functions that run text as Python (`eval`, sympy's `parse_expr`), as far as their code shows."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that grading processes get besides the ordinary ones (`grading_environment`)."""

    def for_process(self) -> dict[str, Any]:
        """What a grading process must know."""
        names = ("memory_mb", "allow_network", "allow_writes", "isolation")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "isolation" and value not in ("auto", "always", "never"):
                raise ConfigError(f"reward limit isolation is {value!r}; expected auto, always or never")
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"reward limit {name} is {value!r}; expected a number above 0")


@dataclass(frozen=True, kw_only=True)
class FailureExample:
    """One failure, to be shown."""

    kind: FailureKind
    reward: str
    sample: int
    """Position in the batch."""
    message: str


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """What grading made of `B` samples."""

    scores: NDArray[np.float32]
    """`[B]` float32: weighted sum of all rewards; 0 where `valid` is False."""
    valid: NDArray[np.bool_]
    """`[B]`: every reward of non-zero weight gave a number."""
    by_reward: Mapping[str, NDArray[np.float32]]
    """Reward's name -> `[B]` float32, before its weight; 0 where it failed."""
    graded: Mapping[str, NDArray[np.bool_]]
    """Reward's name -> `[B]`: it gave a number."""
    failures: Counter[str]
    """`FailureKind` -> failures, each a sample and reward."""
    examples: tuple[FailureExample, ...] = ()
    """The first few of each kind and reward."""

    notices: tuple[str, ...] = ()
    """What went wrong and was put right, for the run's log: samples that were graded again."""

    @classmethod
    def concat(cls, results: Sequence[RewardResult]) -> RewardResult:
        """The results of the same rewards for consecutive samples, as one.

        Raises:
            ValueError: no result, or results of other rewards.
        """
        if not results or any(list(result.by_reward) != list(results[0].by_reward) for result in results):
            raise ValueError("expected at least one result, all of the same rewards")
        names = list(results[0].by_reward)
        starts = np.cumsum([0, *(len(result.scores) for result in results)]).tolist()
        examples = [
            replace(example, sample=start + example.sample)
            for start, result in zip(starts, results, strict=False)
            for example in result.examples
        ]
        return cls(
            scores=np.concatenate([result.scores for result in results]),
            valid=np.concatenate([result.valid for result in results]),
            by_reward={name: np.concatenate([result.by_reward[name] for result in results]) for name in names},
            graded={name: np.concatenate([result.graded[name] for result in results]) for name in names},
            failures=sum((result.failures for result in results), Counter[str]()),
            examples=_first_of_each_kind(examples),
            notices=tuple(notice for result in results for notice in result.notices),
        )

    def means(self) -> dict[str, float]:
        """Mean of each reward over the samples that it graded; 0 where it graded none."""
        return {
            name: float(values[self.graded[name]].mean()) if self.graded[name].any() else 0.0
            for name, values in self.by_reward.items()
        }


def _first_of_each_kind(examples: Sequence[FailureExample]) -> tuple[FailureExample, ...]:
    shown = Counter[tuple[str, str]]()
    kept = []
    for example in examples:
        shown[example.kind, example.reward] += 1
        if shown[example.kind, example.reward] <= EXAMPLES_PER_KIND:
            kept.append(example)
    return tuple(kept)
