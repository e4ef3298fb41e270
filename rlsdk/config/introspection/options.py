"""A backend's own options: converts plain data to an instance of the class that its plugin declares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlsdk.config.introspection.fields import option_fields, section_of
from rlsdk.config.introspection.validation_errors import dotted, explain
from rlsdk.config.problem import Problem, config_error, unknown_key
from rlsdk.interfaces import BackendSpec, PluginLoadError
from rlsdk.registry import Registry


def backend_options(spec: BackendSpec, raw: Mapping[str, Any], registry: Registry) -> object | None:
    """The instance for `TrainSpec.options` or `RolloutSpec.options`; None for a backend without options."""
    if problems := options_problems(spec, raw, registry):
        raise config_error(problems)
    options = registry.load_options(spec)
    return None if options is None else build_options(options, raw)[0]


def options_problems(
    spec: BackendSpec, raw: Mapping[str, Any], registry: Registry, *, prefix: str | None = None
) -> list[Problem]:
    """Problems of a backend's options, below `prefix` (None: `train.BACKEND`)."""
    options = registry.load_options(spec)
    prefix = prefix or f"{spec.kind}.{spec.name}"
    if options is None:
        message = f"backend {spec.name!r} has no options of its own"
        return [Problem(f"{prefix}.{key}", message, value=value) for key, value in raw.items()]
    _, problems = build_options(options, raw)
    return [replace(problem, path=f"{prefix}.{problem.path}") for problem in problems]


def build_options(options: type[Any], raw: Mapping[str, Any]) -> tuple[object | None, list[Problem]]:
    """Builds an instance of a dataclass or pydantic model from plain data; paths are relative to it."""
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    try:
        problems = list(_unknown(options, raw, ()))
        # As JSON: strict types then still accept a list for a tuple, and a string for an enum or a path.
        return TypeAdapter(options).validate_json(json.dumps(raw), strict=True), problems
    except ValidationError as error:
        return None, problems + [p for p in explain(error, raw, lambda path: ()) if not p.is_unknown_key]
    except (PydanticUserError, NameError, TypeError) as error:
        name = f"{options.__module__}:{options.__qualname__}"
        raise PluginLoadError(f"the types of options {name!r} cannot be read: {error}") from error


def _unknown(options: type[Any], raw: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Problem]:
    """Problems of unknown keys, which a dataclass would ignore."""
    fields = option_fields(options)
    for key, value in raw.items():
        if key not in fields:
            yield unknown_key(dotted((*path, key)), key, sorted(fields))
            continue
        nested = section_of(fields[key])
        if nested is not None and isinstance(value, Mapping):
            yield from _unknown(nested, value, (*path, key))
