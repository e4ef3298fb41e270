"""The algorithm of `examples/own_algorithm.py`, which users copy from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from algorithm_cases import make_batch

from rlsdk.interfaces import Batch
from rlsdk.registry import load_function

FILE = Path(__file__).parents[2] / "examples" / "own_algorithm.py"


def advantages(batch: Batch) -> list[float]:
    """By row."""
    estimate = load_function(f"{FILE}:best_of_group", what="advantage", takes=("batch",))
    found: Batch = estimate(batch)
    return found["advantages"][batch.offsets[1:] - 1].tolist()


def test_the_best_samples_win_and_a_group_of_equals_has_no_winner() -> None:
    batch = make_batch([1.0, 0.0, 1.0, 2.0, 2.0], [0, 0, 0, 1, 1])
    assert advantages(batch) == [1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("score", [0.0, -5.0, float("nan")])
def test_a_sample_that_failed_makes_nobody_a_winner(score: float) -> None:
    """Its score stood as minus infinity, so that equal siblings beat it."""
    batch = make_batch([1.0, 1.0, score], [0, 0, 0], valid=[True, True, False])
    assert advantages(batch) == [0.0, 0.0, 0.0]


def test_the_callback_that_warns_of_short_responses_does_so(capsys: pytest.CaptureFixture[str]) -> None:
    """It read a metric that does not exist."""
    warn = load_function(f"{FILE}:warn_when_short", what="callback", takes=("step", "metrics"))
    warn(3, {"response/tokens_mean": 1.5})
    assert "step 3: responses of 1.5 tokens" in capsys.readouterr().err
    warn(4, {"response/tokens_mean": 9.0})
    assert not capsys.readouterr().err


def test_the_loss_is_finite_whatever_the_ratio() -> None:
    from rlsdk.interfaces import PolicyLossInputs

    batch = make_batch([0.0], [0])
    reinforce = load_function(f"{FILE}:reinforce", what="policy loss", takes=("inputs",))
    inputs = PolicyLossInputs(
        log_probs=torch.tensor([0.0, -1.0, -1.0]),
        old_log_probs=torch.tensor([0.0, -1.0, -99.0]),
        advantages=torch.ones(3),
        mask=batch["response_mask"],
        batch=batch,
    )
    loss, metrics = reinforce(inputs, limit=4.0)
    assert loss.tolist() == pytest.approx([0.0, 1.0, 4.0])
    assert metrics["ratio"].tolist() == pytest.approx([1.0, 1.0, 4.0])
