"""Turns of the assistant: where the chat template ends them, and that answers are what it makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from rlsdk.data import AnswerEncoder, AnswerEnds, ChatTemplate, PromptDataset, PromptFormat, answer_notes, learned_reply
from rlsdk.data.answers import Answer
from rlsdk.interfaces import DataError

from .chat_families import CHATML_TOOLS, FAMILIES, end_of, reference_ids, tokenizer_of
from .conftest import make_tokenizer, rows_of

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def learned(tokenizer: Any, row: dict[str, Any], end: int, **form: Any) -> tuple[tuple[int, ...], Answer]:
    """The tokens of a row's prompt, and its answer."""
    fields = PromptFormat(**form)
    prompts = PromptDataset(rows_of(row), tokenizer, fields)
    encoder = AnswerEncoder(tokenizer, 999, AnswerEnds(learned=end, stops=(end,)), form=fields)
    reply = learned_reply(prompts.rows[0], fields.answer_field)
    assert reply is not None
    return prompts[0].prompt_ids, encoder.encode_replies(prompts.rows, [reply], "{answer}")[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_a_turn_is_the_token_with_which_the_template_ends_it(name: str) -> None:
    tokenizer = tokenizer_of(name)
    found = ChatTemplate(tokenizer).end
    assert found == (None if name == "nothing" else end_of(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_and_answer_are_the_conversation_that_the_template_makes(name: str) -> None:
    """Up to the token that ends the turn; a line break behind it is not learned."""
    tokenizer, turns = tokenizer_of(name), [
        {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 3?"}, {"role": "assistant", "content": "It is 5."},
    ]  # fmt: skip
    prompt, answer = learned(tokenizer, {"messages": turns}, end_of(name), prompt_field="messages")
    whole = reference_ids(tokenizer, turns)
    ids = [*prompt, *answer.token_ids]
    assert ids[-1] == end_of(name)
    if name == "nothing":
        ids = ids[:-1]
    assert whole[: len(ids)] == ids
    assert tokenizer.decode(whole[len(ids) :]).replace("<end>", "").strip() == ""
    assert list(prompt) == reference_ids(tokenizer, turns[:-1], add_generation_prompt=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_text_ends_as_the_template_ends_a_turn(name: str) -> None:
    tokenizer = tokenizer_of(name)
    _, answer = learned(tokenizer, {"question": "1+1?", "answer": "2"}, end_of(name))
    assert list(answer.token_ids) == [*tokenizer("2", add_special_tokens=False)["input_ids"], end_of(name)]


@pytest.mark.parametrize("completion", [[{"role": "assistant", "content": "2"}], "2"])
def test_a_completion_is_learned_as_text_or_as_a_message(completion: Any) -> None:
    tokenizer, asked = tokenizer_of("chatml"), [{"role": "user", "content": "1+1?"}]
    row = {"prompt": asked, "completion": completion}
    form = {"prompt_field": "prompt", "answer_field": "completion"}
    prompt, answer = learned(tokenizer, row, end_of("chatml"), **form)
    whole = reference_ids(tokenizer, [*asked, {"role": "assistant", "content": "2"}])
    assert [*prompt, *answer.token_ids] == whole[:-1]
    assert PromptDataset(rows_of(row), tokenizer, PromptFormat(**form))[0].answer == "2"


def test_tool_calls_reasoning_and_tools_reach_prompt_and_answer() -> None:
    tokenizer = tokenizer_of("chatml")
    turns = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "tool_call_id": "x", "content": "3"},
        {"role": "assistant", "content": "", "reasoning_content": "once more", "tool_calls": [CALL]},
    ]
    variables = {"thinking": True}
    prompt, answer = learned(
        tokenizer, {"messages": turns, "tools": [TOOL]}, end_of("chatml"),
        prompt_field="messages", chat_template_kwargs=variables,
    )  # fmt: skip
    whole = reference_ids(tokenizer, turns, tools=[TOOL], **variables)
    assert [*prompt, *answer.token_ids] == whole[:-1]
    assert "once more" in tokenizer.decode(answer.token_ids)
    assert tokenizer.decode(whole).count('"arguments": {"a": 1, "b": 2}') == 2
    assert answer.unread == ()


def test_tools_are_read_as_a_list_or_as_its_json_text() -> None:
    import json

    made = [
        PromptDataset(rows_of({"question": "1+2?", "tools": tools}), tokenizer_of("chatml"))[0].text
        for tools in ([TOOL], json.dumps([TOOL]))
    ]
    assert made[0] == made[1]
    assert '"name": "add"' in made[0]


def test_fields_that_the_template_does_not_show_are_counted_by_name() -> None:
    turns = [{"role": "user", "name": "ann", "content": "hi", "weight": None}]
    rows = rows_of({"question": turns, "tools": [TOOL]}, {"question": "yo"})
    said = PromptDataset(rows, tokenizer_of("gemma")).report.line()
    assert "1 with 'name', which the chat template does not show to the model (first made.jsonl:1)" in said
    assert "1 with 'tools', which the chat template does not show" in said
    assert "weight" not in said
    without = PromptDataset(rows_of({"question": "yo", "tools": [TOOL]}), make_tokenizer()).report.line()
    assert "1 with 'tools', which" in without
    answer = {"role": "assistant", "content": "hey", "reasoning_content": "greet"}
    _, found = learned(tokenizer_of("gemma"), {"question": "hi", "answer": [answer]}, end_of("gemma"))
    assert found.unread == ("reasoning_content",)
    assert answer_notes([found], ["x:1"], special_allowed=False) == [
        "1 with 'reasoning_content', which the chat template does not show (first x:1)"
    ]


def test_a_turn_of_which_nothing_would_be_left_is_refused() -> None:
    called = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    asked = [*called, {"role": "tool", "content": "3"}]
    with pytest.raises(DataError, match=r"made.jsonl:1: message 2 has no content.*does not read its \['tool_calls'\]"):
        PromptDataset(rows_of({"question": asked}), tokenizer_of("phi"))
    with pytest.raises(DataError, match=r"made.jsonl:1: message 2 has no content"):
        learned(tokenizer_of("phi"), {"messages": called}, end_of("phi"), prompt_field="messages")


def test_fields_of_an_answer_need_a_template_that_shows_them() -> None:
    answer = [{"role": "assistant", "content": "2", "reasoning_content": "easy"}]
    with pytest.raises(DataError, match=r"\['reasoning_content'\] of the answer cannot be learned: no chat template"):
        learned(make_tokenizer(), {"question": "1+1?", "answer": answer}, 256)
    changes = make_tokenizer(
        chat_template=CHATML_TOOLS.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    )
    with pytest.raises(DataError, match="the chat template changes the prompt where an answer follows it"):
        learned(changes, {"question": "1+1?", "answer": answer}, 256)
    prompt, found = learned(changes, {"question": "1+1?", "answer": [{"role": "assistant", "content": "2"}]}, 256)
    assert changes.decode([*prompt, *found.token_ids]).endswith("<think>2<end>")


def test_special_tokens_of_an_answer_are_text_and_the_turn_ends_once() -> None:
    turns = [{"role": "user", "content": "say <|im_end|>"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    end = end_of("chatml")
    _, answer = learned(tokenizer_of("chatml"), {"messages": turns}, end, prompt_field="messages")
    assert answer.token_ids.count(end) == 1
    assert answer.special
    assert tokenizer_of("chatml").decode(answer.token_ids) == "a<|im_end|>b<|im_end|>"
    assert answer_notes([answer], ["x:1"], special_allowed=False) == [
        "1 with special tokens in the text, encoded as text (first x:1)"
    ]
    schema = {"type": "function", "function": {"name": "<|im_end|>"}}
    made = PromptDataset(rows_of({"question": "hi", "tools": [schema]}), tokenizer_of("chatml"))
    assert made.report.num_special == 1
    assert made[0].prompt_ids.count(end) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [{"role": "assistant", "content": "2"}]}, "and nothing stands before it"),
        (
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "2"}], "answer": "2"},
            "the row has its answer in another field",
        ),
    ],
)
def test_a_prompt_that_ends_in_the_assistants_turn_is_refused_where_that_is_not_the_answer(
    row: dict[str, Any], said: str
) -> None:
    with pytest.raises(
        DataError, match=f"made.jsonl:1: prompt field 'messages' ends in a turn of the assistant, .*{said}"
    ):
        PromptFormat(prompt_field="messages").select(rows_of(row))


def test_an_answer_of_several_messages_is_refused_where_it_is_learned() -> None:
    several = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    (row,) = PromptFormat().select(rows_of({"question": "?", "answer": several}))
    with pytest.raises(DataError, match=r"'answer' must be a text, or one message of the assistant, got 2 messages"):
        learned_reply(row, "answer")


def test_conversations_say_what_became_the_answer_and_what_is_only_read() -> None:
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    made = PromptDataset(rows_of({"messages": turns}), tokenizer_of("gemma"), PromptFormat(prompt_field="messages"))
    assert "1 conversations end in the assistant's turn, which is the answer" in made.report.line()
    assert "1 earlier turns of the assistant belong to the prompts" in made.report.line()


READS_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}|{% endfor %}</{{ m.role }}>"
    "{% endfor %}"
)


def test_parts_of_text_reach_the_template_in_the_form_that_it_reads() -> None:
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]
    rows = rows_of({"question": [{"role": "user", "content": parts}]}, {"question": "c"})
    assert [prompt.text for prompt in PromptDataset(rows, make_tokenizer(chat_template=READS_PARTS))] == [
        "<user>a|b|</user>", "<user>c|</user>",
    ]  # fmt: skip
    assert PromptDataset(rows, tokenizer_of("gemma"))[0].text.startswith("<bos><start_of_turn>user\nab<end_of_turn>")


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": "x"}, {"type": "audio"}, "text", {"text": "a"}])
def test_a_part_that_is_no_text_is_refused_by_its_type(part: Any) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(DataError, match=r"made.jsonl:1: prompt field 'question': message 1 holds a part of type"):
        PromptFormat().select(rows_of({"question": turns}))
