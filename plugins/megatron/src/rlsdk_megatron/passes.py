"""Running micro-batches through Megatron's own pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlsdk.interfaces import Batch
from rlsdk_megatron.modeling import Stage

AtEnd = Callable[[Stage, Tensor, Batch], Tensor]
"""Makes something of the last stage's hidden states: the loss of a micro-batch, or nothing that counts."""
STAND_IN = [[0]]
"""What a rank without rows runs, so that it takes part: it counts for nothing."""


def run_passes(modules: Sequence[Any], parts: Sequence[Batch], at_end: AtEnd, *, backward: bool) -> None:
    """Runs every micro-batch through all stages, and back. Every rank must call with as many micro-batches.

    Args:
        modules: this rank's stages, wrapped for training or not.
        parts: micro-batches, on the device; at least one row each.
        at_end: called on the ranks of the last stage, once for each micro-batch in order.
        backward: gradients are wanted, and are reduced at the end.
    """
    config = modules[0].config
    shapes = [_shape(part, config) for part in parts]
    most = (max(rows for rows, _ in shapes), max(length for _, length in shapes))
    # Interleaved stages send no shapes along: all micro-batches get that of the largest.
    uniform = config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths

    def step(rows: Iterator[Batch], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(rows)
        hidden = module(*_inputs(batch, most if uniform else _shape(batch, config)))
        stage = getattr(module, "module", module)

        def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
            loss = at_end(stage, hidden, batch)
            # Tokens are counted in the batch's own weights: none here, so that Megatron divides by nothing.
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


def _inputs(batch: Batch, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """`[B, T]` tokens and positions, and `[1, 1, T, T]` true where a position may not look; rows end in padding, which
    no earlier position sees."""
    rows, length = shape
    ids = batch.padded("input_ids", length=length)
    ids = F.pad(ids, (0, 0, 0, rows - batch.num_rows))
    positions = torch.arange(length, device=ids.device).expand_as(ids)
    return ids, positions, _future(length, ids.device)


def _shape(batch: Batch, config: Any) -> tuple[int, int]:
    """Rows, and the longest row or a little more, so that it can be split by position."""
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return batch.num_rows, -(-int(batch.lengths.max()) // ranks) * ranks


@lru_cache(maxsize=64)
def _future(length: int, device: torch.device) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu_(1)
