"""What a backend can do beyond the required methods. Declared before construction, checked before a device is taken."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """Optional features. A backend that claims one is tested for it; a feature that is not claimed is never used. A run
    that needs a feature which its backend does not claim is refused before it starts."""

    VALUE_HEAD = "value_head"
    """Train: `ModelSpec.head` may be `value`, and `forward` computes `values`."""
    SCORE_HEAD = "score_head"
    """Train: `ModelSpec.head` may be `score` (a token-classification head of one label), output `scores`."""
    ENTROPY = "entropy"
    """Train: `forward` and objectives may request `entropy`."""
    DISTILLATION = "distillation"
    """Train: `forward` computes `hidden_states`, `top_ids` and `top_log_probs`; `load_teacher` loads a teacher's head,
    and objectives may then request `divergence`, or without it, by the teacher's `top_log_probs`."""
    OFFLOAD = "offload"
    """Train: `offload(parts)` frees device memory and `onload(parts)` restores it bit for bit. Without it a role
    stays on its device, beside the other roles of its pool."""
    EXPORT = "export"
    """Train: `save_pretrained` writes a folder that `transformers` reads. Required by `rlsdk sft`, `reward-model`,
    `dpo`, and when a warm start produces the reference policy. Without it, checkpoints of `rlsdk train` contain no
    model folder."""
    RESHARD_ON_LOAD = "reshard_on_load"
    """Train: a checkpoint loads at another world size or parallel split."""
    DATA_PARALLEL = "data_parallel"
    """Train: more than one data-parallel rank. A backend that claims no parallel capability is refused for more than
    one rank; one that claims only others must itself refuse a data-parallel size above one (ConfigError)."""
    TENSOR_PARALLEL = "tensor_parallel"
    """Both: a tensor-parallel size above one. Rollout: a replica spans several devices; an engine that does not support
    a `pp_size`, `dp_size` or `ep_size` refuses it in `initialize` (ConfigError), before any request."""
    PIPELINE_PARALLEL = "pipeline_parallel"
    """Train: a pipeline-parallel size above one."""
    CONTEXT_PARALLEL = "context_parallel"
    """Train: a context-parallel size above one."""
    EXPERT_PARALLEL = "expert_parallel"
    """Both: an expert-parallel size above one."""
    PACKING = "packing"
    """Train: no padding token passes through the linear layers."""
    LORA = "lora"
    """Train: with `ModelSpec.adapter` only a low-rank adapter is trained, and the model without it, or with a copy of
    it, is its own reference policy. Rollout: not used; see `ADAPTER_SYNC`."""
    ADAPTER_SYNC = "adapter_sync"
    """Both: the adapter is sent alone, and served beside the model's own weights, which are sent once. Train (with
    `LORA`): `part_layout` and `part_shards` describe the two apart. Rollout: `ModelSpec.adapter` may be given, and
    `update_adapter` replaces the adapter. A run whose two backends do not both claim it sends the weights with the
    adapter added."""
    ADAPTER_VERSIONS = "adapter_versions"
    """Rollout (with `ADAPTER_SYNC` and `ABORT`): the newest `RolloutSpec.adapter_versions` adapters are served side by
    side, each request under the one that it names, and `update_adapter` neither stops nor changes what runs. An
    asynchronous run whose backend does not claim it lets samples finish before each update."""
    SLEEP = "sleep"
    """Rollout: `sleep` frees device memory, `wake` restores service. Without it an engine keeps its memory while others
    of its pool work."""
    ABORT = "abort"
    """Rollout: `abort` ends chosen requests; each still yields what it has, with finish reason `abort`."""
    PARTIAL_ROLLOUT = "partial_rollout"
    """Rollout: `pause` keeps unfinished requests and `resume` continues them, under new weights if there was an
    update."""
    STALE_CACHE = "stale_cache"
    """Rollout: `resume(keep_cache=True)` continues with a KV cache that older weights computed."""
    SEED = "seed"
    """Rollout: the same seed and request give the same tokens, whatever else runs in the batch, and also when some of
    them are passed in as `GenerationRequest.response_ids`."""
    MIN_P = "min_p"
    """Rollout: `SamplingParams.min_p` above zero."""
    STOP_STRINGS = "stop_strings"
    """Rollout: `SamplingParams.stop_strings` may be given."""
    PROMPT_LOG_PROBS = "prompt_log_probs"
    """Rollout: `GenerationRequest.prompt_log_probs` may be given. Needed of a teacher in a rollout engine."""
    SHARDED_UPDATE = "sharded_update"
    """Rollout: `layout()` asks for boxes smaller than whole tensors. If a replica has workers in separate processes,
    there is one layout per worker, and each receives its own part (`RolloutEngine.receive_weights`)."""
    ROUTED_EXPERTS = "routed_experts"
    """Both: the experts each token was routed to are captured, or replayed."""
    MULTIMODAL = "multimodal"
    """Both: inputs other than text tokens."""


class LogProbKind(StrEnum):
    """Which distribution a rollout log-prob (natural logarithm) belongs to."""

    AFTER_TEMPERATURE = "after_temperature"
    """After temperature, before top-k, top-p and min-p: what the contract requires."""
    RAW = "raw"
    """Before temperature: equal to the contract at temperature 1 only."""
    PROCESSED = "processed"
    """After temperature, top-k, top-p and min-p: equal to the contract when none of the three is active."""
