"""Which part of an adapter a rank holds: it follows from the rank's part of the weights. Imports no Megatron."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlsdk.interfaces import Box, ConfigError
from rlsdk_megatron.parts import Part, Shapes, layer_parts

LINEARS: Mapping[str, Sequence[str]] = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
"""Linear module of one of Megatron's layers -> the canonical layers whose rows its weight joins."""


@dataclass(frozen=True)
class LowParts:
    """One rank's part of the adapter of a canonical layer."""

    a: Part
    """All of A; only the columns of this rank where the weight is split by columns."""
    b: Part | None
    """The rows of B that belong to this rank's rows of the weight; None: it has none of them."""
    features: Sequence[slice]
    """Where the rows of B are among the outputs of Megatron's module, in the order of these rows."""


def low_parts(
    shapes: Shapes, layer: int, rank: int, modules: Collection[str]
) -> Iterator[tuple[str, Sequence[LowParts]]]:
    """Each linear module of a layer that has adapters, by its name below the layer, and those adapters: as many on all
    tensor-parallel ranks.

    Args:
        shapes: the split.
        layer: its number in the model.
        rank: of the adapter.
        modules: canonical names of the adapted layers.
    """
    at = f"model.layers.{layer}"
    for linear, names in LINEARS.items():
        if chosen := [f"{at}.{name}" for name in names if f"{at}.{name}" in modules]:
            parts = layer_parts(shapes, at, f"{linear}.weight")
            yield linear, [_low(shapes, module, parts, rank) for module in chosen]


def _low(shapes: Shapes, module: str, parts: Sequence[Part], rank: int) -> LowParts:
    name = f"{module}.weight"
    mine = [part for part in parts if part.name == name]
    # A rank's rows of one canonical layer follow one another, though others' rows may lie between them in the weight.
    first, count = (mine[0].box.offset[0], sum(part.box.size[0] for part in mine)) if mine else (0, 0)
    left, width = (mine[0].box.offset[1], mine[0].box.size[1]) if mine else (0, shapes.shapes[name][1])
    b = Part(f"{module}.lora_B.weight", Box((first, 0), (count, rank)), slice(0, count))
    return LowParts(
        a=Part(f"{module}.lora_A.weight", Box((0, left), (rank, width)), slice(0, rank)),
        b=b if count else None,
        features=tuple(part.rows for part in mine),
    )


def check_targets(modules: Collection[str]) -> None:
    """Raises `ConfigError` if an adapted layer is none of those in `LINEARS`."""
    known = sorted({name.rpartition(".")[2] for names in LINEARS.values() for name in names})
    for module in modules:
        if not any(module.endswith(f".{name}") for names in LINEARS.values() for name in names):
            raise ConfigError(
                f"model.lora.targets {module!r}: backend 'megatron' has adapters beside the linear layers of attention "
                f"and of MLPs only; expected names of {known}, or 'all-linear'"
            )


def check_fusion(*, engine: bool) -> None:
    """Raises `ConfigError` if layers are those of Transformer Engine."""
    if engine:
        raise ConfigError(
            "train.megatron.transformer_engine: layers of Transformer Engine compute a norm and the linear layer after "
            "it in one, and hide the input that an adapter needs; with model.lora give "
            "--train.megatron.transformer_engine never"
        )
