"""Runs rows of unequal length through a transformers model, each prefix once, without the cost of padding; exact.

Two equivalent forms. *Rectangle*: rows are padded on the right; with causal attention no real token attends to padding
after it, so no mask is needed. *Packed*: tokens are concatenated in one row, each distinct prefix once
(`kit.model.prefixes`), so that linear layers process no token twice and no padding; only attention unpacks, to a
rectangle (CPU) or to variable-length rows (CUDA).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsdk.interfaces import Batch, ConfigError
from rlsdk.kit.model.prefixes import Prefixes

ATTENTION = "rlsdk_packed"
"""Name of the attention in transformers' registry."""
MIN_SAVED = 0.15
"""Share of a rectangle's positions that packing must save to be used, since it unpacks in every layer; measured on
CPU."""
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

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def max_length(self) -> int:
        return int(self.offsets.diff().max())


@dataclass(frozen=True)
class HiddenStates:
    """Last hidden states of a batch."""

    flat: Tensor
    """`[M, H]`; includes padding if a rectangle was run."""
    index: Tensor
    """`[N]` int64: index in `flat` of each token of the batch."""

    def at(self, tokens: Tensor) -> Tensor:
        """`[K, H]`: the hidden states of these tokens; `tokens` is `[K]` int64.

        By `index_select`, whose gradient adds in a fixed order. That of `flat[index]` adds in whatever order threads
        come on a CPU, so that two runs of the same seeds differ in their last bits, and it takes four times as long.
        """
        return self.flat.index_select(0, self.index[tokens])


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


def run_backbone(
    backbone: nn.Module, batch: Batch, prefixes: Prefixes, *, packed: bool | None = None, need_last: bool = True
) -> HiddenStates:
    """Runs the model below its head.

    Args:
        backbone: a transformers base model from `kit.model.hf.build_model`.
        batch: `input_ids`, on the model's device; at least one token.
        prefixes: of the batch.
        packed: whether to pack; None: the cheaper form.
        need_last: False if nothing is read from a row's last token (it predicts no token of the row): it is left out.

    Raises:
        ConfigError: `packed` is True for a model that cannot pack.
    """
    able = backbone.config._attn_implementation == ATTENTION  # type: ignore[union-attr]
    if packed and not able:
        raise ConfigError(f"{type(backbone).__name__} cannot run packed rows: leave `packed` at None")
    longest = int(batch.lengths.max())
    width = longest if need_last or longest == 1 else longest - 1
    if packed is not False and able:
        rows, index, read = _pack(batch, prefixes, need_last=width == longest)
        saved = batch.num_rows * width - len(read)
        if packed or batch.lengths.device.type != "cpu" or saved > MIN_SAVED * batch.num_rows * width:
            ids, positions = batch["input_ids"][read], batch.position_ids[read]
            hidden = backbone(input_ids=ids[None], position_ids=positions[None], use_cache=False, packed_rows=rows)
            return HiddenStates(hidden.last_hidden_state[0], index)
    input_ids = batch.padded("input_ids", length=longest)[:, :width]
    hidden = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
    return HiddenStates(hidden.flatten(0, 1), batch.row_of_token * width + batch.position_ids)


def _pack(batch: Batch, prefixes: Prefixes, *, need_last: bool) -> tuple[PackedRows, Tensor, Tensor]:
    """(how to unpack, index of each token of the batch in the packed row, tokens of the packed row).

    Rows whose every prefix is also in another row are not unpacked at all.
    """
    row, position = batch.row_of_token, batch.position_ids
    run = torch.ones_like(row, dtype=torch.bool)
    if not need_last:
        run[(batch.offsets[1:] - 1)[batch.lengths > 0]] = False
    tokens = run.nonzero()[:, 0]
    read = row.new_full((prefixes.count,), len(row)).scatter_reduce(0, prefixes.index[tokens], tokens, "amin")
    have = read < len(row)
    # In the batch's order: the first row with a prefix may end with it and not run it, and a later row may run it.
    read, order = read[have].sort()
    slot = torch.zeros_like(prefixes.first).index_copy(
        0, have.nonzero()[order, 0], torch.arange(len(read), device=row.device)
    )
    index = slot[prefixes.index]
    kept = torch.zeros_like(batch.lengths, dtype=torch.bool).index_fill(0, row[read], True)
    if len(read) < len(tokens):
        tokens = (run & kept[row]).nonzero()[:, 0]
    lengths = torch.zeros_like(batch.lengths).index_add(0, row[tokens], torch.ones_like(tokens))[kept]
    shared = len(read) < len(tokens)
    place = torch.empty_like(row).scatter(0, tokens, torch.arange(len(tokens), device=row.device))
    rows = PackedRows(
        row=(kept.cumsum(0) - 1)[row[tokens]],
        position=position[tokens],
        offsets=F.pad(lengths.cumsum(0), (1, 0)).int(),
        token=index[tokens] if shared else None,
        home=place[read] if shared else None,
    )
    return rows, index, read


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

    With `packed_rows`, B is 1 and T is the packed row. `attention_mask` is the result of `window_for_mask`. `softcap`
    bounds the scores by a tanh; `s_aux` `[heads]` is a score in the softmax without a value (an attention sink).
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
    return (out if packed_rows is None else _gathered(out, packed_rows)), None


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
    tokens = tensor[0].transpose(0, 1)
    if rows.token is not None:
        tokens = tokens.index_select(0, rows.token)
    out = tensor.new_zeros(rows.num_rows, rows.max_length, tensor.shape[1], tensor.shape[3])
    return out.index_put((rows.row, rows.position), tokens).transpose(1, 2)


def _gathered(out: Tensor, rows: PackedRows) -> Tensor:
    """`[R, T, heads, D]` to `[1, U, heads, D]`."""
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
