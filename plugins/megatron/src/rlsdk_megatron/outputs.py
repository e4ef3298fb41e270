"""Computes log-probs, entropy, values and scores from normed hidden states, with a vocabulary split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from rlsdk.interfaces import OUTPUTS, Batch, ConfigError, Head, nearest
from rlsdk.kit.model.chunked_head import VocabularyHead, outputs_of_logits
from rlsdk.kit.model.logit_chunks import chunk_tokens
from rlsdk_megatron.inputs import Inputs, context_size
from rlsdk_megatron.modeling import Stage


def check_names(names: Sequence[str], head: Head) -> None:
    """Raises `ConfigError` for an output that the head does not compute."""
    gives = {Head.LM: ("log_probs", "entropy"), Head.VALUE: ("values",), Head.SCORE: ("scores",)}[head]
    for name in names:
        if name not in gives:
            known = f"a model with head {head.value!r} gives {list(gives)}"
            raise ConfigError(f"output {name!r}{nearest(name, OUTPUTS)}: {known}")


def last_stage_outputs(
    stage: Stage, hidden: Tensor, given: Inputs, names: Sequence[str], head: Head, vocabulary: int
) -> dict[str, Tensor]:
    """`names` of `OUTPUTS`, equal on all tensor- and context-parallel ranks; differentiable.

    Log-probs and entropy are computed for the tokens that count only, in chunks (`rlsdk.kit.model.chunked_head`).

    Args:
        stage: the last one.
        hidden: its hidden states `[T, B, H]`; under sequence parallelism only this rank's positions. Rows beyond those
            of the batch are padding.
        given: its inputs, on the same device.
        names: names in `OUTPUTS`.
        head: the model's head.
        vocabulary: size of the vocabulary, without padding.

    Raises:
        ConfigError: the temperature is not above 0.
    """
    batch, splits = given.batch, bool(stage.config.sequence_parallel)
    if splits:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=head is Head.LM)
    elif head is Head.LM:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    flat = hidden.reshape(-1, hidden.shape[2])
    if head is Head.SCORE:
        last = given.places[batch.offsets[1:] - 1]
        mine = (last >= 0).nonzero()[:, 0]
        numbers = _numbers(stage, flat[last[mine]])
        return {"scores": _joined(numbers.new_zeros(batch.num_rows).index_put((mine,), numbers))}
    wanted = batch.position_ids > 0
    if head is Head.LM and "response_mask" in batch:
        wanted = wanted & batch["response_mask"]
    # The value at t is predicted from the state at t - 1.
    before = given.places.roll(1)
    tokens = (wanted & (before >= 0)).nonzero()[:, 0]
    states = flat[before[tokens]]
    if head is Head.VALUE:
        return {"values": _at(tokens, _numbers(stage, states), batch)}
    if not batch.temperature > 0:
        raise ConfigError(f"temperature {batch.temperature} of the batch: log-probs need one above 0")
    values = _of_logits(stage, states, batch["input_ids"][tokens], batch.temperature, vocabulary)
    found = dict(zip(("log_probs", "entropy"), values, strict=True))
    return {name: _at(tokens, found[name], batch) for name in names}


def _numbers(stage: Any, states: Tensor) -> Tensor:
    numbers: Tensor = stage.score(states).float().squeeze(-1)
    return numbers


def _at(tokens: Tensor, values: Tensor, batch: Batch) -> Tensor:
    """`[N]` float32: `values` at these tokens, the values of other context-parallel ranks at theirs, 0 elsewhere.
    Without any tokens the result is still part of the autograd graph."""
    return _joined(values.new_zeros(batch.num_tokens).index_put((tokens,), values))


def _joined(values: Tensor) -> Tensor:
    """Sum over context-parallel ranks, which have different tokens; each rank gets the gradient of its own tokens."""
    if context_size() == 1:
        return values
    joined: Tensor = _OverContext.apply(values)  # type: ignore[no-untyped-call]
    return joined


class _OverContext(torch.autograd.Function):
    """All-reduce forward, identity backward: every rank computes the same from the full tensor, so the gradient of its
    own part is already complete."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        whole = values.clone()
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        return whole

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


def _of_logits(stage: Any, states: Tensor, targets: Tensor, temperature: float, vocabulary: int) -> tuple[Tensor, ...]:
    """(log-probs, entropy), `[M]` each, from `[M, H]` hidden states."""
    tied = stage.share_embeddings_and_output_weights
    weight: Tensor = stage.shared_embedding_or_output_weight() if tied else stage.output_layer.weight
    start = parallel_state.get_tensor_model_parallel_rank() * len(weight)
    real = min(max(vocabulary - start, 0), len(weight))
    # Padding of the vocabulary is excluded.
    head = VocabularyHead(weight=weight if real == len(weight) else weight[:real], temperature=temperature)
    # Equal on all ranks, also where the last one has padding: each chunk is reduced over them.
    chunk = chunk_tokens(len(weight), states.device.type)
    return outputs_of_logits(head, SplitVocabulary.apply, states, (targets - start,), chunk)


class SplitVocabulary(torch.autograd.Function):
    """Log-prob of the target and entropy, of `[M, V / ranks]` float32 logits; keeps one tensor of that size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`targets [M]` are counted from this rank's first logit. Both results are `[M]`, equal on all ranks."""
        peak = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
        _reduce(peak, dist.ReduceOp.MAX)
        logs = logits - peak[:, None]
        total = logs.exp().sum(-1)
        _reduce(total)
        logs -= total.log()[:, None]
        found = logits.new_zeros(2, len(logits))
        if logits.shape[1]:
            # Without indices of the targets that are here, which the host would have to wait for.
            mine = (targets >= 0) & (targets < logits.shape[1])
            at = targets.clamp(0, logits.shape[1] - 1)[:, None]
            found[0] = torch.where(mine, logs.gather(1, at)[:, 0], 0.0)
            found[1] = -(logs.exp() * logs).sum(-1)
        else:
            mine, at = targets < 0, targets[:, None]
        _reduce(found)
        ctx.save_for_backward(logs, found[1], mine, at)
        return found[0], found[1]

    @staticmethod
    def backward(ctx: Any, chosen: Tensor, entropy: Tensor) -> tuple[Tensor, None]:
        """d log p(y) / d x_j = [j = y] - p_j and d H / d x_j = -p_j (log p_j + H): no communication is needed."""
        logs, value, mine, at = ctx.saved_tensors
        slope = (logs + value[:, None]).mul_(entropy[:, None]).add_(chosen[:, None])
        slope = slope.mul_(logs.exp()).neg_()
        if logs.shape[1]:
            slope.scatter_add_(1, at, torch.where(mine, chosen, 0.0)[:, None])
        return slope, None


def _reduce(tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(tensor, operation, group=parallel_state.get_tensor_model_parallel_group())
