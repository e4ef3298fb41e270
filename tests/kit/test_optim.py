"""AdamW and its schedule, against the formulas of the paper."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.interfaces import ConfigError, OptimSpec
from rlsdk.kit.model.optim import build_optimizer, learning_rate, set_learning_rate


def test_warm_up_is_linear_from_lr_over_warmup_steps() -> None:
    spec = OptimSpec(lr=1.0, warmup_steps=4)
    assert [learning_rate(step, spec) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decays_to_zero_at_total_steps() -> None:
    spec = OptimSpec(lr=2.0, schedule="linear", warmup_steps=2, total_steps=6)
    assert [learning_rate(step, spec) for step in range(8)] == pytest.approx([1, 2, 2, 1.5, 1, 0.5, 0, 0])


def test_cosine_decays_to_its_floor() -> None:
    spec = OptimSpec(lr=1.0, schedule="cosine", total_steps=4, min_lr_ratio=0.2)
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(5)]
    assert [learning_rate(step, spec) for step in range(5)] == pytest.approx(expected)
    assert learning_rate(400, spec) == pytest.approx(0.2)


@given(schedule=st.sampled_from(["constant", "linear", "cosine"]), warmup=st.integers(0, 5), total=st.integers(1, 20))
def test_no_schedule_leaves_the_range_from_zero_to_peak(schedule: str, warmup: int, total: int) -> None:
    spec = OptimSpec(lr=3e-4, schedule=schedule, warmup_steps=warmup, total_steps=total)
    rates = [learning_rate(step, spec) for step in range(30)]
    assert all(0 <= rate <= spec.lr for rate in rates)
    assert all(a >= b for a, b in zip(rates[warmup:], rates[warmup + 1 :], strict=False))


def test_an_unknown_schedule_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        learning_rate(0, OptimSpec(schedule="cosin"))


def test_a_decaying_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="total_steps, which is None"):
        learning_rate(0, OptimSpec(schedule="linear"))


def test_three_steps_equal_adamw_written_out_with_decay_on_matrices_only() -> None:
    torch.manual_seed(0)
    spec = OptimSpec(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    named = {"matrix": torch.nn.Parameter(torch.randn(5, 3)), "vector": torch.nn.Parameter(torch.randn(7))}
    expected = {name: p.detach().double() for name, p in named.items()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    optimizer = build_optimizer(named.items(), spec)
    for step in range(1, 4):
        set_learning_rate(optimizer, lr := 0.01 / step)
        for name, parameter in named.items():
            parameter.grad = torch.randn_like(parameter)
            gradient = parameter.grad.double()
            if name == "matrix":
                expected[name] *= 1 - lr * spec.weight_decay
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            unbiased = first[name] / (1 - 0.8**step), second[name] / (1 - 0.95**step)
            expected[name] -= lr * unbiased[0] / (unbiased[1].sqrt() + spec.eps)
        optimizer.step()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_left_out() -> None:
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    moving = torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([("frozen", frozen), ("moving", moving)], OptimSpec())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
