"""Random steps and mini-batches for the algorithm tests, and their rows as plain Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from rlsdk.interfaces import Batch

UIDS = (-(2**63), -5, 0, 3 << 40)
"""Group identities are any int64."""


def make_batch(
    scores: list[float], uid: list[int], lengths: list[tuple[int, int]] | None = None, **rows: object
) -> Batch:
    """Rows of (prompt, response) lengths, default (1, 2); the score stands on the last response token."""
    lengths = lengths or [(1, 2)] * len(scores)
    batch = Batch.from_rows([[0] * (p + r) for p, r in lengths])
    prompt = torch.tensor([p for p, _ in lengths])
    mask = batch.position_ids >= prompt[batch.row_of_token]
    rewards = torch.zeros(batch.num_tokens, dtype=torch.float64)
    answered = torch.tensor([r > 0 for _, r in lengths])
    rewards[(batch.offsets[1:] - 1)[answered]] = torch.tensor(scores, dtype=torch.float64)[answered]
    return batch.with_tokens(response_mask=mask, token_level_rewards=rewards).with_rows(
        scores=torch.tensor(scores, dtype=torch.float64),
        uid=torch.tensor(uid),
        **{"valid": torch.ones(len(scores), dtype=torch.bool), **{k: torch.as_tensor(v) for k, v in rows.items()}},
    )


@st.composite
def steps(draw: st.DrawFn) -> Batch:
    """Up to 12 rows in up to 4 groups: some not valid, some without a response, some tokens inside responses masked (a
    tool's), some rows with rewards on all tokens, some groups of equal rewards."""
    num_rows = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([[0.0, 1.0, 0.3, -2.0], [1.0], [0.0, 1.0]]))
    lengths = [
        (int(p), int(r)) for p, r in zip(rng.integers(1, 4, num_rows), rng.integers(0, 7, num_rows), strict=True)
    ]
    batch = make_batch(
        rng.choice(levels, num_rows).tolist(),
        rng.choice(np.array(UIDS), num_rows).tolist(),
        lengths,
        valid=(rng.random(num_rows) < 0.8).tolist(),
        truncated=(rng.random(num_rows) < 0.3).tolist(),
        baseline_scores=torch.from_numpy(rng.choice([0.0, 1.0, np.nan], num_rows)),
    )
    last = torch.zeros(batch.num_tokens, dtype=torch.bool)
    last[batch.offsets[1:] - 1] = True
    kept = torch.from_numpy(rng.random(batch.num_tokens) < 0.8) | last
    mask = batch["response_mask"] & kept

    def noise(scale: float) -> torch.Tensor:
        return torch.from_numpy(rng.normal(0, scale, batch.num_tokens)).float()

    log_probs = -noise(1.0).abs()
    dense = noise(0.5) if rng.random() < 0.3 else torch.zeros(batch.num_tokens)
    return batch.with_tokens(
        response_mask=mask,
        token_level_rewards=torch.where(mask, batch["token_level_rewards"] + dense, 0.0),
        log_probs=log_probs,
        old_log_probs=log_probs + noise(0.3),
        ref_log_probs=log_probs + noise(0.5),
        rollout_log_probs=log_probs + noise(0.01),
        entropy=noise(1.0).abs(),
        advantages=noise(1.0),
        values=noise(1.0),
        returns=noise(1.0),
    )


@st.composite
def cuts(draw: st.DrawFn, num_rows: int) -> list[torch.Tensor]:
    """Any cut of the rows into micro-batches, in any order."""
    order = torch.tensor(draw(st.permutations(range(num_rows))))
    return [part for part in order.tensor_split(draw(st.integers(1, num_rows))) if len(part)]


@dataclass(frozen=True)
class PlainRow:
    """A row as lists, over its response tokens only: what the plain loops of the tests read."""

    uid: int
    valid: bool
    fields: dict[str, list[float]]
    length: int
    baseline: float
    """Greedy score."""


def plain_rows(batch: Batch) -> list[PlainRow]:
    """Every row of a batch."""
    found, owner, mask = [], batch.row_of_token.tolist(), batch["response_mask"].tolist()
    tokens = {name: values.tolist() for name, values in batch.tokens.items()}
    for row in range(batch.num_rows):
        at = [t for t in range(batch.num_tokens) if owner[t] == row and mask[t]]
        found.append(
            PlainRow(
                uid=int(batch["uid"][row]),
                valid=bool(batch["valid"][row]),
                fields={name: [float(values[t]) for t in at] for name, values in tokens.items()},
                length=len(at),
                baseline=float(batch["baseline_scores"][row]) if "baseline_scores" in batch else float("nan"),
            )
        )
    return found


def flat(batch: Batch, rows: list[list[float]]) -> torch.Tensor:
    """`[N]` float32: numbers of response tokens, row by row, put where they stand; 0 elsewhere."""
    out = torch.zeros(batch.num_tokens)
    out[batch["response_mask"]] = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    return out


def poison(batch: Batch, *names: str) -> Batch:
    """NaN and infinities off the mask, in these fields."""
    mask = batch["response_mask"]
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(batch.num_tokens)[: batch.num_tokens]
    return batch.with_tokens(**{name: torch.where(mask, batch[name], junk) for name in names})
