"""Mistakes in YAML, in words: where, what, and the line."""

from __future__ import annotations

import pytest

from rlsdk.config.loading.yaml_text import read_yaml
from rlsdk.interfaces import ConfigError


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("model: {path: a}\ndata: train: b", 2, "a second ': ' on one line"),
        ("model:\n  path: a\n   dtype: b", 3, "indented too far"),
        ("trainer:\n  steps\n  seed: 1", 3, "a line without ': '|a second ': ' on one line"),
        ("trainer:\n\tsteps: 1", 2, "a tab; lines are indented with spaces"),
        ("data: @file", 1, "a plain value cannot start with @; put it in quotes"),
        ("trainer:\n    steps: 1\n  seed: 1", 3, "indented otherwise than those it belongs to"),
        ("rewards: [a, b", 1, "not closed: ',' or ']' is missing"),
        ("trainer: {steps: 1", 1, "not closed: ',' or '}' is missing"),
        ("data: {train: 'a}", 1, "a quote or bracket that is not closed"),
        ("data: {train: *.jsonl}", 1, "a plain value cannot start with '\\*'; put it in quotes"),
        ('data: {prompt_template: "\\d"}', 1, "an unknown escape in double quotes"),
        ("model: {path: ${MODEL}}", 1, "environment variables such as ..NAME. are not replaced"),
        ("a: 1\n---\nb: 2", 2, "more than one document"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, line: int, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^f\.yaml:\d+: .*({said}).*; expected YAML$") as caught:
        read_yaml(text, "f.yaml")
    assert int(str(caught.value).split(":")[1]) in (line, line + 1)


def test_the_line_is_shown() -> None:
    with pytest.raises(ConfigError, match=r"f.yaml:2: .*: 'data: train: b'; expected YAML"):
        read_yaml("model: {path: a}\ndata: train: b", "f.yaml")
