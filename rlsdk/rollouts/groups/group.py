"""Groups: the samples of one prompt, with an identity that does not depend on the position in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import Episode, PromptView, SamplingParams, Trajectory


@dataclass(frozen=True, order=True, kw_only=True)
class GroupId:
    """Identity of a group: its prompt and epoch."""

    source: str
    """`train`, or the name of an evaluation."""
    epoch: int
    """Number of full passes over the source before this one."""
    index: int
    """Row of the source: the same in every epoch."""

    def __str__(self) -> str:
        return f"{self.source}/{self.epoch}/{self.index}"


@dataclass(frozen=True, kw_only=True)
class GroupTask:
    """A group to sample."""

    id: GroupId
    ordinal: int
    """Position in the order of the data, counted over all epochs; unique within its source. Lower ones go first."""
    prompt: PromptView
    num_samples: int
    sampling: SamplingParams
    """Sampling parameters; their `seed` is ignored in favour of the group's."""
    seed: tuple[int | str, ...]
    """Seed of all randomness of the group."""
    greedy_baseline: bool = False
    """Adds one greedy sample as a baseline, which is graded but not trained on."""
    adapter_version: int | None = None
    """As `GenerationRequest.adapter_version`."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The grade of one sample."""

    score: float = 0.0
    """Weighted sum of the rewards that apply; 0 where `valid` is False."""
    valid: bool = True
    """Whether it has a score: the sample was generated, no reward of non-zero weight failed, and at least one applies;
    or the sample failed and got the configured score of failed samples."""
    substituted: bool = False
    """Whether it failed and `score` is the configured score of failed samples."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Name of a reward -> its value before weighting; only rewards that returned a number."""
    token_scores: NDArray[np.float64] | None = None
    """`[response tokens]`: scores of all tokens after the prompt, including tool tokens, in addition to `score`; of one
    row after another. None: no reward returned any."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`REWARD/METRIC` -> number, for rewards that returned metrics."""
    failures: tuple[Failure, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether its rewards or its rollouter failed to give it a score."""
        return self.substituted or not self.valid


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Reason why a sample has no reward, or no value of one of its rewards."""

    kind: str
    source: str
    """The reward's name, or `rollout`."""
    message: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One member of a group: it has one score, one place in its group and one advantage, and one row or several."""

    episode: Episode | None
    """What its rollouter made: one row of a plain response, several where a history was cut. None: it failed."""
    text: str
    """The text that the rewards got: the response without the token that ended it."""
    grade: Grade
    lost_tokens: int = 0
    """Tokens that were sampled for it although it failed."""

    @property
    def rows(self) -> tuple[Trajectory, ...]:
        """Its rows of tokens, in order; none if its rollouter failed."""
        return () if self.episode is None else self.episode.rows

    @property
    def total(self) -> float:
        """The score plus the token scores of sampled tokens, which group estimators compare."""
        scores = self.grade.token_scores
        if scores is None or not self.rows:
            return self.grade.score
        mask = np.concatenate([row.response_mask for row in self.rows])
        return self.grade.score + float(scores[mask].sum(dtype=np.float64))

    @property
    def chain_scores(self) -> Mapping[int, float]:
        """Score of each of its chains, by number, without token scores; empty where they have none of their own."""
        if self.episode is None or not self.episode.chain_rewards or self.grade.has_failed:
            return {}
        own = self.episode.chain_rewards
        return {chain: self.grade.score + own.get(chain, 0.0) for chain in sorted({*self.episode.chains} or {0})}

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled, in all rows."""
        return sum(row.num_sampled for row in self.rows)

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it."""
        return self.episode is not None and self.episode.truncated

    @property
    def info(self) -> Mapping[str, float]:
        """Numbers about the episode; of a number that several rows have, the last one."""
        return {} if self.episode is None else self.episode.joined_info


@dataclass(frozen=True, kw_only=True)
class Group:
    """A sampled and graded group."""

    task: GroupTask
    samples: Sequence[Sample]
    """By sample index."""
    baseline: Sample | None = None
    """The greedy baseline sample, if requested."""
