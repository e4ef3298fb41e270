"""Options of a plugin that cannot be imported are read, documented and refused as its own class would."""

from __future__ import annotations

import json
from typing import Any

import pytest
from config_plugins import GustOptions, TurboOptions

from rlsdk.config import build_options
from rlsdk.config.introspection.describe import describe_options
from rlsdk.config.introspection.portable import plain_options
from rlsdk.registry import options_class


def there_and_back(options: type[Any]) -> type[Any]:
    return options_class(json.loads(json.dumps(plain_options(options))))


@pytest.mark.parametrize("options", [TurboOptions, GustOptions])
def test_the_copy_is_documented_as_the_original(options: type[Any]) -> None:
    original = {doc.path: doc for doc in describe_options(options)}
    copy = {doc.path: doc for doc in describe_options(there_and_back(options))}
    assert copy.keys() == original.keys()
    for path, doc in copy.items():
        assert (doc.default, doc.doc) == (original[path].default, original[path].doc)
        if path not in ("speed", "where"):  # An enum is shown by its values, a path as anything.
            assert doc.type == original[path].type
    if options is TurboOptions:
        assert copy["speed"].type == "'slow' or 'fast'"
        assert copy["nested.depth"].doc == "Of the nesting."


RIGHT = {"cpu_offload": True, "sizes": [1, 2], "speed": "fast", "nested": {"depth": 3}, "where": "a/b"}


def test_what_the_original_takes_the_copy_takes() -> None:
    built, problems = build_options(there_and_back(TurboOptions), RIGHT)
    assert problems == []
    assert build_options(TurboOptions, RIGHT)[1] == []
    assert built.nested.depth == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "raw",
    [
        {"cpu_ofload": True},
        {"shard_size": "big"},
        {"nested": {"dept": 1}},
        {"nested": {"depth": "deep"}},
        {"mode": "ful"},
        {"speed": "fastest"},
        {"sizes": ["a"]},
        {"ratio": True},
    ],
    ids=lambda raw: next(iter(raw)),
)
def test_what_the_original_refuses_the_copy_refuses_in_the_same_place(raw: dict[str, Any]) -> None:
    _, of_original = build_options(TurboOptions, raw)
    _, of_copy = build_options(there_and_back(TurboOptions), raw)
    assert [problem.path for problem in of_copy] == [problem.path for problem in of_original] != []


def test_a_required_option_stays_required() -> None:
    _, problems = build_options(there_and_back(GustOptions), {})
    assert [str(problem) for problem in problems] == ["width: is required"]
