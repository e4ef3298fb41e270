"""Training steps in plain torch: the reference for those of train engines."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    Box,
    ForwardBackwardResult,
    Head,
    OptimSpec,
)
from rlsdk.kit.model.hf import canonical_parameters, canonical_tensors
from rlsdk.testing.process.reference import LOCAL_MODEL, plain_outputs
from rlsdk.testing.train.cases import PLAIN_TEACHER, Case, Driven


def plain_model_of(case: Case) -> Any:
    """A plain transformers model with the head of the case; the caller owns it."""
    return copy.deepcopy(_plain_model(case.model, causal=case.head is Head.LM))


@functools.lru_cache(maxsize=12)
def _plain_model(path: str, *, causal: bool) -> Any:
    """The model as read from disk. It is cached: requirements use the same few models many times, and reading takes
    longer than their steps."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    kind: Any = AutoModelForCausalLM if causal else AutoModelForTokenClassification
    return kind.from_pretrained(path, dtype=torch.float32, **LOCAL_MODEL).eval()


def plain_numbers(model: Any, head: Head, batch: Batch) -> dict[str, Tensor]:
    """Every output of the head, row by row without padding; differentiable. 0 outside the mask, if there is one."""
    if head is Head.LM:
        found = plain_outputs(model, batch)
        if PLAIN_TEACHER in batch:
            found["divergence"] = plain_divergence(model, batch)
        mask = batch.tokens.get("response_mask")
        return {n: values if mask is None else values * mask for n, values in found.items()}
    values, scores = [], []
    for ids in torch.split(batch["input_ids"], batch.lengths.tolist()):
        number = model(ids[None]).logits[0, :, 0].float()
        values += [number.new_zeros(1), number[:-1]]
        scores.append(number[-1:])
    return {"values": torch.cat(values), "scores": torch.cat(scores)}


def plain_divergence(model: Any, batch: Batch) -> Tensor:
    """Generalised Jensen-Shannon divergence of each distribution from the teacher's, flat `[N]`, with probabilities as
    in arXiv 2306.13649; differentiable. A vocabulary that is padded is cut to the other one. Of a batch with a
    teacher's most probable tokens, between these and the rest."""
    share, found = batch.meta["divergence_beta"], []
    lengths = batch.lengths.tolist()
    tops = torch.split(batch["teacher_top_ids"], lengths) if "teacher_top_ids" in batch else [None] * len(lengths)
    for ids, teacher, top in zip(
        torch.split(batch["input_ids"], lengths), torch.split(batch[PLAIN_TEACHER], lengths), tops, strict=True
    ):
        logits = model(ids[None]).logits[0, :-1].double() / batch.temperature
        if top is None:
            common = min(logits.shape[-1], teacher.shape[-1])
            ours = logits[:, :common].log_softmax(-1)
            theirs = teacher[1:, :common].double().log_softmax(-1)
        else:
            ours, theirs = (_categories(one, top[1:], logits.shape[-1]) for one in (logits, teacher[1:].double()))
        mean = (share * theirs.exp() + (1 - share) * ours.exp()).log()
        to_mean = share * (theirs.exp() * (theirs - mean)).sum(-1) + (1 - share) * (ours.exp() * (ours - mean)).sum(-1)
        whole = {0.0: (theirs.exp() * (theirs - ours)).sum(-1), 1.0: (ours.exp() * (ours - theirs)).sum(-1)}
        found += [ours.new_zeros(1), whole.get(share, to_mean)]
    return torch.cat(found).float()


def _categories(logits: Tensor, ids: Tensor, common: int) -> Tensor:
    """Log-probs `[T, k + 1]` of these tokens, and of all others together; those from `common` on are others, too."""
    chances = logits.softmax(-1)
    # Next to nothing where a token is another: it takes part in no sum.
    chosen = torch.where(ids < common, chances.gather(-1, ids.clamp(max=logits.shape[-1] - 1)), 1e-300)
    return torch.cat([chosen, 1.0 - chosen.sum(-1, keepdim=True)], -1).log()


def drive_plain(case: Case, model: Any = None) -> Driven:
    """Runs a case in plain torch: one pass over each batch, torch's AdamW, and the documented schedule.

    Args:
        case: the steps.
        model: the model to train; None: the case's own.
    """
    model = plain_model_of(case) if model is None else model
    parameters = canonical_parameters(model)[0]
    decayed = [p for p in parameters.values() if p.dim() >= 2]
    others = [p for p in parameters.values() if p.dim() < 2]
    optim = case.optim
    assert optim is not None
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False, fused=False)
    found = Driven()
    for at, batches in enumerate(case.steps):
        for batch in batches:
            if batch.num_rows == 0:
                found.results.append(ForwardBackwardResult(loss=0.0))
                continue
            numbers = plain_numbers(model, case.head, batch)
            result = case.objective({name: numbers[name] for name in case.objective.outputs}, batch)
            result.loss.backward()
            found.results.append(
                ForwardBackwardResult(
                    loss=float(result.loss.detach()),
                    sums={name: number(value) for name, value in result.sums.items()},
                    maxima={name: number(value) for name, value in result.maxima.items()},
                )
            )
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in gradients])))
        if optim.max_grad_norm is not None and norm > optim.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(optim.max_grad_norm / norm)
        found.norms.append(norm)
        found.lrs.append(scheduled(at, optim))
        found.skipped.append(False)
        for group in optimizer.param_groups:
            group["lr"] = found.lrs[-1]
        optimizer.step()
        optimizer.zero_grad()
    if case.probe is not None:
        batch, names = case.probe
        with torch.no_grad():
            numbers = plain_numbers(model, case.head, batch)
        found.outputs = {name: numbers[name] for name in names}
        found.row_ids, found.lengths = batch["row_id"].tolist(), batch.lengths.tolist()
    tensors = canonical_tensors(model)[0]
    found.shards = [(name, Box.whole(tuple(tensor.shape)), tensor.detach()) for name, tensor in tensors.items()]
    return found


def number(value: Tensor | float) -> float:
    """The value of a metric as a float."""
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def scheduled(step: int, optim: OptimSpec) -> float:
    """Learning rate of a step, as documented by `OptimSpec`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant" or optim.total_steps is None:
        return optim.lr
    done = min((step - optim.warmup_steps) / (optim.total_steps - optim.warmup_steps), 1.0)
    left = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[optim.schedule]
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)
