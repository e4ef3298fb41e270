"""Builds Megatron's model from a Hugging Face configuration; the only module that depends on Megatron-Core's
version."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from rlsdk.interfaces import ConfigError, Head, TrainSpec, nearest
from rlsdk.kit.model.hf import torch_dtype
from rlsdk.kit.ranks.shared_memory import share
from rlsdk_megatron.attention import CausalAttention, GatheringAttention
from rlsdk_megatron.config import MegatronOptions
from rlsdk_megatron.sizes import expert_tensor_size, padded_vocabulary

_log = logging.getLogger("rlsdk_megatron")
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "llama3")

if not hasattr(moe_utils, "te_general_gemm"):
    # Megatron-Core 0.16 compares it with None, but defines it only if Transformer Engine is installed.
    moe_utils.te_general_gemm = None


class Stage(GPTModel):  # type: ignore[misc]
    """A chunk of layers. The last one returns normed hidden states; heads are applied only to the tokens that need
    them."""

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, marked for sequence parallelism: each rank then has the gradient of its own positions only."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def check_model(config: Any) -> None:
    """Raises `ConfigError` if a model has a feature that would be silently ignored."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"model.path: a model of type {kind!r}{nearest(kind, FAMILIES)}; backend 'megatron' builds {list(FAMILIES)}"
        )
    problems = {
        "hidden_act": (config.hidden_act, "silu"),
        "use_sliding_window": (bool(getattr(config, "use_sliding_window", False)), False),
        "mlp_bias": (bool(getattr(config, "mlp_bias", False)), False),
        "mlp_only_layers": (list(getattr(config, "mlp_only_layers", None) or []), []),
        "decoder_sparse_step": (getattr(config, "decoder_sparse_step", 1), 1),
        "rope_type": (rope_of(config).get("rope_type", "default"), ROPE_TYPES),
    }
    for name, (found, expected) in problems.items():
        if found != expected and not (isinstance(expected, tuple) and found in expected):
            raise ConfigError(
                f"model.path: config.json has {name} {found!r}; backend 'megatron' builds models with {expected!r}"
            )


def rope_of(config: Any) -> Mapping[str, Any]:
    """`rope_parameters` of a transformers 5 configuration."""
    return getattr(config, "rope_parameters", None) or {}


TRANSFORMER_ENGINE = "transformer-engine[pytorch]>=2.9,<2.12"
"""What Megatron-Core 0.16 is made for, as its own metadata says."""


def uses_transformer_engine(options: MegatronOptions, device: torch.device) -> bool:
    """Whether Transformer Engine is used. Raises `ConfigError` if it is not installed, unless the options say to do
    without it: layers without it are slow on a GPU, and attention over context-parallel ranks is quadratic."""
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    wanted = options.transformer_engine == "always" or (options.transformer_engine == "auto" and device.type == "cuda")
    if wanted and not HAVE_TE:
        raise ConfigError(
            f"train.megatron.transformer_engine {options.transformer_engine!r}: the package transformer_engine is not "
            f"installed; run `pip install '{TRANSFORMER_ENGINE}'`, or give 'never' for Megatron's local layers: "
            "slower, without fused norms, grouped experts and FP8, and for one context-parallel rank"
        )
    if options.transformer_engine == "never" and device.type == "cuda" and options.context_parallel > 1:
        raise ConfigError(
            f"train.megatron.context_parallel {options.context_parallel}: on CUDA needs Transformer Engine, but "
            "train.megatron.transformer_engine is 'never'; without it attention needs memory that is quadratic in the "
            "length. Give 'auto', or context_parallel 1"
        )
    return bool(HAVE_TE) and device.type == "cuda" and options.transformer_engine != "never"


def packs_rows(options: MegatronOptions) -> bool:
    """Whether layers get concatenated rows without padding. Interleaved stages need micro-batches of one shape, and
    context-parallel ranks need two chunks of every row: both get padded rectangles instead."""
    return options.virtual_stages == 1 and options.context_parallel == 1


def transformer_config(
    config: Any, spec: TrainSpec, options: MegatronOptions, device: torch.device
) -> TransformerConfig:
    """Megatron's configuration of a model.

    Args:
        config: the transformers configuration.
        spec: its `engine_kwargs` replace fields of the result.
        options: the split.
        device: determines whether fused kernels are used.

    Raises:
        ConfigError: `engine_kwargs` names a field that Megatron's configuration does not have, or there is no such
            dtype.
    """
    check_model(config)
    dtype = torch_dtype(spec.model)
    engine = uses_transformer_engine(options, device)
    on_cpu = device.type == "cpu"
    fields: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.model_type == "qwen2" or _has_biased_attention(config),
        "qk_layernorm": config.model_type.startswith("qwen3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": options.tensor_parallel,
        "sequence_parallel": options.sequence_parallel,
        "pipeline_model_parallel_size": options.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": options.virtual_stages if options.virtual_stages > 1 else None,
        "context_parallel_size": options.context_parallel,
        "expert_model_parallel_size": options.expert_parallel,
        "expert_tensor_parallel_size": expert_tensor_size(options),
        # Losses are summed, not averaged: the loss weights are normalised globally.
        "calculate_per_token_loss": True,
        # With two interleaved ranks, the next and the previous rank are the same: only unbatched communication without
        # an exchange of shapes keeps their messages apart.
        "variable_seq_lengths": options.pipeline_parallel > 1 and options.virtual_stages == 1,
        "overlap_p2p_comm": options.virtual_stages > 1,
        "batch_p2p_comm": options.virtual_stages == 1,
        # Gloo reads a sent tensor while the schedule continues, and no stream keeps the tensor alive until then.
        "deallocate_pipeline_outputs": not on_cpu,
        "moe_token_dispatcher_type": "alltoall",
        "cuda_graph_scope": [],  # means the same as the default, without its warning
        # Every parameter is loaded later.
        "perform_initialization": False,
        "use_cpu_initialization": on_cpu,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": engine,
        "bias_activation_fusion": not on_cpu,
        "bias_dropout_fusion": not on_cpu,
        "masked_softmax_fusion": engine,
        "apply_rope_fusion": engine,
        **_recompute(spec, options),
        **(_experts(config, engine) if config.model_type == "qwen3_moe" else {}),
    }
    for name in spec.engine_kwargs:
        if name not in TransformerConfig.__dataclass_fields__:
            raise ConfigError(
                f"train.engine_kwargs {name!r}{nearest(name, TransformerConfig.__dataclass_fields__)}: backend "
                "'megatron' passes them to Megatron's TransformerConfig, which has no such field"
            )
    return TransformerConfig(**{**fields, **spec.engine_kwargs})


def _recompute(spec: TrainSpec, options: MegatronOptions) -> dict[str, Any]:
    chosen = options.recompute
    if chosen == "auto":
        chosen = "full" if spec.activation_checkpointing else "none"
    if chosen == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]} if chosen == "selective" else {}


def _experts(config: Any, engine: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        # A softmax over the chosen experts equals a softmax over all, normalised over the chosen ones.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": engine,
    }


def _layer_spec(config: TransformerConfig, engine: bool) -> ModuleSpec:
    """Specification of a layer's modules."""
    experts: dict[str, Any] = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    if engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm, **experts)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm, **experts)
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention.core_attention = GatheringAttention if config.context_parallel_size > 1 else CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def _has_biased_attention(model: Any) -> bool:
    """Whether queries, keys, values and the output projection have biases. (Qwen2 always has all but the last.)"""
    return bool(getattr(model, "attention_bias", False))


def _with_bias(linear: Any) -> type:
    """A linear layer with a bias; Megatron has only one setting for all layers."""

    class WithBias(linear):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})

    return WithBias


def build_stages(config: TransformerConfig, model: Any, head: Head, *, engine: bool, tied: bool) -> list[Stage]:
    """This rank's chunks of layers, without values. Collective: every rank must call.

    Args:
        config: Megatron's configuration.
        model: the transformers configuration.
        head: a value or score head replaces the language-model head.
        engine: use layers of Transformer Engine.
        tied: input and output embeddings share one weight.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    layer = _layer_spec(config, engine)
    if _has_biased_attention(model):
        attention = layer.submodules.self_attention.submodules
        attention.linear_proj = _with_bias(attention.linear_proj)
    rope = rope_of(model)
    stages = []
    for at in range(virtual or 1):
        place = {"ignore_virtual": False, "vp_stage": at if virtual else None}
        is_last = parallel_state.is_pipeline_last_stage(**place)
        block: Any = layer
        if not engine:
            count = get_num_layers_to_build(config, vp_stage=place["vp_stage"])
            block = TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)
        stage = Stage(
            config=config,
            transformer_layer_spec=block,
            vocab_size=padded_vocabulary(model.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=model.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=is_last,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            rotary_base=rope.get("rope_theta", 10000.0),
            vp_stage=place["vp_stage"],
        )
        if is_last and head is not Head.LM:
            del stage.output_layer
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            stage.score = nn.Linear(config.hidden_size, 1, dtype=config.params_dtype, device=device)
        _set_frequencies(stage, model)
        _mark_split(stage)
        if stage.pre_process and getattr(model, "pad_token_id", None) is not None:
            stage.embedding.word_embeddings.register_forward_hook(_PaddingToken(model.pad_token_id))
        stages.append(stage)
    return stages


def _set_frequencies(stage: Stage, model: Any) -> None:
    """Sets scaled rotary frequencies as transformers computes them: Megatron supports only one set of scaling
    factors."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope_of(model).get("rope_type", "default")
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](model, stage.rotary_pos_emb.inv_freq.device)
        if scaling != 1.0:
            raise ConfigError(f"model.path: rope_type {kind!r} scales attention by {scaling}; expected 1")
        stage.rotary_pos_emb.inv_freq = frequencies


@dataclass(frozen=True)
class _PaddingToken:
    """Hook that stops the gradient of the padding token's embedding where it is looked up, as in transformers."""

    token: int

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], found: Tensor) -> Tensor:
        is_padding = inputs[0] == self.token
        if module.reduce_scatter_embeddings:  # `[T / ranks, B, H]`: this rank's positions
            group = parallel_state.get_tensor_model_parallel_group()
            is_padding = is_padding.t().chunk(group.size())[group.rank()]
        # Pipelines can send only contiguous tensors.
        return torch.where(is_padding[..., None], found.detach(), found).contiguous()


def _mark_split(stage: Stage) -> None:
    """Marks which parameters are split and which are replicated. Megatron does this when it initialises values, which
    is skipped here. Without it the gradient norm, and therefore clipping, would be silently wrong."""
    for module in stage.modules():
        dim = 1 if isinstance(module, tensor_parallel.RowParallelLinear) else 0
        split = (
            tensor_parallel.ColumnParallelLinear,
            tensor_parallel.RowParallelLinear,
            tensor_parallel.VocabParallelEmbedding,
        )
        weight = getattr(module, "weight", None)
        if isinstance(module, split) and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            tensor_parallel.set_tensor_model_parallel_attributes(weight, True, dim, 1)


def make_trainable(
    config: TransformerConfig, stages: Sequence[Stage], options: MegatronOptions
) -> list[DistributedDataParallel]:
    """Creates gradient buffers that are summed over data-parallel ranks. Collective: every rank must call."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=options.distributed_optimizer,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        # `optim_step` starts all gathers itself: hooks would start them in an order that differs between ranks.
        align_param_gather=options.overlap_param_gather,
    )
    wrapped = [
        DistributedDataParallel(config, settings, stage, disable_bucketing=at > 0) for at, stage in enumerate(stages)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if options.overlap_grad_reduce:
        scopes = [module.no_sync for module in wrapped]
        config.no_sync_func = scopes if len(scopes) > 1 else scopes[0]
    return wrapped


def buffers_of(module: Any) -> Iterator[Any]:
    """Megatron's buffers of gradients and, with a distributed optimizer, of weights."""
    yield from (*module.buffers, *module.expert_parallel_buffers)


def finish_gathers(module: Any) -> None:
    """Waits for running gathers of weights; starts none."""
    for group in (*module.bucket_groups, *module.expert_parallel_bucket_groups):
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def keep_shared(stages: Sequence[Stage], buffers: Iterable[Any]) -> None:
    """Moves weights, on a CPU, to shared memory that other processes of the node can read (`kit.ranks.shared_memory`).

    Call it before an optimizer takes views of them.

    Args:
        stages: this rank's stages.
        buffers: the buffers into which `make_trainable` moved parameters.
    """
    gathered = [buffer for buffer in buffers if buffer.param_data is not None]
    for buffer, values in zip(gathered, share([buffer.param_data for buffer in gathered]), strict=True):
        for bucket in buffer.buckets:
            start, stop = buffer.bucket_indices[bucket.bucket_id]
            bucket.param_data = values[start:stop]
        for parameter, (start, stop, _) in buffer.param_index_map.items():
            parameter.data = values[start:stop].view(parameter.shape)
        buffer.param_data = values
    placed = {parameter for buffer in gathered for parameter in buffer.param_index_map}
    others = [p for p in {p: None for stage in stages for p in stage.parameters()} if p not in placed]
    for parameter, values in zip(others, share(others), strict=True):
        parameter.data = values
