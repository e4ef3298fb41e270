"""Attention without Transformer Engine; context-parallel ranks gather the keys and values of all positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from rlsdk_megatron.inputs import own_positions


class CausalAttention(nn.Module):
    """Attention by torch's own kernels, which need no `[T, T]` mask and on CUDA keep no scores of that size either.
    Megatron's local attention keeps both: at 32k tokens 1 GiB for the mask, and 4 GiB of float32 scores per head."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> Tensor:
        """`[T, B, heads * size]` from `[T, B, heads, size]`; for concatenated rows `[T, heads * size]` from
        `[T, heads, size]`, where each row attends only to itself."""
        assert attention_mask is None
        if packed_seq_params is None:
            rows = (part.permute(1, 2, 0, 3) for part in (query, key, value))
            return self._attend(*rows).permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = [torch.split(part.transpose(0, 1), lengths, 1) for part in (query, key, value)]
        return (
            torch.cat([self._attend(*(p[None] for p in row))[0] for row in zip(*parts, strict=True)], 1)
            .transpose(0, 1)
            .flatten(1)
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[B, heads, T, size]`, like each argument."""
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )


class GatheringAttention(nn.Module):
    """Attention of this rank's queries to the keys and values of all ranks; their gradients go back to their ranks.

    More traffic than Transformer Engine's ring attention, and memory for keys and values of whole rows; but it runs on
    any device.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object) -> Tensor:
        """`[T / ranks, B, heads * size]` from query, key and value `[T / ranks, B, heads, size]`; the mask is true
        where attention is not allowed."""
        assert attention_mask is not None
        group = parallel_state.get_context_parallel_group()
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=group)
        whole = [own_positions(len(gathered), rank, group.size(), key.device) for rank in range(group.size())]
        ordered = gathered[torch.cat(whole).argsort()]
        sizes = [key.shape[-1], value.shape[-1]]
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, *ordered.split(sizes, -1)))
        found = F.scaled_dot_product_attention(
            query, key, value, attn_mask=~attention_mask, scale=self.softmax_scale, enable_gqa=True
        )
        return found.permute(2, 0, 1, 3).flatten(2)
