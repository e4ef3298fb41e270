"""The same pairs through TRL's trainers: `peer_preference_outputs.json` has what their losses returned, and its source.

Compared are the loss, its gradient on each token's log-prob or each row's score, and the metrics that both have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_preference import OBJECTIVES, means

from rlsdk.algorithms import (
    DpoObjective,
    KtoObjective,
    RewardModelObjective,
    label_weights,
    mean_log_ratio,
    pair_weights,
)
from rlsdk.interfaces import Batch

PEER = json.loads((Path(__file__).parent / "peer_preference_outputs.json").read_text(encoding="utf-8"))
INPUTS = PEER["inputs"]
LOSS_OF = {"ipo": "ipo", "hinge": "hinge", "simpo": "simpo", "simpo_smooth": "simpo", "cpo": "cpo", "orpo": "orpo"}
"""The others are `sigmoid` with options."""


def batch() -> Batch:
    """The chosen rows, then the rejected ones, each behind one prompt token."""
    lengths = INPUTS["lengths"]
    pairs = len(lengths) // 2
    made = Batch.from_rows([[0] * (1 + n) for n in lengths])
    mask = made.position_ids > 0

    def spread(name: str) -> torch.Tensor:
        flat = torch.full((made.num_tokens,), -7.0)
        flat[mask] = torch.tensor(INPUTS[name])
        return flat

    made = made.with_tokens(
        response_mask=mask, log_probs=spread("log_probs"), ref_log_probs=spread("ref_log_probs")
    ).with_rows(
        uid=torch.arange(pairs).repeat(2),
        chosen=torch.arange(2 * pairs) < pairs,
        valid=torch.ones(2 * pairs, dtype=torch.bool),
        margin=torch.tensor(INPUTS["margin"]).repeat(2),
    )
    return pair_weights(made)


def test_every_loss_of_pairs_was_recorded() -> None:
    assert set(PEER["dpo"]) == {name for name, made in OBJECTIVES.items() if isinstance(made, DpoObjective)}


@pytest.mark.parametrize("name", sorted(PEER["dpo"]))
def test_dpo(name: str) -> None:
    """TRL's rewards are sums over the response under IPO, too, where ours are what its loss compares: means."""
    made, expected = batch(), PEER["dpo"][name]
    log_probs = made["log_probs"].requires_grad_()
    result = DpoObjective(loss=LOSS_OF.get(name, "sigmoid"), **expected["options"])({"log_probs": log_probs}, made)
    result.loss.backward()
    assert log_probs.grad is not None
    assert float(result.loss.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    assert log_probs.grad[made["response_mask"]].tolist() == pytest.approx(expected["gradient"], rel=1e-4, abs=1e-7)
    if name in ("sigmoid", "hinge", "simpo", "simpo_smooth", "cpo", "orpo"):
        found, theirs = means(result), expected["metrics"]
        assert found["accuracy"] == pytest.approx(theirs["accuracies"])
        assert found["reward_margin"] == pytest.approx(theirs["margins"], rel=1e-5)
        assert found["chosen_reward"] == pytest.approx(theirs["chosen"], rel=1e-5)
        assert found["rejected_reward"] == pytest.approx(theirs["rejected"], rel=1e-5)


@pytest.mark.parametrize("name", sorted(PEER["bradley_terry"]))
def test_bradley_terry(name: str) -> None:
    made, expected = batch(), PEER["bradley_terry"][name]
    if not expected["margin"]:
        made = made.with_rows(margin=torch.zeros(made.num_rows))
    scores = torch.tensor(INPUTS["scores"]).requires_grad_()
    objective: Any = RewardModelObjective(center_coef=expected["center_coef"])
    result = objective({"scores": scores}, made)
    result.loss.backward()
    assert scores.grad is not None
    assert float(result.loss.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    assert scores.grad.tolist() == pytest.approx(expected["gradient"], rel=1e-4, abs=1e-7)
    found = means(result)
    assert found["accuracy"] == pytest.approx(expected["accuracy"])
    assert found["score_margin"] == pytest.approx(expected["score_margin"], rel=1e-4)


@pytest.mark.parametrize("name", sorted(PEER["kto"]))
def test_kto(name: str) -> None:
    """TRL's mismatched rows are given as sums of log-probs: here each of them is one token."""
    expected = PEER["kto"][name]
    sums = [torch.tensor(expected[f"mismatched_{who}log_probs"]) for who in ("", "ref_")]
    others = Batch.from_rows([[0]] * len(sums[0])).with_tokens(
        response_mask=torch.ones(len(sums[0]), dtype=torch.bool), ref_log_probs=sums[1]
    )
    estimate = mean_log_ratio(others, sums[0])
    assert max(estimate, 0.0) == pytest.approx(expected["kl"])
    made = label_weights(batch())
    made = made.with_rows(log_ratio_estimate=torch.full((made.num_rows,), estimate))
    log_probs = made["log_probs"].requires_grad_()
    result = KtoObjective(**expected["options"])({"log_probs": log_probs}, made)
    result.loss.backward()
    assert log_probs.grad is not None
    assert float(result.loss.detach()) == pytest.approx(expected["loss"], rel=1e-6)
    assert log_probs.grad[made["response_mask"]].tolist() == pytest.approx(expected["gradient"], rel=1e-4, abs=1e-7)
    rewards = expected["chosen_reward"] - expected["rejected_reward"]
    assert means(result)["reward_margin"] == pytest.approx(rewards / 2, rel=1e-5)
