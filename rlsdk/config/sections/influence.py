"""Which settings samples and their grades depend on: all, but for the fields marked with `NO_INFLUENCE`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlsdk.config.sections.base import Section
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces.settings import NO_INFLUENCE


def influential_settings(config: RunConfig) -> dict[str, Any]:
    """Every setting on which training samples and their grades depend and that is not the default, by dotted path.

    Weights depend on settings, and samples on weights: so settings of the update count as well.
    """
    found = dict(_of_section(config, ""))
    if config.learning_rate_decays:
        found["trainer.steps"] = config.trainer.steps
    return found


def _of_section(section: Section, path: str) -> Iterator[tuple[str, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if NO_INFLUENCE not in field.metadata and value != field.get_default(call_default_factory=True):
            yield from _of_value(value, f"{path}{name}")


def _of_value(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Section):
        yield from _of_section(value, f"{path}.")
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _of_value(item, f"{path}.{key}")
    elif isinstance(value, tuple | list) and any(isinstance(item, Section) for item in value):
        for at, item in enumerate(value):
            yield from _of_value(item, f"{path}.{at}")
    else:
        yield path, list(value) if isinstance(value, tuple) else value
