"""Tests whether draws follow their probabilities and are independent, by sums of functions of each draw minus their
means.

The probabilities of every draw are known. For a function f of the drawn token, f minus its mean under these
probabilities is a martingale difference, regardless of earlier tokens and of where a response ends. Freedman 1975 ("On
tail probabilities for martingales") bounds sums S of these exactly: P(|S| >= x) <= 2 exp(-x^2 / (2 (V + M x / 3))),
with V the sum of variances and M the largest step. `score` is the square root of twice this exponent: a score above 6.5
has a probability below 1e-9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.testing.rollout.audit import Sample

SCORE = 6.5
"""Largest allowed score, for some thousand sums."""
Z = 4.9
"""Largest allowed deviation of a sum that is close to normal, in standard deviations: one false alarm in a million."""
SHIFTS = 3
"""Shifts in steps at which the noise of two samples is compared."""
RAREST = 0.05
"""Probability of all of a draw's least probable tokens that one function looks at: those that filters nearly left
out."""
UNSEEN = 1e-12
"""Probabilities below this are 0 except for rounding."""


@dataclass(frozen=True)
class Steps:
    """Values of a function at N draws, minus their expectations."""

    found: Tensor
    """`[N]`: mean 0."""
    variance: Tensor
    """`[N]`."""
    largest: Tensor
    """`[N]`: largest possible absolute value."""

    def of(self, chosen: Tensor) -> Steps:
        """The draws where `chosen [N]` is true."""
        return Steps(self.found[chosen], self.variance[chosen], self.largest[chosen])

    def z(self) -> float:
        """Deviation of the sum in standard deviations; 0 if nothing was random."""
        variance = float(self.variance.sum())
        return float(self.found.sum()) / variance**0.5 if variance > UNSEEN else 0.0

    def score(self) -> float:
        """The score, as defined by the module."""
        if not len(self.found):
            return 0.0
        return float(scores(self.found.sum().abs(), self.variance.sum(), self.largest.max()))


def scores(off: Tensor, variance: Tensor, largest: Tensor) -> Tensor:
    """Scores of many sums: from their absolute deviations, variances and largest steps."""
    scale = (variance + largest * off / 3).clamp(min=UNSEEN).sqrt()
    return torch.where(variance > UNSEEN, off / scale, 0.0)


def steps_of(values: Tensor, chances: Tensor, tokens: Tensor) -> Steps:
    """The value of a function at each drawn token, minus its expectation.

    Args:
        values: `[N, V]`: the function at every token.
        chances: `[N, V]`: probabilities of the tokens; rows sum to 1.
        tokens: `[N]`: the drawn tokens.
    """
    mean = (chances * values).sum(-1)
    off = values - mean[:, None]
    possible = torch.where(chances > UNSEEN, off.abs(), 0.0)
    found = off.gather(1, tokens[:, None])[:, 0]
    # A token at the border of a filter, which rounding kept, is not counted.
    found = torch.where(chances.gather(1, tokens[:, None])[:, 0] > UNSEEN, found, 0.0)
    return Steps(found, (chances * off.square()).sum(-1), possible.amax(-1))


def midpoints(chances: Tensor) -> Tensor:
    """`[N, V]`: the midpoint of each token's interval of [0, 1), with tokens in order: the probability transform."""
    return chances.cumsum(-1) - chances / 2


def _mass_below(chances: Tensor) -> Tensor:
    """`[N, V]`: the probability of each token and all that are less probable."""
    ordered, index = chances.sort(dim=-1, stable=True)
    return torch.empty_like(chances).scatter_(-1, index, ordered.cumsum(-1))


def functions(samples: Sequence[Sample], eos: int) -> Mapping[str, Tensor]:
    """The functions to evaluate at every draw of one request's samples: name -> `[N, V]`."""
    chances = torch.cat([sample.chances for sample in samples])
    probabilities = torch.cat([sample.probabilities for sample in samples])
    place, request = midpoints(chances), samples[0].request
    vocabulary = chances.shape[1]
    given = torch.tensor([*request.prompt_ids, *request.response_ids])
    prompt, stops = torch.zeros(2, vocabulary, dtype=torch.float64)
    prompt[given] = 1
    stops[[eos, *(token for token in request.sampling.stop_token_ids if token < vocabulary)]] = 1
    before, seen = [], []
    for sample in samples:
        length = len(sample.tokens)
        one = torch.zeros(2, length, vocabulary, dtype=torch.float64)
        one[0, torch.arange(length), torch.cat([given[-1:], sample.tokens])[:-1]] = 1
        one[1, torch.arange(1, length), sample.tokens[:-1]] = 1
        before.append(one[0])
        seen.append(one[1].cumsum(0).clamp(max=1))
    return {
        # For tokens that filters keep, the probabilities before the filters are equally informative.
        "surprise": -probabilities.clamp(min=1e-30).log(),
        "most probable": (chances == chances.amax(-1, keepdim=True)).double(),
        "unlikely": (chances < 0.3 / (chances > UNSEEN).sum(-1, keepdim=True)).double(),
        "rarest": (_mass_below(chances) <= RAREST).double(),
        "place": place,
        "middle": (place - 0.5).abs(),
        "same as before": torch.cat(before),
        "seen before": torch.cat(seen),
        "of the prompt": prompt.expand(len(chances), -1),
        "stop or end": stops.expand(len(chances), -1),
    }


@dataclass(frozen=True)
class DrawStatistics:
    """Statistics of all draws of a set of samples."""

    by_name: Mapping[str, Steps]
    position: Tensor
    """`[N]`: position in the response."""
    is_last: Tensor
    """`[N]`: whether the draw is at the limit of the response."""

    @classmethod
    def of(cls, samples: Sequence[Sample], eos: int) -> DrawStatistics:
        """Statistics of samples that are not greedy; at least one must have tokens."""
        by_request: dict[str, list[Sample]] = {}
        for sample in samples:
            if len(sample.tokens) and sample.sampling.temperature:
                by_request.setdefault(sample.request.request_id, []).append(sample)
        return cls.joined([cls._of_request(same, eos) for same in by_request.values()])

    @classmethod
    def _of_request(cls, samples: Sequence[Sample], eos: int) -> DrawStatistics:
        """Statistics of the samples of one request."""
        chances = torch.cat([sample.chances for sample in samples])
        tokens = torch.cat([sample.tokens for sample in samples])
        steps = {name: steps_of(values, chances, tokens) for name, values in functions(samples, eos).items()}
        first = len(samples[0].request.response_ids)
        position = torch.cat([torch.arange(first, first + len(sample.tokens)) for sample in samples])
        return cls(steps, position, position == samples[0].sampling.max_tokens - 1)

    @classmethod
    def joined(cls, parts: Sequence[DrawStatistics]) -> DrawStatistics:
        """Concatenates statistics."""
        steps = {
            name: Steps(
                *(torch.cat([getattr(part.by_name[name], field) for part in parts]) for field in Steps.__annotations__)
            )
            for name in parts[0].by_name
        }
        return cls(steps, torch.cat([part.position for part in parts]), torch.cat([part.is_last for part in parts]))

    def faults(self, borders: Sequence[int] = (1, 2, 8)) -> list[str]:
        """Sums whose score is too large: over all positions, and between `borders`."""
        parts = {"all": self.position >= 0, "the last": self.is_last}
        for low, high in zip((0, *borders), (*borders, 10**9), strict=True):
            parts[f"{low} to {high - 1}" if high < 10**9 else f"{low} and more"] = (self.position >= low) & (
                self.position < high
            )
        return [
            f"{name!r} at positions {where}: score {score:.3g}, sum {float(steps.found.sum()):.4g}"
            for name, every in self.by_name.items()
            for where, chosen in parts.items()
            if (score := (steps := every.of(chosen)).score()) > SCORE
        ]


@dataclass(frozen=True)
class Noise:
    """Samples of equal length, to test whether their noise is independent."""

    tokens: Tensor
    """`[S, T]`."""
    chances: Tensor
    """`[S, T, V]`."""
    place: Tensor
    """`[S, T]`: position of each draw in [0, 1), minus 1/2, in standard deviations."""
    farthest: Tensor
    """`[S, T]`: largest possible absolute value of `place`."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Noise:
        """From samples ordered by number, cut to the length of the shortest."""
        length = min(len(sample.tokens) for sample in samples)
        tokens = torch.stack([sample.tokens[:length] for sample in samples])
        chances = torch.stack([sample.chances[:length] for sample in samples])
        off = midpoints(chances) - 0.5
        deviation = (chances * off.square()).sum(-1).clamp(min=UNSEEN).sqrt()
        farthest = torch.where(chances > UNSEEN, off.abs(), 0.0).amax(-1) / deviation
        return cls(tokens, chances, off.gather(2, tokens[..., None])[..., 0] / deviation, farthest)

    def faults(self) -> list[str]:
        """Pairs of draws that are more correlated than by chance: over all pairs of samples at the same distance, and
        for each pair."""
        found = [*self._steps_apart()]
        count = len(self.tokens)
        if count > 1:
            first, second = torch.triu_indices(count, count, 1)
            for shift in range(-SHIFTS, SHIFTS + 1):
                found += self._samples_apart(first, second, shift)
        return found

    def _steps_apart(self) -> Iterator[str]:
        """Compares draws of the same sample."""
        for lag in range(1, self.tokens.shape[1]):
            early, late = slice(None, -lag), slice(lag, None)
            score = self._score((slice(None), early), (slice(None), late), None)
            if float(score.max()) > SCORE:
                yield f"draws {lag} steps apart: score {float(score.max()):.3g}"

    def _samples_apart(self, first: Tensor, second: Tensor, shift: int) -> Iterator[str]:
        """Compares the draws of two samples, the second's `shift` steps later."""
        length = self.tokens.shape[1]
        early = slice(max(-shift, 0), length - max(shift, 0))
        late = slice(max(shift, 0), length - max(-shift, 0))
        if early.stop <= early.start:
            return
        for what, apart in (("each two", None), ("all", second - first)):
            score = self._score((first, early), (second, late), apart)
            worst = int(score.argmax()) % score.shape[-1]
            if float(score.max()) > SCORE:
                who = f"{worst} samples" if apart is not None else f"samples {int(first[worst])}, {int(second[worst])}"
                yield f"{who} and {shift} steps apart ({what}): score {float(score.max()):.3g}"

    def _score(self, one: tuple[object, slice], two: tuple[object, slice], apart: Tensor | None) -> Tensor:
        """`[2, P]`: scores by places and by equal tokens, for each pair, or for each distance in `apart [P]`; for draws
        of one sample, over all samples."""
        tokens, place = self.tokens[one], self.place[one]  # type: ignore[index]
        later, its_place, far = self.tokens[two], self.place[two], self.farthest[two]  # type: ignore[index]
        chance = self.chances[two].gather(2, tokens[..., None])[..., 0]  # type: ignore[index]
        off = torch.stack([place * its_place, (later == tokens).double() - chance])
        variance = torch.stack([place.square(), chance * (1 - chance)])
        largest = torch.stack([place.abs() * far, torch.maximum(chance, 1 - chance)])
        # A token that is impossible is not counted.
        largest[1] = torch.where(variance[1] > UNSEEN, largest[1], 0.0)
        if isinstance(one[0], slice):
            return scores(off.sum((1, 2)).abs(), variance.sum((1, 2)), largest.amax((1, 2)))[:, None]
        off, variance, largest = off.sum(2), variance.sum(2), largest.amax(2)
        if apart is not None:
            most = int(apart.max()) + 1
            index = apart.expand(2, -1)
            off = torch.zeros(2, most, dtype=off.dtype).scatter_add(1, index, off)
            variance = torch.zeros(2, most, dtype=off.dtype).scatter_add(1, index, variance)
            largest = torch.zeros(2, most, dtype=off.dtype).scatter_reduce(1, index, largest, "amax")
        return scores(off.abs(), variance, largest)
