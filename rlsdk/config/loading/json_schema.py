"""The configuration as a JSON schema, with which an editor completes, explains and checks a YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

from rlsdk.config.introspection.describe import option_texts
from rlsdk.config.sections.role_kinds import OWN_SECTIONS
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces import BackendKind, BackendSpec, PluginError
from rlsdk.registry import Registry

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema(registry: Registry) -> dict[str, Any]:
    """The schema of a run's configuration, with the options of every installed backend.

    `rlsdk plan`, not the schema, checks values that depend on others and names that must be registered.
    """
    schema = RunConfig.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    for kind in BackendKind:
        # Sections that may contain the backend's options under its name.
        sections = [RunConfig.model_fields[name].annotation for name, own in OWN_SECTIONS.items() if own is kind]
        for spec in _backends(registry, kind):
            options = _options(spec, registry, definitions)
            for section in sections:
                if (
                    options is not None
                    and (definition := definitions.get(getattr(section, "__name__", ""))) is not None
                ):
                    definition["properties"].setdefault(spec.name, options)
    rewards = schema["properties"]["rewards"]
    rewards["items"] = {"anyOf": [rewards["items"], {"type": "string", "description": "Its name, or file.py:fn."}]}
    return {"$schema": DIALECT, "$id": "rlsdk-run", **schema, "title": "A run of rlsdk"}


def _backends(registry: Registry, kind: BackendKind) -> Iterator[BackendSpec]:
    for row in registry.rows():
        if isinstance(row.spec, BackendSpec) and row.spec.kind is kind:
            yield row.spec


def _options(spec: BackendSpec, registry: Registry, definitions: dict[str, Any]) -> Mapping[str, Any] | None:
    """Schema of a backend's own options; its definitions are added to `definitions`. None: it has no options, or they
    cannot be read."""
    try:
        options = registry.load_options(spec)
        if options is None:
            return None
        prefix = f"{spec.kind.value}.{spec.name}."
        schema = TypeAdapter(options).json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
    except (PluginError, TypeError, NameError):
        return None
    definitions |= {f"{prefix}{name}": one for name, one in schema.pop("$defs", {}).items()}
    for name, text in option_texts(options).items():
        if name in schema.get("properties", {}):
            schema["properties"][name].setdefault("description", text)
    return {**schema, "additionalProperties": False, "description": f"Options of the backend {spec.name}."}
