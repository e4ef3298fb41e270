"""Divergence of a model's distribution of the next token from a teacher's, over the whole vocabulary, and the head of a
teacher that it is computed with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rlsdk.interfaces import ModelSpec
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
