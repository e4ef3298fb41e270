"""What a backend can do beyond the required methods. Declared before construction, asked before a device is taken."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """Optional abilities. A backend that claims one is tested for it; one that does not is never asked. A run that
    cannot do without is refused before it starts."""

    VALUE_HEAD = "value_head"
    """Train: `ModelSpec.head` may be `value`, and `values` may be asked of `forward`."""
    SCORE_HEAD = "score_head"
    """Train: `ModelSpec.head` may be `score` (a token-classification head of one label), output `scores`."""
    ENTROPY = "entropy"
    """Train: `entropy` may be asked of `forward` and by an objective."""
    OFFLOAD = "offload"
    """Train: `offload(parts)` frees device memory and `onload(parts)` restores it bit for bit. Without it a role
    stays on its device, beside the other roles of its pool."""
    EXPORT = "export"
    """Train: `save_pretrained` writes a folder that `transformers` reads. Needed by `rlsdk sft`, `reward-model`, `dpo`,
    and where a warm start makes the reference policy; checkpoints of `rlsdk train` hold no model folder without it."""
    RESHARD_ON_LOAD = "reshard_on_load"
    """Train: a checkpoint loads at another world size or parallel split."""
    DATA_PARALLEL = "data_parallel"
    """Train: more than one data-parallel rank. A backend that claims none of the parallel capabilities is refused for
    more than one rank; one that claims others refuses a data-parallel size above one itself (ConfigError)."""
    TENSOR_PARALLEL = "tensor_parallel"
    """Both: a tensor-parallel size above one. Rollout: a replica of several devices; which of `pp_size`, `dp_size` and
    `ep_size` an engine takes, it says when it is built (ConfigError), before a request comes."""
    PIPELINE_PARALLEL = "pipeline_parallel"
    """Train: a pipeline-parallel size above one."""
    CONTEXT_PARALLEL = "context_parallel"
    """Train: a context-parallel size above one."""
    EXPERT_PARALLEL = "expert_parallel"
    """Both: an expert-parallel size above one."""
    PACKING = "packing"
    """Train: no padding token passes through the linear layers."""
    LORA = "lora"
    """Both: adapters are trained or served."""
    SLEEP = "sleep"
    """Rollout: `sleep` frees device memory, `wake` restores service. Without it an engine keeps its memory while others
    of its pool work."""
    ABORT = "abort"
    """Rollout: `abort` ends chosen requests; each still yields what it has, with finish reason `abort`."""
    PARTIAL_ROLLOUT = "partial_rollout"
    """Rollout: `pause` keeps unfinished requests and `resume` goes on with them, under new weights if they came."""
    STALE_CACHE = "stale_cache"
    """Rollout: `resume(keep_cache=True)` goes on with keys and values of older weights."""
    SEED = "seed"
    """Rollout: same seed and same request give the same tokens, whatever else runs in the batch, and also where a part
    of them came as `GenerationRequest.response_ids`."""
    MIN_P = "min_p"
    """Rollout: `SamplingParams.min_p` above zero."""
    STOP_STRINGS = "stop_strings"
    """Rollout: `SamplingParams.stop_strings` may be given."""
    SHARDED_UPDATE = "sharded_update"
    """Rollout: `layout()` asks for boxes smaller than whole tensors; where a replica has workers in processes of their
    own, one layout for each, which takes its part itself (`RolloutEngine.receive_weights`)."""
    ROUTED_EXPERTS = "routed_experts"
    """Both: the experts each token was routed to are captured, or replayed."""
    MULTIMODAL = "multimodal"
    """Both: inputs other than text tokens."""


class LogProbKind(StrEnum):
    """Which distribution a rollout log-prob (natural logarithm) speaks of."""

    AFTER_TEMPERATURE = "after_temperature"
    """After temperature, before top-k, top-p and min-p: what the contract asks for."""
    RAW = "raw"
    """Before temperature: equal to the contract at temperature 1 only."""
    PROCESSED = "processed"
    """After temperature, top-k, top-p and min-p: equal to the contract when none of the three is in force."""
