"""Forecasts the backend's memory without Megatron, for `rlsdk plan`."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlsdk.interfaces import (
    DTYPE_BYTES,
    ConfigError,
    Forecast,
    RankContext,
    RankMemory,
    RolloutSpec,
    TrainSpec,
    Workload,
)
from rlsdk.kit.memory.forecast import ModelTensors, training
from rlsdk.kit.memory.kv_cache import head_size
from rlsdk.kit.memory.pass_memory import rows_of_pass
from rlsdk.kit.model.adapters import target_modules
from rlsdk.kit.model.hf import build_model, load_model_config
from rlsdk_megatron.activations import Activations
from rlsdk_megatron.adapter_parts import check_fusion, check_targets, low_parts
from rlsdk_megatron.config import MegatronOptions, split_problems
from rlsdk_megatron.parts import Part, Shapes
from rlsdk_megatron.sizes import Place, expert_tensor_size, padded_vocabulary, place_of

MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4
"""Bytes per parameter of the optimizer's float32 copy (with bfloat16 weights), of AdamW's moments, and of the
gradient."""
MODULES_BYTES = 300 << 20
"""Host memory of Megatron's modules and their imports. Proportional set size of Megatron-Core 0.16 on a CPU; see
docs/benchmarks.md."""


def forecast(contexts: Sequence[RankContext], spec: TrainSpec | RolloutSpec, workload: Workload) -> Forecast:
    """See `ForecastFn`. Assumes that all experts get the same number of tokens."""
    spec = training(spec, "megatron")
    options = spec.options if isinstance(spec.options, MegatronOptions) else MegatronOptions()
    config, world = load_model_config(spec.model), len(contexts)
    device = torch.device(contexts[0].device).type
    if problems := list(split_problems(options, num_ranks=world, device=device, model=config.to_dict())):
        raise ConfigError("; ".join(f"train.megatron.{name}: {message}" for name, message in problems))
    model = build_model(spec.model, empty=True)
    tensors, low = ModelTensors.of(model), AdapterParts.of(model, spec, options, device)
    places = [place_of(rank, world, options) for rank in range(world)]
    # Replicas hold the same parameters, which are computed once.
    held = functools.cache(lambda place: list(_held(place, options, config, tensors)))
    dp_size = world // (options.tensor_parallel * options.pipeline_parallel * options.context_parallel)
    rows, passes = rows_of_pass(spec, row_tokens=workload.row_tokens, num_rows=-(-workload.update_rows // dp_size))
    activations = Activations.of(
        config, spec, options, rows=rows, row_tokens=workload.row_tokens, passes=passes, device=device
    )
    layouts = []
    for ctx, place in zip(contexts, places, strict=True):
        boxes = dict.fromkeys((part.name, part.box) for parts, _ in held(place) for part in parts)
        layouts.append((tensors.layout(ctx, spec.model.dtype, boxes),))
    own = functools.cache(lambda place: low.numel(place, options, config, tensors))
    memory = [_memory(place, held(place), own(place), spec, options, activations, world) for place in places]
    return Forecast(layouts=tuple(layouts), memory=tuple(memory), dp_size=dp_size)


Held = tuple[list[Part], int]
"""A parameter's parts of the checkpoint, and its number of elements with padding."""


@dataclass(frozen=True)
class AdapterParts:
    """What ranks hold of an adapter; without one, nothing."""

    rank: int
    modules: Collection[str]
    """Canonical names of the adapted layers."""

    @classmethod
    def of(cls, model: Any, spec: TrainSpec, options: MegatronOptions, device: str) -> AdapterParts:
        """Raises `ConfigError` as the engine does at its start."""
        if spec.model.adapter is None:
            return cls(0, ())
        check_fusion(engine=device != "cpu" and options.transformer_engine != "never")
        modules = target_modules(model, spec.model.adapter)
        check_targets(modules)
        return cls(spec.model.adapter.rank, set(modules))

    def numel(self, place: Place, options: MegatronOptions, config: Any, tensors: ModelTensors) -> int:
        """Elements of A and B on a rank."""
        shapes = _shapes(place, options, config, tensors)
        return sum(
            low.a.box.numel + (low.b.box.numel if low.b is not None else 0)
            for layers in _chunks(place, options, config)
            for layer in layers
            for _, lows in low_parts(shapes, layer, self.rank, self.modules)
            for low in lows
        )


def _shapes(place: Place, options: MegatronOptions, config: Any, tensors: ModelTensors) -> Shapes:
    return Shapes(
        shapes=tensors.shapes,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_size=head_size(config),
        tp_rank=place.tp_rank,
        tp_size=options.tensor_parallel,
        ep_rank=place.ep_rank,
        ep_size=options.expert_parallel,
        experts=getattr(config, "num_experts", None) or 0,
        etp_rank=place.etp_rank,
        etp_size=expert_tensor_size(options),
    )


def _chunks(place: Place, options: MegatronOptions, config: Any) -> Iterator[range]:
    """Numbers of the layers in each of a rank's chunks."""
    stages = options.pipeline_parallel
    each = config.num_hidden_layers // (stages * options.virtual_stages)
    for chunk in range(options.virtual_stages):
        first = (chunk * stages + place.pp_rank) * each
        yield range(first, first + each)


def _held(place: Place, options: MegatronOptions, config: Any, tensors: ModelTensors) -> Iterator[Held]:
    """Every parameter of a rank, in Megatron's order (for layers without Transformer Engine)."""
    shapes = _shapes(place, options, config, tensors)
    rows = padded_vocabulary(config.vocab_size, options.tensor_parallel) // options.tensor_parallel
    for chunk, layers in enumerate(_chunks(place, options, config)):
        is_first = place.pp_rank == chunk == 0
        is_last = place.pp_rank == options.pipeline_parallel - 1 and chunk == options.virtual_stages - 1
        if is_first:
            yield shapes.vocabulary("model.embed_tokens.weight", rows), rows * config.hidden_size
        for layer in layers:
            for parts in _layer(shapes, f"model.layers.{layer}"):
                yield parts, sum(part.box.numel for part in parts)
        if is_last:
            yield from _end(shapes, rows, config, tensors, has_embedding=is_first)


def _layer(shapes: Shapes, at: str) -> Iterator[list[Part]]:
    def whole(*names: str) -> Iterator[list[Part]]:
        yield from (shapes.whole(name) for name in names if name in shapes.shapes)

    yield from whole(f"{at}.input_layernorm.weight")
    yield shapes.columns(f"{at}.self_attn.o_proj.weight")
    yield from whole(f"{at}.self_attn.o_proj.bias")
    yield shapes.attention(f"{at}.self_attn", "weight")
    if f"{at}.self_attn.q_proj.bias" in shapes.shapes:
        yield shapes.attention(f"{at}.self_attn", "bias")
    yield from whole(
        f"{at}.self_attn.q_norm.weight", f"{at}.self_attn.k_norm.weight", f"{at}.post_attention_layernorm.weight"
    )
    if not shapes.experts:
        yield shapes.gate_up(f"{at}.mlp")
        yield shapes.columns(f"{at}.mlp.down_proj.weight")
        return
    yield shapes.whole(f"{at}.mlp.gate.weight")
    for local in range(shapes.experts // shapes.ep_size):
        yield shapes.expert_gate_up(f"{at}.mlp.experts", shapes.expert(str(local)))
        yield shapes.expert_down(f"{at}.mlp.experts", shapes.expert(str(local)))


def _end(shapes: Shapes, rows: int, config: Any, tensors: ModelTensors, *, has_embedding: bool) -> Iterator[Held]:
    """The last norm and the head. A tied head is a copy of the embedding, unless the embedding is on this rank."""
    yield shapes.whole("model.norm.weight"), config.hidden_size
    if "score.weight" in tensors.shapes:
        for name in ("score.weight", "score.bias"):
            if name in tensors.shapes:
                yield shapes.whole(name), shapes.whole(name)[0].box.numel
    elif "lm_head.weight" in tensors.shapes or not has_embedding:
        name = tensors.tied.get("lm_head.weight", "lm_head.weight")
        yield shapes.vocabulary(name, rows), rows * config.hidden_size


def _memory(
    place: Place,
    held: Sequence[Held],
    low: int,
    spec: TrainSpec,
    options: MegatronOptions,
    activations: Activations,
    world: int,
) -> RankMemory:
    """`low`: elements of an adapter, float32, beside which weights have neither gradients nor state."""
    experts = sum(numel for parts, numel in held if parts and ".experts." in parts[0].name)
    others = sum(numel for _, numel in held) - experts
    weights = (experts + others) * DTYPE_BYTES[spec.model.dtype] + 4 * low
    forward = activations.forward_bytes(place)
    if spec.optim is None:
        return RankMemory(weights_bytes=weights, forward_bytes=forward, process_bytes=MODULES_BYTES)
    copies = MASTER_BYTES if spec.model.dtype != "float32" else 0
    if spec.model.adapter is not None:
        experts, others, copies = 0, low, 0
    stage = world // options.pipeline_parallel
    shared = options.distributed_optimizer
    others_on = stage // options.tensor_parallel if shared else 1
    experts_on = stage // (options.expert_parallel * expert_tensor_size(options)) if shared else 1
    stepped = others // others_on + experts // experts_on
    return RankMemory(
        weights_bytes=weights,
        optimizer_bytes=stepped * (MOMENT_BYTES + copies),
        gradients_bytes=(experts + others) * GRADIENT_BYTES,
        gradients_stay=True,
        forward_bytes=forward,
        backward_bytes=activations.backward_bytes(place),
        process_bytes=MODULES_BYTES,
    )
