"""Drawing tokens: exact chances, exact filters, and noise that is a pure function of its counters."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import ask, distributions, make_engine, run
from torch import Tensor

from rlsdk.interfaces import SamplingParams
from rlsdk.kit.generation.sampling import (
    BRANCH,
    RowSampling,
    choose,
    draw,
    filtered,
    mixed_seed,
    num_levels,
    row_keys,
    splitmix64,
    uniforms,
)

CPU = torch.device("cpu")
ALPHA = 1e-4
"""Seeds are fixed; a right sampler fails one seed in ten thousand."""


def assert_frequencies(counts: Tensor, chances: Tensor) -> None:
    """Chi-square, rare tokens taken together; what has no chance was never drawn."""
    expected = chances.double() * counts.sum()
    assert counts[chances == 0].sum() == 0
    common = expected >= 5
    observed = torch.cat([counts[common].double(), counts[~common].sum().double()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    wanted *= observed.sum() / wanted.sum()
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    free = (len(observed) - 1) / 2
    assert len(observed) == 1 or mpmath.gammainc(free, statistic / 2, mpmath.inf, regularized=True) > ALPHA


def noise(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    keys = row_keys(np.full(rows, seed, np.uint64), np.arange(rows))
    return uniforms(keys, np.zeros(rows, np.int64), vocabulary)


@pytest.mark.parametrize("vocabulary", [1, 2, BRANCH, BRANCH + 1, 100, BRANCH**2, BRANCH**2 + 7])
def test_every_token_is_drawn_as_often_as_its_weight_says(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.rand(vocabulary, generator=generator) ** 4 * 3
    weights[torch.rand(vocabulary, generator=generator) < 0.3] = 0
    weights[vocabulary // 2] = 1.0
    found = choose(weights.expand(40_000, -1), noise(40_000, vocabulary))
    assert_frequencies(torch.bincount(found, minlength=vocabulary), weights / weights.sum())


@given(st.integers(1, 3 * BRANCH**2), st.integers(0, 2**32), st.sampled_from([0.0, 1.0 - 2.0**-24, 0.5]), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_token_without_weight_is_never_drawn(vocabulary: int, seed: int, number: float, lonely: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(8, vocabulary, generator=generator)
    weights[torch.rand(8, vocabulary, generator=generator) < (1 - 1 / vocabulary if lonely else 0.5)] = 0
    weights[:, int(torch.randint(vocabulary, (1,), generator=generator))] = 1e-20 if lonely else 0.3
    found = choose(weights, torch.full((8, num_levels(vocabulary)), number))
    assert (weights[torch.arange(8), found] > 0).all()


def test_rounding_of_the_weights_hardly_ever_changes_a_token() -> None:
    """Weights of a peaked distribution over many tokens, moved by the rounding that another batch shape brings."""
    generator = torch.Generator().manual_seed(0)
    rows, vocabulary = 2000, 20_000
    probs = (torch.randn(rows, vocabulary, generator=generator) * 3).softmax(-1)
    moved = probs * (1 + 1e-6 * torch.randn(rows, vocabulary, generator=generator))
    number = noise(rows, vocabulary)
    assert (choose(probs, number) != choose(moved, number)).sum() <= 2


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 10**6))
def test_noise_of_a_row_is_the_same_in_any_company(seed: int, index: int, position: int) -> None:
    others = np.arange(5)
    alone = uniforms(row_keys(np.array([seed], np.uint64), np.array([index])), np.array([position]), 1000)
    seeds = np.array([*range(5), seed], np.uint64)
    among = uniforms(row_keys(seeds, np.array([*others, index])), np.array([*others, position]), 1000)
    assert torch.equal(alone[0], among[-1])


@pytest.mark.parametrize("varies", ["seed", "index", "position"])
def test_noise_is_uniform_and_uncorrelated_along_every_counter(varies: str) -> None:
    steps, still = np.arange(20_000), np.full(20_000, 3)
    seeds, indices, positions = (steps if varies == name else still for name in ("seed", "index", "position"))
    numbers = uniforms(row_keys(seeds.astype(np.uint64), indices), positions, 1000)
    assert numbers.shape == (20_000, 2)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    for column in (numbers[:, 0].numpy(), numbers[:, 1].numpy()):
        ordered, count = np.sort(column), len(column)
        steps = np.arange(count + 1) / count
        farthest = max(float((steps[1:] - ordered).max()), float((ordered - steps[:-1]).max()))
        # Kolmogorov's test against a uniform distribution, the first term of his series.
        assert 2 * math.exp(-2 * count * farthest**2) > ALPHA
        assert abs(np.corrcoef(column[1:], column[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers.T.numpy())[0, 1]) < 0.03


def test_splitmix64_gives_its_published_values() -> None:
    """The first outputs of the reference implementation from seed 1234567 (Vigna, prng.di.unimi.it)."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + golden * at) % 2**64 for at in range(3)], np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_mixed_seeds_depend_on_every_part_and_on_their_order() -> None:
    assert len({mixed_seed(*parts) for parts in [(1, 2), (2, 1), (1, 2, 0), (1,), (-1, 2), (1, 3)]}) == 6


def kept(probs: list[float], **sampling: Any) -> list[int]:
    """Which tokens the filters leave."""
    params = SamplingParams(**sampling)
    return filtered(torch.tensor([probs]), RowSampling.of([params], CPU))[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 100}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [1]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.75}, [0, 1]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.5}, [0, 1]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.2}, [0, 1, 2, 3]),
        # top-p is of what top-k leaves: 0.5 of 0.75 is below 0.7, 0.5 of 1 would be too; 0.66 tells them apart.
        ({"top_k": 2, "top_p": 0.66}, [1]),
        ({"top_p": 0.66}, [0, 1]),
        ({"top_p": 0.9, "min_p": 0.5}, [0, 1]),
    ],
)
def test_filters_leave_what_they_say(sampling: dict[str, Any], left: list[int]) -> None:
    assert kept([0.25, 0.5, 0.125, 0.125], **sampling) == left


def test_of_equal_tokens_the_first_go_first() -> None:
    assert kept([0.25] * 4, top_k=2) == [0, 1]
    assert kept([0.25] * 4, top_p=0.5) == [0, 1]
    assert kept([0.25] * 4, top_p=0.6) == [0, 1, 2]
    assert kept([0.25] * 4, min_p=1.0) == [0, 1, 2, 3]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 300))
def test_top_p_of_one_leaves_out_nothing_beside_rows_that_are_cut(seed: int, vocabulary: int) -> None:
    probs = (torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)) * 6).softmax(-1)
    rows = RowSampling.of([SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=2)], CPU)
    found = filtered(probs, rows)
    assert torch.equal(found[0], probs[0])
    assert (found[1:] <= probs[1:]).all()


def test_greedy_takes_the_first_of_the_largest_and_its_log_prob_at_temperature_1() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]] * 2)
    rows = RowSampling.of([SamplingParams(temperature=0.0), SamplingParams(temperature=2.0)], CPU)
    tokens, log_probs = draw(logits, rows, noise(2, 4))
    assert int(tokens[0]) == 1
    assert float(log_probs[0]) == pytest.approx(float(logits[0].log_softmax(-1)[1]))
    assert float(log_probs[1]) == pytest.approx(float((logits[1] / 2).log_softmax(-1)[tokens[1]]))


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7}, {"top_k": 6}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_tokens_of_the_engine_follow_the_exact_distribution(
    served: Any, plain: Any, qwen2: Any, filters: dict[str, Any]
) -> None:
    prompt, n = [5, 17, 40], 4000
    probs = distributions(plain, prompt, [0], filters.get("temperature", 1.0))[0].exp()
    keep = torch.ones_like(probs, dtype=torch.bool)
    order = probs.argsort(descending=True)
    if "top_k" in filters:
        keep[order[filters["top_k"] :]] = False
    if "top_p" in filters:
        keep[order[probs[order].cumsum(0) - probs[order] >= filters["top_p"]]] = False
    if "min_p" in filters:
        keep &= probs >= filters["min_p"] * probs.max()
    outputs = run(make_engine(qwen2, max_running=n), [ask("x", prompt, n, max_tokens=1, seed=11, **filters)])
    counts = torch.bincount(torch.tensor([int(o.token_ids[0]) for o in outputs]), minlength=len(probs))
    assert_frequencies(counts, torch.where(keep, probs, 0.0) / probs[keep].sum())


def test_pairs_of_tokens_follow_the_exact_joint_distribution(plain: Any, qwen2: Any) -> None:
    """The second token's chances are those after the first: no noise is used twice."""
    prompt, n = [5, 17, 40], 8000
    engine = make_engine(qwen2, max_running=n)
    params = {"max_tokens": 2, "top_k": 4, "stop_token_ids": (), "seed": 5}
    drawn = torch.tensor([o.token_ids.tolist() for o in run(engine, [ask("x", prompt, n, **params)])])

    def chances(ids: list[int]) -> Tensor:
        probs = distributions(plain, ids, [0])[0].exp()
        top = probs.topk(4)
        return torch.zeros_like(probs).scatter(0, top.indices, top.values / top.values.sum())

    first = chances(prompt)
    joint = torch.stack([first[a] * (chances([*prompt, a]) if first[a] > 0 else first * 0) for a in range(len(first))])
    counts = torch.bincount(drawn[:, 0] * len(first) + drawn[:, 1], minlength=joint.numel())
    assert_frequencies(counts, joint.flatten())


@pytest.mark.parametrize("size", [259, 1031, 32_000])
def test_logits_that_are_not_finite_give_a_log_prob_that_is_not_and_a_token_of_the_vocabulary(size: int) -> None:
    """They led past a vocabulary that is no power of 16: "index 287 is out of bounds" in place of what was wrong."""
    rows = RowSampling.of([SamplingParams()], torch.device("cpu"))
    noise = uniforms(np.array([1], np.uint64), np.array([0]), size)
    tokens, log_probs = draw(torch.full((1, size), torch.nan), rows, noise)
    assert 0 <= int(tokens) < size
    assert not log_probs.isfinite().any()
