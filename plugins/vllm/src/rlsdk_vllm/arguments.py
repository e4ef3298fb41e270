"""Configuration of vLLM, and checks of what it does not support.

Tested versions: 0.31 and 0.32 (their CPU builds).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlsdk.interfaces import ConfigError, RankContext, RolloutSpec, nearest
from rlsdk.kit.memory.kv_cache import head_size
from rlsdk.kit.model.hf import load_model_config
from rlsdk.kit.ranks.replica_devices import check_devices
from rlsdk.kit.weights.tensor_origins import Source
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.environment import has_copies_apart, has_own_process, has_workers_apart
from rlsdk_vllm.low_rank import adapter_slots, lora_arguments
from rlsdk_vllm.memory import kv_cache_bytes
from rlsdk_vllm.nodes import CopiesHere, check_copies

OWNED = {
    *("load_format", "model_loader_extra_config", "logprobs_mode", "model", "worker_extension_cls"),
    *("weight_transfer_config", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
}
"""Arguments that only this plugin sets."""
CPU_BLOCK_TOKENS = 32
"""Tokens per KV cache block on a CPU."""
GPU_BATCHED_TOKENS = 8192
"""Tokens in one pass on a GPU. vLLM's default depends on who starts it; for this plugin it would be 2,048, so that
prompts are read in four times as many passes."""


def check_split(ctx: RankContext, spec: RolloutSpec, options: VllmOptions) -> None:
    """Raises `ConfigError` if vLLM cannot split a replica like this."""
    check_devices(ctx, spec)
    if ctx.device == "cpu" and spec.pp_size > 1:
        raise ConfigError(
            f"rollout.pp_size {spec.pp_size}: vLLM on a CPU serves one stage (0.32 with two loses requests); give "
            "rollout.tp_size, or another rollout.backend"
        )
    if ctx.device == "cpu" and spec.ep_size > 1:
        raise ConfigError(
            f"rollout.ep_size {spec.ep_size}: vLLM on a CPU (0.32) crashes with a segmentation fault when whole "
            "experts are distributed; give 1, which splits every expert"
        )
    stage = spec.tp_size * spec.dp_size
    if spec.ep_size not in (1, stage):
        raise ConfigError(
            f"rollout.ep_size {spec.ep_size}: vLLM distributes experts over all devices of a stage or over none; give "
            f"{stage} (rollout.tp_size {spec.tp_size} x rollout.dp_size {spec.dp_size}), or 1"
        )
    if spec.dp_size > 1 and not has_own_process(ctx, spec, options):
        raise ConfigError(
            f"rollout.vllm.asynchronous false: with rollout.dp_size {spec.dp_size} vLLM runs each copy of attention in "
            "its own process; give true, or leave it out"
        )
    if has_copies_apart(ctx, spec):
        check_copies(ctx, spec)


def check_cpu_attention(spec: RolloutSpec) -> None:
    """Raises `ConfigError` if vLLM's CPU attention does not support this head size, which vLLM would report only in the
    first pass, or if it would silently compute wrong log-probs."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = load_model_config(spec.model)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if getattr(config, "kv_lora_rank", None) and rope == "default":
        # The error is in vLLM's own kernel; torch computes yarn. Found by comparison with transformers, and reproduced
        # with vLLM alone.
        raise ConfigError(
            f"model.path {spec.model.path!r}: vLLM on a CPU (0.32) rotates latent attention wrongly where rope_type is "
            "'default' (log-probs off by up to 2); DeepSeek's own files have 'yarn', which is correct. Use another "
            "model, a GPU, or rollout.backend transformers"
        )
    size, sizes = head_size(config), CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise ConfigError(
            f"model.path {spec.model.path!r}: its attention heads have {size} dimensions; vLLM on a CPU takes {sizes}. "
            "Use another model, a GPU, or rollout.backend transformers"
        )


def engine_args(
    kind: Any,
    ctx: RankContext,
    spec: RolloutSpec,
    options: VllmOptions,
    shapes: Mapping[str, tuple[int, ...]],
    sources: Sequence[Source] | None = None,
    place: CopiesHere | None = None,
) -> Any:
    """Builds vLLM's arguments, an instance of `kind`; `spec.engine_kwargs` overrides them.

    Args:
        kind: `EngineArgs` or `AsyncEngineArgs`.
        ctx: the engine's context.
        spec: the engine's specification.
        options: the engine's options.
        shapes: shapes of the canonical tensors.
        sources: the tensors in the model's files, if they differ (`rlsdk.kit.weights.file_tensors`).
        place: the copies of attention of this node, if they are on several nodes; None: one node.

    Raises:
        ConfigError: vLLM has no such argument, or cannot serve the model.
    """
    from rlsdk_vllm.loader import LOAD_FORMAT
    from rlsdk_vllm.transfer import NAME

    on_cpu = ctx.device == "cpu"
    if on_cpu:
        check_cpu_attention(spec)
    files = None if sources is None else [source.packed() for source in sources]
    arguments: dict[str, Any] = {
        "model": spec.model.path,
        "revision": spec.model.revision,
        "trust_remote_code": spec.model.trust_remote_code,
        "dtype": spec.model.dtype,
        "skip_tokenizer_init": True,
        # Only the request determines how a sample is drawn and where it ends.
        "generation_config": "vllm",
        "load_format": LOAD_FORMAT,
        "model_loader_extra_config": {"shapes": dict(shapes), "sources": files, "load": spec.load_weights},
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": -1,  # as many as a request asks for
        "max_model_len": spec.max_model_tokens,
        "max_num_seqs": spec.max_running,
        "tensor_parallel_size": spec.tp_size,
        "pipeline_parallel_size": spec.pp_size,
        "data_parallel_size": spec.dp_size,
        "enable_expert_parallel": spec.ep_size > 1,
        "distributed_executor_backend": executor(ctx, spec),
        "worker_extension_cls": "rlsdk_vllm.worker.WorkerExtension",
        "weight_transfer_config": {"backend": NAME},
        "seed": ctx.seed + ctx.rank,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_bytes(ctx, spec, options),
        # Its allocator serves one engine of a process: it is asked for only where memory has to be given back.
        "enable_sleep_mode": spec.shares_devices and not on_cpu,
        # vLLM's default if the engine has its own process; in this process every step is awaited.
        "async_scheduling": None if has_own_process(ctx, spec, options) and not on_cpu else False,
        "disable_log_stats": True,
    }
    if on_cpu:
        # Samples share their prompt in whole blocks: the smallest size with fast attention, instead of 128.
        arguments["block_size"] = CPU_BLOCK_TOKENS
    if spec.model.adapter is not None:
        arguments |= lora_arguments(spec.model.adapter, adapter_slots(spec, options), on_cpu=on_cpu)
    if place is not None:
        arguments |= place.arguments()
    if options.max_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_batched_tokens
    elif not on_cpu:
        # At least one token of each running sample fits in a pass.
        arguments["max_num_batched_tokens"] = max(GPU_BATCHED_TOKENS, spec.max_running)
    owned = sorted(OWNED & set(spec.engine_kwargs))
    if owned:
        raise ConfigError(f"rollout.engine_kwargs: only the plugin sets {owned}; leave them out")
    known = kind.__dataclass_fields__
    for name in spec.engine_kwargs:
        if name not in known:
            raise ConfigError(
                f"rollout.engine_kwargs.{name}: vLLM's EngineArgs has no such field{nearest(name, known)}"
            )
    return kind(**{**arguments, **spec.engine_kwargs})


def executor(ctx: RankContext, spec: RolloutSpec) -> str | None:
    """Name of the executor that starts vLLM's workers. By default vLLM counts the devices that this process sees (one)
    and refuses; or, in a Ray actor, it uses Ray, and its workers would then choose devices themselves."""
    if spec.num_devices == 1:
        return None
    return "ray" if has_workers_apart(ctx, spec) else "mp"


@contextmanager
def explained_start(spec: RolloutSpec) -> Iterator[None]:
    """Raises `ConfigError` if vLLM refused the model or its arguments."""
    try:
        yield
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise ConfigError(
            f"model.path {spec.model.path!r}: vLLM could not start: {error}. Give a model and rollout.engine_kwargs "
            "that vLLM supports, or another rollout backend"
        ) from error
