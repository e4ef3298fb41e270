"""Splits the tokens of a packed row over ranks (Ulysses, arXiv 2309.14509): each rank has a stretch of the row with all
attention heads; inside attention it has the whole row with a share of the heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rlsdk.interfaces import ConfigError

_MOVING_ROTARY = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies depend on the longest position of a pass: ranks would disagree."""


@dataclass(frozen=True)
class ContextSplit:
    """This rank's place among the ranks that split each row. All of them run the same batch."""

    rank: int
    size: int
    group: Any
    """A `dist.ProcessGroup` of the ranks, in order. Every pass forward or backward is collective over it."""

    def stretch(self, num_tokens: int) -> int:
        """Tokens of each rank of a row of `num_tokens`, which is padded to a multiple of the ranks."""
        return -(-num_tokens // self.size)

    def own_tokens(self, row: Tensor) -> Tensor:
        """`[1, stretch]` of `[1, U]`: this rank's tokens, with zeros for padding."""
        stretch = self.stretch(row.shape[1])
        padded = F.pad(row, (0, stretch * self.size - row.shape[1]))
        return padded[:, self.rank * stretch : (self.rank + 1) * stretch]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """`[1, heads, stretch, D]` of each to `[1, heads / ranks, num_tokens, D]`, by one exchange. Key-value heads
        that the ranks do not divide are repeated, as often as they must be.

        Raises:
            ConfigError: the ranks do not divide the query heads.
        """
        check_heads(query.shape[1], self.size)
        copies = math.lcm(key.shape[1], self.size) // key.shape[1]
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        stretch, tensors = query.shape[2], (query, key, value)
        parts = [tensor[0].transpose(0, 1).reshape(stretch, self.size, -1) for tensor in tensors]
        whole = self._exchange(torch.cat(parts, 2).transpose(0, 1)).flatten(0, 1)[:num_tokens]
        own = torch.split(whole, [part.shape[2] for part in parts], 1)
        found = (part.reshape(num_tokens, -1, tensor.shape[3]) for part, tensor in zip(own, tensors, strict=True))
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in found)
        return query, key, value

    def to_tokens(self, out: Tensor) -> Tensor:
        """`[1, U, heads / ranks, D]` to `[1, stretch, heads, D]`: the reverse of `to_heads`."""
        stretch = self.stretch(out.shape[1])
        padded = F.pad(out[0], (0, 0, 0, 0, 0, stretch * self.size - out.shape[1]))
        return self._exchange(padded.reshape(self.size, stretch, *out.shape[2:])).transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """`[heads / ranks]` of `[heads]`."""
        return of_heads.chunk(self.size)[self.rank]

    def join(self, values: Tensor, room: int) -> Tensor:
        """`[ranks * room, ...]` of `[m, ...]`: the values of all ranks, each padded to `room`. Every rank computes the
        same loss of them, so the gradient of a rank's own values is complete without a reduction."""
        joined: Tensor = _Join.apply(values, self, room)  # type: ignore[no-untyped-call]
        return joined

    def own(self, joined: Tensor, count: int) -> Tensor:
        """`[count, ...]`: this rank's part of a joined tensor."""
        first = self.rank * (len(joined) // self.size)
        return joined[first : first + count]

    def _exchange(self, parts: Tensor) -> Tensor:
        """`[ranks, ...]` to the same shape: part r goes to rank r, and part r of the result is from rank r."""
        exchanged: Tensor = _Exchange.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return exchanged


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(slope, ctx.group), None


def _all_to_all(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found


class _Join(torch.autograd.Function):
    """All-gathers forward; backward each rank takes the gradient of its own values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, split: ContextSplit, room: int) -> Tensor:
        ctx.split, ctx.count = split, len(values)
        mine = values.new_zeros(room, *values.shape[1:])
        mine[: len(values)] = values
        joined = values.new_empty(split.size, *mine.shape)
        if joined.numel():
            dist.all_gather(list(joined), mine, group=split.group)
        found = joined.flatten(0, 1)
        if not values.is_floating_point():
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return ctx.split.own(slope, ctx.count), None, None


def check_heads(heads: int, size: int) -> None:
    """Raises `ConfigError` where `size` ranks cannot share attention heads."""
    if heads % size:
        raise ConfigError(_uneven_heads(heads, size))


def split_problems(config: Mapping[str, Any], size: int) -> list[str]:
    """Why `size` ranks cannot split the rows of a model, from the fields of its `config.json`; missing fields are not
    checked."""
    fields = {**config, **(config.get("text_config") or {})}
    heads, kinds = fields.get("num_attention_heads", fields.get("n_head")), sorted(_rotary_kinds(fields))
    found = [_uneven_heads(heads, size)] if isinstance(heads, int) and heads % size else []
    if moving := [kind for kind in kinds if kind in _MOVING_ROTARY]:
        found.append(
            f"{size}: the model's rotary embedding is {moving[0]!r}, whose frequencies depend on the longest row of a "
            "pass, so that ranks with different parts of it would disagree; expected 1"
        )
    return found


def check_model(model: nn.Module, size: int, *, packs: bool) -> None:
    """Raises `ConfigError` where `size` ranks cannot split the rows of a model; `packs`: it runs packed rows."""
    if size > 1 and not packs:
        raise ConfigError(
            f"context_parallel: {size} splits packed rows, and the layers of {type(model).__name__} cannot run them "
            "(`kit.model.packed.can_pack`); expected 1"
        )
    problems = split_problems(model.config.to_dict(), size) if size > 1 else []  # type: ignore[union-attr, operator]
    if problems:
        raise ConfigError(f"context_parallel: {problems[0]}")


def _uneven_heads(heads: int, size: int) -> str:
    valid = [n for n in range(1, heads + 1) if heads % n == 0]
    return f"{size} does not divide the model's {heads} attention heads; expected one of {valid}"


def _rotary_kinds(fields: Mapping[str, Any]) -> set[str]:
    """Kinds of rotary embedding of a model, which may have one for each kind of layer."""
    kinds = set()
    for name in ("rope_parameters", "rope_scaling"):
        given = fields.get(name) or {}
        for settings in (given, *(part for part in given.values() if isinstance(part, Mapping))):
            kinds |= {str(settings[key]) for key in ("rope_type", "type") if settings.get(key)}
    return kinds
