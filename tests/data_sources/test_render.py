from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.data import DataRow, PromptFormat, Template, render
from rlsdk.interfaces import ConfigError, DataError

from .conftest import rows_of


def prompt_of(row: dict[str, Any], form: PromptFormat) -> object:
    return form.select(rows_of(row))[0].prompt


def test_a_template_fills_in_fields_of_the_row_and_nothing_else() -> None:
    row = {"question": "1+1", "n": 3, "options": ["A)1", "B)2"], "deep": {"x": "y"}}
    form = PromptFormat(prompt_template="{prompt} {n} {deep.x}\n{options} \\boxed{} {{n}} {0} {a b}")
    assert prompt_of(row, form) == "1+1 3 y\nA)1\nB)2 \\boxed{} {n} {0} {a b}"


@pytest.mark.parametrize("template", ["{prompt.__class__}", "{n.real}", "{deep.keys}"])
def test_a_template_reaches_no_attribute(template: str) -> None:
    row = rows_of({"question": "secret", "n": 3, "deep": {"x": 1}})[0]
    with pytest.raises(DataError, match=r"made.jsonl:1: row has no field"):
        Template(template).fill(row, prompt="secret")


@pytest.mark.parametrize("template", ["{prompt!r}", "{prompt[0]}", "{prompt:>9}", "{}", "%s {"])
def test_what_is_no_plain_name_in_braces_stays_as_it_is(template: str) -> None:
    assert Template(template).fill(rows_of({"question": "secret"})[0], prompt="secret") == template


@given(text=st.text(), value=st.text())
def test_a_value_is_never_read_as_a_template(text: str, value: str) -> None:
    row = DataRow(row={"a": value, "b": "wrong"}, source="x:1")
    assert Template("{a}").fill(row) == value
    assert Template("{a}").fill(DataRow(row={"a": "{b}", "b": "wrong"}, source="x:1")) == "{b}"
    assert Template(text.replace("{", "")).fill(row) == text.replace("{", "")


def test_a_missing_prompt_names_file_line_fields_and_the_nearest() -> None:
    with pytest.raises(
        DataError, match=r"made.jsonl:2: row has no field 'question'; did you mean 'Question'.*'Question'"
    ):
        PromptFormat().select(rows_of({"question": "a"}, {"Question": "b", "answer": "1"}))


@pytest.mark.parametrize(
    "value", [7, None, [], ["text"], [{"role": "user"}], [{"role": "user", "content": 3}], {"a": 1}]
)
def test_a_prompt_of_the_wrong_type_names_file_and_line(value: object) -> None:
    with pytest.raises(DataError, match=r"made.jsonl:1: prompt field 'question' must be"):
        PromptFormat().select(rows_of({"question": value}))


@pytest.mark.parametrize(
    ("value", "answer"), [("5", "5"), (51.0, "51.0"), (7, "7"), (None, None), (["a", "b"], "a\nb")]
)
def test_an_answer_is_text_whatever_the_row_holds(value: object, answer: str | None) -> None:
    assert PromptFormat().select(rows_of({"question": "q", "answer": value}))[0].answer == answer


def test_a_nested_answer_is_found_by_its_path() -> None:
    rows = rows_of({"question": "q", "reward_model": {"ground_truth": "9"}})
    assert PromptFormat(answer_field="reward_model.ground_truth").select(rows)[0].answer == "9"


def test_an_answer_field_that_no_row_has_is_an_error_unless_it_is_the_default() -> None:
    assert PromptFormat().select(rows_of({"question": "q"}))[0].answer is None
    with pytest.raises(DataError, match="no field 'solutoin'; did you mean 'solution'"):
        PromptFormat(answer_field="solutoin").select(rows_of({"question": "q", "solution": "1"}))


def test_a_chat_template_is_used_where_there_is_one(tokenizer: Any, chat_tokenizer: Any) -> None:
    rows = PromptFormat().select(rows_of({"question": "hi"}))
    assert render(rows, tokenizer, PromptFormat()) == ["hi"]
    assert render(rows, chat_tokenizer, PromptFormat()) == ["<user>hi</user><assistant>"]
    assert render(rows, chat_tokenizer, PromptFormat(chat_template="never")) == ["hi"]
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        render(rows, tokenizer, PromptFormat(chat_template="always"))


def test_messages_and_a_system_prompt_need_a_chat_template(tokenizer: Any, chat_tokenizer: Any) -> None:
    turns = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    form = PromptFormat(system_prompt="be short")
    rows = form.select(rows_of({"question": turns}, {"question": "yo"}))
    assert render(rows, chat_tokenizer, form) == [
        "<system>own</system><user>hi</user><assistant>",
        "<system>be short</system><user>yo</user><assistant>",
    ]
    with pytest.raises(ConfigError, match="system_prompt 'be short' needs a chat template, but the tokenizer has none"):
        render(rows, tokenizer, form)
    with pytest.raises(ConfigError, match=r"made.jsonl:1: the prompt is a list of chat messages"):
        render(rows, tokenizer, PromptFormat())
    with pytest.raises(DataError, match=r"made.jsonl:1: .* holds chat messages, which prompt_template"):
        PromptFormat(prompt_template="Q: {prompt}").select(rows_of({"question": turns}))


def test_a_row_that_the_chat_template_refuses_is_named(chat_tokenizer: Any) -> None:
    rows = PromptFormat().select(rows_of({"question": "fine"}, {"question": "refuse me"}))
    with pytest.raises(DataError, match=r"made.jsonl:2: the chat template refuses this row: .*no such thing"):
        render(rows, chat_tokenizer, PromptFormat())
