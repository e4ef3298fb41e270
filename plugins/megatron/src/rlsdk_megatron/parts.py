"""Maps Megatron's parameters to tensors of the Hugging Face checkpoint, as boxes and views of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlsdk.interfaces import Box, ConfigError, LayoutError


@dataclass(frozen=True)
class Part:
    """A box of a canonical tensor, and the rows of this rank's parameter that hold it."""

    name: str
    box: Box
    rows: slice
    """Rows of the parameter; other dimensions are complete."""

    def view(self, parameter: Tensor) -> Tensor:
        """The memory of this part in the parameter, in the shape of the box."""
        return parameter.detach()[self.rows].view(self.box.size)


@dataclass(frozen=True)
class Held:
    """One parameter of this rank."""

    parameter: nn.Parameter
    parts: Sequence[Part]
    """Its parts of the checkpoint; rows outside all parts (padding of the vocabulary) are zero."""


Piece = tuple[str, int, int]
"""Canonical name, first row, number of rows."""


@dataclass(frozen=True)
class Shapes:
    """Sizes that determine the mapping."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every canonical tensor."""
    heads: int
    groups: int
    head_size: int
    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int
    experts: int
    etp_rank: int
    etp_size: int

    @classmethod
    def of(cls, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
        """From Megatron's configuration and groups."""
        from megatron.core import parallel_state  # imported here: forecasts use this class without Megatron

        return cls(
            shapes=shapes,
            heads=config.num_attention_heads,
            groups=config.num_query_groups,
            head_size=config.kv_channels,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            ep_rank=parallel_state.get_expert_model_parallel_rank(),
            ep_size=parallel_state.get_expert_model_parallel_world_size(),
            experts=config.num_moe_experts or 0,
            etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
            etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        )

    def cut_rows(self, pieces: Sequence[Piece], start: int, stop: int) -> list[Part]:
        """Parts of a parameter with rows `[start, stop)` of these concatenated pieces."""
        parts, at = [], 0
        for name, first, count in pieces:
            low, high = max(at, start), min(at + count, stop)
            if low < high:
                width = self.shapes[name][1:]
                box = Box((first + low - at, *(0 for _ in width)), (high - low, *width))
                parts.append(Part(name, box, slice(low - start, high - start)))
            at += count
        return parts

    def whole(self, name: str) -> list[Part]:
        """Part of a tensor that every rank holds completely."""
        return self.cut_rows([(name, 0, self.shapes[name][0])], 0, self.shapes[name][0])

    def vocabulary(self, name: str, rows: int) -> list[Part]:
        """This rank's `rows` rows of the vocabulary, with padding."""
        return self.cut_rows([(name, 0, self.shapes[name][0])], self.tp_rank * rows, (self.tp_rank + 1) * rows)

    def columns(self, name: str) -> list[Part]:
        """This rank's part of a matrix that is split by columns."""
        rows, columns = self.shapes[name]
        mine = columns // self.tp_size
        return [Part(name, Box((0, self.tp_rank * mine), (rows, mine)), slice(0, rows))]

    def attention(self, prefix: str, kind: str) -> list[Part]:
        """Queries, keys and values. For each key-value head: the query heads that share it, then its key, then its
        value. This sequence is split over the ranks, within a head if there are more ranks than key-value heads."""
        size, queries = self.head_size, self.heads // self.groups * self.head_size
        pieces: list[Piece] = []
        for group in range(self.groups):
            pieces.append((f"{prefix}.q_proj.{kind}", group * queries, queries))
            pieces += [(f"{prefix}.{name}_proj.{kind}", group * size, size) for name in ("k", "v")]
        mine = sum(count for _, _, count in pieces) // self.tp_size
        return self.cut_rows(pieces, self.tp_rank * mine, (self.tp_rank + 1) * mine)

    def gate_up(self, prefix: str) -> list[Part]:
        """This rank's rows of the gate projection, then the same rows of the up projection."""
        mine = self.shapes[f"{prefix}.gate_proj.weight"][0] // self.tp_size
        names = (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        return self.cut_rows([(name, self.tp_rank * mine, mine) for name in names], 0, 2 * mine)

    def expert_gate_up(self, prefix: str, expert: int) -> list[Part]:
        """As `gate_up`, for one expert of a tensor `[E, 2 I, H]` of all experts."""
        name = f"{prefix}.gate_up_proj"
        _, both, width = self.shapes[name]
        mine = both // 2 // self.etp_size
        starts = (self.etp_rank * mine, both // 2 + self.etp_rank * mine)
        return [
            Part(name, Box((expert, start, 0), (1, mine, width)), slice(at * mine, (at + 1) * mine))
            for at, start in enumerate(starts)
        ]

    def expert_down(self, prefix: str, expert: int) -> list[Part]:
        """Columns of one expert of a tensor `[E, H, I]` of all experts."""
        name = f"{prefix}.down_proj"
        _, rows, columns = self.shapes[name]
        mine = columns // self.etp_size
        return [Part(name, Box((expert, 0, self.etp_rank * mine), (1, rows, mine)), slice(0, rows))]

    def expert(self, local: str) -> int:
        """Global number of this rank's expert `local`."""
        return self.ep_rank * (self.experts // self.ep_size) + int(local)


Rule = Callable[[Shapes, str, "re.Match[str]"], list[Part]]
LAYER_RULES: Mapping[str, Rule] = {
    r"input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight": lambda s, at, m: s.whole(
        f"{at}.input_layernorm.weight"
    ),
    r"pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight": lambda s, at, m: s.whole(
        f"{at}.post_attention_layernorm.weight"
    ),
    r"self_attention\.linear_qkv\.(weight|bias)": lambda s, at, m: s.attention(f"{at}.self_attn", m[1]),
    r"self_attention\.linear_proj\.weight": lambda s, at, m: s.columns(f"{at}.self_attn.o_proj.weight"),
    r"self_attention\.linear_proj\.bias": lambda s, at, m: s.whole(f"{at}.self_attn.o_proj.bias"),
    r"self_attention\.([qk])_layernorm\.weight": lambda s, at, m: s.whole(f"{at}.self_attn.{m[1]}_norm.weight"),
    r"mlp\.linear_fc1\.weight": lambda s, at, m: s.gate_up(f"{at}.mlp"),
    r"mlp\.linear_fc2\.weight": lambda s, at, m: s.columns(f"{at}.mlp.down_proj.weight"),
    r"mlp\.router\.weight": lambda s, at, m: s.whole(f"{at}.mlp.gate.weight"),
    # One module per expert, or one module with a weight per expert.
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc1\.weight|linear_fc1\.weight(\d+))": lambda s, at, m: (
        s.expert_gate_up(f"{at}.mlp.experts", s.expert(m[1] or m[2]))
    ),
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc2\.weight|linear_fc2\.weight(\d+))": lambda s, at, m: (
        s.expert_down(f"{at}.mlp.experts", s.expert(m[1] or m[2]))
    ),
}
"""Parameter of a layer -> function of its parts, below the layer's canonical prefix."""


def held_by(stages: Sequence[nn.Module], shapes: Shapes, tied: Mapping[str, str]) -> list[Held]:
    """Every parameter of this rank's stages. Collective: every rank must call.

    Raises:
        ConfigError: Megatron's model and the checkpoint do not have the same tensors.
        LayoutError: the shape of a parameter does not match its parts.
    """
    held = [
        _checked(Held(parameter, parts_of(stage, name, parameter, shapes, tied)), name)
        for stage in stages
        for name, parameter in stage.named_parameters()
    ]
    mine = {part.name for one in held for part in one.parts}
    present = torch.tensor([name in mine for name in shapes.shapes], dtype=torch.int32)
    dist.all_reduce(present, dist.ReduceOp.MAX)
    if lacking := sorted(name for name, found in zip(shapes.shapes, present.tolist(), strict=True) if not found):
        raise ConfigError(
            f"model.path: the checkpoint has {len(lacking)} tensors that Megatron's model does not have, first "
            f"{lacking[0]!r}; backend 'megatron' cannot train this model"
        )
    return held


def parts_of(stage: Any, name: str, parameter: nn.Parameter, shapes: Shapes, tied: Mapping[str, str]) -> Sequence[Part]:
    """Parts of a parameter of a stage."""
    fixed: Mapping[str, Callable[[], list[Part]]] = {
        "embedding.word_embeddings.weight": lambda: shapes.vocabulary("model.embed_tokens.weight", len(parameter)),
        "output_layer.weight": lambda: shapes.vocabulary(tied.get("lm_head.weight", "lm_head.weight"), len(parameter)),
        "decoder.final_layernorm.weight": lambda: shapes.whole("model.norm.weight"),
        "score.weight": lambda: shapes.whole("score.weight"),
        "score.bias": lambda: shapes.whole("score.bias"),
    }
    try:
        if name in fixed:
            return fixed[name]()
        _, _, at, rest = name.split(".", 3)
        return layer_parts(shapes, f"model.layers.{stage.decoder.layers[int(at)].layer_number - 1}", rest)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"model.path: the checkpoint has no tensor for Megatron's {name!r} ({error})") from error


def layer_parts(shapes: Shapes, at: str, rest: str) -> list[Part]:
    """Parts of a parameter of a layer.

    Args:
        shapes: the split.
        at: the layer's canonical prefix.
        rest: Megatron's name of the parameter below the layer.
    """
    for pattern, rule in LAYER_RULES.items():
        if match := re.fullmatch(pattern, rest):
            return rule(shapes, at, match)
    raise ConfigError(f"model.path: Megatron's parameter {rest!r} has no place in a Hugging Face checkpoint")


def _checked(held: Held, name: str) -> Held:
    shape = tuple(held.parameter.shape)
    for part in held.parts:
        rows = len(range(shape[0])[part.rows])
        if (rows, *shape[1:]) != part.box.size[-len(shape) :]:
            raise LayoutError(f"Megatron's {name!r} has shape {shape}, but its part {part.name!r} has {part.box.size}")
    return held


def all_parts(held: Sequence[Held]) -> Iterator[tuple[Part, nn.Parameter]]:
    """Every box of this rank once, in a fixed order. A tied embedding on two stages of this rank is listed once."""
    seen: set[tuple[str, Box]] = set()
    for one in held:
        for part in one.parts:
            if (part.name, part.box) not in seen:
                seen.add((part.name, part.box))
                yield part, one.parameter
