from __future__ import annotations

from typing import Any

import pytest

from rlsdk.rewards.text.schema import json_schema

from .conftest import sample

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/years"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"years": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ('{"name": "a", "age": 3}', True),
        ('```json\n{"name": "a"}\n```', True),
        ('Here it is:\n```\n{"name": "a"}\n```\nDone.', True),
        ('```json\n{"age": 1}\n```\nno:\n```json\n{"name": "a"}\n```', True),
        ('<think>{"age": 1}</think>{"name": "a"}', True),
        ('<answer>{"name": "a"}</answer>', True),
        ('<think>so\n```json\n{"name": "a"}\n```\n', False),
        ('<think>so\n```json\n{"name": "a"}\n```\n</think>```json\n{"age": 1}\n```', False),
        ('{"name": "a", "age": -1}', False),
        ('{"name": "a", "age": 1.5}', False),
        ('{"age": 3}', False),
        ('{"name": "a", "more": 1}', False),
        ('{"name": "a"} and more', False),
        ('so {"name": "a"}', False),
        ('{"name": "a", "name": "b"}', False),
        ('{"name": "a", "age": NaN}', False),
        ("{'name': 'a'}", False),
        ('{"name": "a"', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_only_json_that_the_schema_allows_is_right(response: str, right: bool) -> None:
    assert json_schema(sample(response), schema=SCHEMA) == right


def test_a_row_may_hold_its_own_schema_as_an_object_or_as_text() -> None:
    rows: list[dict[str, Any]] = [{"schema": {"type": "integer"}}, {"schema": '{"type": "integer"}'}]
    for row in rows:
        assert json_schema(sample("3", row=row)) == 1.0
        assert json_schema(sample('"3"', row=row)) == 0.0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "no JSON schema in 'schema'"),
        ({"schema": "{"}, "is not valid JSON"),
        ({"schema": {"type": "no"}}, "not a JSON schema"),
    ],
)
def test_a_row_without_a_schema_is_an_error(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        json_schema(sample("3", row=row))


def test_nothing_is_fetched_for_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(ValueError, match=r"nothing is fetched: .*example"):
        json_schema(sample("3"), schema={"$ref": "http://example.invalid/s.json"})
