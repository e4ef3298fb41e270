"""One uniform number, one token: the inverse of the cumulative distribution."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk_vllm.sampler import BLOCK, draw, uniforms


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3 * BLOCK + 5), st.integers(0, 1 << 30))
def test_a_token_is_drawn_where_the_number_falls(num_tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, num_tokens, generator=generator) * 3
    # Some tokens are filtered out, but never all.
    logits[torch.rand(logits.shape, generator=generator) < 0.4] = -torch.inf
    logits[0, seed % num_tokens] = 1.0
    levels = torch.rand(200, generator=generator, dtype=torch.float64)
    levels[:2] = torch.tensor([0.0, 1.0 - 2.0**-53])
    drawn = draw(logits.expand(200, -1), levels)
    exact = logits[0].double().softmax(-1)
    upper = exact.cumsum(0)
    assert (exact[drawn] > 0).all()
    assert (levels <= upper[drawn] + 1e-6).all()
    assert (levels >= (upper - exact)[drawn] - 1e-6).all()


def test_the_numbers_are_uniform_and_none_follows_from_another() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    found = uniforms(seeds.ravel() << np.uint64(31), positions.ravel())
    assert found.min() >= 0.0
    assert found.max() < 1.0
    counts = np.bincount((found * 100).astype(int), minlength=100)
    assert ((counts - 900.0) ** 2 / 900.0).sum() < 180
    grid = found.reshape(300, 300) - 0.5
    for shifted in (grid[1:] * grid[:-1], grid[:, 1:] * grid[:, :-1]):
        assert abs(shifted.mean()) < 5 / 12 / 300


def test_what_is_not_a_number_gives_a_token_all_the_same() -> None:
    assert 0 <= int(draw(torch.full((1, 300), torch.nan), torch.tensor([0.5], dtype=torch.float64))) < 300
