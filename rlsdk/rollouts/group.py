"""Groups: the samples of one prompt, under an identity that never is a position in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlsdk.interfaces import PromptView, SamplingParams, Trajectory


@dataclass(frozen=True, order=True, kw_only=True)
class GroupId:
    """Which prompt, the how-manieth time."""

    source: str
    """`train`, or the name of an evaluation."""
    epoch: int
    """Full passes over the source before it."""
    index: int
    """Row of the source: the same in every epoch."""

    def __str__(self) -> str:
        return f"{self.source}/{self.epoch}/{self.index}"


@dataclass(frozen=True, kw_only=True)
class GroupTask:
    """A group that is to be made."""

    id: GroupId
    ordinal: int
    """Place in the order of the data, counted over all epochs; unique within its source. Lower goes first."""
    prompt: PromptView
    num_samples: int
    sampling: SamplingParams
    """Its `seed` is not read; see `seed`."""
    seed: tuple[int | str, ...]
    """What all randomness of the group is drawn from."""
    greedy_baseline: bool = False
    """One more sample, greedy, that is graded and not trained on: what others are measured against."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What grading made of one sample."""

    score: float = 0.0
    """Weighted sum of all rewards; 0 where `valid` is False."""
    valid: bool = True
    """Every reward of non-zero weight gave a number, and the sample was made."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Reward's name -> its value before its weight; only those that gave a number."""
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a sample has no reward, or no value of one of its rewards."""

    kind: str
    source: str
    """The reward's name, or `rollout`."""
    message: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One member of a group."""

    trajectory: Trajectory | None
    """None: its rollouter failed."""
    text: str
    """What the rewards saw: the response without the token that ended it."""
    grade: Grade


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group that was made and graded."""

    task: GroupTask
    samples: Sequence[Sample]
    """By sample index."""
    baseline: Sample | None = None
    """The greedy one, where it was asked for."""
