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

from rlsdk.interfaces import Batch, ConfigError

ATTENTION = "rlsdk_packed"
"""Name of the attention in transformers' registry."""
MAX_PADDING = 0.15
"""Share of pads up to which the rectangle is cheaper than unpacking in every layer; measured on CPU."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that `packed_attention` computes."""
_NOT_COMPUTED = ("position_bias", "indices", "block_indices", "sinks")
"""What a few families pass to their attention and `packed_attention` does not know."""


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
    """Makes `ATTENTION` known to transformers; safe to call again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, window_for_mask)


def can_pack(model: nn.Module) -> bool:
    """True where rows of a model meet in attention only and that attention can be replaced.

    Recurrent layers would carry state from row to row; such models run as rectangles with the attention they have.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    kinds = set(getattr(config, "layer_types", None) or ())
    swaps = all(getattr(m, "_supports_attention_backend", True) for m in model.modules())
    recurrent = any(getattr(m, "_is_stateful", False) for m in model.modules())
    return swaps and not recurrent and kinds <= _ATTENTION_LAYERS


def run_backbone(
    backbone: nn.Module, batch: Batch, *, packed: bool | None = None, need_last: bool = True
) -> HiddenStates:
    """Runs the model below its head.

    Args:
        backbone: a transformers base model from `kit.hf.build_model`.
        batch: `input_ids`, on the model's device; at least one token.
        packed: which form; None: the cheaper one.
        need_last: False where nothing is read from a row's last token (nothing follows it that it could predict): a
            rectangle then leaves its last column out.

    Raises:
        ConfigError: `packed` was asked of a model that cannot.
    """
    able = backbone.config._attn_implementation == ATTENTION  # type: ignore[union-attr]
    longest = int(batch.lengths.max())
    area = longest * batch.num_rows
    if packed is None:
        dense = batch.lengths.device.type == "cpu" and area - batch.num_tokens <= MAX_PADDING * area
        packed = able and not dense
    if not packed:
        width = longest if need_last or longest == 1 else longest - 1
        input_ids = batch.padded("input_ids", length=longest)[:, :width]
        hidden = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return HiddenStates(hidden.flatten(0, 1), batch.row_of_token * width + batch.position_ids)
    if not able:
        raise ConfigError(f"{type(backbone).__name__} cannot run packed rows: leave `packed` at None")
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention in transformers' calling convention: `[B, heads, T, D]` in, `[B, T, heads, D]` out.

    With `packed_rows`, B is 1 and T runs over all rows end to end. `attention_mask` is what `window_for_mask` made.
    `softcap` bounds the scores by a tanh; `s_aux` `[heads]` is a score that takes part in the softmax and carries no
    value (an attention sink). Dropout is ignored.

    Raises:
        ConfigError: the model asks for something else than these, or comes with keys of a cache.
    """
    if strange := [name for name in _NOT_COMPUTED if kwargs.get(name) is not None]:
        raise ConfigError(f"{type(module).__name__} passes {strange} to its attention, which rlsdk cannot compute")
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{query.shape[2]} new positions came with keys of {key.shape[2]}: this attention is for whole rows and "
            "knows no cache; call model.set_attn_implementation('sdpa') on a model that decodes"
        )
    sliding_window = None if attention_mask is None else int(attention_mask)
    plain = softcap is None and s_aux is None
    if packed_rows is not None and plain and _has_varlen(query, value):
        return _varlen(query, key, value, packed_rows, scaling, sliding_window), None
    if packed_rows is not None:
        query, key, value = (_spread(tensor, packed_rows) for tensor in (query, key, value))
    if plain:
        out = _causal(query, key, value, scaling, sliding_window)
    else:
        out = _causal_in_full(query, key, value, scaling, sliding_window, softcap, s_aux)
    out = out.transpose(1, 2)
    return (out if packed_rows is None else out[packed_rows.row, packed_rows.position][None]), None


def window_for_mask(*args: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Tensor | None:
    """Stands for a mask, which would cost memory quadratic in the tokens: a scalar with its window; None without one.

    Not every family tells its attention the window, but each asks for a mask that has it.

    Raises:
        ConfigError: the model masks by rules of its own.
    """
    if use_vmap:
        raise ConfigError("this model builds attention masks by rules of its own, which rlsdk cannot compute")
    return None if local_size is None else torch.tensor(local_size)


def _spread(tensor: Tensor, rows: PackedRows) -> Tensor:
    """`[1, heads, N, D]` to `[B, heads, T, D]`, zeros where no token stands."""
    out = tensor.new_zeros(rows.num_rows, rows.max_length, tensor.shape[1], tensor.shape[3])
    return out.index_put((rows.row, rows.position), tensor[0].transpose(0, 1)).transpose(1, 2)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    mask = None
    if window is not None and window < query.shape[2]:
        mask = _visible(query.shape[2], window, query.device)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def _causal_in_full(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention written out, for what no kernel of torch offers. Memory grows with T squared."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    length = query.shape[2]
    scores = scores.masked_fill(~_visible(length, window or length, query.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
    return scores.softmax(dim=3, dtype=torch.float32)[..., :length].to(value.dtype) @ value


def _visible(length: int, window: int, device: torch.device) -> Tensor:
    """`[T, T]` bool: which key each query sees."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None]
    return (distance >= 0) & (distance < window)


def _has_varlen(query: Tensor, value: Tensor) -> bool:
    """torch's kernel for varying lengths: CUDA, half precision, heads of one size up to 256."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and half and query.shape[3] == value.shape[3] <= 256


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None, window: int | None
) -> Tensor:
    """Attention over varying lengths, without unpacking. Runs on CUDA only; no test of a CPU machine reaches it."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    left = -1 if window is None else window - 1
    at, longest = rows.offsets, rows.max_length
    out = varlen_attn(q, k, v, at, at, longest, longest, scale=scaling, window_size=(left, 0))
    return cast(Tensor, out)[None]
