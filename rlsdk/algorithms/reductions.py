"""Reductions over rows, samples, groups and masks of the packed batch, for estimators, corrections and metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rlsdk.interfaces import Batch, check_samples

CHAIN_SCORES = "chain_scores"


def valid_rows(batch: Batch) -> Tensor:
    """Returns `[B]` bool: rows whose reward can be used; all rows if the batch has no field `valid`."""
    if "valid" in batch:
        return batch["valid"]
    return torch.ones(batch.num_rows, dtype=torch.bool, device=batch.lengths.device)


def trained_rows(batch: Batch) -> Tensor:
    """Returns `[B]` bool: valid rows that contribute to the loss, by the field `trained` if the batch has it."""
    return valid_rows(batch) & batch["trained"] if "trained" in batch else valid_rows(batch)


def response_lengths(batch: Batch) -> Tensor:
    """Returns `[B]` int64: number of tokens of each row that the policy sampled; tool tokens do not count."""
    return batch.row_sum(batch["response_mask"].long())


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a batch, in the order of their first rows, and reductions over their rows and tokens.

    A sample has one row or several (`Batch.sample_of_row`). Its rows and tokens are in the order of `row_id`, wherever
    they are in the batch.
    """

    batch: Batch
    index: Tensor
    """`[B]` int64: sample of each row, 0..count-1."""
    count: int
    are_chains: bool = False
    """Whether each is a chain of a sample, with a score of its own: see `scored`."""

    @classmethod
    def of(cls, batch: Batch) -> Samples:
        """The samples of a batch.

        Raises:
            BatchError: rows of one sample differ in what a sample has once: its score, whether it is valid.
        """
        index = batch.sample_of_row
        samples = cls(batch=batch, index=index, count=int(index.max()) + 1 if len(index) else 0)
        if samples.has_several_rows:
            check_samples(batch)
        return samples

    @classmethod
    def scored(cls, batch: Batch) -> Samples:
        """What has a score and a place in a group: the samples, or the chains of each where the batch has
        `chain_scores`. A group of chains has the chains of one number of the samples of one prompt.

        Raises:
            BatchError: as `of`.
        """
        samples = cls.of(batch)
        if CHAIN_SCORES not in batch:
            return samples
        chain = batch["chain"] if "chain" in batch else torch.zeros_like(samples.index)
        found, index = torch.unique(_pairs(samples.index, chain), return_inverse=True)
        rows = torch.arange(batch.num_rows, device=index.device)
        first = torch.full_like(found, batch.num_rows).scatter_reduce(0, index, rows, "amin")
        return replace(samples, index=first.argsort().argsort()[index], count=len(found), are_chains=True)

    @property
    def has_several_rows(self) -> bool:
        """Whether a sample has more than one row."""
        return self.count < self.batch.num_rows

    @cached_property
    def rows(self) -> Tensor:
        """`[B]` int64: the rows sample by sample, each in the order of `row_id`."""
        if not self.has_several_rows:
            return self.index
        by_id = self.batch["row_id"].argsort()
        return by_id[self.index[by_id].argsort(stable=True)]

    @property
    def tokens(self) -> Tensor:
        """`[N]` int64: the positions of all tokens sample by sample, each in the order in which it was written."""
        return self.batch.token_index(self.rows)

    @cached_property
    def of_token(self) -> Tensor:
        """`[N]` int64: sample of each token."""
        return self.index[self.batch.row_of_token]

    @cached_property
    def chains(self) -> Chains:
        """The chains of the samples; each sample is one where the batch has no field `chain`."""
        if "chain" not in self.batch or not self.count:
            return Chains(rows=self.rows, of_token=self.of_token, count=self.count)
        chain = self.batch["chain"]
        _, of_row = torch.unique(self.index * (int(chain.max()) + 1) + chain, return_inverse=True)
        rows = self.rows[of_row[self.rows].argsort(stable=True)]
        return Chains(rows=rows, of_token=of_row[self.batch.row_of_token], count=int(of_row.max()) + 1)

    @cached_property
    def last(self) -> Tensor:
        """`[S]` int64: the last row of each sample."""
        return self.rows[self.sum(torch.ones_like(self.index)).cumsum(0) - 1]

    def of_rows(self, per_row: Tensor) -> Tensor:
        """Returns `[S]`: a value that all rows of a sample have in common, from `[B]`."""
        return per_row[self.last]

    def sum(self, per_row: Tensor) -> Tensor:
        """Returns `[S]`: the sum of a `[B]` tensor over each sample's rows, in its dtype."""
        return per_row.new_zeros(self.count).index_add(0, self.index, per_row)

    def token_sum(self, flat: Tensor) -> Tensor:
        """Returns `[S]`: the sum of a flat `[N]` tensor over each sample's tokens, in its dtype; differentiable."""
        return flat.new_zeros(self.count).index_add(0, self.of_token, flat)

    def token_mean(self, flat: Tensor, mask: Tensor) -> Tensor:
        """Returns `[S]`: mean of a flat `[N]` tensor over each sample's tokens under `mask`; 0 if it has none.

        Differentiable.
        """
        count = self.token_sum(mask.to(flat.dtype)).clamp(min=1)
        return self.token_sum(torch.where(mask, flat, 0.0)) / count

    @property
    def valid(self) -> Tensor:
        """`[S]` bool: samples whose reward can be used."""
        return self.of_rows(valid_rows(self.batch))

    @property
    def lengths(self) -> Tensor:
        """`[S]` int64: number of tokens of each sample that the policy sampled; tool tokens do not count."""
        return self.token_sum(self.batch["response_mask"].long())

    @property
    def scores(self) -> Tensor:
        """`[S]` float64: the score of each, without token scores."""
        return self.of_rows(self.batch[CHAIN_SCORES if self.are_chains else "scores"])

    @property
    def groups(self) -> Groups:
        """The samples of each prompt, or chains of one number of them: groups over `[S]` values."""
        uid = self.of_rows(self.batch["uid"])
        if not self.are_chains or "chain" not in self.batch:
            return Groups.by(uid)
        return Groups.by(_pairs(torch.unique(uid, return_inverse=True)[1], self.of_rows(self.batch["chain"])))

    def add_to_scores(self, change: Tensor) -> Batch:
        """The batch with `change`, `[S]` of samples, added to their scores, on all their rows."""
        names = [name for name in ("scores", CHAIN_SCORES) if name in self.batch]
        added = change.double()[self.index]
        return self.batch.with_rows(**{name: self.batch[name] + added.to(self.batch[name].dtype) for name in names})


@dataclass(frozen=True, kw_only=True)
class Chains:
    """Rows that follow one another in time: those of one agent of a sample."""

    rows: Tensor
    """`[B]` int64: the rows chain by chain, each in the order of `row_id`."""
    of_token: Tensor
    """`[N]` int64: chain of each token, 0..count-1, in ascending order of the samples."""
    count: int


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """One number for each pair of numbers from 0."""
    return first * (int(second.max()) + 1 if len(second) else 1) + second


def total_scores(samples: Samples, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns `[S]` float64: the score of each plus its `token_scores`, if the batch has them, each rounded to
    `dtype`."""
    scores: Tensor = samples.scores.to(dtype).double()
    if "token_scores" in samples.batch:
        scores = scores + samples.token_sum(samples.batch["token_scores"].to(dtype).double())
    return scores


def outcome_rewards(samples: Samples) -> Tensor:
    """Returns `[S]` float64: sum of each sample's `token_level_rewards` over its response; 0 for invalid samples."""
    batch = samples.batch
    rewards = torch.where(batch["response_mask"], batch["token_level_rewards"], 0.0)
    return torch.where(samples.valid, samples.token_sum(rewards.double()), 0.0)


def with_advantages(samples: Samples, per_sample: Tensor) -> Batch:
    """Adds `advantages`, flat `[N]` float32: the value of each sample (`[S]`) on all its response tokens."""
    spread = per_sample.float()[samples.of_token]
    return samples.batch.with_tokens(advantages=torch.where(samples.batch["response_mask"], spread, 0.0))


def standardize(values: Tensor, where: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Returns `(x - mean) / sqrt(variance + eps)` over `where`, 0 elsewhere.

    Computed in float64, returned in the dtype of `values`. The variance has the divisor n - 1. Fewer than two values,
    or equal ones, give 0.
    """
    chosen = values[where].double()
    out = values.new_zeros(values.shape)
    if len(chosen) > 1:
        out[where] = ((chosen - chosen.mean()) * (chosen.var() + eps).rsqrt()).to(values.dtype)
    return out


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Groups of rows or of samples with equal `uid` (any int64), and reductions over them."""

    index: Tensor
    """`[B]` or `[S]` int64: group of each row or sample, 0..count-1, in ascending order of `uid`."""
    count: int

    @classmethod
    def of(cls, batch: Batch) -> Groups:
        """Groups the rows of a batch by the field `uid`. `Samples.groups` groups its samples."""
        return cls.by(batch["uid"])

    @classmethod
    def by(cls, uid: Tensor) -> Groups:
        """Groups whatever has these `uid`s."""
        uids, index = torch.unique(uid, return_inverse=True)
        return cls(index=index, count=len(uids))

    def sum(self, values: Tensor) -> Tensor:
        """Returns `[groups]`: sum of `values` over each group, in their dtype; differentiable."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def largest(self, values: Tensor) -> Tensor:
        """Returns `[groups]`: maximum of `values` in each group."""
        start = values.new_full((self.count,), -torch.inf)
        return start.scatter_reduce(0, self.index, values, "amax")

    def smallest(self, values: Tensor) -> Tensor:
        """Returns `[groups]`: minimum of `values` in each group."""
        return -self.largest(-values)
