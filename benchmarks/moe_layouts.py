"""Layouts of large mixture-of-experts models from their public shapes, as a trainer and a rollout engine cut them.

Shapes are the fields of `config.json` of the models' public repositories. deepseek-ai/DeepSeek-V3 and
moonshotai/Kimi-K2-Instruct are of the DeepseekV3 architecture: multi-head latent attention, some dense layers, then
routed experts with one shared expert (the extra multi-token-prediction layer of DeepSeek-V3 is left out).
Qwen/Qwen3-235B-A22B is of Qwen3MoE: grouped-query attention, routed experts in every layer. Every expert is a canonical
tensor of its own, whatever an engine stacks or fuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from rlsdk.interfaces import Box, TensorMeta, WeightLayout

GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """Public sizes of one model, under the names of its `config.json`."""

    name: str
    architecture: str
    """`model_type` of its configuration."""
    vocab_size: int
    num_attention_heads: int
    n_routed_experts: int
    first_k_dense_replace: int
    num_hidden_layers: int = 61
    num_key_value_heads: int | None = None
    """None: latent attention."""
    head_dim: int = 128
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    n_shared_experts: int = 1
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128


MODELS = {
    "671b": MoeShape(
        name="DeepSeek-V3",
        architecture="deepseek_v3",
        vocab_size=129280,
        num_attention_heads=128,
        n_routed_experts=256,
        first_k_dense_replace=3,
    ),
    "1t": MoeShape(
        name="Kimi-K2",
        architecture="kimi_k2",
        vocab_size=163840,
        num_attention_heads=64,
        n_routed_experts=384,
        first_k_dense_replace=1,
    ),
    "235b": MoeShape(
        name="Qwen3-235B-A22B",
        architecture="qwen3_moe",
        vocab_size=151936,
        num_attention_heads=64,
        num_key_value_heads=4,
        n_routed_experts=128,
        first_k_dense_replace=0,
        num_hidden_layers=94,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        n_shared_experts=0,
    ),
}


@dataclass(frozen=True)
class Weight:
    """A canonical tensor, where in the model it is, and the dimension that tensor parallelism cuts."""

    meta: TensorMeta
    layer: int
    """-1: the embedding; the number of layers: the final norm and the head."""
    tp_dim: int | None
    expert: int | None = None
    heads: int | None = None
    """Of keys or values: tensor parallelism over more ranks than that copies whole heads."""


def weights(shape: MoeShape) -> Iterator[Weight]:
    """Every canonical tensor, in the order of the checkpoint."""
    hidden = shape.hidden_size
    yield _weight("model.embed_tokens.weight", (shape.vocab_size, hidden), -1, 0)
    for layer in range(shape.num_hidden_layers):
        yield _weight(f"model.layers.{layer}.input_layernorm.weight", (hidden,), layer)
        attention = f"model.layers.{layer}.self_attn"
        if shape.num_key_value_heads is None:
            yield from _latent_attention(shape, attention, layer)
        else:
            yield from _grouped_attention(shape, attention, layer, shape.num_key_value_heads)
        yield _weight(f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,), layer)
        yield from _feed_forward(shape, layer)
    yield _weight("model.norm.weight", (hidden,), shape.num_hidden_layers)
    yield _weight("lm_head.weight", (shape.vocab_size, hidden), shape.num_hidden_layers, 0)


def _latent_attention(shape: MoeShape, attention: str, layer: int) -> Iterator[Weight]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    query = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    key_value = heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    yield _weight(f"{attention}.q_a_proj.weight", (shape.q_lora_rank, hidden), layer)
    yield _weight(f"{attention}.q_a_layernorm.weight", (shape.q_lora_rank,), layer)
    yield _weight(f"{attention}.q_b_proj.weight", (query, shape.q_lora_rank), layer, 0)
    latent = shape.kv_lora_rank + shape.qk_rope_head_dim
    yield _weight(f"{attention}.kv_a_proj_with_mqa.weight", (latent, hidden), layer)
    yield _weight(f"{attention}.kv_a_layernorm.weight", (shape.kv_lora_rank,), layer)
    yield _weight(f"{attention}.kv_b_proj.weight", (key_value, shape.kv_lora_rank), layer, 0)
    yield _weight(f"{attention}.o_proj.weight", (hidden, heads * shape.v_head_dim), layer, 1)


def _grouped_attention(shape: MoeShape, attention: str, layer: int, kv_heads: int) -> Iterator[Weight]:
    hidden, size = shape.hidden_size, shape.head_dim
    yield _weight(f"{attention}.q_proj.weight", (shape.num_attention_heads * size, hidden), layer, 0)
    for name in ("k_proj", "v_proj"):
        yield _weight(f"{attention}.{name}.weight", (kv_heads * size, hidden), layer, 0, heads=kv_heads)
    yield _weight(f"{attention}.o_proj.weight", (hidden, shape.num_attention_heads * size), layer, 1)
    yield _weight(f"{attention}.q_norm.weight", (size,), layer)
    yield _weight(f"{attention}.k_norm.weight", (size,), layer)


def _feed_forward(shape: MoeShape, layer: int) -> Iterator[Weight]:
    hidden, block = shape.hidden_size, f"model.layers.{layer}.mlp"
    if layer < shape.first_k_dense_replace:
        yield from _projections(block, shape.intermediate_size, hidden, layer)
        return
    yield _weight(f"{block}.gate.weight", (shape.n_routed_experts, hidden), layer)
    if shape.num_key_value_heads is None:
        yield _weight(f"{block}.gate.e_score_correction_bias", (shape.n_routed_experts,), layer, dtype="float32")
    for expert in range(shape.n_routed_experts):
        yield from _projections(f"{block}.experts.{expert}", shape.moe_intermediate_size, hidden, layer, expert)
    if shape.n_shared_experts:
        shared = shape.n_shared_experts * shape.moe_intermediate_size
        yield from _projections(f"{block}.shared_experts", shared, hidden, layer)


def _projections(prefix: str, inner: int, hidden: int, layer: int, expert: int | None = None) -> Iterator[Weight]:
    yield _weight(f"{prefix}.gate_proj.weight", (inner, hidden), layer, 0, expert)
    yield _weight(f"{prefix}.up_proj.weight", (inner, hidden), layer, 0, expert)
    yield _weight(f"{prefix}.down_proj.weight", (hidden, inner), layer, 1, expert)


def _weight(
    name: str,
    shape: tuple[int, ...],
    layer: int,
    tp_dim: int | None = None,
    expert: int | None = None,
    dtype: str = "bfloat16",
    heads: int | None = None,
) -> Weight:
    return Weight(TensorMeta(name=name, shape=shape, dtype=dtype), layer, tp_dim, expert, heads)


@lru_cache(maxsize=1 << 16)
def tp_box(shape: tuple[int, ...], dim: int | None, rank: int, size: int) -> Box:
    """The even share of one tensor-parallel rank; the last may be smaller, and empty."""
    if dim is None or size == 1:
        return Box.whole(shape)
    share = -(-shape[dim] // size)
    low, high = min(shape[dim], rank * share), min(shape[dim], (rank + 1) * share)
    offset, extent = [0] * len(shape), list(shape)
    offset[dim], extent[dim] = low, high - low
    return Box(tuple(offset), tuple(extent))


def megatron_like(shape: MoeShape, *, tp: int, pp: int, ep: int, ranks: int) -> list[WeightLayout]:
    """Training layouts: rank = stage * (dp * tp) + replica * tp + tensor-parallel rank.

    Layers are spread over stages as evenly as they go, the embedding on the first stage, norm and head on the last.
    Within a stage of dp * tp ranks, attention, dense and shared parts are cut by tensor parallelism and copied dp
    times; experts are whole, spread over groups of `ep` neighbouring ranks, and copied dp * tp / ep times.
    """
    per_stage = ranks // pp
    if per_stage * pp != ranks or per_stage % tp or per_stage % ep or shape.n_routed_experts % ep:
        raise ValueError(f"{ranks} ranks cannot be cut into tp {tp}, pp {pp}, ep {ep}")
    first = [shape.num_hidden_layers * stage // pp for stage in range(pp + 1)]
    stage_of = [next(s for s in range(pp) if first[s] <= layer < first[s + 1]) for layer in range(first[-1])]
    by_stage: list[list[Weight]] = [[] for _ in range(pp)]
    for weight in weights(shape):
        by_stage[stage_of[min(max(weight.layer, 0), first[-1] - 1)]].append(weight)
    per_rank = shape.n_routed_experts // ep
    layouts = []
    for rank in range(ranks):
        local = rank % per_stage
        mine = [w for w in by_stage[rank // per_stage] if w.expert is None or w.expert // per_rank == local % ep]
        layouts.append(_layout(mine, local % tp, tp, rank, node=f"train-{rank // GPUS_PER_NODE}"))
    return layouts


def vllm_like(shape: MoeShape, *, tp: int, ep: int, ranks: int) -> list[WeightLayout]:
    """Rollout layouts: replicas of `ep` ranks, each of which holds whole experts; the rest is cut by tensor parallelism
    in groups of `tp` neighbours, copied ep / tp times in a replica."""
    if ranks % ep or ep % tp or shape.n_routed_experts % ep:
        raise ValueError(f"{ranks} ranks cannot be cut into tp {tp}, ep {ep}")
    per_rank = shape.n_routed_experts // ep
    every = list(weights(shape))
    mine = [[w for w in every if w.expert is None or w.expert // per_rank == at] for at in range(ep)]
    shared = [_layout(mine[at], at % tp, tp, 0, node="") for at in range(ep)]
    return [
        WeightLayout(
            rank=rank,
            node=f"rollout-{rank // GPUS_PER_NODE}",
            device=f"cuda:{rank % GPUS_PER_NODE}",
            process=f"rollout:{rank}",
            tensors=shared[rank % ep].tensors,
            boxes=shared[rank % ep].boxes,
            worker=f"worker {rank % ep} of {rank // ep}",
        )
        for rank in range(ranks)
    ]


def _layout(mine: list[Weight], tp_rank: int, tp: int, rank: int, node: str) -> WeightLayout:
    return WeightLayout(
        rank=rank,
        node=node,
        device=f"cuda:{rank % GPUS_PER_NODE}",
        process=f"train:{rank}",
        tensors=tuple(w.meta for w in mine),
        boxes=tuple(
            (w.meta.name, tp_box(w.meta.shape, None if w.expert is not None else w.tp_dim, *_share(w, tp_rank, tp)))
            for w in mine
        ),
    )


def _share(weight: Weight, tp_rank: int, tp: int) -> tuple[int, int]:
    """(which share a rank has, of how many)."""
    if weight.heads is None or tp <= weight.heads:
        return tp_rank, tp
    return tp_rank * weight.heads // tp, weight.heads


def num_parameters(shape: MoeShape) -> int:
    """Of all canonical tensors."""
    return sum(math.prod(w.meta.shape) for w in weights(shape))
