"""Negotiation: decides from specifications alone whether a backend can do what a run needs, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, UnsupportedCapabilityError
from rlsdk.registry.explain import spoken
from rlsdk.registry.known import FIRST_PARTY
from rlsdk.registry.registry import Registry

SPLITS = frozenset(
    {
        Capability.DATA_PARALLEL,
        Capability.TENSOR_PARALLEL,
        Capability.PIPELINE_PARALLEL,
        Capability.CONTEXT_PARALLEL,
        Capability.EXPERT_PARALLEL,
    }
)
"""Capabilities with which a train engine can use several ranks. A backend that claims one of them is not refused for
the number of ranks: its options decide along which axes it is split."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Requirements of a run on one backend. None: not required."""

    kind: BackendKind
    device: str | None = None
    """`cpu` or `cuda`."""
    dtype: str | None = None
    model_type: str | None = None
    """`model_type` of the model's `config.json`."""
    num_ranks: int = 1
    """Processes of one engine: all ranks of a train engine, one replica of a rollout engine."""
    takes_weights: bool = False
    """Rollout: it must serve the trainer's weights."""
    capabilities: frozenset[Capability] = frozenset()
    because: Mapping[str, str] = field(default_factory=dict)
    """Name of a requirement (`device`, ..., or a capability's value) -> the field of the configuration that causes
    it."""


@dataclass(frozen=True)
class Lack:
    """One thing that a backend cannot do."""

    requirement: str
    """`device`, `dtype`, `model_type`, `num_ranks`, `takes_weights`, or a capability's value."""
    message: str
    """Text after the backend's name: "does not support ..."."""


def lacks(needed: Requirements, spec: BackendSpec) -> list[Lack]:
    """Everything in `needed` that this backend cannot do."""
    return list(_lacks(needed, spec))


def require(needed: Requirements, name: str, registry: Registry) -> BackendSpec:
    """Returns the specification of a backend that meets all requirements.

    Raises:
        PluginError: there is no usable backend of that name.
        UnsupportedCapabilityError: lists what is missing, the field that needs it, and the backends that support it.
    """
    spec = registry.backend(needed.kind, name)
    if found := lacks(needed, spec):
        raise UnsupportedCapabilityError("; ".join(explain_lack(lack, needed, name, registry) for lack in found))
    return spec


def explain_lack(lack: Lack, needed: Requirements, name: str, registry: Registry) -> str:
    """One missing requirement as text: what the backend lacks, the field that needs it, and the backends that support
    it."""
    field_name = needed.because.get(lack.requirement)
    asked = f", needed by {field_name}" if field_name else ""
    able = [
        other.name
        for other in registry.backends(needed.kind)
        if lack.requirement not in {missing.requirement for missing in lacks(needed, other)}
    ]
    said = f"{spoken(needed.kind)} {name!r} {lack.message}{asked}; installed and able: {_listed(able)}"
    known = {row.name for row in registry.rows() if row.kind == needed.kind}
    others = [f"`pip install {package}`" for other, package in FIRST_PARTY[needed.kind].items() if other not in known]
    return said if able or not others else f"{said}. Others that can be installed: {', '.join(others)}"


def _lacks(needed: Requirements, spec: BackendSpec) -> Iterator[Lack]:
    if needed.device is not None and needed.device not in spec.devices:
        yield Lack("device", f"does not run on {needed.device!r} (but on {_listed(sorted(spec.devices))})")
    if needed.dtype is not None and needed.dtype not in spec.dtypes:
        yield Lack("dtype", f"does not compute in {needed.dtype!r} (but in {_listed(sorted(spec.dtypes))})")
    if needed.model_type is not None and spec.architectures is not None and needed.model_type not in spec.architectures:
        runs = _listed(sorted(spec.architectures))
        yield Lack("model_type", f"does not run models of type {needed.model_type!r} (but {runs})")
    if spec.max_ranks is not None and needed.num_ranks > spec.max_ranks:
        processes = "1 process" if spec.max_ranks == 1 else f"{spec.max_ranks} processes"
        yield Lack("num_ranks", f"spans at most {processes}, not {needed.num_ranks}")
    elif needed.kind is BackendKind.TRAIN and needed.num_ranks > 1 and not spec.capabilities & SPLITS:
        yield Lack("num_ranks", f"supports neither 'data_parallel' nor another way to use {needed.num_ranks} processes")
    if needed.takes_weights and not spec.takes_weights:
        yield Lack(
            "takes_weights", "serves weights of its own and takes none from a trainer (it can evaluate and generate)"
        )
    for capability in sorted(needed.capabilities - spec.capabilities):
        yield Lack(capability.value, f"does not support {capability.value!r}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
