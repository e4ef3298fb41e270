"""`rlsdk plugins`: shows what is installed, and why something cannot be used."""

from __future__ import annotations

import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator, Sequence

from rlsdk.api.installed import HEADINGS, cells, plugin_rows, record
from rlsdk.interfaces import BackendKind, BackendSpec, ComponentSpec, PluginNotFoundError, RlsdkError, nearest
from rlsdk.registry import FIRST_PARTY, ComponentKind, Guard, Isolation, Registry, Row, installed_version, spoken
from rlsdk.system.printable import MESSAGE_CHARS, described, one_line, shown
from rlsdk.system.streams import stdout_aside

WIDTH = 100


def list_plugins(*, as_json: bool) -> None:
    """Prints every backend, component and plugin that was found, usable or not."""
    with stdout_aside():
        rows = plugin_rows()
    if as_json:
        print(json.dumps([record(row) for row in rows], indent=2))
        return
    print("\n".join(_grouped(rows)))
    for kind, names in FIRST_PARTY.items():
        for name in sorted(set(names) - {row.name for row in rows}):
            print(f"not installed: {spoken(kind)} {name!r}; run `pip install {names[name]}`")


def _grouped(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of a table of the rows, under a heading for each kind."""
    heading, *lines = table([HEADINGS, *((f"  {name}", *rest) for name, *rest in map(cells, rows))]).splitlines()
    yield heading
    for kind, group in itertools.groupby(zip(rows, lines, strict=True), key=lambda pair: pair[0].kind):
        yield f"\n{spoken(kind)}"
        yield from (line for _, line in group)
    yield ""


def show_plugin(name: str) -> None:
    """Prints capabilities, options and tested engine versions of a backend, or the known facts about a component.

    Raises:
        PluginNotFoundError: no backend, component, plugin or distribution of that name is installed.
    """
    registry = Registry.discover()
    rows = registry.rows()
    found = [row for row in rows if row.name == name]
    found = found or [row for row in rows if name in (row.source.distribution, row.source.entry_point)]
    if not found:
        raise _unknown(name, rows)
    print("\n\n".join("\n".join(one_line(line, MESSAGE_CHARS) for line in _info(row, registry)) for row in found))


def table(rows: list[tuple[str, ...]]) -> str:
    """Returns aligned columns of text without line wrapping, so output is the same in a terminal, a pipe and a file.
    Each row stays one line, whatever its cells hold."""
    rows = [tuple(one_line(str(cell), MESSAGE_CHARS) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def said(error: Exception) -> str:
    """The message of an error of our own, which is complete, or of a stranger's code."""
    return str(error) if isinstance(error, RlsdkError) else described(error)


def _unknown(name: str, rows: list[Row]) -> PluginNotFoundError:
    for kind, installable in FIRST_PARTY.items():
        if name in installable:
            hint = f"run `pip install {installable[name]}`"
            return PluginNotFoundError(f"{spoken(kind)} {name!r} is not installed; {hint}")
    names = sorted({row.name for row in rows})
    absent = {other: package for kind in FIRST_PARTY.values() for other, package in kind.items() if other not in names}
    if (near := nearest(name, [*names, *absent])) and not nearest(name, names):
        meant = next(other for other in absent if near.endswith(f"{other!r}?"))
        return PluginNotFoundError(f"nothing named {name!r} is installed{near} Then run `pip install {absent[meant]}`")
    return PluginNotFoundError(
        f"nothing named {name!r} is installed (installed: {', '.join(names)}){nearest(name, names)}"
    )


def _info(row: Row, registry: Registry) -> Iterator[str]:
    yield f"{row.name}: {spoken(row.kind)} of {row.source}"
    yield f"  state         {row.state}{f': {row.reason}' if row.reason else ''}"
    if isinstance(row.spec, BackendSpec):
        yield from _backend_info(row.spec, row.isolation)
        yield from _option_info(row.spec, registry)
    elif isinstance(row.spec, ComponentSpec):
        yield from _component_info(row, row.spec, registry)


def _backend_info(spec: BackendSpec, isolation: Isolation | None) -> Iterator[str]:
    yield f"  description   {spec.description}"
    yield f"  engine        {spec.engine}"
    yield f"  interface     {'.'.join(map(str, spec.interface))}"
    yield f"  capabilities  {', '.join(sorted(spec.capabilities)) or 'none'}"
    yield f"  devices       {', '.join(sorted(spec.devices))}"
    yield f"  dtypes        {', '.join(sorted(spec.dtypes))}"
    yield f"  models        {', '.join(sorted(spec.architectures or ())) or 'all that its engine runs'}"
    yield f"  processes     {spec.max_ranks if spec.max_ranks is not None else 'no limit'}"
    if spec.kind is BackendKind.ROLLOUT:
        yield f"  log-probs     {spec.log_prob_kind}"
        yield f"  weights       {'from the trainer' if spec.takes_weights else 'fixed: runs cannot train with it'}"
    for distribution, specifier in spec.engine_requires.items():
        version = isolation.versions.get(distribution) if isolation else installed_version(distribution)
        yield f"  tested with   {distribution}{specifier}; installed: {version or 'none'}"
    if isolation:
        yield f"  environment   {isolation.environment}"
        yield f"  has           {', '.join(f'{name} {version}' for name, version in isolation.versions.items())}"


def _option_info(spec: BackendSpec, registry: Registry) -> Iterator[str]:
    try:
        if (options := registry.load_options(spec)) is None:
            yield "  options       none"
            return
        from rlsdk.config.introspection.describe import describe_options

        with Guard():
            found = list(describe_options(options))
    except Exception as error:  # of a stranger's code
        yield f"  options       cannot be shown: {said(error)}"
        return
    yield f"  options       as --{spec.kind}.{spec.name}.OPTION"
    for option in found:
        default = f"default {option.default}" if option.default else "required"
        yield f"    {option.path} ({option.type}, {default})"
        yield from textwrap.wrap(option.doc, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _component_info(row: Row, spec: ComponentSpec, registry: Registry) -> Iterator[str]:
    yield f"  description   {spec.description}"
    yield f"  target        {spec.target if isinstance(spec.target, str) else shown(spec.target)}"
    if not row.state.usable or not isinstance(row.kind, ComponentKind):
        return
    try:
        with Guard():
            signature = str(inspect.signature(registry.component(row.kind, row.name)))
    except Exception as error:  # of a stranger's code
        yield f"  signature     cannot be shown: {said(error)}"
        return
    yield f"  signature     {row.name}{signature}"
