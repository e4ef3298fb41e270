"""What is trained and served, and where one rank of an engine stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Head(StrEnum):
    """What the model ends in."""

    LM = "lm"
    """Vocabulary logits: outputs `log_probs` and `entropy`."""
    VALUE = "value"
    """One number per token: output `values`."""
    SCORE = "score"
    """One number per row, read at its last token: output `scores`."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Names a model in Hugging Face form. Plain data: nothing is loaded by making one."""

    path: str
    """A local folder (`config.json`, safetensors, tokenizer files) or a hub name."""
    revision: str | None = None
    """Branch, tag or commit of a hub name."""
    dtype: str = "float32"
    """Of parameters as computed with, and of exports: `float32`, `bfloat16` or `float16`. What a train engine steps is
    float32 all the same (see `TrainEngine`)."""
    head: Head = Head.LM
    trust_remote_code: bool = False
    """Runs code that comes with the model. Off unless the user asks for it by name."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where one rank of one engine stands. Every rank of a group gets the same values but for its own position."""

    role: str
    """`actor`, `rollout`, `ref`, `critic`, `reward`, or a name that the user chose."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Position among the ranks of this group on this node."""
    node: str = "localhost"
    """Identifies the node; equal strings mean shared memory is possible."""
    device: str = "cpu"
    """`cpu` or `cuda:N`, as torch spells it in this process: often `cuda:0` in every process of a node."""
    accelerators: tuple[str, ...] = ()
    """The device behind each `cuda:N`, by N: a name that no other device of this node has. Empty on a CPU, or where
    nobody knows."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Rendezvous of this group: rank 0's process listens on it until `rlsdk.kit.rendezvous.init_process_group` takes
    the socket over. Nothing else can bind it. 0 when `world_size` is 1."""
    num_threads: int = 1
    """CPU threads that this rank may use."""
    seed: int = 0
    """Of the run. Engines derive what they need; two engines never share a generator."""
    timeout_s: float = 600.0
    """Deadline of every collective and every wait on another process: `deadlines.collective_s`. How long the controller
    waits for a call is another matter (see `TrainEngine`)."""
    scratch_dir: str | None = None
    """A folder on this node for temporary files, removed when the run ends."""
    bundles: tuple[int, ...] = ()
    """Rollout with its own workers: the placement-group bundles this replica may use, first is its own."""
    device_nodes: tuple[str, ...] = ()
    """Node of each device of this rank, in the order of `bundles`; the first is `node`. Empty: all are on `node`."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Position and size on every parallel axis. `rank` fields are 0-based; sizes multiply to the world size
    (but for `ep`, which subdivides others and is left out of the product)."""

    dp_rank: int = 0
    dp_size: int = 1
    """Ranks that see different rows. The batch is split over this axis and no other."""
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
class OptimSpec:
    """AdamW with a schedule, spelled the same for every train engine."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Applied to parameters of two or more dimensions only."""
    max_grad_norm: float | None = 1.0
    """Clips the global 2-norm of the gradient; None never clips."""
    schedule: str = "constant"
    """`constant`, or `linear` or `cosine` to `min_lr_ratio`."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from lr / warmup_steps."""
    total_steps: int | None = None
    """Optimizer steps over which `linear` and `cosine` decay; they require it."""
    min_lr_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """All that a train engine is built from, besides its `RankContext`."""

    model: ModelSpec
    optim: OptimSpec | None = None
    """None: a frozen model (reference, reward); `forward_backward` and `optim_step` are never called."""
    micro_batch_tokens: int | None = None
    """Most tokens in one forward and backward pass on one rank; a longer row goes alone. Exactly one of this and
    `micro_batch_rows` is set."""
    micro_batch_rows: int | None = None
    """Most rows in one forward and backward pass on one rank."""
    activation_checkpointing: bool = False
    init_from_config: bool = False
    """Random weights from `config.json` and `RankContext.seed` in place of the checkpoint's; the same on any number of
    ranks."""
    options: object | None = None
    """An instance of `BackendSpec.options`: what only this backend knows."""
    engine_kwargs: dict[str, object] = field(default_factory=dict)
    """Raw arguments for the framework that the engine wraps, untouched by the core; refused (ConfigError) by an engine
    that passes none on. The engine class itself is built without arguments."""


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """All that a rollout engine is built from, besides its `RankContext`."""

    model: ModelSpec
    max_model_tokens: int = 2048
    """Longest prompt plus response."""
    max_running: int = 256
    """Most samples that the engine decodes at once, of all calls of `generate` together; the others wait."""
    tp_size: int = 1
    """Devices over which attention and dense layers are split."""
    pp_size: int = 1
    """Pipeline stages."""
    dp_size: int = 1
    """Copies of attention inside the replica, each with `tp_size` devices and requests of its own; the experts of a
    mixture are shared by all of them."""
    ep_size: int = 1
    """Devices over which whole experts are dealt out; of the `tp_size * dp_size` of a stage. 1: experts are split as
    dense layers are."""
    load_weights: bool = True
    """False: weights arrive by `update_weights` before the first request; start without reading the checkpoint."""
    options: object | None = None
    """An instance of `BackendSpec.options`."""
    engine_kwargs: dict[str, object] = field(default_factory=dict)
    """As in `TrainSpec`."""

    @property
    def num_devices(self) -> int:
        """Devices of one replica: `tp_size * pp_size * dp_size`."""
        return self.tp_size * self.pp_size * self.dp_size
