"""Settings that a user writes and the code that follows them gets, declared once: name, type, range, default, meaning.

A section of the configuration and what is built from it inherit the same class: `train.optim` and `OptimSpec`,
`reward_limits` and the limits of grading processes. Ranges are checked where a configuration is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from rlsdk.interfaces.errors import ConfigError

PositiveInt = Annotated[int, Gt(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]


class _NoInfluence:
    """See `NO_INFLUENCE`."""

    def __repr__(self) -> str:
        return "NO_INFLUENCE"


NO_INFLUENCE = _NoInfluence()
"""Marks a field on which neither the samples of training nor their grades can depend: `Annotated[T, NO_INFLUENCE]`. All
other fields count: where one changed, a resumed run does not use the samples in its journal."""


class _FromList:
    """See `FROM_LIST`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "strict": False}


FROM_LIST = _FromList()
"""Marks a tuple that is a list in a configuration, as YAML has no tuples: `Annotated[tuple[T, ...], FROM_LIST]`."""


def shared(settings: object, kind: type[Any]) -> Mapping[str, Any]:
    """The fields of `kind` (a dataclass) by name, as `settings` has them: what it was built from, or builds another
    of."""
    return {field.name: getattr(settings, field.name) for field in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """AdamW and its learning-rate schedule, with the same names for every train backend."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], FROM_LIST] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, only for parameters with two or more dimensions."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest global 2-norm of the gradient; larger gradients are clipped. null: no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a linear or cosine decay to `min_lr_ratio` over all optimizer steps
    of the run."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: Annotated[float, Ge(0.0), Le(1.0)] = 0.0
    """Final learning rate of a decay, as a fraction of `lr`."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """A low-rank adapter (LoRA, arXiv:2106.09685): a target layer computes `W x + scale * B A x`; only A `[rank, in]`
    and B `[out, rank]` are trained, in float32."""

    rank: NonNegativeInt = 0
    """Rank of the adapter; 0: no adapter, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale, see `scaling`."""
    scaling: Literal["standard", "rslora"] = "standard"
    """Scale of the product: standard: alpha / rank; rslora: alpha / sqrt(rank) (arXiv:2312.03732)."""
    targets: Annotated[tuple[str, ...], FROM_LIST] = ("all-linear",)
    """Layers that get an adapter: last parts of their names (`q_proj`), whole names, or `all-linear`: every linear
    layer but the output layer and the routers of experts."""
    dropout: NonNegativeFloat = 0.0
    """Only 0: with dropout, log-probs of training would differ from those of sampling."""
    init: Literal["uniform", "gaussian"] = "uniform"
    """How A begins: uniform (Kaiming, as PEFT's default), or gaussian with standard deviation 1 / rank. B begins at 0,
    so that the first policy is the model."""
    path: str | None = None
    """Folder of an adapter in PEFT's format to start from, of the same rank, scale and targets."""
    export: Literal["adapter", "merged"] = "adapter"
    """What `model/` of checkpoints and of finished runs holds. adapter: PEFT's two files; merged: the whole model with
    the adapter added to its weights."""

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / (self.rank if self.scaling == "standard" else self.rank**0.5)


@dataclass(frozen=True, kw_only=True)
class PassLimits:
    """How much one forward and backward pass holds. Exactly one limit is set where a model runs; an engine that uses
    `rlsdk.kit`'s `check_limits` refuses others."""

    micro_batch_tokens: PositiveInt | None = None
    """Most tokens in one pass on one device; a longer row is a pass of its own. In sections of models besides the
    actor, if this and `micro_batch_rows` are null, both are as in `train`."""
    micro_batch_rows: PositiveInt | None = None
    """Most rows in one pass on one device."""


@dataclass(frozen=True, kw_only=True)
class TrainPasses(PassLimits):
    """The passes of a model that is trained."""

    activation_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSize:
    """How one replica of a rollout engine is split over devices."""

    tp_size: PositiveInt = 1
    """Tensor-parallel size of one replica."""
    pp_size: PositiveInt = 1
    """Pipeline stages of one replica, each of `tp_size * dp_size` devices."""
    dp_size: PositiveInt = 1
    """Copies of the attention layers in one replica, which share the experts of a mixture (data-parallel attention)."""
    ep_size: PositiveInt = 1
    """Expert-parallel size: devices over which whole experts are distributed; 1: each expert is split like dense
    layers."""

    @property
    def num_devices(self) -> int:
        """Devices of one replica: `tp_size * pp_size * dp_size`."""
        return self.tp_size * self.pp_size * self.dp_size

    def expert_problem(self) -> str | None:
        """What is wrong with `ep_size`, if anything: what was expected."""
        stage = self.tp_size * self.dp_size
        if stage % self.ep_size == 0:
            return None
        return f"expected a divisor of the {stage} devices of a stage (tp_size {self.tp_size} x dp_size {self.dp_size})"


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """Requests to a reward service."""

    batch_size: PositiveInt = 64
    """Most samples in one request."""
    batch_wait_s: NonNegativeFloat = 0.02
    """Seconds that a sample waits to be batched with others."""
    max_concurrent: PositiveInt = 4
    """Most concurrent requests."""
    timeout_s: PositiveFloat = 60.0
    """Seconds per attempt, from connecting to the last byte."""
    retries: NonNegativeInt = 3
    """Retries after a connection error or a status that may pass: 408, 425, 429, 500 and above (but 501 and 505)."""
    retry_wait_s: NonNegativeFloat = 0.5
    """Seconds before the first retry; doubled for each further one. The service's `Retry-After` counts if longer."""
    max_response_bytes: PositiveInt = 8 << 20
    """Largest size of one response in bytes."""
    send_tokens: bool = False
    """Also sends the token ids of responses, for services that score tokens."""


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """The question to a judge, and how its verdict is read."""

    template: str
    """Text of the question; `{prompt}`, `{response}`, `{answer}` and `{any_field_of_the_row}` are filled in."""
    system_prompt: str | None = None
    """Text of the system message."""
    pattern: str | None = None
    """Regular expression with one group; its last match in the reply is the verdict. null: the text after `Score:`,
    `Rating:` or `Verdict:`."""
    lowest: float = 0.0
    """Smallest numeric verdict; its score is 0."""
    highest: float = 1.0
    """Largest numeric verdict; its score is 1. A verdict outside of `lowest` and `highest` is a failure."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge's reply."""
    max_tokens: PositiveInt = 1024
    """Most tokens of the judge's reply."""
    seed: NonNegativeInt = 0
    """Seed in requests, for services that sample with a seed."""


@dataclass(frozen=True, kw_only=True)
class RewardLimits:
    """Limits of grading. A sample that exceeds one has no reward; the run continues."""

    timeout_s: PositiveFloat = 10.0
    """Seconds for grading one sample."""
    memory_mb: PositiveInt = 1024
    """MiB of address space that grading may add to a grading process."""
    start_timeout_s: Annotated[PositiveFloat, NO_INFLUENCE] = 120.0
    """Seconds to start a grading process, including imports of reward modules and their `prepare`."""
    batched_timeout_s: PositiveFloat = 60.0
    """Seconds for one call of a batched reward; after that its samples are graded one by one."""
    batch_timeout_s: PositiveFloat = 600.0
    """Seconds for all samples of one submission; samples not graded by then count as timed out."""
    max_batch_samples: PositiveInt | None = None
    """Most samples in one call of a batched reward; null: all that finished together."""
    max_losses_in_a_row: PositiveInt = 5
    """Grading processes lost in a row without grading a sample; after that the remaining samples count as crashed."""
    max_attempts: PositiveInt = 3
    """Attempts at grading a sample if its grading process is killed or stopped from outside."""
    max_value: PositiveFloat = 1e30
    """Largest absolute value of a score, a token score or a metric."""
    max_record_bytes: PositiveInt = 1 << 21
    """Most bytes that a reward may return for one sample: 8 per token score, plus the metrics."""
    max_metrics: PositiveInt = 32
    """Most metrics that a reward may return for one sample."""
    log_mb: Annotated[PositiveFloat, NO_INFLUENCE] = 4.0
    """Largest size in MiB of `logs/rewards.log`, the output of rewards; later output is dropped, with a note."""
    allow_network: bool = False
    """Allows rewards to open sockets, for instance to call a judge. False: the system refuses it if it can."""
    allow_writes: bool = False
    """Allows rewards to write files outside their temporary folder. False: the system refuses it if it can."""
    isolation: Literal["auto", "always", "never"] = "auto"
    """Grades every sample in its own forked process. auto: for rewards that evaluate text as Python; always: for all
    rewards, which costs milliseconds per sample, and rewards cannot keep state between calls."""
    environment: Annotated[tuple[str, ...], FROM_LIST] = ()
    """Environment variables that rewards get in addition to the standard ones (an API key, for instance)."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "isolation" and value not in ("auto", "always", "never"):
                raise ConfigError(f"reward limit isolation is {value!r}; expected auto, always or never")
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"reward limit {name} is {value!r}; expected a number above 0")


FORMER_TRANSPORTS = {
    "shared_memory": "ring",
    "shared_file": "ring",
    "cuda_ipc": "device_ring",
    "inline": "object_store",
}
"""Names that transports of weights had -> the one that replaces each. The old names go with interface 2.2."""


def transport_name(name: Any) -> Any:
    """Today's name of a transport; other values unchanged."""
    new = FORMER_TRANSPORTS.get(name) if isinstance(name, str) else None
    if new is None:
        return name
    warnings.warn(
        f"the transport {name!r} is now {new!r}; the old name goes with interface 2.2",
        FutureWarning,
        stacklevel=2,
    )
    return new
