"""Fields of prompt and answer that nobody named, ShareGPT's conversations, and files of other names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rlsdk.data import DataRow, PromptFormat, load_rows
from rlsdk.interfaces import ConfigError, DataError
from rlsdk.registry import ComponentKind, Registry

REGISTRY = Registry.discover({})


def load(path: Path) -> list[DataRow]:
    kinds = REGISTRY.usable(ComponentKind.DATASET)
    return load_rows(str(path), kinds=kinds, resolve=lambda kind: REGISTRY.component(ComponentKind.DATASET, kind))


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"question": "q", "answer": "a", "prompt": "other"}, "q", "a"),
        ({"prompt": "p", "completion": "c"}, "p", "c"),
        ({"problem": "p", "solution": "s", "label": 3}, "p", "s"),
        ({"instruction": "i", "output": "o"}, "i", "o"),
        ({"prompt": "p", "reward_model": {"ground_truth": "2"}}, "p", "2"),
        ({"question": None, "prompt": "p", "answer": None, "target": "t"}, "p", "t"),
        ({"prompt": "p", "text": "unknown"}, "p", None),
    ],
)
def test_the_first_known_field_is_taken(tmp_path: Path, row: Any, prompt: str, answer: str | None) -> None:
    (selected,) = PromptFormat().select(load(written(tmp_path / "rows.jsonl", row)))
    assert (selected.prompt, selected.answer) == (prompt, answer)


def test_a_field_that_is_named_is_taken_whatever_the_others_are_called(tmp_path: Path) -> None:
    rows = load(written(tmp_path / "rows.jsonl", {"prompt": "p", "mine": "m", "solution": "s", "right": "r"}))
    (selected,) = PromptFormat(prompt_field="mine", answer_field="right").select(rows)
    assert (selected.prompt, selected.answer) == ("m", "r")
    with pytest.raises(DataError, match="row has no field 'question'"):
        PromptFormat(prompt_field="question").select(rows)


def test_a_row_without_the_field_of_the_first_row_is_an_error_and_takes_no_other(tmp_path: Path) -> None:
    rows = load(written(tmp_path / "rows.jsonl", {"problem": "p"}, {"prompt": "q"}))
    with pytest.raises(DataError, match=r"rows.jsonl:2: row has no field 'problem'"):
        PromptFormat().select(rows)


@pytest.mark.parametrize("names", [("human", "gpt"), ("user", "assistant"), ("user", "chatgpt"), ("human", "model")])
def test_conversations_of_sharegpt_are_messages(tmp_path: Path, names: tuple[str, str]) -> None:
    asks, answers = names
    turns = [
        {"from": "system", "value": "be brief"}, {"from": asks, "value": "one"}, {"from": answers, "value": "1"},
        {"from": asks, "value": "two"}, {"from": answers, "value": "2"},
    ]  # fmt: skip
    (selected,) = PromptFormat().select(load(written(tmp_path / "rows.jsonl", {"conversations": turns, "label": 7})))
    assert selected.prompt == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"}, {"role": "user", "content": "two"},
    ]  # fmt: skip
    assert (selected.answer, selected.is_split) == ("2", True), "the last turn is the answer, not a field `label`"


def test_a_turn_of_an_unknown_speaker_is_refused_by_row(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "one"}, {"from": "function_call", "value": "{}"}]
    with pytest.raises(DataError, match=r"rows.jsonl:1: prompt field 'conversations' must be .*human or gpt"):
        PromptFormat().select(load(written(tmp_path / "rows.jsonl", {"conversations": turns})))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "ROWS.JSONL.GZ", "rows.ndjson", "rows.jsonl"])
def test_lines_are_read_under_each_of_their_names(tmp_path: Path, name: str) -> None:
    plain = written(tmp_path / "plain.jsonl", {"question": "q1"}, {"question": "q2"})
    path = tmp_path / name
    path.write_bytes(gzip.compress(plain.read_bytes()) if name.lower().endswith("gz") else plain.read_bytes())
    assert [row.row["question"] for row in load(path)] == ["q1", "q2"]


@pytest.mark.parametrize("damage", ["cut", "plain text", "flipped"])
def test_a_damaged_archive_is_named(tmp_path: Path, damage: str) -> None:
    packed = gzip.compress(b'{"question": "q"}\n' * 1000)
    path = tmp_path / "rows.jsonl.gz"
    flipped = packed[:60] + bytes([packed[60] ^ 255]) + packed[61:]
    path.write_bytes({"cut": packed[:-20], "plain text": b'{"question": "q"}\n', "flipped": flipped}[damage])
    with pytest.raises(DataError, match=r"rows.jsonl.gz"):
        load(path)


@pytest.mark.parametrize("indent", [None, 2])
def test_the_only_field_with_objects_holds_the_rows(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": [1, 2], "data": [{"question": "q"}], "empty": []}, indent=indent))
    assert [row.row["question"] for row in load(path)] == ["q"]


def test_one_line_with_a_conversation_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}]}))
    assert [*load(path)[0].row] == ["messages"]


@pytest.mark.parametrize("template", ["Solve it.", "", "{ prompt }", "{{prompt}}"])
def test_a_template_without_a_field_is_refused(tmp_path: Path, template: str) -> None:
    rows = load(written(tmp_path / "rows.jsonl", {"question": "q"}))
    with pytest.raises(ConfigError, match=r"holds no field of a row.*\['question'\]"):
        PromptFormat(prompt_template=template).select(rows)
