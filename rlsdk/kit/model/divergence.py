"""Divergence of a model's distribution of the next token from a teacher's, over the whole vocabulary, and the head of a
teacher that it is computed with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rlsdk.interfaces import ConfigError, ModelSpec
from rlsdk.kit.files.weight_files import checkpoint_files, open_weights
from rlsdk.kit.model.hf import build_model, canonical_parameters


def divergence(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """`[m]`: generalised Jensen-Shannon divergence between the distributions of two logits, in nats; differentiable in
    the first.

    beta KL(teacher || mean) + (1 - beta) KL(policy || mean), with mean = beta teacher + (1 - beta) policy (Agarwal et
    al., arXiv 2306.13649, equation 1). At the ends, as in the paper's limits up to scale: beta 0 is the forward
    KL(teacher || policy), beta 1 the reverse KL(policy || teacher).

    Args:
        policy: `[m, V]` logits.
        teacher: `[m, W]` logits. Where W is not V, a vocabulary is padded: both are taken over the tokens they share.
        beta: in [0, 1].
    """
    common = min(policy.shape[-1], teacher.shape[-1])
    found: Tensor = _Divergence.apply(policy[..., :common], teacher[..., :common].detach(), beta)  # type: ignore[no-untyped-call]
    return found


class _Divergence(torch.autograd.Function):
    """Keeps one tensor of the size of the logits: their gradient."""

    @staticmethod
    def forward(ctx: Any, policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
        logs, others = policy.log_softmax(-1), teacher.log_softmax(-1)
        values, slope = _forward_kl(logs, others) if beta == 0.0 else _mixed(logs, others, beta)
        ctx.save_for_backward(slope)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * gradient[..., None], None, None


def _forward_kl(logs: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || policy), and its gradient in the policy's logits."""
    probabilities = others.exp()
    values = (probabilities * (others - logs)).sum(-1)
    return values, logs.exp() - probabilities


def _mixed(logs: Tensor, others: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence for beta above 0, and its gradient in the policy's logits. Through the mean there is none: the
    derivatives of both terms in it cancel."""
    probabilities = logs.exp()
    if beta == 1.0:
        share, part, values = 1.0, logs - others, logs.new_zeros(logs.shape[:-1])
    else:
        mean = torch.logaddexp(others + math.log(beta), logs + math.log1p(-beta))
        share, part = 1.0 - beta, logs - mean
        values = beta * (others.exp() * (others - mean)).sum(-1)
    weighed = share * probabilities * part
    total = weighed.sum(-1)
    return values + total, weighed - probabilities * total[..., None]


def top_divergence(policy: Tensor, top_ids: Tensor, top_log_probs: Tensor, beta: float) -> Tensor:
    """`[m]`: `divergence` between the distributions over the k tokens that a teacher gives and **the rest as one more
    category**, in nats; differentiable in `policy`.

    Merging tokens cannot increase such a divergence (data-processing inequality), so it is a lower bound of that over
    the whole vocabulary, and equal to it where the k tokens are all of it. It stays a divergence: it is 0 only where
    the policy gives each of the k tokens, and so the rest, the teacher's probability. The sum over the k tokens alone
    is none: for the reverse KL it falls below 0 as a policy empties them.

    Args:
        policy: `[m, V]` logits.
        top_ids: `[m, k]` int64, distinct. Tokens beyond V, which the policy lacks, count to the rest.
        top_log_probs: `[m, k]`: the teacher's.
        beta: see `divergence`.
    """
    found: Tensor = _TopDivergence.apply(policy, top_ids, top_log_probs.detach(), beta)  # type: ignore[no-untyped-call]
    return found


NEVER = -100.0
"""Log-prob in place of minus infinity: its probability, 4e-44, takes part in no sum."""


class _TopDivergence(torch.autograd.Function):
    """Keeps one tensor of the size of the logits: their gradient."""

    @staticmethod
    def forward(ctx: Any, policy: Tensor, top_ids: Tensor, top: Tensor, beta: float) -> Tensor:
        known = top_ids < policy.shape[-1]
        ids = torch.where(known, top_ids, 0)
        logs, rest, is_whole = _categories(policy, ids, known)
        others = _with_rest(top.to(policy.dtype).masked_fill(~known, NEVER), is_whole)
        values, slope = _forward_kl(logs, others) if beta == 0.0 else _mixed(logs, others, beta)
        # Within the rest, as the policy shares it out.
        gradient = rest.mul_(slope[..., -1:])
        gradient.scatter_add_(-1, ids, slope[..., :-1].masked_fill(~known, 0.0))
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * gradient[..., None], None, None, None


def _categories(policy: Tensor, ids: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs `[m, k + 1]` of the chosen tokens and of all others together; `[m, V]`: each token's share of the
    others, 0 on the chosen ones; `[m]`: whether there are no others. What is not `known` is no token: it has
    `NEVER`."""
    taken = torch.zeros_like(policy, dtype=torch.int8).scatter_add_(-1, ids, known.to(torch.int8))
    masked = policy.masked_fill(taken > 0, -torch.inf)
    others, total = masked.logsumexp(-1, keepdim=True), policy.logsumexp(-1, keepdim=True)
    is_whole = others.isneginf()
    share = (masked - others.masked_fill(is_whole, 0.0)).exp_()
    chosen = (policy.gather(-1, ids) - total).masked_fill(~known, NEVER)
    return torch.cat([chosen, others - total], -1).clamp_(min=NEVER), share, is_whole[..., 0]


def _with_rest(top: Tensor, is_whole: Tensor) -> Tensor:
    """Log-probs `[m, k + 1]` of a teacher, whose rest is what its tokens leave of 1: at least what rounding may hide,
    unless its tokens are the whole vocabulary."""
    left = (1.0 - top.double().exp().sum(-1)).to(top.dtype).clamp(min=torch.finfo(top.dtype).eps)
    return torch.cat([top, left.log().masked_fill(is_whole, NEVER)[..., None]], -1)


@torch.no_grad()
def most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most probable tokens `[m, k]` of `[m, V]` logits, the best one first, and their log-probs."""
    if not 1 <= count <= logits.shape[-1]:
        raise ConfigError(f"top_k {count}: expected 1 to the {logits.shape[-1]} tokens of the vocabulary")
    values, ids = logits.topk(count, dim=-1)
    return ids, values - logits.logsumexp(-1, keepdim=True)


def load_teacher_head(spec: ModelSpec, device: torch.device) -> nn.Module:
    """A teacher's model whose head alone has weights, on `device`; its backbone stays on the meta device.

    Reads only the head's tensors of the checkpoint.

    Raises:
        ConfigError: the checkpoint cannot be read, or lacks them.
    """
    model: nn.Module = build_model(spec, empty=True)
    _, tied = canonical_parameters(model)
    files = checkpoint_files(spec)
    above = _modules_above(model)
    names = {f"{at}.{name}" for at, module in above.items() for name, _ in module.named_parameters()}
    sources = {name: name if name in files else tied.get(name, name) for name in names}
    whole = None if set(sources.values()) <= files.keys() else canonical_of(build_model(spec))
    for at, module in above.items():
        module.to_empty(device=device)
        for name, parameter in module.named_parameters():
            source = sources[f"{at}.{name}"]
            with torch.no_grad():
                parameter.copy_(_read(files[source], source) if whole is None else whole[source])
            parameter.requires_grad_(False)
    return model


def canonical_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of a model by each of its names."""
    parameters, tied = canonical_parameters(model)
    return {**parameters, **{name: parameters[owner] for name, owner in tied.items()}}


def _modules_above(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a transformers model above its backbone."""
    below = {str(getattr(model, "base_model_prefix", "model")), "model"}
    return {at: module for at, module in model._modules.items() if module is not None and at not in below}


def _read(path: Any, name: str) -> Tensor:
    with open_weights(path) as file:
        found: Tensor = file.get_tensor(name)
    return found
