"""The registry: looks up everything that is installed by kind and name, or raises an explanatory error."""

from __future__ import annotations

import importlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

from rlsdk.interfaces import (
    BackendKind,
    BackendSpec,
    ComponentSpec,
    ForecastFn,
    PluginLoadError,
    RlsdkError,
    RolloutEngine,
    TrainEngine,
)
from rlsdk.registry.discovery import discover_rows
from rlsdk.registry.explain import not_found, unusable
from rlsdk.registry.functions import load_function
from rlsdk.registry.guard import Guard
from rlsdk.registry.load import plugin_rows
from rlsdk.registry.portable import options_class
from rlsdk.registry.row import ComponentKind, Isolation, Kind, Row, Source, State
from rlsdk.system.printable import described, shown

logger = logging.getLogger(__name__)
_warned: list[Row] = []
"""Untested engines that this process has warned about."""

TAKES: Mapping[ComponentKind, Sequence[str]] = {
    ComponentKind.ALGORITHM: ("context",),
    ComponentKind.ADVANTAGE: ("batch",),
    ComponentKind.LOSS: ("inputs",),
    ComponentKind.AGGREGATION: ("batch", "counted", "max_tokens"),
    ComponentKind.KL_ESTIMATOR: ("log_probs", "ref_log_probs"),
    ComponentKind.CALLBACK: ("step", "metrics"),
    ComponentKind.ROLLOUTER: ("prompt", "generate"),
}
"""Positional arguments of functions that can be given by module or file."""


class Registry:
    """What is installed. Looking up an unusable name always raises an error with the reason.

    It can be pickled (without the original exceptions), and `Registry.discover()` rebuilds it in any process.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = list(rows)

    @classmethod
    def discover(cls, environ: Mapping[str, str] | None = None) -> Registry:
        """Reads the metadata of every installed distribution and loads the light entry modules.

        Args:
            environ: environment with `RLSDK_PLUGINS` and `RLSDK_DISABLE_PLUGINS`; None: that of the process.
        """
        return cls(discover_rows(environ))

    def register_module(self, plugin: object, *, distribution: str = "in process", version: str = "") -> list[Row]:
        """Adds a plugin that is not installed: a module, or an object with methods marked `@hookimpl`.

        Returns:
            Its rows, as `rows()` shows them.
        """
        source = Source(distribution=distribution, version=version, entry_point=getattr(plugin, "__name__", ""))
        added = plugin_rows(plugin, source)
        self._rows += added
        return self.rows()[-len(added) :] if added else []

    def rows(self) -> list[Row]:
        """Everything that was found, usable or not, in order of discovery; duplicates are marked."""
        claims = self._claims()
        return [_clash(row, claims[row.kind, row.name]) if row.claims_name else row for row in self._rows]

    def usable(self, kind: Kind) -> list[str]:
        """Sorted usable names of that kind."""
        return sorted(row.name for row in self.rows() if row.kind == kind and row.state.usable)

    def backends(self, kind: BackendKind) -> list[BackendSpec]:
        """Every usable backend of that kind, sorted by name."""
        specs = [row.spec for row in self.rows() if row.kind == kind and row.state.usable]
        return sorted((spec for spec in specs if isinstance(spec, BackendSpec)), key=lambda spec: spec.name)

    def row(self, kind: Kind, name: str) -> Row:
        """The one usable row of that kind and name.

        Raises:
            PluginNotFoundError: nothing of that name is installed.
            DuplicatePluginError: two plugins claim it.
            InterfaceVersionError: it was written for another interface.
            PluginLoadError: it is installed, but its import failed, it is invalid, or its engine is missing.
        """
        found = [row for row in self.rows() if row.kind == kind and row.name == name]
        usable = [row for row in found if row.state.usable]
        if usable:
            return usable[0]
        if found:
            raise unusable(kind, name, found)
        raise not_found(kind, name, self.rows())

    def backend(self, kind: BackendKind, name: str) -> BackendSpec:
        """The specification of a usable backend; raises as `row` does. Warns about an untested engine version."""
        row = self.row(kind, name)
        if row.state is State.UNTESTED and row not in _warned:
            _warned.append(row)
            logger.warning("%s backend %r (%s): %s", kind, name, row.source, row.reason)
        if not isinstance(row.spec, BackendSpec):
            raise PluginLoadError(f"{kind} {name!r} is not a backend")
        return row.spec

    def target(self, kind: ComponentKind, name: str) -> str | object:
        """The registered target of a component: an import string, or the object; raises as `row` does."""
        spec = self.row(kind, name).spec
        if not isinstance(spec, ComponentSpec):
            raise PluginLoadError(f"{kind} {name!r} is not a component")
        return spec.target

    def component(self, kind: ComponentKind, name: str) -> Any:
        """Imports the function or class of a component; raises as `row` does."""
        target = self.target(kind, name)
        if not isinstance(target, str):
            return target
        return self._resolve(target, f"{kind} {name!r}", self.row(kind, name).source)

    def function(self, kind: ComponentKind, name: str) -> Any:
        """Looks up a function by its registered name, `pkg.mod:fn` or `file.py:fn`.

        Raises:
            ConfigError: there is no such file, module or function, or it cannot be called as one of its kind.
            PluginError: as `row` does.
        """
        if ":" in name:
            return load_function(name, what=str(kind), takes=TAKES[kind])
        return self.component(kind, name)

    def is_own(self, kind: ComponentKind, name: str) -> bool:
        """Whether it is built in and registered by import string: it is then known without importing it, and torch."""
        try:
            target = None if ":" in name else self.target(kind, name)
        except RlsdkError:
            return False
        return isinstance(target, str) and target.startswith("rlsdk.")

    def sharding_manager(self, train: str, rollout: str, name: str = "auto") -> Any:
        """The sharding manager class of that name; `auto`: the one most specific to this pair of backends."""
        if name != "auto":
            return self.component(ComponentKind.SHARDING_MANAGER, name)
        claimed = {row.name for row in self.rows() if row.kind == ComponentKind.SHARDING_MANAGER}
        candidates = (f"{train}+{rollout}", f"{train}+*", f"*+{rollout}", "*+*")
        chosen = next((candidate for candidate in candidates if candidate in claimed), candidates[0])
        return self.component(ComponentKind.SHARDING_MANAGER, chosen)

    def load_engine(self, spec: BackendSpec) -> type[Any]:
        """Imports the engine class of a backend.

        Raises:
            PluginLoadError: the import failed (with its own message, chained); it is not an engine of that kind, or
                lacks abstract methods; or it is in its own environment.
        """
        source = self._source(spec)
        if isolation := self.isolation(spec):
            raise PluginLoadError(
                f"{spec.kind} backend {spec.name!r} ({source}) lives in {isolation.environment!r} and cannot be "
                f"imported here; run this with {isolation.python}"
            )
        engine = self._resolve(spec.engine, f"{spec.kind} backend {spec.name!r}", source)
        base = TrainEngine if spec.kind is BackendKind.TRAIN else RolloutEngine
        if not (isinstance(engine, type) and issubclass(engine, base)):
            raise PluginLoadError(
                f"{spec.kind} backend {spec.name!r} ({source}): {spec.engine!r} is {shown(engine)}, "
                f"not a subclass of rlsdk.interfaces.{base.__name__}; this is a bug of the plugin"
            )
        if missing := sorted(getattr(engine, "__abstractmethods__", ())):
            raise PluginLoadError(
                f"{spec.kind} backend {spec.name!r} ({source}): {engine.__qualname__} lacks {missing}, which every "
                f"{base.__name__} must have; this is a bug of the plugin"
            )
        return engine

    def load_options(self, spec: BackendSpec) -> type[Any] | None:
        """The class of a backend's own options, or None: imported, or made from their description if the backend has an
        environment of its own.

        Raises:
            PluginLoadError: the import failed, or it is neither a dataclass nor a pydantic model.
        """
        if spec.options is None:
            return None
        source = self._source(spec)
        isolation = self.isolation(spec)
        if isolation is not None and isolation.options is not None:
            return options_class(isolation.options)
        options = self._resolve(spec.options, f"options of {spec.kind} backend {spec.name!r}", source)
        if not (isinstance(options, type) and (is_dataclass(options) or hasattr(options, "model_fields"))):
            raise PluginLoadError(
                f"options of {spec.kind} backend {spec.name!r} ({source}): {spec.options!r} is {shown(options)}, "
                "neither a dataclass nor a pydantic model; this is a bug of the plugin"
            )
        return options

    def load_forecast(self, spec: BackendSpec) -> ForecastFn | None:
        """Imports the forecast function of a backend; None if it has none, or if it has its own environment.

        Raises:
            PluginLoadError: the import failed.
        """
        if spec.forecast is None or self.isolation(spec) is not None:
            return None
        what = f"forecast of {spec.kind} backend {spec.name!r}"
        found: ForecastFn = self._resolve(spec.forecast, what, self._source(spec))
        return found

    def isolation(self, spec: BackendSpec) -> Isolation | None:
        """The environment of a backend that has its own; None otherwise."""
        return next((row.isolation for row in self._rows if row.spec == spec), None)

    def _claims(self) -> dict[tuple[str, str], list[Row]]:
        claims: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self._rows:
            if row.claims_name:
                claims[row.kind, row.name].append(row)
        return claims

    def _source(self, spec: BackendSpec) -> Source:
        return next((row.source for row in self._rows if row.spec == spec), Source(distribution="unknown"))

    def _resolve(self, target: str, what: str, source: Source) -> Any:
        module, _, attribute = target.partition(":")
        try:
            with Guard():
                found: Any = importlib.import_module(module)
                for part in attribute.split("."):
                    found = getattr(found, part)
        except Exception as error:
            raise PluginLoadError(
                f"{what} ({source}) is installed, but {target!r} could not be imported: {described(error)}"
            ) from error
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": [replace(row, error=None) for row in self._rows]}


def _clash(row: Row, claims: list[Row]) -> Row:
    if len(claims) == 1:
        return row
    others = [str(other.source) for other in claims if other is not row]
    if all(other.source == row.source for other in claims):
        return replace(row, state=State.CLASH, reason=f"registered {len(claims)} times by {row.source}")
    return replace(row, state=State.CLASH, reason=f"also registered by {', '.join(others)}")
