"""Runs rows of unequal length through a transformers model, each prefix once, without the cost of padding; exact.

Two equivalent forms. *Rectangle*: rows are padded on the right; with causal attention no real token attends to padding
after it, so no mask is needed. *Packed*: tokens are concatenated in one row, each distinct prefix once
(`kit.model.prefixes`), so that linear layers process no token twice and no padding; only attention unpacks, to a
rectangle (CPU) or to variable-length rows (CUDA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsdk.interfaces import ConfigError
from rlsdk.kit.model.context_parallel import ContextSplit

ATTENTION = "rlsdk_packed"
"""Name of the attention in transformers' registry."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that `packed_attention` supports."""
_NOT_COMPUTED = ("position_bias", "indices", "block_indices", "sinks")
"""Arguments that a few families pass to attention and `packed_attention` does not support."""


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """How attention unpacks a packed row of `U` tokens; passed to every layer. Unpacked are `M` tokens of `R` rows,
    concatenated."""

    row: Tensor
    """`[M]` int64: row of each token."""
    position: Tensor
    """`[M]` int64: its position in the row."""
    offsets: Tensor
    """`[R + 1]` int32."""
    token: Tensor | None
    """`[M]` int64: index of each in the packed row; None if both are in the same order and `M` is `U`."""
    home: Tensor | None
    """`[U]` int64: one of the `M` tokens for each token of the packed row; None as above."""
    max_length: int
    """Tokens of the longest of the `R` rows."""
    split: ContextSplit | None = None
    """Ranks that each run a stretch of the packed row; None: this rank runs all of it."""

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """`U`."""
        return len(self.row if self.home is None else self.home)

    @property
    def is_one(self) -> bool:
        """Whether the packed row is one row, in its own order: there is nothing to unpack."""
        return self.num_rows == 1 and self.token is None


def register_attention() -> None:
    """Registers `ATTENTION` with transformers; safe to call again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, window_for_mask)


def can_pack(model: nn.Module) -> bool:
    """Whether rows of a model interact only in attention, and that attention can be replaced.

    Recurrent layers would carry state from row to row; such models run as rectangles with their own attention.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    kinds = set(getattr(config, "layer_types", None) or ())
    swaps = all(getattr(m, "_supports_attention_backend", True) for m in model.modules())
    recurrent = any(getattr(m, "_is_stateful", False) for m in model.modules())
    return swaps and not recurrent and kinds <= _ATTENTION_LAYERS


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

    With `packed_rows`, B is 1 and T is the packed row, or this rank's stretch of it. `attention_mask` is the result of
    `window_for_mask`. `softcap` bounds the scores by a tanh; `s_aux` `[heads]` is a score in the softmax without a
    value (an attention sink).
    Dropout is ignored.

    Raises:
        ConfigError: the model needs other arguments, or uses a KV cache.
    """
    if strange := [name for name in _NOT_COMPUTED if kwargs.get(name) is not None]:
        raise ConfigError(f"{type(module).__name__} passes {strange} to its attention, which rlsdk cannot compute")
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{query.shape[2]} new positions came with {key.shape[2]} keys: this attention is for whole rows and "
            "knows no cache; call model.set_attn_implementation('sdpa') on a model that decodes"
        )
    split = None if packed_rows is None else packed_rows.split
    if packed_rows is not None and split is not None:
        query, key, value = split.to_heads(query, key, value, packed_rows.num_tokens)
        s_aux = None if s_aux is None else split.own_heads(s_aux)
    window = None if attention_mask is None else int(attention_mask)
    out = _attention(query, key, value, scaling, window, softcap, s_aux, packed_rows)
    return (out if split is None else split.to_tokens(out)), None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    packed_rows: PackedRows | None,
) -> Tensor:
    """`packed_attention` of whole rows."""
    plain = softcap is None and s_aux is None
    if packed_rows is not None and plain and _has_varlen(query, value):
        return _varlen(query, key, value, packed_rows, scaling, sliding_window)
    if packed_rows is not None:
        query, key, value = (_spread(tensor, packed_rows) for tensor in (query, key, value))
    if plain:
        out = _causal(query, key, value, scaling, sliding_window)
    else:
        out = _causal_in_full(query, key, value, scaling, sliding_window, softcap, s_aux)
    out = out.transpose(1, 2)
    return out if packed_rows is None else _gathered(out, packed_rows)


def window_for_mask(*args: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Tensor | None:
    """Replaces a mask, whose memory would be quadratic in the tokens, by a scalar with its window; None without a
    window.

    Not every family passes the window to its attention, but each requests a mask with it.

    Raises:
        ConfigError: the model has masks of its own.
    """
    if use_vmap:
        raise ConfigError("this model builds attention masks by rules of its own, which rlsdk cannot compute")
    return None if local_size is None else torch.tensor(local_size)


def _spread(tensor: Tensor, rows: PackedRows) -> Tensor:
    """`[1, heads, U, D]` to `[R, heads, T, D]`, with zeros at positions without a token."""
    if rows.is_one:
        return tensor
    tokens = tensor[0].transpose(0, 1)
    if rows.token is not None:
        tokens = tokens.index_select(0, rows.token)
    out = tensor.new_zeros(rows.num_rows, rows.max_length, tensor.shape[1], tensor.shape[3])
    return out.index_put((rows.row, rows.position), tokens).transpose(1, 2)


def _gathered(out: Tensor, rows: PackedRows) -> Tensor:
    """`[R, T, heads, D]` to `[1, U, heads, D]`."""
    if rows.is_one:
        return out
    row, position = rows.row, rows.position
    if rows.home is not None:
        row, position = row[rows.home], position[rows.home]
    return out[row, position][None]


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
    """Attention without a fused kernel, for arguments that no kernel of torch supports. Memory is quadratic in T."""
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
    """Whether torch's variable-length kernel applies: CUDA, half precision, heads of one size up to 256."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and half and query.shape[3] == value.shape[3] <= 256


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None, window: int | None
) -> Tensor:
    """Variable-length attention without unpacking. CUDA only; not tested on a CPU."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    if rows.token is not None:
        q, k, v = (tensor.index_select(0, rows.token) for tensor in (q, k, v))
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    left = -1 if window is None else window - 1
    at, longest = rows.offsets, rows.max_length
    out = cast(Tensor, varlen_attn(q, k, v, at, at, longest, longest, scale=scaling, window_size=(left, 0)))
    return (out if rows.home is None else out.index_select(0, rows.home))[None]
