"""Loads the rows of one plugin. Errors of a plugin are reported in its own row, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pluggy

from rlsdk.interfaces import BackendKind, BackendSpec, ComponentSpec, Hooks, PluginError, nearest
from rlsdk.registry.checks import backend_nonsense, component_state, engine_state, interface_misfit, plain_backend
from rlsdk.registry.guard import SLOW_S, Guard
from rlsdk.registry.row import PLUGIN, ComponentKind, Row, Source, State
from rlsdk.system.printable import MESSAGE_CHARS, described, one_line, printable, shown

MAX_NAMES = 1000
"""Most entry points of a distribution, and most names that one hook of a plugin registers; further ones are an
error."""
BACKEND_HOOK = "rlsdk_register_backends"
COMPONENT_HOOKS: Mapping[str, ComponentKind] = {
    "rlsdk_register_algorithms": ComponentKind.ALGORITHM,
    "rlsdk_register_advantages": ComponentKind.ADVANTAGE,
    "rlsdk_register_losses": ComponentKind.LOSS,
    "rlsdk_register_aggregations": ComponentKind.AGGREGATION,
    "rlsdk_register_kl_estimators": ComponentKind.KL_ESTIMATOR,
    "rlsdk_register_rewards": ComponentKind.REWARD,
    "rlsdk_register_datasets": ComponentKind.DATASET,
    "rlsdk_register_trackers": ComponentKind.TRACKER,
    "rlsdk_register_sharding_managers": ComponentKind.SHARDING_MANAGER,
    "rlsdk_register_callbacks": ComponentKind.CALLBACK,
    "rlsdk_register_rollouters": ComponentKind.ROLLOUTER,
    "rlsdk_register_environments": ComponentKind.ENVIRONMENT,
    "rlsdk_register_sandboxes": ComponentKind.SANDBOX,
}


def load_rows(load: Callable[[], object], source: Source) -> list[Row]:
    """Loads a plugin by calling `load`, and collects everything that it registers."""
    slow = (
        f"plugin {source.entry_point!r} ({source}) has been loading for {SLOW_S:.0f} s; "
        f"RLSDK_DISABLE_PLUGINS={source.entry_point} leaves it out"
    )
    try:
        with Guard(slow):
            plugin = load()
    except Exception as error:
        return [broken(source, f"its import failed: {described(error)}", error)]
    return plugin_rows(plugin, source)


def plugin_rows(plugin: object, source: Source) -> list[Row]:
    """Rows of a loaded plugin: a module, or an object with marked methods.

    Each plugin gets its own pluggy manager, so that hooks of one plugin cannot affect another.
    """
    manager = pluggy.PluginManager("rlsdk")
    manager.add_hookspecs(Hooks)
    try:
        with Guard():
            if isinstance(plugin, type):
                what = f"the class {shown(plugin)}; expected a module or an object"
                return [broken(source, f"its entry point gives {what}")]
            manager.register(plugin)
            callers = manager.get_hookcallers(plugin) or []
    except Exception as error:
        return [broken(source, f"its hooks do not fit: {described(error)}", error)]
    if not callers:
        return [broken(source, f"nothing in {shown(plugin)} is marked with @hookimpl")]
    rows = _unknown_hooks(manager, source)
    for hook in (BACKEND_HOOK, *COMPONENT_HOOKS):
        rows += _call(manager, hook, source)
    return rows


def broken(source: Source, reason: str, error: BaseException | None = None) -> Row:
    """A row for a plugin that could not be loaded."""
    name = source.entry_point or source.distribution
    return Row(name=name, kind=PLUGIN, source=source, state=State.BROKEN, reason=reason, error=error)


def _unknown_hooks(manager: pluggy.PluginManager, source: Source) -> list[Row]:
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = (BACKEND_HOOK, *COMPONENT_HOOKS)
        names = sorted(name for name in vars(manager.hook) if name.startswith("rlsdk_") and name not in known)
        said = ", ".join(f"{name!r}{nearest(name, known)}" for name in names)
        return [broken(source, f"there is no hook {said}" if names else str(error), error)]
    return []


def _call(manager: pluggy.PluginManager, hook: str, source: Source) -> list[Row]:
    rows: list[Row] = []

    def add(make: Callable[[], Row]) -> None:
        if len(rows) >= MAX_NAMES:
            raise PluginError(f"registered more than {MAX_NAMES} names")
        try:
            rows.append(make())
        except BaseException as error:  # its values are a stranger's objects; the hook may go on with the next name
            rows.append(broken(source, f"{hook} registered what cannot be read: {described(error)}", error))

    def register_backend(spec: BackendSpec) -> None:
        add(lambda: _backend_row(spec, source))

    def register_component(
        name: str, target: object, description: str = "", *, requires: str = "", install_hint: str = ""
    ) -> None:
        spec = ComponentSpec(
            name=name, target=target, description=description, requires=requires, install_hint=install_hint
        )
        add(lambda: _component_row(COMPONENT_HOOKS[hook], spec, source))

    register = register_backend if hook == BACKEND_HOOK else register_component
    try:
        with Guard(f"{hook} of plugin {source.entry_point!r} ({source}) has not returned for {SLOW_S:.0f} s"):
            returned = getattr(manager.hook, hook)(register=register)
    except Exception as error:
        return [*rows, broken(source, f"{hook} failed: {described(error)}", error)]
    if returned:
        rows.append(broken(source, f"{hook} returned {shown(returned[0])}; call register(...) for each instead"))
    return rows


def _backend_row(spec: BackendSpec, source: Source) -> Row:
    if nonsense := backend_nonsense(spec):
        name = one_line(spec.name) if isinstance(spec, BackendSpec) and isinstance(spec.name, str) else ""
        name = name or source.entry_point
        kind = spec.kind if isinstance(spec, BackendSpec) and isinstance(spec.kind, BackendKind) else PLUGIN
        return Row(name=name, kind=kind, source=source, state=State.BROKEN, reason=nonsense)
    spec = plain_backend(spec)
    if misfit := interface_misfit(spec):
        state, reason = State.WRONG_INTERFACE, misfit
    else:
        state, reason = engine_state(spec)
    return Row(name=spec.name, kind=spec.kind, source=source, state=state, reason=reason, spec=spec)


def _component_row(kind: ComponentKind, spec: ComponentSpec, source: Source) -> Row:
    state, reason = component_state(spec)
    name = str.__str__(spec.name) if isinstance(spec.name, str) else shown(spec.name)
    texts = {field: printable(str(getattr(spec, field)), MESSAGE_CHARS) for field in ("description", "install_hint")}
    spec = replace(spec, name=name, **texts)
    return Row(name=one_line(name), kind=kind, source=source, state=state, reason=reason, spec=spec)
