"""Cutting a sample into several rows changes no advantage, weight, loss, gradient or metric.

In the order in which rows are made, the arithmetic is the same and so are the bits; in another order, sums are equal up
to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_cases import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_cuts import CutStep, cut_steps
from torch import Tensor

from rlsdk import algorithms as alg
from rlsdk.algorithms import PolicyObjective, Samples, ValueObjective, loss_weights, update_means
from rlsdk.interfaces import Batch, BatchError, Objective, ObjectiveResult, concat
from rlsdk.kit.model.microbatch import groups_to_keep, micro_batches
from rlsdk.registry import ComponentKind, Registry
from rlsdk.trainer.learner.mini_batches import cut_mini_batches, has_advantage, with_signal

REGISTRY = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
ESTIMATORS = {
    name: REGISTRY.function(ComponentKind.ADVANTAGE, name) for name in REGISTRY.usable(ComponentKind.ADVANTAGE)
}
OPTIONS: dict[str, list[Mapping[str, Any]]] = {
    "grpo": [{"scale": "batch"}],
    "reinforce": [{"gamma": 0.9}],
    "reinforce_plus_plus": [{"gamma": 0.9}],
    "gae": [{"gamma": 0.9, "lam": 0.7}, {"gamma": 0.9, "lam": 0.7, "critic_lam": 1.0, "normalize": False}],
}
CASES = [(name, options) for name in sorted(ESTIMATORS) for options in ({}, *OPTIONS.get(name, []))]
LOSSES = sorted(REGISTRY.usable(ComponentKind.LOSS))
AGGREGATIONS = sorted({*alg.AGGREGATIONS} - {alg.Aggregation.ROW_MEAN})
"""`row_mean` counts rows: it says that it depends on the cut."""
SHAPES: Mapping[str, Callable[[Batch], Batch]] = {
    "punishment": partial(alg.overlong_punishment, max_tokens=4, cache_tokens=3),
    "penalty": partial(alg.length_penalty, coef=0.3, free_tokens=1, max_penalty=1.0),
    "relative": partial(alg.relative_length_reward, coef=0.5),
}
REJECTS: Mapping[str, Callable[[Batch], Batch]] = {
    "truncated": alg.overlong_filter,
    **{
        level: partial(alg.reject_rows, level=level, upper=1.3, lower=0.8)
        for level in ("token", "sequence", "geometric")
    },
}


def equal(found: Tensor, expected: Tensor, *, exact: bool) -> None:
    if exact:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def either_order(step: CutStep, data: st.DataObject) -> tuple[CutStep, bool]:
    """The step as it is made, or its rows shuffled; and whether it is as made."""
    order = torch.tensor(data.draw(st.permutations(range(step.cut.num_rows))))
    in_order = data.draw(st.booleans())
    return (step, True) if in_order else (step.shuffled(order), False)


@settings(max_examples=200, deadline=None)
@given(cut_steps(), st.sampled_from(CASES), st.data())
def test_a_sample_has_one_place_in_its_group_and_one_advantage(
    step: CutStep, case: tuple[str, Mapping[str, Any]], data: st.DataObject
) -> None:
    name, options = case
    step, exact = either_order(step, data)
    made = ("advantages", "returns")
    names = [[field for field in (*batch.tokens, *batch.rows) if field not in made] for batch in (step.whole, step.cut)]
    whole = ESTIMATORS[name](step.whole.keep(names[0]), **options)
    cut = ESTIMATORS[name](step.cut.keep(names[1]), **options)
    for field in made:
        assert (field in whole) == (field in cut)
        if field in whole:
            equal(step.of_whole(cut[field]), whole[field], exact=exact)
            assert not cut[field][~cut["response_mask"]].any()


@settings(max_examples=100, deadline=None)
@given(cut_steps(), st.sampled_from([0.0, 0.2]), st.booleans(), st.data())
def test_rewards_of_tokens_stand_where_they_stood(
    step: CutStep, kl_coef: float, dense: bool, data: st.DataObject
) -> None:
    step, _ = either_order(step, data)
    made = []
    for batch in (step.whole, step.cut):
        if dense:
            batch = batch.with_tokens(token_scores=torch.where(batch["response_mask"], batch["values"], 0.0).double())
        made.append(alg.token_level_rewards(batch, kl_coef=kl_coef, log_probs=batch["old_log_probs"]))
    equal(step.of_whole(made[1]["token_level_rewards"]), made[0]["token_level_rewards"], exact=not dense)
    assert alg.score_dtype(made[1]) == alg.score_dtype(made[0])


@settings(max_examples=100, deadline=None)
@given(cut_steps(), st.sampled_from(sorted(SHAPES)), st.sampled_from(sorted(REJECTS)), st.data())
def test_lengths_and_corrections_are_those_of_samples(
    step: CutStep, shape: str, reject: str, data: st.DataObject
) -> None:
    step, exact = either_order(step, data)
    whole, cut = (SHAPES[shape](batch) for batch in (step.whole, step.cut))
    equal(step.of_samples(cut["scores"]), whole["scores"], exact=True)
    whole, cut = (REJECTS[reject](batch) for batch in (step.whole, step.cut))
    equal(step.of_samples(cut["trained"]), whole["trained"], exact=True)
    for level in ("token", "sequence", "geometric"):
        whole, cut = (alg.correct_rollout(batch, level=level, upper=1.2) for batch in (step.whole, step.cut))
        equal(step.of_whole(cut["rollout_weight"]), whole["rollout_weight"], exact=exact)


@settings(max_examples=100, deadline=None)
@given(cut_steps(), st.sampled_from(AGGREGATIONS), st.sampled_from([None, "truncated", "token"]), st.data())
def test_weights_in_the_loss_are_those_of_samples(
    step: CutStep, aggregation: str, reject: str | None, data: st.DataObject
) -> None:
    step, exact = either_order(step, data)
    made = []
    for batch in (step.whole, step.cut):
        batch = batch if reject is None else REJECTS[reject](batch)
        batch = batch.with_tokens(loss_weight=loss_weights(batch, aggregation, max_tokens=8))
        made.append((batch["loss_weight"], alg.keep_top_entropy(batch, 0.5)["loss_weight"]))
    for found, expected in zip(made[1], made[0], strict=True):
        equal(step.of_whole(found), expected, exact=exact)


@settings(max_examples=60, deadline=None)
@given(cut_steps(), st.data())
def test_metrics_of_a_step_count_samples(step: CutStep, data: st.DataObject) -> None:
    step, _ = either_order(step, data)
    signals = [
        alg.group_signal(batch, compares=compares) for compares in (None, "best") for batch in (step.whole, step.cut)
    ]
    for whole, cut in (signals[:2], signals[2:]):
        assert torch.equal(whole.num_valid, cut.num_valid)
        assert torch.equal(whole.has_signal, cut.has_signal)
    found = [
        alg.mismatch(batch, batch["old_log_probs"], batch["rollout_log_probs"]) for batch in (step.whole, step.cut)
    ]
    assert asdict(found[1]) == pytest.approx(asdict(found[0]), rel=1e-6, nan_ok=True)
    assert Samples.of(step.cut).count == step.whole.num_rows
    versions = torch.arange(step.whole.num_rows) % 3
    old = step.whole.with_rows(policy_version=versions, last_policy_version=versions)
    rows = versions[step.whole.row_of_token[step.source.clamp(min=0)]]
    of_row = torch.zeros(step.cut.num_rows, dtype=torch.int64).scatter_reduce(
        0, step.cut.row_of_token, torch.where(step.source < 0, -1, rows), "amax", include_self=False
    )
    cut = step.cut.with_rows(policy_version=of_row, last_policy_version=of_row)
    assert alg.count_stale(cut, 2) == alg.count_stale(old, 2)


def learned(objective: Objective, batch: Batch) -> tuple[ObjectiveResult, Mapping[str, Tensor]]:
    """The result, and the gradient on each output."""
    outputs = {name: batch[name].clone().requires_grad_() for name in objective.outputs}
    result = objective(outputs, batch)
    result.loss.backward()
    return result, {name: values.grad for name, values in outputs.items() if values.grad is not None}


def same_update(step: CutStep, objectives: tuple[Objective, Objective], limit: int) -> None:
    """Loss, gradient and metrics of the cut step, in micro-batches, are those of the whole one."""
    expected, gradients = learned(objectives[0], step.whole)
    passes = micro_batches(step.cut.lengths, max_tokens=limit, groups=groups_to_keep(step.cut, objectives[1]))
    found = [learned(objectives[1], step.cut.select(rows)) for rows in passes]
    torch.testing.assert_close(sum(r.loss for r, _ in found), expected.loss, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        flat = torch.zeros(step.cut.num_tokens)
        for rows, (_, of_pass) in zip(passes, found, strict=True):
            flat[step.cut.token_index(rows)] = of_pass[name]
        torch.testing.assert_close(step.of_whole(flat), gradient, rtol=1e-4, atol=1e-6)
        assert not flat[step.source < 0].any()
    sums = {name: math.fsum(float(r.sums[name]) for r, _ in found) for name in expected.sums}
    means = [update_means([each]) for each in (sums, {name: float(value) for name, value in expected.sums.items()})]
    assert means[0] == pytest.approx(means[1], rel=1e-4, abs=1e-4)
    maxima = {name: max(float(r.maxima[name]) for r, _ in found) for name in expected.maxima}
    assert maxima == pytest.approx({name: float(value) for name, value in expected.maxima.items()}, rel=1e-5)


@settings(max_examples=200, deadline=None)
@given(
    cut_steps(), st.sampled_from(LOSSES), st.sampled_from(AGGREGATIONS), st.booleans(), st.booleans(),
    st.integers(1, 40), st.data(),
)  # fmt: skip
def test_a_policy_update_does_not_depend_on_the_cut(
    step: CutStep, loss: str, aggregation: str, penalties: bool, sparse: bool, limit: int, data: st.DataObject
) -> None:
    """For every loss and aggregation; with `sparse`, some rows have no advantage, and so have some samples."""
    step, _ = either_order(step, data)
    options: dict[str, Any] = {"kl_coef": 0.3, "entropy_coef": 0.1} if penalties else {}
    objective = PolicyObjective(loss=REGISTRY.function(ComponentKind.LOSS, loss), **options)
    cut = PolicyObjective(loss=objective.loss, **options, several_rows=True)
    made = []
    for batch in (step.whole, step.cut):
        if sparse:
            batch = batch.with_tokens(advantages=torch.where(batch["advantages"] > 1.0, batch["advantages"], 0.0))
        batch = batch.with_tokens(advantages=torch.where(batch["response_mask"], batch["advantages"], 0.0))
        batch = alg.correct_rollout(batch, level="sequence")
        batch = batch.with_tokens(loss_weight=loss_weights(batch, aggregation, max_tokens=8))
        made.append(batch.with_rows(has_advantage=has_advantage(Samples.of(batch))))
    step = CutStep(whole=made[0], cut=made[1], source=step.source)
    if step.cut.num_rows > step.whole.num_rows:
        same_update(step, (objective, cut), limit)
    kept = [with_signal(batch, torch.arange(batch.num_rows)) for batch in made]
    if made[0]["advantages"].any():
        samples = [set(zip(*(batch[name][rows].tolist() for name in ("uid", "sample")), strict=True)) for batch, rows in
                   ((made[0].with_rows(sample=_numbers(made[0])), kept[0]), (made[1], kept[1]))]  # fmt: skip
        assert samples[0] == samples[1]


def _numbers(batch: Batch) -> Tensor:
    uids = batch["uid"].tolist()
    return torch.tensor([uids[:row].count(uid) for row, uid in enumerate(uids)])


@settings(max_examples=50, deadline=None)
@given(cut_steps(), st.sampled_from(AGGREGATIONS), st.sampled_from([None, 0.2]), st.integers(1, 40))
def test_a_critics_update_does_not_depend_on_the_cut(
    step: CutStep, aggregation: str, clip: float | None, limit: int
) -> None:
    made = [
        batch.with_tokens(loss_weight=loss_weights(batch, aggregation, max_tokens=8))
        for batch in (step.whole, step.cut)
    ]
    objective = ValueObjective(clip=clip)
    same_update(CutStep(whole=made[0], cut=made[1], source=step.source), (objective, objective), limit)


@settings(max_examples=50, deadline=None)
@given(cut_steps(), st.integers(1, 5), st.integers(0, 9), st.data())
def test_mini_batches_hold_the_same_samples(step: CutStep, parts: int, seed: int, data: st.DataObject) -> None:
    whole = cut_mini_batches(step.whole.sample_of_row, parts, seed=(seed,))
    cut = cut_mini_batches(step.cut.sample_of_row, parts, seed=(seed,))
    number = step.cut.sample_of_row
    assert [sorted(set(number[rows].tolist())) for rows in cut] == [rows.tolist() for rows in whole]
    assert sorted(torch.cat(cut).tolist()) == list(range(step.cut.num_rows))


# What has no identity, or a wrong one


def rows_of(*samples: int, **rows: Any) -> Batch:
    batch = make_batch([1.0] * len(samples), [7] * len(samples))
    fields = {name: torch.from_numpy(np.array(values)) for name, values in rows.items()}
    return batch.with_rows(sample=torch.tensor(samples), **fields)


def test_rows_of_samples_survive_a_split_and_a_join_in_any_order() -> None:
    batch = rows_of(0, 0, 1, 2, 2)
    joined = concat([batch.select([4, 1]), batch.select([0, 3, 2])])
    assert Samples.of(joined).index.tolist() == [0, 1, 1, 0, 2]
    assert [joined["row_id"][row].item() for row in Samples.of(joined).rows] == [3, 4, 0, 1, 2]
    assert joined["row_id"][Samples.of(joined).last].tolist() == [4, 1, 2]


def test_without_the_field_each_row_is_a_sample() -> None:
    batch = rows_of(0, 0, 1)
    assert Samples.of(batch).count == 2
    assert Samples.of(batch.keep(["uid", "response_mask"])).count == 3


@pytest.mark.parametrize("field", ["scores", "valid", "truncated", "baseline_scores"])
def test_rows_of_one_sample_with_two_values_are_refused_by_name(field: str) -> None:
    values = {"valid": [True, False, True], "truncated": [True, False, True]}.get(field, [0.5, 1.0, 0.0])
    batch = rows_of(3, 3, 4, **{field: values}).with_rows(row_id=torch.tensor([10, 11, 12]))
    text = rf"{field}: .*one sample.*sample 3 of uid 7 has {values[0]} in row_id 10 and {values[1]} in row_id 11"
    for use in (batch.validate, lambda: alg.grpo(batch), lambda: loss_weights(batch, "sequence_mean")):
        with pytest.raises(BatchError, match=text):
            use()


def test_a_score_that_is_not_a_number_on_all_rows_is_one_value() -> None:
    nan = float("nan")
    batch = rows_of(0, 0, 1, scores=[nan, nan, 1.0], valid=[False, False, True])
    assert Samples.of(batch.validate()).valid.tolist() == [False, True]


def test_samples_of_no_prompt_are_refused() -> None:
    batch = rows_of(0, 1).keep(["sample", "scores", "response_mask"])
    for use in (batch.validate, lambda: Samples.of(batch)):
        with pytest.raises(BatchError, match=r"sample: .*no uid.*keep `uid` with it, or neither"):
            use()
