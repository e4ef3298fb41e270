"""Objectives on pairs: by hand, against plain Python, gradients, and that a pair is never cut."""

import math
import pickle
from collections.abc import Mapping
from typing import Any, get_args

import pytest
import torch
from algorithm_cases import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.algorithms import DpoObjective, RewardModelObjective, pair_weights, update_means
from rlsdk.algorithms.objectives.preference import DPO_LOSSES
from rlsdk.config import PreferencesConfig
from rlsdk.config.sections.preferences import SMOOTHED
from rlsdk.interfaces import Batch, BatchError, ConfigError, Objective, ObjectiveResult

OBJECTIVES: dict[str, Any] = {
    "bradley_terry": RewardModelObjective(),
    "centred": RewardModelObjective(center_coef=0.1),
    "sigmoid": DpoObjective(beta=0.3),
    "conservative": DpoObjective(beta=0.3, label_smoothing=0.2),
    "ipo": DpoObjective(loss="ipo", beta=0.5),
    "hinge": DpoObjective(loss="hinge", beta=0.7),
    "with_sft": DpoObjective(beta=0.3, sft_coef=0.5),
    "simpo": DpoObjective(loss="simpo", beta=2.0, target_margin=0.6),
    "simpo_smooth": DpoObjective(loss="simpo", beta=2.0, target_margin=0.6, label_smoothing=0.1),
    "orpo": DpoObjective(loss="orpo", beta=0.4, sft_coef=1.0),
    "cpo": DpoObjective(loss="cpo", beta=0.3, sft_coef=1.0),
}


@st.composite
def preferences(draw: st.DrawFn) -> Batch:
    """Up to six pairs in any order, some not valid, some with an empty response, some with a margin."""
    pairs = draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    order = torch.tensor(draw(st.permutations(range(2 * pairs))))
    uid = (torch.arange(pairs).repeat(2) * 10**14 - 3)[order]
    chosen = (torch.arange(2 * pairs) < pairs)[order]
    lengths = [(1 + i % 3, int(n)) for i, n in enumerate(torch.randint(0, 6, (2 * pairs,), generator=generator))]
    batch = make_batch([0.0] * 2 * pairs, uid.tolist(), lengths, chosen=chosen.tolist())
    n = batch.num_tokens
    batch = batch.with_tokens(
        log_probs=-torch.rand(n, generator=generator) * 3 - 1e-3,
        ref_log_probs=-torch.rand(n, generator=generator) * 3,
    )
    return pair_weights(
        batch.with_rows(
            model_scores=torch.randn(2 * pairs, generator=generator),
            margin=torch.rand(2 * pairs, generator=generator),
            valid=torch.rand(2 * pairs, generator=generator) < 0.85,
        )
    )


def leaf(objective: Any, batch: Batch) -> Tensor:
    return batch["model_scores" if objective.outputs == ("scores",) else "log_probs"].double().clone()


def run(objective: Any, batch: Batch, numbers: Tensor | None = None) -> tuple[ObjectiveResult, Tensor]:
    """The result, and the gradient on scores or log-probs."""
    numbers = (leaf(objective, batch) if numbers is None else numbers).requires_grad_()
    result = objective({objective.outputs[0]: numbers}, batch)
    result.loss.backward()
    assert numbers.grad is not None
    return result, numbers.grad


def means(result: ObjectiveResult) -> Mapping[str, float]:
    return update_means([{name: float(value) for name, value in result.sums.items()}])


def pair(scores: list[float]) -> Batch:
    """A chosen and a rejected row with these scores."""
    return pair_weights(make_batch(scores, [4, 4], chosen=[True, False])).with_rows(model_scores=torch.tensor(scores))


# By hand


def test_bradley_terry_by_hand() -> None:
    result, gradient = run(RewardModelObjective(), pair([2.0, 0.5]))
    assert float(result.loss.detach()) == pytest.approx(math.log(1 + math.exp(-1.5)))
    slope = 1 / (1 + math.exp(1.5))
    assert gradient.tolist() == pytest.approx([-slope, slope])
    assert means(result) == pytest.approx(
        {"accuracy": 1.0, "score_margin": 1.5, "score": 1.25, "preference_loss": float(result.loss.detach())}
    )


def test_a_margin_moves_the_point_of_indifference() -> None:
    batch = pair([2.0, 0.5]).with_rows(margin=torch.tensor([1.5, 99.0]))
    result, _ = run(RewardModelObjective(), batch)
    assert float(result.loss.detach()) == pytest.approx(math.log(2))


def test_centring_pulls_the_sum_to_zero() -> None:
    plain, _ = run(RewardModelObjective(), pair([2.0, 1.0]))
    centred, _ = run(RewardModelObjective(center_coef=0.1), pair([2.0, 1.0]))
    assert float((centred.loss - plain.loss).detach()) == pytest.approx(0.9)


def dpo_pair() -> Batch:
    """Chosen: log p - log ref = 0.5 + 0.5; rejected: -1.0 + 0 + 0."""
    batch = make_batch([0.0, 0.0], [1, 1], [(1, 2), (1, 3)], chosen=[True, False])
    return pair_weights(batch).with_tokens(
        log_probs=torch.tensor([-9.0, -1.0, -1.0, -9.0, -3.0, -1.0, -1.0]),
        ref_log_probs=torch.tensor([7.0, -1.5, -1.5, 7.0, -2.0, -1.0, -1.0]),
    )


@pytest.mark.parametrize(
    ("objective", "loss"),
    [
        (DpoObjective(beta=0.5), math.log(1 + math.exp(-1.0))),
        (
            DpoObjective(beta=0.5, label_smoothing=0.1),
            0.9 * math.log(1 + math.exp(-1.0)) + 0.1 * math.log(1 + math.exp(1.0)),
        ),
        (DpoObjective(loss="ipo", beta=0.5), (0.5 + 1 / 3 - 1) ** 2),
        (DpoObjective(loss="hinge", beta=0.25), 0.5),
        (DpoObjective(beta=0.5, sft_coef=0.2), math.log(1 + math.exp(-1.0)) + 0.2 * 1.0),
        # Log-probs without the reference: -1 and -1 of the chosen answer, -3, -1 and -1 of the rejected one.
        (DpoObjective(loss="cpo", beta=0.5, sft_coef=1.0), math.log(1 + math.exp(-0.5 * 3)) + 1.0),
        (DpoObjective(loss="simpo", beta=2.0, target_margin=0.5), math.log(1 + math.exp(-(2.0 * (-1 + 5 / 3) - 0.5)))),
        (
            DpoObjective(loss="orpo", beta=0.25, sft_coef=1.0),
            0.25 * math.log(1 + ((math.exp(5 / 3) - 1) / (math.e - 1)) ** -1) + 1.0,
        ),
    ],
)
def test_dpo_by_hand(objective: DpoObjective, loss: float) -> None:
    result, _ = run(objective, dpo_pair())
    assert float(result.loss.detach()) == pytest.approx(loss)


def test_the_metrics_of_dpo_by_hand() -> None:
    found = means(run(DpoObjective(beta=0.5), dpo_pair())[0])
    assert found["accuracy"] == 1.0
    assert (found["chosen_reward"], found["rejected_reward"]) == pytest.approx((0.5, -0.5))
    assert found["reward_margin"] == pytest.approx(1.0)
    assert found["chosen_nll"] == pytest.approx(1.0)
    assert "sft_loss" not in found


def test_the_supervised_term_stands_beside_the_preference_loss() -> None:
    plain = means(run(DpoObjective(beta=0.5), dpo_pair())[0])
    result, _ = run(DpoObjective(beta=0.5, sft_coef=0.2), dpo_pair())
    found = means(result)
    assert found["preference_loss"] == pytest.approx(plain["preference_loss"])
    assert found["sft_loss"] == pytest.approx(0.2)
    assert found["preference_loss"] + found["sft_loss"] == pytest.approx(float(result.loss.detach()))


def test_the_chosen_answer_alone_is_held_up() -> None:
    """Where the pair is decided the gradient of DPO is gone, and that of the supervised term is what is left."""
    batch = dpo_pair()
    decided = torch.where(batch["response_mask"] & ~batch["chosen"][batch.row_of_token], -400.0, batch["log_probs"])
    _, gradient = run(DpoObjective(beta=0.5, sft_coef=0.2), batch.with_tokens(log_probs=decided))
    assert gradient.tolist() == pytest.approx([0.0, -0.1, -0.1, 0.0, 0.0, 0.0, 0.0])


# Against plain Python, and gradients


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def of_pair(objective: Any, chosen: float, rejected: float, margin: float) -> float:
    h = chosen - rejected
    if isinstance(objective, RewardModelObjective):
        return -log_sigmoid(h - margin) + objective.center_coef * (chosen + rejected) ** 2
    if objective.loss == "ipo":
        return (h - 1 / (2 * objective.beta)) ** 2
    if objective.loss == "hinge":
        return max(0.0, 1 - objective.beta * h)
    if objective.loss == "orpo":
        odds = [math.exp(x) / (1 - math.exp(x)) for x in (min(chosen, -1e-7), min(rejected, -1e-7))]
        return objective.beta * math.log(1 + odds[1] / odds[0])
    e, z = objective.label_smoothing, objective.beta * h - objective.target_margin * (objective.loss == "simpo")
    return -(1 - e) * log_sigmoid(z) - e * log_sigmoid(-z)


def in_plain_python(objective: Any, batch: Batch) -> float:
    """Mean over the pairs of which both rows are valid."""
    numbers: dict[tuple[int, bool], tuple[float, bool, float]] = {}
    owner, mask = batch.row_of_token.tolist(), batch["response_mask"].tolist()
    free = getattr(objective, "loss", "") in ("simpo", "orpo", "cpo")
    difference = (batch["log_probs"].double() - (0.0 if free else batch["ref_log_probs"])).tolist()
    log_probs, held_up = batch["log_probs"].tolist(), dict[int, float]()
    for row in range(batch.num_rows):
        if isinstance(objective, RewardModelObjective):
            number = float(batch["model_scores"][row])
        else:
            own = [difference[t] for t in range(batch.num_tokens) if owner[t] == row and mask[t]]
            number = sum(own) / max(len(own) if objective.loss in ("ipo", "simpo", "orpo") else 1, 1)
            if batch["chosen"][row]:
                those = [log_probs[t] for t in range(batch.num_tokens) if owner[t] == row and mask[t]]
                held_up[int(batch["uid"][row])] = getattr(objective, "sft_coef", 0.0) * -sum(those) / max(len(those), 1)
        key = (int(batch["uid"][row]), bool(batch["chosen"][row]))
        numbers[key] = (number, bool(batch["valid"][row]), float(batch["margin"][row]))
    losses = []
    for uid in {uid for uid, _ in numbers}:
        (chosen, ok, margin), (rejected, also, _) = numbers[uid, True], numbers[uid, False]
        if ok and also:
            losses.append(of_pair(objective, chosen, rejected, margin) + held_up.get(uid, 0.0))
    return sum(losses) / max(len(losses), 1)


@settings(max_examples=50, deadline=None)
@given(preferences(), st.sampled_from(sorted(OBJECTIVES)))
def test_equals_plain_python(batch: Batch, name: str) -> None:
    result, _ = run(OBJECTIVES[name], batch)
    assert float(result.loss.detach()) == pytest.approx(in_plain_python(OBJECTIVES[name], batch), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@settings(max_examples=3, deadline=None)
@given(batch=preferences())
def test_gradcheck(name: str, batch: Batch) -> None:
    objective = OBJECTIVES[name]
    rows = {key: value.double() if value.is_floating_point() else value for key, value in batch.rows.items()}
    exact = Batch(lengths=batch.lengths, tokens=batch.tokens, rows=rows)
    numbers = leaf(objective, batch).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: objective({objective.outputs[0]: x}, exact).loss, (numbers,), eps=1e-6, atol=1e-5
    )


@settings(max_examples=50, deadline=None)
@given(st.data(), preferences(), st.sampled_from(sorted(OBJECTIVES)))
def test_micro_batches_of_whole_pairs_add_up(data: st.DataObject, batch: Batch, name: str) -> None:
    objective = OBJECTIVES[name]
    numbers = leaf(objective, batch)
    whole, gradient = run(objective, batch, numbers.clone())
    uids = batch["uid"].unique()
    cut = data.draw(st.lists(st.booleans(), min_size=len(uids), max_size=len(uids)))
    loss = 0.0
    for side in (True, False):
        members = torch.isin(batch["uid"], uids[torch.tensor(cut) == side])
        rows = members.nonzero()[:, 0]
        part = numbers[rows] if objective.outputs == ("scores",) else numbers[batch.token_index(rows)]
        result, part_gradient = run(objective, batch.select(rows), part.clone())
        loss += float(result.loss.detach())
        expected = gradient[rows] if objective.outputs == ("scores",) else gradient[batch.token_index(rows)]
        torch.testing.assert_close(part_gradient, expected)
    assert loss == pytest.approx(float(whole.loss.detach()), rel=1e-5, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(preferences(), st.sampled_from(sorted(OBJECTIVES)))
def test_pairs_that_are_not_valid_and_prompts_change_nothing_not_even_nan(batch: Batch, name: str) -> None:
    objective = OBJECTIVES[name]
    clean, gradient = run(objective, batch)
    counted = batch["row_weight"] > 0
    on = batch["response_mask"] & counted[batch.row_of_token]
    noisy = batch.with_tokens(**{f: torch.where(on, batch[f], torch.nan) for f in ("log_probs", "ref_log_probs")})
    noisy = noisy.with_rows(
        model_scores=torch.where(counted, batch["model_scores"], torch.nan),
        margin=torch.where(counted & batch["chosen"], batch["margin"], torch.nan),
    )
    found, noisy_gradient = run(objective, noisy)
    assert torch.equal(found.loss, clean.loss)
    assert torch.equal(noisy_gradient, gradient)
    assert found.sums == clean.sums


# Whole pairs


def test_weights_share_the_loss_among_whole_valid_pairs() -> None:
    batch = make_batch([0.0] * 6, [1, 2, 3, 1, 2, 3], chosen=[True, True, False, False, False, True])
    assert pair_weights(batch)["row_weight"].tolist() == pytest.approx([1 / 3] * 6)
    failed = batch.with_rows(valid=torch.tensor([True, False, True, True, True, True]))
    assert pair_weights(failed)["row_weight"].tolist() == pytest.approx([0.5, 0.0, 0.5, 0.5, 0.0, 0.5])


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_half_a_pair_is_refused(name: str) -> None:
    """An engine that cuts micro-batches by length would otherwise train on nonsense."""
    batch = dpo_pair().with_rows(model_scores=torch.zeros(2))
    assert OBJECTIVES[name].whole_groups
    with pytest.raises(BatchError, match=r"uid 1: expected one chosen and one rejected row, got 1 and 0.*whole_groups"):
        run(OBJECTIVES[name], batch.select([0]))


@pytest.mark.parametrize("chosen", [[True, True], [False, False]])
def test_two_of_a_kind_are_refused(chosen: list[bool]) -> None:
    with pytest.raises(BatchError, match="uid 9: expected one chosen and one rejected row"):
        pair_weights(make_batch([0.0, 0.0], [9, 9], chosen=chosen))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_each_reads_its_fields_and_no_others(name: str) -> None:
    objective = OBJECTIVES[name]
    batch = dpo_pair().with_rows(model_scores=torch.tensor([1.0, 0.0]))
    cut, _ = run(objective, batch.keep(objective.fields), leaf(objective, batch))
    assert torch.equal(cut.loss, run(objective, batch)[0].loss)
    assert isinstance(objective, Objective)
    assert pickle.loads(pickle.dumps(objective)) == objective


def test_a_batch_of_no_rows_gives_zero() -> None:
    empty = dpo_pair().with_rows(model_scores=torch.zeros(2)).select(slice(0, 0))
    for objective in OBJECTIVES.values():
        assert float(run(objective, empty)[0].loss.detach()) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "sigmoyd"}, r"DPO loss 'sigmoyd'; did you mean 'sigmoid'\?"),
        ({"beta": 0.0}, "DPO beta is 0.0"),
        ({"label_smoothing": 0.5}, "DPO label_smoothing is 0.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, r"above 0 with \['sigmoid', 'simpo', 'cpo'\] only"),
        ({"loss": "simpo", "target_margin": -1.0}, "DPO target_margin is -1.0"),
        ({"sft_coef": -0.1}, "DPO sft_coef is -0.1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DpoObjective(**options)


def test_odds_are_finite_where_an_answer_is_certain() -> None:
    """A mean log-prob of 0 has infinite odds; neither the loss nor its gradient may be NaN."""
    batch = dpo_pair()
    certain = torch.where(batch["chosen"][batch.row_of_token], 0.0, batch["log_probs"])
    result, gradient = run(DpoObjective(loss="orpo"), batch.with_tokens(log_probs=certain))
    assert bool(torch.isfinite(result.loss))
    assert bool(torch.isfinite(gradient).all())
    assert 0.0 <= float(result.loss.detach()) < 1e-5


def test_the_configuration_knows_which_losses_have_a_reference_and_smooth() -> None:
    for loss in get_args(PreferencesConfig.model_fields["loss"].annotation):
        objective = DpoObjective(loss=loss)
        assert ("ref_log_probs" in objective.fields) is PreferencesConfig(loss=loss).has_reference
        if loss in SMOOTHED:
            assert DpoObjective(loss=loss, label_smoothing=0.1).label_smoothing == 0.1
        else:
            with pytest.raises(ConfigError):
                DpoObjective(loss=loss, label_smoothing=0.1)
    assert set(DPO_LOSSES) == set(get_args(PreferencesConfig.model_fields["loss"].annotation))
