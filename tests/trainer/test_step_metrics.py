"""Metrics of a step's samples."""

from __future__ import annotations

import pytest
import torch

from rlsdk.interfaces import Batch
from rlsdk.trainer.learner.metrics import special_share


def test_responses_with_special_tokens_are_counted_and_prompts_are_not() -> None:
    batch = Batch.from_rows([[7, 1, 2], [1, 7, 2], [1, 2, 3], [7, 7, 7]])
    batch = batch.with_tokens(response_mask=torch.tensor([False, True, True] * 4))
    assert special_share(batch, {7, 9}) == pytest.approx(0.5)
    assert special_share(batch, {8}) == special_share(batch, set()) == 0.0
