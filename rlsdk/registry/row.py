"""One line of what is installed: a backend, a component, or a plugin that could not be read."""

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


Kind = BackendKind | ComponentKind
PLUGIN = "plugin"
"""Kind of a row that stands for a whole plugin, because what it would have added is unknown."""


class State(StrEnum):
    """Whether a name can be used."""

    READY = "ready"
    UNTESTED = "untested engine"
    """Usable, with a warning: the engine's version is outside the window that the plugin was tested with."""
    ENGINE_MISSING = "engine missing"
    WRONG_INTERFACE = "wrong interface"
    CLASH = "clash"
    BROKEN = "broken"
    DISABLED = "disabled"
    ELSEWHERE = "elsewhere"
    """It lives in its own environment, from where it cannot serve."""

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
    """Where a plugin lives that has its own environment."""

    environment: str
    python: str
    """Interpreter of that environment: workers of the backend are started with it."""
    versions: Mapping[str, str]
    """Of Python (as `python`) and of the distributions in there that matter."""
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
    """Why it cannot be used, or what to know when it is."""
    spec: BackendSpec | ComponentSpec | None = None
    isolation: Isolation | None = None
    """Set when the plugin lives in its own environment, and cannot be imported here."""
    error: BaseException | None = field(default=None, compare=False, repr=False)
    """What was raised, in the process that discovered it."""

    @property
    def interface(self) -> str:
        """Interface version that a backend was written against, as text."""
        return ".".join(map(str, self.spec.interface)) if isinstance(self.spec, BackendSpec) else ""

    @property
    def claims_name(self) -> bool:
        """True when no other row of its kind may have its name."""
        return self.kind != PLUGIN and self.state in (State.READY, State.UNTESTED, State.ENGINE_MISSING)
