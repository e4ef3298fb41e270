"""What a plan holds, before it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlsdk.planning.batches import BatchSize
from rlsdk.planning.calibration import Prediction
from rlsdk.planning.hardware import Hardware
from rlsdk.planning.memory import PhaseMemory
from rlsdk.planning.places import Places
from rlsdk.planning.reshard import ReshardSummary

TIGHT = 0.9
"""Share of a device's memory above which fragmentation and what is not counted may end a run."""


@dataclass(frozen=True, kw_only=True)
class PlannedRole:
    """One role of the run."""

    name: str
    backend: str
    model: str
    head: str
    dtype: str
    lr: float | None
    """Peak learning rate; None: frozen, or a rollout engine."""
    pool: str
    ranks: int
    devices_per_rank: int
    weights_bytes: int | None
    """Bytes of weights on the fullest rank; None: unknown."""
    optimizer_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class PlanContents:
    """What a plan says of a run."""

    hardware: Hardware
    num_nodes: int
    devices_per_node: int
    roles: tuple[PlannedRole, ...]
    places: Places
    batches: tuple[BatchSize, ...]
    reshard: ReshardSummary | None
    """Weight transfer; None: a backend cannot forecast its layout."""
    adapter_bytes: int
    """Bytes of an adapter that all replicas together are sent at each sync; then `reshard` is of the weights below it,
    which are sent once. 0: every sync sends all weights."""
    memory: tuple[PhaseMemory, ...]
    host_bytes: int
    """Main memory that GPU processes use for weights and blocks on the fullest node; 0 with CPU ranks."""
    prediction: Prediction | None
    unknown: tuple[str, ...]
    """What could not be computed, and why."""
    notices: tuple[str, ...] = ()
    """Warnings on settings that can spoil the run, as the run itself prints them at its start."""
    change: Mapping[str, object] | None = None
    """Of a run that does not fit: fields with the smallest change with which it does; empty: none of those that are
    known. None: none was looked for."""

    @property
    def peak(self) -> PhaseMemory:
        """The phase with the largest memory."""
        return max(self.memory, key=lambda phase: phase.known_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None: unknown."""
        if self.hardware.device_bytes is None:
            return None
        if self.peak.known_bytes > self.hardware.device_bytes:
            return False
        return True if all(phase.is_known for phase in self.memory) else None

    @property
    def is_tight(self) -> bool:
        size = self.hardware.device_bytes
        return size is not None and self.peak.known_bytes > TIGHT * size
