"""KV cache of many rows, each at its own position, and the attention that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rlsdk.kit.model.outputs import output_logits
from rlsdk.kit.model.packed import packed_attention, window_for_mask

ATTENTION = "rlsdk_rows"
"""Name of the attention in transformers' registry."""
GROWTH = 64
"""Smallest number of tokens by which buffers grow."""


@dataclass
class RowStep:
    """One token for every row: passed to the attention of every layer."""

    position: int | Tensor
    """Of the new token: one number where all rows are equally long, else `[R]`."""
    longest: int
    """Tokens of the longest row, the new one included."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def visible(self, window: int | None, device: torch.device) -> Tensor | None:
        """`[R, 1, 1, T]` bool, R 1 where all rows are equally long: the keys that each row sees; None: every one."""
        if window is not None and window >= self.longest:
            window = None
        if window is None and isinstance(self.position, int):
            return None
        if window not in self.masks:
            place = torch.arange(self.longest, device=device)[None, None, None]
            last = self.position if isinstance(self.position, int) else self.position[:, None, None, None]
            seen = place <= last
            self.masks[window] = seen if window is None else seen & (place > last - window)
        return self.masks[window]


class KeyValueCache:
    """The part of transformers' `Cache` that models use, besides `update`. No mask is built, so the sizes do not
    matter."""

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def get_query_offset(self, layer: int = 0) -> int:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class PrefillStates(KeyValueCache):
    """Collects the keys and values of prompts, layer by layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.layers.append((key, value))
        return key, value


class PositionedRows(KeyValueCache):
    """Rows of any lengths: buffers of `[capacity, heads, length, dim]` for each layer, the first `count` rows in use.

    Rows are written in place and never padded on the left, so a token's keys stand at its own position.
    """

    lockstep = False

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(ATTENTION, row_attention)
        AttentionMaskInterface.register(ATTENTION, window_for_mask)
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.backbone = getattr(model, model.base_model_prefix)
        self.clear()

    def clear(self) -> None:
        """Drops all rows and frees their memory."""
        self.count = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.now = RowStep(0, 0)

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, PrefillStates]:
        """Runs prompts, padded on the right: under causal attention a pad stands after every real token.

        Args:
            prompts: `[T]` int64 each, on the host.

        Returns:
            Logits `[P, V]` after each prompt, and what `add` makes rows of.
        """
        padded = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True).to(self.model.device)
        states = PrefillStates()
        hidden = self.backbone(
            input_ids=padded,
            position_ids=torch.arange(padded.shape[1], device=padded.device)[None],
            past_key_values=states,
            use_cache=True,
        ).last_hidden_state
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=padded.device)
        return output_logits(self.model, hidden[torch.arange(len(last), device=padded.device), last]), states

    def add(self, states: PrefillStates, owner: Tensor, *, capacity: int, most: int) -> None:
        """Appends rows.

        Args:
            states: from `prefill`.
            owner: `[new]` int64: which prompt each row continues from.
            capacity: rows that there may be before the memory is cleared.
            most: tokens that the longest row may get.
        """
        if not self.keys:
            self.keys = [key.new_zeros(0, key.shape[1], 0, key.shape[3]) for key, _ in states.layers]
            self.values = [value.new_zeros(0, value.shape[1], 0, value.shape[3]) for _, value in states.layers]
        length = states.layers[0][0].shape[2]
        self._reserve(capacity, length + 1, most)
        new = slice(self.count, self.count + len(owner))
        for layer, (key, value) in enumerate(states.layers):
            self.keys[layer][new, :, :length] = key[owner]
            self.values[layer][new, :, :length] = value[owner]
        self.count += len(owner)
        self.now.longest = max(self.now.longest, length)

    def step(self, tokens: Tensor, positions: NDArray[np.int64], *, most: int) -> Tensor:
        """Logits `[R, V]` after `tokens [R]`, which stand at `positions [R]`."""
        highest = int(positions.max())
        self._reserve(self.count, highest + 1, most)
        aligned = bool((positions == highest).all())
        at = torch.from_numpy(positions).to(tokens.device)
        self.now = RowStep(highest if aligned else at, highest + 1)
        hidden = self.backbone(
            input_ids=tokens[:, None],
            position_ids=at[:1, None] if aligned else at[:, None],
            past_key_values=self,
            use_cache=True,
            row_step=self.now,
        ).last_hidden_state
        return output_logits(self.model, hidden[:, 0])

    def keep(self, order: Tensor) -> None:
        """Moves row `order[i]` to row i; drops rows from `len(order)` on."""
        moved = (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
        source, used = order[moved], self.now.longest
        for buffer in (*self.keys, *self.values):
            buffer[moved, :, :used] = buffer[source, :, :used]
        self.count = len(order)

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Of transformers' cache: writes one token a row, gives every row's keys and values up to the longest row."""
        keys, values = self.keys[layer][: self.count], self.values[layer][: self.count]
        if isinstance(self.now.position, int):
            keys[:, :, self.now.position] = key[:, :, 0]
            values[:, :, self.now.position] = value[:, :, 0]
        else:
            rows = torch.arange(self.count, device=key.device)
            keys[rows, :, self.now.position] = key[:, :, 0]
            values[rows, :, self.now.position] = value[:, :, 0]
        return keys[:, :, : self.now.longest], values[:, :, : self.now.longest]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.now.longest - 1

    def _reserve(self, rows: int, length: int, most: int) -> None:
        have_rows, _, have_length, _ = self.keys[0].shape
        if rows <= have_rows and length <= have_length:
            return
        if length > have_length:
            # At once for a short response; half as much again for a long one, which may end early.
            have_length = min(max(most, length), max(length + GROWTH, have_length * 3 // 2))
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                # Zeros: what is masked still takes part in products, where leftovers might not be finite.
                buffers[layer] = old.new_zeros(max(rows, have_rows), old.shape[1], have_length, old.shape[3])
                buffers[layer][: self.count, :, : self.now.longest] = old[: self.count, :, : self.now.longest]


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row_step: RowStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: that of `kit.model.packed` over prompts; with a `row_step`, one
    query a row. The other arguments are those of `packed_attention`."""
    if row_step is None:
        return packed_attention(module, query, key, value, attention_mask, scaling, softcap, s_aux, **kwargs)
    rows, heads, _, _ = query.shape
    # The heads that share keys stand where a kernel expects queries of one head: no key is read twice.
    query = query.reshape(rows, key.shape[1], heads // key.shape[1], query.shape[3])
    visible = row_step.visible(None if attention_mask is None else int(attention_mask), query.device)
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    else:
        out = _attend_in_full(query, key, value, visible, scaling, softcap, s_aux)
    return out.reshape(rows, 1, heads, value.shape[3]), None


def _attend_in_full(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in plain operations, for cases that no torch kernel supports."""
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores).view(1, *scores.shape[1:3], 1).expand(len(scores), -1, -1, -1)
        scores = torch.cat([scores, sink], dim=3)
    return scores.softmax(dim=3, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype) @ value
