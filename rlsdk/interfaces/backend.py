"""What a plugin declares about itself: plain data, readable without importing any engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from rlsdk.interfaces.capability import Capability, LogProbKind

INTERFACE_VERSION = (2, 1)
"""Version of everything in `rlsdk.interfaces`. A plugin fits when its major number is equal and its minor is not
newer."""


class BackendKind(StrEnum):
    TRAIN = "train"
    ROLLOUT = "rollout"


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """One backend of one plugin. Created in the plugin's light entry module, which imports no engine."""

    name: str
    """As typed after `--train-backend`: lower case, digits, dashes."""
    kind: BackendKind
    engine: str
    """`package.module:Class` of the TrainEngine or RolloutEngine; imported when the engine is built, and called without
    arguments; all settings arrive in `initialize`."""
    options: str | None = None
    """`package.module:Class` of a dataclass (or pydantic model) with the backend's own options; must import without the
    engine. `rlsdk plugins info` shows the types, defaults and docstrings of its fields."""
    forecast: str | None = None
    """`package.module:function`, a `ForecastFn`: the memory that the engine would use, for `rlsdk plan`. None: the plan
    shows it as unknown."""
    description: str = ""
    interface: tuple[int, int] = INTERFACE_VERSION
    """The interface version that the plugin was written against."""
    capabilities: frozenset[Capability] = frozenset()
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16", "float16"})
    architectures: frozenset[str] | None = None
    """`model_type`s of `config.json` that it runs; None: the engine decides."""
    max_ranks: int | None = None
    """Maximum number of processes it spans (1 for single-process engines); None: no limit."""
    takes_weights: bool = True
    """Rollout: serves the weights that `update_weights` delivers. False: it serves its own weights (an external
    server), so it can evaluate and generate, but no run can train with it."""
    log_prob_kind: LogProbKind = LogProbKind.AFTER_TEMPERATURE
    """Rollout: what its log-probs mean."""
    engine_requires: Mapping[str, str] = field(default_factory=dict)
    """Distribution (`a|b`: either of them) -> version specifier that the plugin was tested with. Not installed: the
    backend is unavailable and says how to install it. Outside the range: a warning."""
    install_hint: str = ""
    """The command that makes it available."""


@runtime_checkable
class ChecksPlace(Protocol):
    """Optional method of an options class: it knows which values fit a model and a number of ranks. It is called before
    any process starts; the engine checks again when it is built."""

    def place_problems(self, *, num_ranks: int, device: str, model: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
        """Yields the name of each bad option and what is wrong with its value, with the values that would work.

        Args:
            num_ranks: processes that one engine spans.
            device: `cpu` or `cuda`.
            model: fields of `config.json`; empty if they are not known yet.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ComponentSpec:
    """A named function or class that is not an engine: estimator, loss, reward, data set, tracker, callback."""

    name: str
    target: object
    """`package.module:attribute`, resolved when used, or the object itself."""
    description: str = ""
    requires: str = ""
    """Distribution (`a|b`: either of them) that it imports and that its own distribution does not depend on. Not
    installed: the component is unavailable and says how to install it."""
    install_hint: str = ""
    """The command that installs it."""
