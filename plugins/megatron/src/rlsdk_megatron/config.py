"""Options of the backend `megatron`, and whether they fit a model and a number of ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Problem = tuple[str, str]
"""An option's name, and what is wrong with its value."""


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """Options of this backend. Ranks beyond tensor, context and pipeline parallelism are data-parallel."""

    tensor_parallel: int = 1
    """Tensor-parallel size. Must divide the number of attention heads; and divide, or be a multiple of, the number of
    key-value heads."""
    sequence_parallel: bool = False
    """Splits norms and residuals by position over the tensor-parallel ranks: less memory, the same traffic."""
    pipeline_parallel: int = 1
    """Number of pipeline stages. Must divide the number of layers."""
    virtual_stages: int = 1
    """Chunks of layers per pipeline rank (interleaved schedule): smaller bubbles, more traffic. Needs at least two
    pipeline ranks."""
    context_parallel: int = 1
    """Context-parallel size: ranks over which the positions of a row are split. With Transformer Engine by ring
    attention; otherwise keys and values are gathered."""
    expert_parallel: int = 1
    """Expert-parallel size: ranks over which the experts of a layer are distributed. They are taken from the tensor-
    and data-parallel ranks."""
    distributed_optimizer: bool = True
    """Splits optimizer state and update over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduces gradients in buckets during the backward pass."""
    overlap_param_gather: bool = False
    """Gathers updated weights in buckets during the next pass. Needs `distributed_optimizer`."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations to recompute in the backward pass. auto: all of a layer with `train.activation_checkpointing`,
    otherwise none. selective: those of attention."""
    transformer_engine: Literal["auto", "always", "never"] = "auto"
    """Uses layers of Transformer Engine, with its fused kernels. auto: on CUDA, where it must be
    installed. never: Megatron's local layers, which are slow on CUDA."""

    def place_problems(self, *, num_ranks: int, device: str, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """See `rlsdk.interfaces.ChecksPlace`."""
        return split_problems(self, num_ranks=num_ranks, device=device, model=model)


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
