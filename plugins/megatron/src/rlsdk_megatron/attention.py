"""Attention over context-parallel ranks without Transformer Engine: keys and values of all positions are gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from rlsdk_megatron.inputs import own_positions


class GatheringAttention(nn.Module):
    """This rank's queries on everybody's keys and values; gradients of those go back to their ranks.

    More traffic than Transformer Engine's ring, and memory for the keys and values of whole rows; it runs anywhere.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object) -> Tensor:
        """`[T / ranks, B, heads * size]` from `[T / ranks, B, heads, size]` of each; the mask is true where a query
        may not look."""
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
