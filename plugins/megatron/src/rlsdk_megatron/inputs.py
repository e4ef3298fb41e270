"""Converts rows to model inputs, and locates each token's hidden state in the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlsdk.interfaces import Batch


@dataclass(frozen=True)
class Inputs:
    """One micro-batch, as a rectangle or as one long row."""

    batch: Batch
    ids: Tensor
    """`[B, T]` token ids at this context-parallel rank's positions."""
    positions: Tensor
    """`[B, T]`: position of each token in its row."""
    future: Tensor | None
    """`[1, 1, T, all T]`, true where attention is masked; None if attention is causal by itself."""
    packed: PackedSeqParams | None
    places: Tensor
    """`[N]`: index of each token's state among the `[T * B]` of this rank; -1: on another rank."""


def rectangle(batch: Batch, shape: tuple[int, int]) -> Inputs:
    """Rows with padding at the end, which no earlier position attends to.

    Args:
        batch: on the device.
        shape: number of rows and of positions; the latter a multiple of `length_unit`.
    """
    rows, length = shape
    ids = F.pad(batch.padded("input_ids", length=length), (0, 0, 0, rows - batch.num_rows))
    mine = own_positions(length, parallel_state.get_context_parallel_rank(), context_size(), ids.device)
    column = torch.full((length,), -1, device=ids.device)
    column[mine] = torch.arange(len(mine), device=ids.device)
    there = column[batch.position_ids]
    places = torch.where(there < 0, there, there * rows + batch.row_of_token)
    return Inputs(batch, ids[:, mine], mine.expand(rows, -1), _future(length, mine), None, places)


def one_row(batch: Batch, length: int) -> Inputs:
    """Concatenated rows without padding, for attention with `PackedSeqParams`.

    Args:
        batch: on the device.
        length: length of the result; padding after the last row forms one more row, whose outputs are not read.
    """
    padding = length - batch.num_tokens
    lengths = torch.cat([batch.lengths, batch.lengths.new_tensor([padding] if padding else [])])
    ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = max(batch.max_length, padding)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    positions = F.pad(batch.position_ids, (0, padding))
    ids = F.pad(batch["input_ids"], (0, padding))
    return Inputs(batch, ids[None], positions[None], None, packed, torch.arange(batch.num_tokens, device=ids.device))


def context_size() -> int:
    """Number of context-parallel ranks."""
    size: int = parallel_state.get_context_parallel_world_size()
    return size


def length_unit(sequence_parallel: bool) -> int:
    """Required divisor of the number of positions: each context-parallel rank has two chunks, and sequence-parallel
    ranks split these."""
    context = context_size()
    tensor = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel else 1
    return int(tensor * (2 * context if context > 1 else 1))


def own_positions(length: int, rank: int, size: int, device: torch.device) -> Tensor:
    """Positions of a row on a context-parallel rank: one chunk from each end, which balances work, because late
    positions attend to more keys. Megatron's rotary embedding and Transformer Engine expect this order."""
    if size == 1:
        return torch.arange(length, device=device)
    stretches = torch.arange(length, device=device).chunk(2 * size)
    return torch.cat([stretches[rank], stretches[2 * size - 1 - rank]])


def _future(length: int, mine: Tensor) -> Tensor | None:
    """Attention mask of a context-parallel rank: causal kernels do not support its two chunks of a row."""
    if len(mine) == length:
        return None
    return (torch.arange(length, device=mine.device) > mine[:, None])[None, None]
