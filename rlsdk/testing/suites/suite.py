"""Base of all conformance suites: finds the backend as a run does, and checks its registration."""

from __future__ import annotations

import functools
import json
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

import pytest

from rlsdk.interfaces import (
    INTERFACE_VERSION,
    BackendKind,
    BackendSpec,
    Capability,
    ChecksPlace,
    PluginError,
    RolloutEngine,
    TrainEngine,
)
from rlsdk.registry import Registry, Row, installed_version
from rlsdk.testing.suites.renamed import new_name
from rlsdk.testing.suites.report import Finding, SuiteReport
from rlsdk.testing.suites.requirements import MARK, NOT_CLAIMED, Measured, required, requirement
from rlsdk.testing.suites.session import COLLECTOR, PLUGIN
from rlsdk.version import __version__

METHODS: Mapping[Capability, Sequence[str]] = {
    Capability.ABORT: ("abort",),
    Capability.SLEEP: ("sleep", "wake"),
    Capability.PARTIAL_ROLLOUT: ("pause", "resume"),
    Capability.DISTILLATION: ("load_teacher",),
    Capability.OFFLOAD: ("offload", "onload"),
    Capability.EXPORT: ("save_pretrained",),
}
"""Capability -> methods whose defaults only refuse."""
DTYPES = frozenset({"float32", "bfloat16", "float16"})
"""Of `BackendSpec.dtypes`."""
HEAVY = ("torch", "transformers", "ray", "numpy", "datasets")
"""Packages that no entry module may import, besides its engine."""
QUESTION = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
IMPORT_TIMEOUT_S = 120.0


class Suite:
    """Subclass a kind of suite, not this class. A subclass may set the attributes at the top; the others are
    internal."""

    backend: ClassVar[str] = ""
    """Name of the backend, as in `--train-backend NAME`."""
    options: ClassVar[Any] = None
    """The backend's own options: a mapping of fields, or an instance of its options class; None: its defaults."""
    engine_kwargs: ClassVar[Mapping[str, object]] = {}
    """Raw arguments of the engine's constructor."""
    device: ClassVar[str] = "cpu"
    """`cpu` or `cuda:0`; a world of several ranks takes `cuda:0`, `cuda:1`, ..."""
    modules: ClassVar[Sequence[ModuleType]] = ()
    """Entry modules to register in this process, for a plugin that is not installed."""
    kind: ClassVar[BackendKind]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises `TypeError` if the class omits a requirement by an old name: it would run nevertheless."""
        super().__init_subclass__(**kwargs)
        for name in (name for name, value in vars(cls).items() if value is None):
            if new := new_name(name):
                raise TypeError(f"{cls.__name__}.{name} = None omits nothing: this requirement is now {new!r}")

    @classmethod
    @functools.cache
    def registry(cls) -> Registry:
        """The installed plugins, read once, and `modules`."""
        registry = Registry.discover()
        for module in cls.modules:
            registry.register_module(module)
        return registry

    @classmethod
    def row(cls) -> Row:
        """Raises: PluginError: no usable backend has this name."""
        return cls.registry().row(cls.kind, cls.backend)

    @classmethod
    def spec(cls) -> BackendSpec:
        """Raises: PluginError: no usable backend has this name."""
        spec = cls.row().spec
        assert isinstance(spec, BackendSpec)
        return spec

    @classmethod
    @functools.cache
    def why_unusable(cls) -> str:
        """Why this suite cannot run: no backend with this name is usable, or its engine cannot be imported."""
        try:
            cls.registry().load_engine(cls.spec())
        except PluginError as error:
            return str(error)
        return ""

    @classmethod
    def built_options(cls) -> object | None:
        """The engine's `options`, built as in a run."""
        if not isinstance(cls.options, Mapping | None):
            return cls.options  # type: ignore[no-any-return]
        kind = cls.registry().load_options(cls.spec())
        if kind is None:
            if cls.options:
                raise ValueError(f"backend {cls.backend!r} has no options of its own; {cls.__name__} gives some")
            return None
        return kind(**(cls.options or {}))  # type: ignore[no-any-return]

    @pytest.fixture
    def measured(self, request: pytest.FixtureRequest) -> Measured:
        """Records the numbers of a requirement."""
        return Measured(request.node.user_properties)

    @pytest.fixture(autouse=True)
    def _claimed(self, request: pytest.FixtureRequest) -> None:
        """Skips requirements of capabilities that the backend does not claim."""
        if not request.config.pluginmanager.has_plugin(COLLECTOR):
            pytest.exit(
                f'{type(self).__name__} needs the pytest plugin of rlsdk: write `pytest_plugins = ["{PLUGIN}"]` in the '
                f"conftest.py, or run `pytest -p {PLUGIN}`",
                returncode=pytest.ExitCode.USAGE_ERROR,
            )
        mark = request.node.get_closest_marker(MARK)
        needs = mark.args[1] if mark is not None else None
        if needs is not None and needs not in self.spec().capabilities:
            pytest.skip(f"{NOT_CLAIMED}{needs.value}")

    @requirement("registration.usable", basic=True)
    def test_registration_usable(self, measured: Measured) -> None:
        """The backend is found by its name, fits this interface version, and its engine class loads."""
        spec = self.spec()
        engine = self.registry().load_engine(spec)
        assert issubclass(engine, TrainEngine if spec.kind is BackendKind.TRAIN else RolloutEngine)
        assert pickle.loads(pickle.dumps(spec)) == spec, "the specification does not survive a process border"
        assert spec.description, "BackendSpec.description is empty: `rlsdk plugins list` has nothing to say of it"

    @requirement("registration.light", basic=True)
    def test_registration_light(self, measured: Measured) -> None:
        """The entry module and the options import neither the engine nor torch, so that listing plugins stays fast."""
        spec = self.spec()
        modules = [module.__name__ for module in self.modules] or _entry_modules(self.row())
        if spec.options is not None:
            modules.append(spec.options.partition(":")[0])
        own = {name.replace("-", "_") for names in spec.engine_requires for name in names.split("|")}
        heavy = sorted({module for name in modules for module in imported_by(name)} & {*HEAVY, *own})
        measured.none("heavy modules imported", heavy)

    @requirement("registration.options", basic=True)
    def test_registration_options(self, measured: Measured) -> None:
        """Options have defaults or are given, are plain data, and each has a docstring."""
        kind = self.registry().load_options(self.spec())
        options = self.built_options()
        if kind is None or options is None:
            return
        assert pickle.loads(pickle.dumps(options)) == options, "options do not survive a process border"
        if is_dataclass(kind):
            from rlsdk.config.introspection.describe import describe_options

            measured.none("options without a docstring", [o.path for o in describe_options(kind) if not o.doc])
            measured.record("options", len(fields(kind)))

    @requirement("registration.place", since=(2, 0), basic=True)
    def test_registration_place(self, measured: Measured) -> None:
        """Dtypes and devices are known names and include the suite's; a forecast can be loaded; options that check
        their place name one of their fields and a reason, even if nothing is known about the model yet."""
        spec, registry = self.spec(), self.registry()
        measured.none("dtypes that are not known", sorted(spec.dtypes - DTYPES))
        measured.none("devices that are not known", sorted(spec.devices - {"cpu", "cuda"}))
        device = self.device.partition(":")[0]
        measured.equal(f"claims not {device}, on which it is tried", device not in spec.devices, 0)
        if spec.forecast is not None and registry.isolation(spec) is None:
            assert callable(registry.load_forecast(spec)), f"{spec.forecast} is no function"
        kind, options = registry.load_options(spec), self.built_options()
        if not isinstance(options, ChecksPlace):
            return
        known = {field.name for field in fields(kind)} if kind is not None and is_dataclass(kind) else None
        for num_ranks in (1, 2, 8):
            found = list(options.place_problems(num_ranks=num_ranks, device=device, model={}))
            strange = [p for p in found if len(p) != 2 or not p[1] or (known is not None and p[0] not in known)]
            measured.none(f"problems of no option, {num_ranks} ranks", strange)

    @requirement("registration.capabilities", basic=True)
    def test_registration_capabilities(self, measured: Measured) -> None:
        """Every claimed capability is one of this kind of engine, and the engine implements its methods."""
        spec = self.spec()
        engine = self.registry().load_engine(spec)
        base = TrainEngine if spec.kind is BackendKind.TRAIN else RolloutEngine
        absent = [
            f"{capability.value} is claimed, {engine.__qualname__}.{method} is the interface's, which refuses"
            for capability, methods in METHODS.items()
            if capability in spec.capabilities
            for method in methods
            if getattr(engine, method, None) is getattr(base, method, None)
        ]
        measured.record("capabilities", len(spec.capabilities))
        strange = sorted(spec.capabilities - required(type(self)))
        measured.none(f"claimed, and no capability of a {spec.kind} engine", strange)
        measured.none("claimed and absent", absent)


@functools.cache
def imported_by(module: str) -> frozenset[str]:
    """Top-level names of all modules that importing this one loads, in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", QUESTION, module],
        env=environment, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{module} cannot be imported alone: {done.stderr[-2000:]}"
    return frozenset(json.loads(done.stdout.splitlines()[-1]))


def settings_of(suite: type[Any]) -> frozenset[str]:
    """Attributes that a subclass of a suite may set, besides its backend."""
    declared = {name for kind in suite.__mro__ for name, is_a in vars(kind).get("__annotations__", {}).items()
                if "ClassVar" in str(is_a)}  # fmt: skip
    return frozenset(declared - {"backend", "kind", "modules"})


def variant_of(suite: type[Any]) -> str:
    """Settings of a suite that differ from the kit's defaults: `asynchronous=True, tp_size=2`."""
    base = next(kind for kind in suite.__mro__ if kind.__module__.startswith("rlsdk.testing."))
    found: dict[str, object] = {}
    for name in sorted(settings_of(base)):
        value = getattr(suite, name)
        if value != getattr(base, name):
            found |= value if isinstance(value, Mapping) else _set_fields(value) or {name: value}
    return ", ".join(f"{name}={value}" for name, value in found.items())


def _set_fields(options: Any) -> dict[str, object]:
    """Fields of an options instance that differ from their defaults."""
    if not is_dataclass(options):
        return {}
    values = {field: getattr(options, field.name) for field in fields(options)}
    return {field.name: value for field, value in values.items() if value != field.default}


def suite_report(suite: type[Any], findings: Sequence[Finding], *, left_out: int = 0) -> SuiteReport:
    """The findings with the tested versions of plugin, engine and interface."""
    report = SuiteReport(
        suite=suite.__name__,
        backend=suite.backend,
        kind=suite.kind.value,
        rlsdk=__version__,
        python=platform.python_version(),
        device=suite.device,
        variant=variant_of(suite),
        findings=findings,
        left_out=left_out,
    )
    try:
        row = suite.row()
    except PluginError:
        return report
    engine = dict(_engine_versions(row.spec)) if isinstance(row.spec, BackendSpec) else {}
    interface = row.interface or ".".join(map(str, INTERFACE_VERSION))
    return replace(report, plugin=str(row.source), interface=interface, engine=engine)


def _engine_versions(spec: BackendSpec) -> Iterator[tuple[str, str]]:
    for names in spec.engine_requires:
        for name in names.split("|"):
            if version := installed_version(name):
                yield name, version


def _entry_modules(row: Row) -> list[str]:
    """Modules of the entry point that registered the backend."""
    import importlib.metadata

    for distribution in importlib.metadata.distributions(name=row.source.distribution):
        return [
            entry.module
            for entry in distribution.entry_points
            if entry.group == "rlsdk" and entry.name == row.source.entry_point
        ]
    return []
