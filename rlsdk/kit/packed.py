"""Rows of unequal length through a transformers model, without padding where padding costs, and always exact.

Two forms of the same numbers. *Rectangle*: rows are padded on the right; with causal attention a pad stands behind
every real token, so no real token ever sees one and no mask is needed. *Packed*: all rows end to end in one row, so
linear layers see real tokens only; attention alone unpacks to a rectangle (CPU) or runs over varying lengths (CUDA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsdk.interfaces import Batch

ATTENTION = "rlsdk_packed"
"""Name of the attention in transformers' registry."""
MAX_PADDING = 0.15
"""Share of pads up to which the rectangle is cheaper than unpacking in every layer; measured on CPU."""


@dataclass(frozen=True)
class PackedRows:
    """How a packed row is cut: passed to the attention of every layer."""

    row: Tensor
    """`[N]` int64: which row a token belongs to."""
    position: Tensor
    """`[N]` int64: its position there."""
    offsets: Tensor
    """`[B + 1]` int32."""
    num_rows: int
    max_length: int


@dataclass(frozen=True)
class HiddenStates:
    """Last hidden states of a batch."""

    flat: Tensor
    """`[M, H]`, pads included where a rectangle was run."""
    index: Tensor
    """`[N]` int64: where each token of the batch stands in `flat`."""


def register_attention() -> None:
    """Makes `ATTENTION` known to transformers; safe to call again.

    No mask function is registered with it, so none is built: causality is the attention's own, and a mask would cost
    memory quadratic in the tokens.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)


def run_backbone(
    backbone: nn.Module, batch: Batch, *, packed: bool | None = None, need_last: bool = True
) -> HiddenStates:
    """Runs the model below its head.

    Args:
        backbone: a transformers base model that was built with `ATTENTION`.
        batch: `input_ids`, on the model's device; at least one token.
        packed: which form; None: the cheaper one.
        need_last: False where nothing is read from a row's last token (nothing follows it that it could predict): a
            rectangle then leaves its last column out.
    """
    longest = int(batch.lengths.max())
    area = longest * batch.num_rows
    if packed is None:
        packed = area - batch.num_tokens > MAX_PADDING * area or batch.lengths.device.type == "cuda"
    if not packed:
        width = longest if need_last or longest == 1 else longest - 1
        input_ids = batch.padded("input_ids", length=longest)[:, :width]
        hidden = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return HiddenStates(hidden.flatten(0, 1), batch.row_of_token * width + batch.position_ids)
    rows = PackedRows(
        row=batch.row_of_token,
        position=batch.position_ids,
        offsets=batch.offsets.int(),
        num_rows=batch.num_rows,
        max_length=longest,
    )
    hidden = backbone(
        input_ids=batch["input_ids"][None], position_ids=rows.position[None], use_cache=False, packed_rows=rows
    ).last_hidden_state
    return HiddenStates(hidden[0], torch.arange(batch.num_tokens, device=hidden.device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention in transformers' calling convention: `[B, heads, T, D]` in, `[B, T, heads, D]` out.

    With `packed_rows`, B is 1 and T runs over all rows end to end.
    """
    if packed_rows is None:
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    if query.device.type == "cuda":
        return _varlen(query, key, value, packed_rows, scaling, sliding_window), None
    spread = [_spread(tensor, packed_rows) for tensor in (query, key, value)]
    out = _causal(spread[0], spread[1], spread[2], scaling, sliding_window).transpose(1, 2)
    return out[packed_rows.row, packed_rows.position][None], None


def _spread(tensor: Tensor, rows: PackedRows) -> Tensor:
    """`[1, heads, N, D]` to `[B, heads, T, D]`, zeros where no token stands."""
    out = tensor.new_zeros(rows.num_rows, rows.max_length, tensor.shape[1], tensor.shape[3])
    return out.index_put((rows.row, rows.position), tensor[0].transpose(0, 1)).transpose(1, 2)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    mask = None
    if window is not None and window < query.shape[2]:
        back = torch.arange(query.shape[2], device=query.device)
        distance = back[:, None] - back[None]
        mask = (distance >= 0) & (distance < window)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None, window: int | None
) -> Tensor:
    """Attention over varying lengths on CUDA (torch's own kernel), without unpacking."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    left = -1 if window is None else window - 1
    at, longest = rows.offsets, rows.max_length
    out = varlen_attn(q, k, v, at, at, longest, longest, scale=scaling, window_size=(left, 0))
    return cast(Tensor, out)[None]
