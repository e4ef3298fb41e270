"""Random steps and mini-batches for the algorithm tests."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from rlsdk.interfaces import Batch


def make_batch(
    scores: list[float], uid: list[int], lengths: list[tuple[int, int]] | None = None, **rows: object
) -> Batch:
    """Rows of (prompt, response) lengths, default (1, 2); the score stands on the last response token."""
    lengths = lengths or [(1, 2)] * len(scores)
    batch = Batch.from_rows([[0] * (p + r) for p, r in lengths])
    prompt = torch.tensor([p for p, _ in lengths])
    mask = batch.position_ids >= prompt[batch.row_of_token]
    rewards = torch.zeros(batch.num_tokens)
    rewards[batch.offsets[1:] - 1] = torch.tensor(scores)
    return batch.with_tokens(response_mask=mask, token_level_rewards=rewards).with_rows(
        scores=torch.tensor(scores),
        uid=torch.tensor(uid),
        **{"valid": torch.ones(len(scores), dtype=torch.bool), **{k: torch.tensor(v) for k, v in rows.items()}},
    )


@st.composite
def steps(draw: st.DrawFn) -> Batch:
    """Up to 12 rows in up to 4 groups, some not valid, some tokens inside responses masked."""
    num_rows = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = [
        (int(p), int(r)) for p, r in zip(rng.integers(1, 4, num_rows), rng.integers(1, 6, num_rows), strict=True)
    ]
    batch = make_batch(
        rng.choice([0.0, 1.0, 0.3, -2.0], num_rows).tolist(),
        rng.integers(0, 4, num_rows).tolist(),
        lengths,
        valid=(rng.random(num_rows) < 0.8).tolist(),
    )
    last = torch.zeros(batch.num_tokens, dtype=torch.bool)
    last[batch.offsets[1:] - 1] = True
    kept = torch.from_numpy(rng.random(batch.num_tokens) < 0.8) | last

    def noise(scale: float) -> torch.Tensor:
        return torch.from_numpy(rng.normal(0, scale, batch.num_tokens)).float()

    log_probs = -noise(1.0).abs()
    return batch.with_tokens(
        response_mask=batch["response_mask"] & kept,
        log_probs=log_probs,
        old_log_probs=log_probs + noise(0.3),
        ref_log_probs=log_probs + noise(0.5),
        rollout_log_probs=log_probs + noise(0.01),
        entropy=noise(1.0).abs(),
        advantages=noise(1.0),
    )


@st.composite
def cuts(draw: st.DrawFn, num_rows: int) -> list[torch.Tensor]:
    """Any cut of the rows into micro-batches, in any order."""
    order = torch.tensor(draw(st.permutations(range(num_rows))))
    return [part for part in order.tensor_split(draw(st.integers(1, num_rows))) if len(part)]
