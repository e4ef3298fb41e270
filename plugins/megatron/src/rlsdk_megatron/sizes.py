"""Checks whether a split fits a model and a number of ranks, from sizes only. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlsdk_megatron.config import MegatronOptions

Problem = tuple[str, str]
"""An option's name, and what is wrong with its value."""


ROW_ALIGNMENT = 8
"""Embedding rows of one rank are padded to a multiple of this, for kernels and because few vocabulary sizes divide
evenly."""

CHUNK_ELEMENTS = 1 << 25
"""Largest number of float32 logits in memory at once on a rank; with gradients, each chunk is recomputed."""


def padded_vocabulary(size: int, ranks: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks."""
    return -(-size // (ranks * ROW_ALIGNMENT)) * ranks * ROW_ALIGNMENT


def expert_tensor_size(options: MegatronOptions) -> int:
    """Tensor-parallel size of experts: 1 if whole experts are distributed, otherwise `tensor_parallel`."""
    return 1 if options.expert_parallel > 1 else options.tensor_parallel


@dataclass(frozen=True)
class Place:
    """Position of a rank in Megatron's order: tensor-parallel ranks are neighbours, pipeline stages are furthest
    apart."""

    tp_rank: int
    pp_rank: int
    ep_rank: int
    etp_rank: int


def place_of(rank: int, num_ranks: int, options: MegatronOptions) -> Place:
    """Position of a rank; the split must be valid."""
    stage = num_ranks // options.pipeline_parallel
    within, split = rank % stage, expert_tensor_size(options)
    return Place(
        tp_rank=within % options.tensor_parallel,
        pp_rank=rank // stage,
        ep_rank=within // split % options.expert_parallel,
        etp_rank=within % split,
    )


def split_problems(
    options: MegatronOptions, *, num_ranks: int, device: str, model: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yields every reason why this split cannot run, each with the values that would work.

    Args:
        options: the split.
        num_ranks: the engine's number of ranks.
        device: `cpu` or `cuda`.
        model: fields of `config.json`; missing fields are not checked.
    """
    below = [name for name in SIZES if getattr(options, name) < 1]
    for name in below:
        yield name, f"{getattr(options, name)}: expected 1 or more"
    if below:
        return
    yield from _ranks(options, num_ranks)
    yield from _heads(options, model)
    yield from _layers(options, model)
    yield from _experts(options, num_ranks, model)
    if options.sequence_parallel and options.tensor_parallel == 1:
        yield "sequence_parallel", "True splits over the tensor-parallel ranks, but tensor_parallel is 1; set it to 2"
    if options.overlap_param_gather and not options.distributed_optimizer:
        yield (
            "overlap_param_gather",
            "True needs distributed_optimizer, whose shards it gathers; set that to True, or this to False",
        )
    if options.transformer_engine == "always" and device == "cpu":
        yield (
            "transformer_engine",
            "'always': Transformer Engine runs on CUDA only; expected 'auto' or 'never' on a CPU",
        )


SIZES = (
    "tensor_parallel", "pipeline_parallel", "virtual_stages", "context_parallel", "expert_parallel",
)  # fmt: skip


def _ranks(options: MegatronOptions, num_ranks: int) -> Iterator[Problem]:
    tensor, pipeline, context = options.tensor_parallel, options.pipeline_parallel, options.context_parallel
    product = tensor * pipeline * context
    if num_ranks % product:
        valid = _divisors(num_ranks, lambda size: num_ranks % (size * pipeline * context) == 0)
        hint = f"tensor_parallel one of {valid}" if valid else f"a multiple of {product} devices"
        yield (
            "tensor_parallel",
            f"{tensor} x pipeline_parallel {pipeline} x context_parallel {context} = {product} does not divide the "
            f"{num_ranks} ranks; expected {hint}",
        )


def _heads(options: MegatronOptions, model: Mapping[str, Any]) -> Iterator[Problem]:
    size = options.tensor_parallel
    heads, groups, inner = (
        model.get(name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )

    def fits(n: int) -> bool:
        shared = groups is None or groups % n == 0 or n % groups == 0
        return (heads is None or heads % n == 0) and shared and (inner is None or inner % n == 0)

    if heads and not fits(size):
        yield (
            "tensor_parallel",
            f"{size} does not split {heads} attention heads, {groups} key-value heads and an intermediate size of "
            f"{inner} evenly; expected one of {_divisors(heads, fits)}",
        )


def _layers(options: MegatronOptions, model: Mapping[str, Any]) -> Iterator[Problem]:
    stages, virtual, layers = options.pipeline_parallel, options.virtual_stages, model.get("num_hidden_layers")
    if virtual > 1 and stages == 1:
        yield "virtual_stages", f"{virtual} splits the stages of a pipeline, but pipeline_parallel is 1; expected 1"
    elif layers and layers % stages:
        yield (
            "pipeline_parallel",
            f"{stages} does not divide the {layers} layers; expected one of {_divisors(layers, lambda n: True)}",
        )
    elif layers and layers % (stages * virtual):
        yield (
            "virtual_stages",
            f"{virtual} x pipeline_parallel {stages} does not divide the {layers} layers; expected one of "
            f"{_divisors(layers // stages, lambda n: True)}",
        )


def _experts(options: MegatronOptions, num_ranks: int, model: Mapping[str, Any]) -> Iterator[Problem]:
    size, experts = options.expert_parallel, model.get("num_experts") or model.get("num_local_experts")
    if experts and options.tensor_parallel > 1 and not options.sequence_parallel:
        yield "sequence_parallel", "False: training experts with tensor_parallel above 1 needs it; expected True"
    if size == 1 or not model:
        return
    if not experts:
        yield "expert_parallel", f"{size}: {model.get('model_type', 'this model')!r} has no experts; expected 1"
        return
    stage = max(num_ranks // options.pipeline_parallel, 1)
    valid = _divisors(stage, lambda n: experts % n == 0)
    if size not in valid:
        yield (
            "expert_parallel",
            f"{size} does not distribute {experts} experts evenly over the {stage} ranks of a pipeline stage; expected "
            f"one of {valid}",
        )


def _divisors(number: int, fits: Any) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0 and fits(n)]
