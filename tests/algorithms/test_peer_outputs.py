"""The same inputs through verl's published functions: `peer_outputs.json` has what they returned, and its source.

Where rlsdk differs on purpose, the difference is stated at the test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsdk import algorithms as alg
from rlsdk.interfaces import Batch

PEER = json.loads((Path(__file__).parent / "peer_outputs.json").read_text(encoding="utf-8"))
INPUTS, OPTIONS = PEER["inputs"], PEER["source"]["options"]
BOUNDS = {"clip_low": OPTIONS["clip_low"], "clip_high": OPTIONS["clip_high"]}


def batch() -> Batch:
    """Rows of one prompt token and the recorded response; the score stands on its last token."""
    lengths, scores = INPUTS["lengths"], torch.tensor(INPUTS["scores"])
    made = Batch.from_rows([[0] * (1 + n) for n in lengths])
    mask = made.position_ids > 0
    rewards = torch.zeros(made.num_tokens)
    rewards[made.offsets[1:] - 1] = scores

    def spread(values: list[float]) -> Tensor:
        flat = torch.zeros(made.num_tokens)
        flat[mask] = torch.tensor(values)
        return flat

    fields = {name: spread(values) for name, values in INPUTS.items() if len(values) == sum(lengths)}
    made = made.with_tokens(response_mask=mask, token_level_rewards=rewards, **fields)
    return made.with_rows(
        scores=scores, uid=torch.tensor(INPUTS["uid"]), baseline_scores=torch.tensor(INPUTS["baseline_scores"])
    )


def on_mask(made: Batch, values: Tensor) -> list[float]:
    found: list[float] = values[made["response_mask"]].tolist()
    return found


ESTIMATORS: dict[str, Callable[[Batch], Batch]] = {
    "gae": lambda b: alg.gae(b, gamma=OPTIONS["gamma"], lam=OPTIONS["lam"]),
    "grpo": alg.grpo,
    "dr_grpo": alg.dr_grpo,
    "grpo_passk": alg.grpo_passk,
    "rloo": alg.rloo,
    "opo": alg.opo,
    "reinforce_plus_plus": lambda b: alg.reinforce_plus_plus(b, gamma=OPTIONS["gamma"]),
    "reinforce_plus_plus_baseline": alg.reinforce_plus_plus_baseline,
    "remax": alg.remax,
    "gpg": alg.gpg,
}


def test_every_recorded_estimator_is_compared() -> None:
    assert set(ESTIMATORS) == set(PEER["advantages"])


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_advantages(name: str) -> None:
    """gpg: alpha agrees here, because no recorded reward is 0 and all groups have signal."""
    made = ESTIMATORS[name](batch())
    assert on_mask(made, made["advantages"]) == pytest.approx(
        PEER["advantages"][name]["advantages"], rel=1e-4, abs=1e-5
    )
    if name in ("gae", "reinforce_plus_plus", "remax"):
        assert on_mask(made, made["returns"]) == pytest.approx(PEER["advantages"][name]["returns"], rel=1e-4, abs=1e-5)


LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo_clip": ("token_mean", {**BOUNDS, "dual_clip": OPTIONS["dual_clip"]}),
    "gspo": ("sequence_mean", BOUNDS),
    "sapo": ("sequence_mean", {name: OPTIONS[name] for name in ("tau_positive", "tau_negative")}),
    "cispo": ("token_mean", BOUNDS),
    "policy_gradient": ("token_mean", {}),
}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_and_gradients(name: str) -> None:
    aggregation, options = LOSSES[name]
    made = batch()
    made = made.with_tokens(loss_weight=alg.loss_weights(made, aggregation))
    log_probs = made["log_probs"].requires_grad_()
    objective = alg.PolicyObjective(loss=f"rlsdk.algorithms.losses:{name}", loss_options=options)
    result = objective({"log_probs": log_probs}, made)
    result.loss.backward()
    assert log_probs.grad is not None
    expected = PEER["losses"][name]
    assert float(result.loss.detach()) == pytest.approx(expected["loss"], rel=1e-4)
    assert on_mask(made, log_probs.grad) == pytest.approx(expected["gradient"], rel=1e-4, abs=1e-6)


def test_the_value_loss_and_its_gradient() -> None:
    made = batch()
    values = made["values"].clone().requires_grad_()
    made = made.with_tokens(loss_weight=alg.loss_weights(made), values=made["old_values"])
    result = alg.ValueObjective(clip=OPTIONS["value_clip"])({"values": values}, made)
    result.loss.backward()
    assert values.grad is not None
    assert float(result.loss.detach()) == pytest.approx(PEER["value"]["loss"], rel=1e-4)
    assert on_mask(made, values.grad) == pytest.approx(PEER["value"]["gradient"], rel=1e-4, abs=1e-6)
    assert float(result.sums["value_clip_fraction"]) == pytest.approx(PEER["value"]["clip_fraction"], rel=1e-4)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("token_mean", "token-mean"),
        ("sequence_mean", "seq-mean-token-mean"),
        ("sequence_token_sum", "seq-mean-token-sum"),
        ("token_sum_norm", "seq-mean-token-sum-norm"),
    ],
)
def test_aggregations(ours: str, theirs: str) -> None:
    made = batch()
    found = (made["advantages"] * alg.loss_weights(made, ours, max_tokens=OPTIONS["max_tokens"])).sum()
    assert float(found) == pytest.approx(PEER["aggregations"][theirs], rel=1e-4)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("k1", "k1"), ("k2", "k2"), ("abs", "abs"), ("low_var_kl", "low_var_kl"), ("low_var_kl", "k3")]
)
def test_kl_estimators(ours: str, theirs: str) -> None:
    """verl's k3 is cut at 10, which is `low_var_kl` here; ours goes on to a ratio of e^5 and then straight."""
    made = batch()
    found = alg.KL_ESTIMATORS[ours](made["log_probs"], made["ref_log_probs"])
    assert on_mask(made, found) == pytest.approx(PEER["kl"][theirs], rel=1e-4, abs=1e-5)
    assert max(PEER["kl"]["k3"]) == 10


def test_correction_weights_and_mismatch() -> None:
    made = batch()
    for level, expected in PEER["correction"].items():
        found = alg.correct_rollout(made, level=level, upper=OPTIONS["correction_upper"])["rollout_weight"]
        assert on_mask(made, found) == pytest.approx(expected, rel=1e-4)
    numbers = alg.mismatch(made, made["old_log_probs"], made["rollout_log_probs"])
    assert numbers.kl_k1 == pytest.approx(PEER["mismatch"]["kl"], rel=1e-4)
    assert numbers.kl_k3 == pytest.approx(PEER["mismatch"]["k3_kl"], rel=1e-4)
