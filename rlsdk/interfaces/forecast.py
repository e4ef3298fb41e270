"""What an engine would hold, worked out without building it. `rlsdk plan` is made of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlsdk.interfaces.model import RankContext, RolloutSpec, TrainSpec
from rlsdk.interfaces.weights import WeightLayout


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The most that a run gives to the ranks of one role."""

    row_tokens: int
    """Longest prompt plus response."""
    update_rows: int
    """Train: rows of one optimizer step, over all ranks."""
    running_rows: int
    """Rollout: samples that one replica decodes at once."""
    device_bytes: int | None = None
    """Memory of one device; of the whole machine where devices are processes on a CPU. None: unknown."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that a rank takes on each of its devices. None: the engine cannot say."""

    weights_bytes: int | None = None
    optimizer_bytes: int | None = 0
    gradients_bytes: int | None = 0
    """Train: what lives from the first backward pass of an update to its optimizer step."""
    gradients_stay: bool = False
    """Train: gradients are allocated once, with the optimizer, and live as long as it does."""
    forward_bytes: int | None = 0
    """Besides all that: what a pass without gradient takes at its peak; rollout: a decoding step."""
    backward_bytes: int | None = 0
    """Train: what a forward and backward pass take at their peak."""
    cache_bytes: int | None = 0
    """Rollout: keys and values."""
    cache_stays: bool = False
    """Rollout: keys and values are allocated once, not with the requests."""
    on_host: bool = False
    """Weights, optimizer and gradients live on the host while the device works."""
    process_bytes: int = 0
    """Main memory, tensors left out, that the engine takes besides a worker with torch and transformers: its modules,
    and processes that it starts."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What the ranks of one role would hold."""

    layouts: tuple[tuple[WeightLayout, ...], ...]
    """Per rank: what its `layout()` would give (train: one). `process` may be empty: it is that of the rank."""
    memory: tuple[RankMemory, ...]
    """Per rank."""
    dp_size: int = 1
    """Train: ranks that see different rows."""


ForecastFn = Callable[[Sequence[RankContext], TrainSpec | RolloutSpec, Workload], Forecast]
"""What `BackendSpec.forecast` names. Called with the contexts of all ranks of a role, in rank order; starts nothing,
takes no device, reads no weights.

Raises:
    ConfigError: sizes that do not fit, as the engine's own `initialize` would.
"""
