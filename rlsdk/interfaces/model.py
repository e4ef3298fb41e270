"""What is trained and served, and the position of one rank of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rlsdk.interfaces.settings import AdapterSettings, OptimSettings, ReplicaSize, TrainPasses


class Head(StrEnum):
    """Head of the model."""

    LM = "lm"
    """Vocabulary logits: outputs `log_probs` and `entropy`."""
    VALUE = "value"
    """One number per token: output `values`."""
    SCORE = "score"
    """One number per row, read at its last token: output `scores`."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec(AdapterSettings):
    """The adapter of a model; its rank is above 0."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Names a model in Hugging Face format. Plain data: creating one loads nothing."""

    path: str
    """A local folder (`config.json`, safetensors, tokenizer files) or a hub name."""
    revision: str | None = None
    """Branch, tag or commit of a hub name."""
    dtype: str = "float32"
    """Dtype of the computation and of exports: `float32`, `bfloat16` or `float16`. A train engine's optimizer steps
    float32 weights in any case (see `TrainEngine`)."""
    head: Head = Head.LM
    """A value or score head is loaded if the checkpoint holds one; otherwise it is random, from `RankContext.seed`."""
    trust_remote_code: bool = False
    """Allows code that comes with the model to run. Off unless the user sets it explicitly."""
    adapter: AdapterSpec | None = None
    """None: all weights are trained. Otherwise the model's own weights stay frozen in `dtype`, and a train engine holds
    A and B of the adapter in float32. Given to train engines with `Capability.LORA`, and to rollout engines with
    `Capability.ADAPTER_SYNC` if they are to serve the adapter beside the weights."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Position of one rank of one engine. Every rank of a group gets the same values except for its own position."""

    role: str
    """`actor`, `rollout`, `ref`, `critic`, `reward`, or a user-defined name."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Position among the ranks of this group on this node."""
    node: str = "localhost"
    """Identifies the node; equal strings mean shared memory is possible."""
    device: str = "cpu"
    """`cpu` or `cuda:N`, as torch spells it in this process: often `cuda:0` in every process of a node."""
    accelerators: tuple[str, ...] = ()
    """Physical device of each `cuda:N`, indexed by N: a name that is unique on this node. Empty on a CPU, or if
    unknown."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Rendezvous of this group: rank 0's process listens on it until `rlsdk.kit.ranks.rendezvous.init_process_group`
    takes the socket over. No other process can bind it. 0 when `world_size` is 1."""
    num_threads: int = 1
    """CPU threads that this rank may use."""
    seed: int = 0
    """The run's seed. Engines derive their own seeds from it; two engines never share a generator."""
    timeout_s: float = 600.0
    """Deadline of every collective and every wait on another process: `deadlines.collective_s`. It does not limit how
    long the controller waits for a call (see `TrainEngine`)."""
    scratch_dir: str | None = None
    """A folder on this node for temporary files, removed when the run ends."""
    bundles: tuple[int, ...] = ()
    """Rollout engines that start their own workers: the placement-group bundles that this replica may use; the first
    one is its own."""
    device_nodes: tuple[str, ...] = ()
    """Node of each device of this rank, in the order of `bundles`; the first is `node`. Empty: all are on `node`."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Position and size on every parallel axis. `rank` fields are 0-based; the product of the sizes is the world size
    (without `ep`, which subdivides other axes)."""

    dp_rank: int = 0
    dp_size: int = 1
    """Number of data-parallel ranks. The batch is split over this axis only."""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    @property
    def is_collector(self) -> bool:
        """True on the one rank of each data-parallel group whose results are read: tp 0, cp 0, last pp stage."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == self.pp_size - 1


@dataclass(frozen=True, kw_only=True)
class OptimSpec(OptimSettings):
    """The optimizer of a train engine."""

    total_steps: int | None = None
    """Optimizer steps, warm-up included, after which `linear` and `cosine` have decayed; they require it."""


@dataclass(frozen=True, kw_only=True)
class TrainSpec(TrainPasses):
    """Everything that a train engine is built from, in addition to its `RankContext`. Exactly one of
    `micro_batch_tokens` and `micro_batch_rows` is set."""

    model: ModelSpec
    optim: OptimSpec | None = None
    """None: a frozen model (reference, reward); `forward_backward` and `optim_step` are never called."""
    init_from_config: bool = False
    """Initialises random weights from `config.json` and `RankContext.seed` instead of loading the checkpoint; the
    result does not depend on the number of ranks."""
    options: object | None = None
    """An instance of `BackendSpec.options`: this backend's own options."""
    engine_kwargs: dict[str, object] = field(default_factory=dict)
    """Raw arguments for the framework that the engine wraps, not checked by the core. An engine that passes none on
    refuses them (ConfigError). The engine class itself is constructed without arguments."""


@dataclass(frozen=True, kw_only=True)
class RolloutSpec(ReplicaSize):
    """Everything that a rollout engine is built from, in addition to its `RankContext`."""

    model: ModelSpec
    max_model_tokens: int = 2048
    """Maximum length of prompt plus response."""
    max_running: int = 256
    """Maximum number of samples that the engine decodes at once, over all calls of `generate`; the others wait."""
    load_weights: bool = True
    """False: start without reading the checkpoint; weights arrive through `update_weights` before the first request."""
    shares_devices: bool = True
    """False: no other role is on its devices, so that the engine is never put to sleep and need not prepare for it."""
    adapter_versions: int = 1
    """With `ModelSpec.adapter`: versions of the adapter that requests may name, the newest one among them. An engine
    without `Capability.ADAPTER_VERSIONS` ignores it: its requests name none."""
    options: object | None = None
    """An instance of `BackendSpec.options`."""
    engine_kwargs: dict[str, object] = field(default_factory=dict)
    """As in `TrainSpec`."""
