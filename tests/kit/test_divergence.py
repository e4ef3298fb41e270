"""The divergence from a teacher, and its gradient, against the plain formulas; and by models with caps and scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsdk.interfaces import Batch, ConfigError, ModelSpec
from rlsdk.kit.model import logit_chunks
from rlsdk.kit.model.divergence import divergence, load_teacher_head
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.outputs import OutputModel, TeacherHead
from rlsdk.testing.process.models import write_tiny_model

BETAS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])


def plain(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The formulas of arXiv 2306.13649, with probabilities."""
    q, p = policy.softmax(-1), teacher.softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    if beta in (0.0, 1.0):
        return kl(q, p) if beta else kl(p, q)
    mean = beta * p + (1 - beta) * q
    return beta * kl(p, mean) + (1 - beta) * kl(q, mean)


@given(
    tokens=st.integers(0, 4),
    vocabulary=st.integers(2, 40),
    beta=BETAS,
    sharpness=st.floats(0.1, 5.0),
    seed=st.integers(0, 2**31),
)
def test_value_and_gradient_are_those_of_the_formula_in_float64(
    tokens: int, vocabulary: int, beta: float, sharpness: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy, teacher, slope = (
        torch.randn(tokens, size, generator=generator, dtype=torch.float64) for size in (vocabulary, vocabulary, 1)
    )
    policy = (sharpness * policy).requires_grad_()
    found, expected = divergence(policy, sharpness * teacher, beta), plain(policy, sharpness * teacher, beta)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert (found >= -1e-12).all()
    gradients = [torch.autograd.grad((slope[:, 0] * value).sum(), policy)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


@given(beta=BETAS, seed=st.integers(0, 2**31))
def test_padding_of_either_vocabulary_changes_nothing(beta: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy, teacher, more = (torch.randn(3, size, generator=generator) for size in (7, 7, 4))
    expected = divergence(policy, teacher, beta)
    assert torch.equal(divergence(torch.cat([policy, more], -1), teacher, beta), expected)
    assert torch.equal(divergence(policy, torch.cat([teacher, more], -1), beta), expected)
    assert divergence(policy, policy, beta).abs().max() < 1e-6


def test_far_apart_distributions_stay_finite() -> None:
    """Where a probability is 0 in float32, its logarithm is not."""
    policy = torch.tensor([[200.0, 0.0]], requires_grad=True)
    for beta in (0.0, 0.5, 1.0):
        found = divergence(policy, -policy.detach(), beta)
        assert float(found.detach()) == pytest.approx(200.0 if beta in (0.0, 1.0) else math.log(2), rel=1e-5)
        (gradient,) = torch.autograd.grad(found.sum(), policy)
        assert gradient.isfinite().all()


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"tied": True}),
    ("gemma2", {"final_logit_softcapping": 5.0}),
    ("granite", {"logits_scaling": 3.0}),
    ("llama", {"hidden_size": 64, "vocab_size": 160}),
]


@pytest.mark.parametrize(("family", "shape"), FAMILIES)
def test_a_teachers_head_and_hidden_states_give_the_divergence_of_both_models(
    family: str, shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caps, scales, tied and padded heads, in chunks of three tokens; gradients of every parameter of the policy."""
    monkeypatch.setitem(logit_chunks.MAX_LOGITS, "cpu", 3 * 128)
    folders = [
        write_tiny_model(tmp_path / "policy", seed=1),
        write_tiny_model(tmp_path / "teacher", architecture=family, seed=2, sharpness=2.0, **shape),
    ]
    policy, teacher = (ModelSpec(path=str(folder), dtype="float32") for folder in folders)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 100, (n,), generator=generator).tolist() for n in (9, 1, 6)]
    batch = Batch.from_rows(rows)
    mask = (batch.position_ids > 0) & (torch.rand(batch.num_tokens, generator=generator) < 0.8)
    batch = batch.with_tokens(response_mask=mask).with_meta(temperature=0.7)
    with torch.no_grad():
        states = OutputModel(build_model(teacher))(batch, ("hidden_states",))["hidden_states"]
    assert not states[~mask].any()
    taught = batch.with_tokens(teacher_states=states).with_meta(teacher_temperature=1.6, divergence_beta=0.3)
    model = OutputModel(build_model(policy))
    with pytest.raises(ConfigError, match="no teacher was loaded"):
        model(taught, ("divergence",))
    model.teachers[0] = TeacherHead(load_teacher_head(teacher, torch.device("cpu")))
    weight = torch.rand(batch.num_tokens, generator=generator)
    found = model(taught, ("log_probs", "divergence"))
    (weight * (found["divergence"] + 0.1 * found["log_probs"])).sum().backward()
    whole, other = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders)
    total, at = torch.zeros(()), 0
    for row in rows:
        part = slice(at + 1, at + len(row))
        ids = torch.tensor([row])
        with torch.no_grad():
            theirs = other(ids).logits[0, :-1, :128] / 1.6
        ours = whole(ids).logits[0, :-1] / 0.7
        values = plain(ours, theirs, 0.3)
        torch.testing.assert_close(found["divergence"][part][mask[part]], values[mask[part]], rtol=1e-4, atol=1e-5)
        logs = ours.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        total = total + (weight[part] * mask[part] * (values + 0.1 * logs)).sum()
        at += len(row)
    total.backward()  # type: ignore[no-untyped-call]
    expected = dict(whole.named_parameters())
    for name, parameter in model.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=2e-3, atol=2e-5, msg=name)


def test_a_teachers_head_is_all_that_is_loaded(tmp_path: Path) -> None:
    spec = ModelSpec(path=str(write_tiny_model(tmp_path / "teacher", tied=True, layers=4)), dtype="bfloat16")
    model = load_teacher_head(spec, torch.device("cpu"))
    held = {name: p for name, p in model.named_parameters(remove_duplicate=False) if not p.is_meta}
    assert list(held) == ["lm_head.weight"]
    assert held["lm_head.weight"].dtype is torch.bfloat16
    expected = build_model(spec).lm_head.weight
    assert torch.equal(held["lm_head.weight"], expected)
