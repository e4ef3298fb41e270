"""What is computed of logits in chunks equals plain autograd on all logits, in float64, and its memory is bounded."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.kit.memory.pass_memory import LiveBytes
from rlsdk.kit.model.chunked_head import OfLogits, VocabularyHead, log_probs, outputs_of_logits
from rlsdk.kit.model.logit_chunks import chunk_tokens

Results = tuple[list[Tensor], dict[str, Tensor]]


def divergence(logits: Tensor, others: Tensor) -> tuple[Tensor]:
    """KL from the distribution of a second model: something else that is computed of logits."""
    ours, theirs = logits.log_softmax(-1), others.to(logits).log_softmax(-1)
    return ((ours.exp() * (ours - theirs)).sum(-1),)


def plain_log_probs(logits: Tensor, targets: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
    logs = logits.log_softmax(-1)
    chosen = logs.gather(1, targets[:, None])[:, 0]
    return (chosen, -(logs.exp() * logs).sum(-1)) if entropy else (chosen,)


def tensors(tokens: int, vocabulary: int, hidden: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    return {
        "hidden": draw(tokens, hidden),
        "weight": draw(vocabulary, hidden),
        "bias": draw(vocabulary),
        "scale": draw(()).exp(),
    }


def run(
    compute: Callable[..., tuple[Tensor, ...]],
    given: Tensor,
    leaves: dict[str, Tensor],
    slopes: list[Tensor],
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Results:
    """Results and gradients of the leaves; without `chunk` by plain autograd."""
    leaves = {
        name: leaf.clone().requires_grad_(leaf.requires_grad or name != "frozen") for name, leaf in leaves.items()
    }
    hidden, weight, bias, scale = leaves.values()
    if chunk is None:
        found = compute((hidden @ weight.t() + bias) * scale / temperature, given)
    else:
        head = VocabularyHead(
            weight=weight,
            bias=bias,
            project=lambda hidden, product: (product(hidden) if product else hidden @ weight.t() + bias) * scale,
            others=(scale,),
            temperature=temperature,
        )
        found = outputs_of_logits(head, compute, hidden, (given,), chunk)
    loss = sum((slope.to(value) * value).sum() for slope, value in zip(slopes, found, strict=False))
    loss.backward()  # type: ignore[union-attr]
    return [value.detach() for value in found], {name: leaf.grad for name, leaf in leaves.items()}  # type: ignore[misc]


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(2, 30),
    chunk=st.integers(1, 45),
    entropy=st.booleans(),
    temperature=st.sampled_from([0.6, 1.0, 1.9]),
    seed=st.integers(0, 99),
)
def test_equals_plain_autograd_in_float64(
    tokens: int, vocabulary: int, chunk: int, entropy: bool, temperature: float, seed: int
) -> None:
    leaves = tensors(tokens, vocabulary, 6, seed)
    targets = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))
    slopes = [torch.linspace(-1, 2, tokens), torch.linspace(1, -3, tokens)]
    exact = {name: leaf.double() for name, leaf in leaves.items()}
    compute = functools.partial(log_probs, entropy=entropy)
    found = run(compute, targets, leaves, slopes, temperature=temperature, chunk=chunk)
    plain = functools.partial(plain_log_probs, entropy=entropy)
    assert_near(found, run(plain, targets, exact, slopes, temperature=temperature))


@settings(max_examples=20)
@given(tokens=st.integers(1, 30), chunk=st.integers(1, 35), seed=st.integers(0, 99))
def test_anything_can_be_computed_of_logits(tokens: int, chunk: int, seed: int) -> None:
    leaves = tensors(tokens, 17, 6, seed)
    others = torch.randn(tokens, 17, generator=torch.Generator().manual_seed(seed + 1))
    slopes = [torch.linspace(-1, 2, tokens)]
    exact = {name: leaf.double() for name, leaf in leaves.items()}
    assert_near(run(divergence, others, leaves, slopes, chunk=chunk), run(divergence, others.double(), exact, slopes))


def assert_near(found: Results, expected: Results) -> None:
    for value, exact in zip(found[0], expected[0], strict=True):
        assert value.dtype is torch.float32
        torch.testing.assert_close(value.double(), exact, rtol=2e-5, atol=2e-5)
    for name, exact in expected[1].items():
        limit = 1e-5 * float(exact.abs().max()) + 1e-5
        torch.testing.assert_close(found[1][name].double(), exact, rtol=0, atol=limit, msg=name)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [7, 100])
def test_log_probs_and_hidden_gradients_are_those_of_torch_bit_for_bit(chunk: int, entropy: bool) -> None:
    leaves = tensors(50, 300, 16, seed=3)
    targets = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(4))
    slopes = [torch.linspace(-1, 2, 50), torch.linspace(1, -3, 50)]
    found = run(functools.partial(log_probs, entropy=entropy), targets, leaves, slopes, chunk=chunk)
    plain = run(functools.partial(plain_log_probs, entropy=entropy), targets, leaves, slopes, chunk=chunk)
    for one, other in zip(found[0], plain[0], strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(found[1][name], plain[1][name]) for name in leaves)


def head_of(dtype: torch.dtype, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    leaves = tensors(tokens, 50, 32, seed=6)
    targets = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(7))
    return leaves["hidden"].to(dtype), leaves["weight"].to(dtype), targets


def weight_gradient(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    weight = weight.clone().requires_grad_()
    outputs_of_logits(VocabularyHead(weight=weight), log_probs, hidden, (targets,), chunk)[0].sum().backward()
    assert weight.grad is not None
    return weight.grad.double()


def test_chunks_add_the_gradient_of_a_half_precision_weight_in_float32() -> None:
    """Added up in bfloat16, the rounding of 250 chunks would be many times that of one."""
    hidden, weight, targets = head_of(torch.bfloat16, 2000)
    exact = weight_gradient(hidden.double(), weight.double(), targets, 2000)
    once, often = (weight_gradient(hidden, weight, targets, chunk) for chunk in (2000, 8))
    assert (often - exact).norm() <= 1.1 * (once - exact).norm()


def test_a_frozen_weight_or_frozen_layers_get_no_gradient() -> None:
    hidden, weight, targets = head_of(torch.float32, 30)
    hidden.requires_grad_()
    outputs_of_logits(VocabularyHead(weight=weight), log_probs, hidden, (targets,), 4)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    assert weight_gradient(hidden.detach(), weight, targets, 4).abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_memory_is_bounded_by_the_chunk(entropy: bool, dtype: torch.dtype) -> None:
    chunk, vocabulary, hidden = 64, 1024, 8
    compute: OfLogits = functools.partial(log_probs, entropy=entropy)

    def peak(tokens: int) -> int:
        states = torch.zeros(tokens, hidden, dtype=dtype, requires_grad=True)
        weight = torch.zeros(vocabulary, hidden, dtype=dtype, requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.int64)
        with LiveBytes() as live:
            values = outputs_of_logits(VocabularyHead(weight=weight), compute, states, (targets,), chunk)
            torch.stack(values).sum().backward()
        outputs, gradients = 4 * 4 * tokens, 4 * states.numel() + 8 * weight.numel()
        return live.peak - outputs - gradients

    assert peak(8 * chunk) <= 4 * 4 * chunk * vocabulary
    assert peak(32 * chunk) <= 4 * 4 * chunk * vocabulary


def test_chunks_are_larger_on_accelerators() -> None:
    assert chunk_tokens(151_936, "cpu") == 220
    assert chunk_tokens(151_936, "cuda:3") == 1766
    assert chunk_tokens(1 << 40, "cpu") == chunk_tokens(1 << 40, "cuda") == 1


def order_of_gradients(tokens: int, *, steady: bool) -> list[str]:
    """In which the gradients of a head of two matrices come; chunks have four tokens."""
    torch.manual_seed(0)
    low = {"a": torch.randn(2, 6, requires_grad=True), "b": torch.randn(11, 2, requires_grad=True)}
    found: list[str] = []
    for name, parameter in low.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))
    head = VocabularyHead(
        weight=None, project=lambda hidden, _: hidden @ low["a"].T @ low["b"].T, others=(*low.values(),), steady=steady
    )
    targets = torch.zeros(tokens, dtype=torch.int64)
    outputs_of_logits(head, log_probs, torch.randn(tokens, 6), (targets,), 4)[0].sum().backward()
    return found


def test_a_steady_head_has_gradients_in_one_order_for_any_number_of_tokens() -> None:
    """An engine may add what comes first on one rank to what comes first on another (ZeRO 2)."""
    assert order_of_gradients(2, steady=True) == order_of_gradients(9, steady=True)
    assert order_of_gradients(2, steady=False) != order_of_gradients(9, steady=False)
