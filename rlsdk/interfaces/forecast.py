"""The memory and weights that an engine would hold, computed without building it. Used by `rlsdk plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlsdk.interfaces.model import RankContext, RolloutSpec, TrainSpec
from rlsdk.interfaces.weights import WeightLayout


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The largest load that a run puts on the ranks of one role."""

    row_tokens: int
    """Maximum length of prompt plus response."""
    update_rows: int
    """Train: rows of one optimizer step, over all ranks."""
    running_rows: int
    """Rollout: samples that one replica decodes at once."""
    device_bytes: int | None = None
    """Memory of one device, or of the whole machine when devices are processes on a CPU. None: unknown."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that a rank uses on each of its devices. None: unknown to the engine."""

    weights_bytes: int | None = None
    optimizer_bytes: int | None = 0
    gradients_bytes: int | None = 0
    """Train: what is allocated from the first backward pass of an update to its optimizer step."""
    gradients_stay: bool = False
    """Train: gradients are allocated once, with the optimizer, and live as long as it does."""
    forward_bytes: int | None = 0
    """In addition to the above: peak of a pass without gradient; rollout: peak of a decoding step."""
    backward_bytes: int | None = 0
    """Train: peak of a forward and backward pass."""
    cache_bytes: int | None = 0
    """Rollout: the KV cache."""
    cache_stays: bool = False
    """Rollout: the KV cache is allocated once, not per request."""
    asleep_bytes: int = 0
    """Rollout: what stays on the device while the engine sleeps, such as captured graphs; counted only then."""
    on_host: bool = False
    """Weights, optimizer and gradients are kept in host memory while the device computes."""
    process_bytes: int = 0
    """Host memory, without tensors, that the engine needs on top of a worker with torch and transformers: its modules,
    and processes that it starts."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What the ranks of one role would hold."""

    layouts: tuple[tuple[WeightLayout, ...], ...]
    """Per rank: what its `layout()` would return (train: one). An empty `process` means the rank's own process."""
    memory: tuple[RankMemory, ...]
    """Per rank."""
    dp_size: int = 1
    """Train: number of data-parallel ranks."""
    adapter_bytes: int = 0
    """Rollout, with `ModelSpec.adapter`: bytes that a replica is sent at each sync after the first."""


ForecastFn = Callable[[Sequence[RankContext], TrainSpec | RolloutSpec, Workload], Forecast]
"""The function that `BackendSpec.forecast` names. Called with the contexts of all ranks of a role, in rank order. It
starts nothing, uses no device and reads no weights.

Raises:
    ConfigError: sizes that do not fit; the same ones as in the engine's `initialize`.
"""
