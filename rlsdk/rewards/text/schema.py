"""Reward for responses that must be JSON that follows a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.rewards.functions.load import checks_rows, prepared_by
from rlsdk.rewards.text.answer import without_thoughts
from rlsdk.rewards.text.texts import answer_text

MAX_CHARS = 262_144
"""Longer responses are not parsed."""

_FENCED = re.compile(r"```(?:json|JSON)?[ \t]*+\n(.*?)\n?```", re.DOTALL)


def _import_jsonschema() -> None:
    import jsonschema  # noqa: F401


@checks_rows
@prepared_by(_import_jsonschema)
def json_schema(sample: RewardSample, *, schema: Mapping[str, Any] | None = None, field: str = "schema") -> float:
    """Returns 1 if the response is JSON that is valid under the schema, else 0.

    The JSON is the response's last fenced block, the content of the `<answer>` tags, or the whole response without its
    thoughts. Additional text, NaN, infinities and duplicate keys are not valid JSON here. References inside the schema
    are resolved; nothing is fetched.

    Args:
        sample: its row holds the schema, unless `schema` is given.
        schema: one schema for all rows.
        field: field of the row with the schema, as an object or as JSON text.

    Raises:
        ValueError: the row has no schema, it is not valid, or it has a reference to outside of itself.
        ConfigError: `schema` is not valid.
    """
    from referencing.exceptions import Unresolvable

    validator = _validator(json.dumps(_schema_of(sample, field))) if schema is None else _given(schema)
    text = _json_text(sample.response)
    if len(text) > MAX_CHARS:
        return 0.0
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
        return float(validator.is_valid(value))
    except (ValueError, RecursionError):
        return 0.0
    except Unresolvable as error:
        raise ValueError(f"the schema has a reference to outside of itself, and nothing is fetched: {error}") from error


def _given(schema: Mapping[str, Any]) -> Any:
    try:
        return _validator(json.dumps(schema))
    except ValueError as error:
        raise ConfigError(f"schema is {error}") from error


def _schema_of(sample: RewardSample, field: str) -> Any:
    loaded = sample.row.get(field)
    try:
        loaded = json.loads(loaded) if isinstance(loaded, str) else loaded
    except ValueError as error:
        raise ValueError(f"the data row's {field!r} is not valid JSON: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"the data row has no JSON schema in {field!r}; set the reward's option 'field' or 'schema'")
    return loaded


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    """Builds a validator. Raises ValueError if the schema is not valid.

    The registry is empty, because the default one fetches references from the network.
    """
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    loaded = json.loads(schema)
    kind = validator_for(loaded, default=Draft202012Validator)
    try:
        kind.check_schema(loaded)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from error
    return kind(loaded, registry=Registry())


def _json_text(response: str) -> str:
    fenced = _FENCED.findall(without_thoughts(response))
    return fenced[-1] if fenced else answer_text(response)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("duplicate key")
    return keys
