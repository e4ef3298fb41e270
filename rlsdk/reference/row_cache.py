"""Key-value memory of many rows, each at its own position, and the attention that reads it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "rlsdk_decode"
"""Name of the attention in transformers' registry."""


class PrefillCache:
    """Collects the keys and values of a prefill, layer by layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.layers.append((key, value))
        return key, value

    def get_seq_length(self, layer: int = 0) -> int:
        return 0


class RowCache:
    """Key and value buffers of `[capacity, heads, length, dim]` per layer; the first `count` rows are in use."""

    def __init__(self, capacity: int, length: int) -> None:
        self.capacity = capacity
        self.length = length
        self.count = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.position: int | Tensor = 0
        """Where the current step writes: one number when all rows are equally long, else `[count]`."""
        self.longest = 0
        """Tokens in the longest row so far."""

    def add(self, prefill: PrefillCache, prompt_of_row: Tensor) -> None:
        """Appends rows: the prompt's keys and values, copied for each of its samples."""
        if not self.keys:
            for key, value in prefill.layers:
                shape = (self.capacity, key.shape[1], self.length, key.shape[3])
                self.keys.append(key.new_zeros(shape))
                self.values.append(value.new_zeros(shape))
        new = slice(self.count, self.count + len(prompt_of_row))
        for layer, (key, value) in enumerate(prefill.layers):
            self.keys[layer][new, :, : key.shape[2]] = key[prompt_of_row]
            self.values[layer][new, :, : value.shape[2]] = value[prompt_of_row]
        self.count += len(prompt_of_row)
        self.longest = max(self.longest, prefill.layers[0][0].shape[2])

    def place(self, position: Tensor, highest: int) -> dict[str, Tensor]:
        """Says where the next step writes; returns what `decode_attention` needs to know of it.

        Args:
            position: `[count]` int64 of the new token in each row.
            highest: of all positions.
        """
        self.longest = highest + 1
        if bool((position == highest).all()):
            self.position = highest
            return {}
        self.position = position
        place = torch.arange(self.longest, device=position.device)
        return {"visible": (place <= position[:, None])[:, None, None], "row_ends": position}

    def keep(self, rows: Tensor) -> None:
        """Moves these rows to the front and forgets the others."""
        for buffers in (self.keys, self.values):
            for buffer in buffers:
                buffer[: len(rows), :, : self.longest] = buffer[rows, :, : self.longest]
        self.count = len(rows)

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes one token per row, and gives every row's keys and values up to the longest row."""
        keys, values = self.keys[layer][: self.count], self.values[layer][: self.count]
        if isinstance(self.position, int):
            keys[:, :, self.position] = key[:, :, 0]
            values[:, :, self.position] = value[:, :, 0]
        else:
            rows = torch.arange(self.count, device=key.device)
            keys[rows, :, self.position] = key[:, :, 0]
            values[rows, :, self.position] = value[:, :, 0]
        return keys[:, :, : self.longest], values[:, :, : self.longest]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.longest - 1


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    visible: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Prefill is causal over right-padded prompts (pads stand behind every real token); a decoding step sees the keys
    that `visible [R, 1, 1, T]` marks, or all."""
    length, keys = query.shape[2], key.shape[2]
    mask = visible
    if sliding_window is not None and sliding_window < keys:
        mask = _windowed(query, keys, sliding_window, visible, kwargs.get("row_ends"))
    grouped = query.shape[1] != key.shape[1]
    causal = mask is None and length > 1
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2), None


def _windowed(query: Tensor, keys: int, window: int, visible: Tensor | None, ends: Tensor | None) -> Tensor:
    place = torch.arange(keys, device=query.device)
    if query.shape[2] > 1:
        distance = place[:, None] - place[None]
        return (distance >= 0) & (distance < window)
    last = ends[:, None, None, None] if ends is not None else torch.tensor(keys - 1, device=query.device)
    near = (last - place) < window
    return near if visible is None else near & visible


def register_attention() -> None:
    """Makes `ATTENTION` known to transformers, which then builds no mask; safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, decode_attention)
