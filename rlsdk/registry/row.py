"""One entry of the registry: a backend, a component, or a plugin that could not be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlsdk.interfaces import BackendKind, BackendSpec, ComponentSpec


class ComponentKind(StrEnum):
    """What a plugin can add besides engines; each has its own hook."""

    ALGORITHM = "algorithm"
    ADVANTAGE = "advantage"
    LOSS = "loss"
    AGGREGATION = "aggregation"
    KL_ESTIMATOR = "kl estimator"
    REWARD = "reward"
    DATASET = "dataset"
    TRACKER = "tracker"
    SHARDING_MANAGER = "sharding manager"
    CALLBACK = "callback"
    ROLLOUTER = "rollouter"
    ENVIRONMENT = "environment"
    SANDBOX = "sandbox"


Kind = BackendKind | ComponentKind
PLUGIN = "plugin"
"""Kind of a row for a whole plugin, if what it provides is unknown."""


class State(StrEnum):
    """Whether a name can be used."""

    READY = "ready"
    UNTESTED = "untested engine"
    """Usable, with a warning: the engine's version is outside the tested range."""
    ENGINE_MISSING = "engine missing"
    WRONG_INTERFACE = "wrong interface"
    CLASH = "clash"
    BROKEN = "broken"
    DISABLED = "disabled"
    ELSEWHERE = "elsewhere"
    """It is in its own environment, from which it cannot be used."""

    @property
    def usable(self) -> bool:
        return self in (State.READY, State.UNTESTED)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a plugin comes from."""

    distribution: str
    version: str = ""
    entry_point: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """The environment of a plugin that has its own."""

    environment: str
    python: str
    """Interpreter of that environment, with which workers of the backend are started."""
    versions: Mapping[str, str]
    """Versions of Python (as `python`) and of the relevant distributions in it."""
    options: Mapping[str, Any] | None
    """Description of the backend's options, see `rlsdk.registry.portable`; None: it has none."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One name that a plugin provides, or fails to provide."""

    name: str
    kind: BackendKind | ComponentKind | str
    source: Source
    state: State = State.READY
    reason: str = ""
    """Reason why it cannot be used, or a warning."""
    spec: BackendSpec | ComponentSpec | None = None
    isolation: Isolation | None = None
    """Its own environment, if it has one; it then cannot be imported here."""
    error: BaseException | None = field(default=None, compare=False, repr=False)
    """The exception, in the process that discovered it."""

    @property
    def interface(self) -> str:
        """Interface version of a backend, as text."""
        return ".".join(map(str, self.spec.interface)) if isinstance(self.spec, BackendSpec) else ""

    @property
    def claims_name(self) -> bool:
        """Whether no other row of its kind may have its name."""
        return self.kind != PLUGIN and self.state in (State.READY, State.UNTESTED, State.ENGINE_MISSING)
