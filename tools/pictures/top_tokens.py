"""The reverse KL over a teacher's top tokens alone, and with the rest as one more category, as a policy leaves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rlsdk.kit.model.divergence import divergence, most_probable, top_divergence

from .svg import COLORS, frame, line, picture, text

SIZE, TOP_K = 50, 5
"""Tokens, and of those the ones that the teacher gives."""
STEPS, RATE = 400, 1.0
WIDTH, HEIGHT, PANEL, TALL = 860, 330, 390, 220
NAMES = ("over all tokens", "top tokens, and the rest as one", "top tokens alone")
Loss = Callable[[Tensor], Tensor]


def losses() -> tuple[Loss, Loss, Loss]:
    """The three, of a policy's logits `[V]`: of a teacher with most of its mass on its top tokens."""
    teacher = -0.9 * torch.arange(SIZE, dtype=torch.float64).clamp(max=6)
    ids, top = most_probable(teacher[None], TOP_K)

    def alone(policy: Tensor) -> Tensor:
        logs = policy.log_softmax(-1)[ids[0]]
        return (logs.exp() * (logs - top[0])).sum()

    return (
        lambda policy: divergence(policy[None], teacher[None], 1.0)[0],
        lambda policy: top_divergence(policy[None], ids, top, 1.0)[0],
        alone,
    )


def values(shares: Sequence[float]) -> list[list[float]]:
    """Each loss, of policies that give the top tokens these shares, and the others the rest evenly."""
    teacher = -0.9 * torch.arange(TOP_K, dtype=torch.float64)
    found = []
    for loss in losses():
        of_loss = []
        for share in shares:
            others = torch.full((SIZE - TOP_K,), (1 - share) / (SIZE - TOP_K), dtype=torch.float64)
            of_loss.append(float(loss(torch.cat([share * teacher.softmax(-1), others]).log())))
        found.append(of_loss)
    return found


def learned() -> list[list[float]]:
    """Probability of the top tokens by step of gradient descent on each loss, from a policy that is nearly even."""
    found = []
    for loss in losses():
        policy = torch.linspace(0.0, 0.5, SIZE, dtype=torch.float64).requires_grad_()
        of_loss = []
        for _ in range(STEPS):
            of_loss.append(float(policy.softmax(-1)[:TOP_K].detach().sum()))
            (slope,) = torch.autograd.grad(loss(policy), policy)
            policy = (policy - RATE * slope).detach().requires_grad_()
        found.append(of_loss)
    return found


def top_tokens_picture() -> str:
    """The losses by what the policy leaves, and what it learns from each."""
    shares = [at / 100 for at in range(2, 99, 2)]
    body = [
        text(20, 18, f"Reverse KL from a teacher that gives its {TOP_K} top tokens of {SIZE}", bold=True, size=13),
        *_panel(20, "loss, by the probability that the policy gives the top tokens", values(shares), (-0.5, 3.0)),
        *_panel(20 + PANEL + 30, f"probability of the top tokens, in {STEPS} steps of descent", learned(), (0.0, 1.0)),
    ]
    for at, name in enumerate(NAMES):
        body += [
            text(30 + 260 * at, HEIGHT - 14, "―", bold=True, fill=COLORS[at]),
            text(48 + 260 * at, HEIGHT - 14, name),
        ]
    return picture(WIDTH, HEIGHT, "Top tokens alone, and with the rest as one more category", body)


def _panel(left: float, title: str, curves: Sequence[Sequence[float]], span: tuple[float, float]) -> Iterator[str]:
    low, high = span
    top = 62

    def y(value: float) -> float:
        return top + TALL * (1 - (min(max(value, low), high) - low) / (high - low))

    yield text(left, top - 14, title)
    yield frame(left, top, PANEL, TALL)
    yield line(left, y(0.0), left + PANEL, y(0.0), dashed=True)
    yield text(left + 4, y(0.0) - 4, "0", size=11)
    yield text(left + 4, top + 12, f"{high:g}", size=11)
    for curve, color in zip(curves, COLORS, strict=False):
        points = " ".join(
            f"{left + PANEL * at / (len(curve) - 1):.1f},{y(value):.1f}" for at, value in enumerate(curve)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
