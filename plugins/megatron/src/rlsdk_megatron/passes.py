"""Runs micro-batches through Megatron's own pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlsdk.interfaces import Batch
from rlsdk_megatron.inputs import Inputs, length_unit, one_row, rectangle
from rlsdk_megatron.modeling import Stage

AtEnd = Callable[[Stage, Tensor, Inputs], Tensor]
"""Processes the last stage's hidden states; returns the loss of a micro-batch, or a value that is ignored."""
STAND_IN = [[0]]
"""Row that a rank without rows runs, so that it takes part in collectives; it has no effect."""


def run_passes(
    modules: Sequence[Any], parts: Sequence[Batch], at_end: AtEnd, *, backward: bool, packs: bool = False
) -> None:
    """Runs every micro-batch forward through all stages, and backward if asked. Collective: every rank must call, with
    the same number of micro-batches.

    Args:
        modules: this rank's stages, wrapped for training or not.
        parts: micro-batches, on the device; at least one row each.
        at_end: called on the ranks of the last stage, once for each micro-batch in order.
        backward: compute gradients and reduce them at the end.
        packs: rows are concatenated without padding, which attention must support.
    """
    config = modules[0].config
    unit = length_unit(config.sequence_parallel)
    shapes = [_shape(part, unit, packs) for part in parts]
    most = (max(rows for rows, _ in shapes), max(length for _, length in shapes))
    # Interleaved stages do not send shapes: all micro-batches get the shape of the largest.
    uniform = config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths

    def step(rows: Iterator[Batch], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(rows)
        shape = most if uniform else _shape(batch, unit, packs)
        given = one_row(batch, shape[1]) if packs else rectangle(batch, shape)
        extra = {"packed_seq_params": given.packed} if given.packed is not None else {}
        hidden = module(given.ids, given.positions, given.future, **extra)
        stage = getattr(module, "module", module)

        def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
            loss = at_end(stage, hidden, given)
            # The batch's weights already account for token counts; with 0, Megatron does not divide by them.
            return loss if non_loss_data else (loss, torch.zeros((), dtype=torch.int, device=loss.device), {})

        return hidden, finish

    iterators: Any = [iter(parts) for _ in modules]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(modules) > 1 else iterators[0],
        model=list(modules),
        num_microbatches=len(parts),
        seq_length=most[1],
        micro_batch_size=most[0],
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )


def _shape(batch: Batch, unit: int, packs: bool) -> tuple[int, int]:
    """Number of rows and of positions: the longest row, rounded up so that positions can be split; or one row with all
    tokens."""
    longest = batch.num_tokens if packs else batch.max_length
    return 1 if packs else batch.num_rows, -(-longest // unit) * unit
