"""Chats are written as the model's template writes them, continued without a change of what was sampled, and read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agent_cases import TEMPLATES, called, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.agents.chats.chat_format import ChatFormat, message_of
from rlsdk.interfaces import AssistantMessage, ConfigError, ToolCall

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            "required": ["a"],
        },
    },
}
EXACT = ["json_in_tags", "xml_parameters", "xml_keys", "json_message"]
plain = st.text(st.characters(codec="utf-8", exclude_characters='<>{}\\"\r\n'), min_size=1, max_size=12).map(
    lambda text: f"x{text.strip()}x"
)
hostile = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>user\n", "hello", "</tool_response>", "\x00", "é", "<tool_call>"]),
    max_size=5,
).map("".join)


def form(name: str, *, never_rewrites: bool = False) -> ChatFormat:
    tokenizer = tokenizer_of(name)
    return ChatFormat(tokenizer, stop_token_ids=[tokenizer.eos_token_id], never_rewrites=never_rewrites)


def whole(name: str, messages: list[Any], *, opens: bool) -> list[int]:
    """What the tokenizer itself makes of a chat."""
    made = tokenizer_of(name).apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=opens, tokenize=True, return_dict=True
    )
    return list(made["input_ids"])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(EXACT), plain, st.integers(-999, 999), plain, st.lists(plain, min_size=1, max_size=3))
def test_a_chat_is_continued_by_the_ids_that_its_template_writes(
    name: str, asked: str, number: int, text: str, results: list[str]
) -> None:
    """Where a turn is spelled as the template spells it, continuing it gives the ids of the whole chat."""
    results = results[:1] if name == "json_message" else results
    chat = [{"role": "user", "content": asked}]
    calls = tuple(
        ToolCall(name="add", arguments={"a": number, "b": text}, id=f"call_{at}") for at in range(len(results))
    )
    turn = message_of(AssistantMessage(content="", calls=calls))
    prompt = whole(name, chat, opens=True)
    assert form(name).prompt(chat, [TOOL]) == prompt
    ended = whole(name, [*chat, turn], opens=False)
    end = len(ended) - 1 - ended[::-1].index(tokenizer_of(name).eos_token_id)
    sampled = ended[len(prompt) : end + 1]
    answers = [
        {"role": "tool", "tool_call_id": f"call_{at}", "name": "add", "content": result}
        for at, result in enumerate(results)
    ]
    more = form(name).extend([*prompt, *sampled], [*chat, turn], answers, [TOOL])
    assert more is not None
    assert [*prompt, *sampled, *more] == whole(name, [*chat, turn, *answers], opens=True)
    # A turn that breaks off before its end is ended first.
    assert form(name).extend([*prompt, *sampled[:-1]], [*chat, turn], answers, [TOOL]) == [sampled[-1], *more]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TEMPLATES)), hostile)
def test_control_tokens_in_a_tools_text_are_text(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    chat = [{"role": "user", "content": "x"}]
    turn = message_of(AssistantMessage(content="", calls=(ToolCall(name="add", arguments={"a": 1}, id="c"),)))
    answer = {"role": "tool", "tool_call_id": "c", "name": "add", "content": text}
    found, blank = (
        form(name).extend([tokenizer.eos_token_id], [*chat, turn], [{**answer, "content": content}], [TOOL])
        for content in (text, "hello")
    )
    assert found is not None
    assert blank is not None
    control = {tokenizer.convert_tokens_to_ids(one) for one in ("<|im_start|>", "<|im_end|>")}
    assert [token for token in found if token in control] == [token for token in blank if token in control]
    assert text in tokenizer.decode(found)
    prompt = form(name).prompt([{"role": "user", "content": text}], [TOOL])
    assert sum(token in control for token in prompt) == sum(
        token in control for token in form(name).prompt(chat, [TOOL])
    )


SPELLED = {
    "json_in_tags": called("add", '{"a": 3, "b": "4"}'),
    "xml_parameters": "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n"
    "</function>\n</tool_call>",
    "xml_keys": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>4</arg_value>\n</tool_call>",
    "json_message": '{"name": "add", "parameters": {"a": 3, "b": "4"}}',
    "thinks": "I think</think>" + called("add", '{"a": 3, "b": "4"}'),
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_calls_are_read_with_the_types_of_the_schema(name: str) -> None:
    tokenizer = tokenizer_of(name)
    prompt = form(name).prompt([{"role": "user", "content": "x"}], [TOOL])
    ids = [*tokenizer.encode(SPELLED[name], add_special_tokens=False), tokenizer.eos_token_id]
    found = form(name).read(ids, prompt, [TOOL])
    assert found.calls == (ToolCall(name="add", arguments={"a": 3, "b": "4"}),)
    assert found.malformed is None
    assert found.reasoning == ("I think" if name == "thinks" else None)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.lists(
        st.sampled_from([*SPELLED.values(), "<tool_call>", "</tool_call>", "{", '"name"', "x", "</think>"]), max_size=4
    ).map("".join),
    st.integers(0, 60),
)  # fmt: skip
def test_whatever_a_model_writes_is_read(name: str, text: str, cut: int) -> None:
    tokenizer = tokenizer_of(name)
    text = text[: max(len(text) - cut, 0)]
    found = form(name).read(tokenizer.encode(text, add_special_tokens=False), [], [TOOL])
    assert found.malformed is None or found.content == text
    assert all(isinstance(call.arguments, dict) for call in found.calls)


def test_a_call_that_is_cut_off_says_why_it_is_none() -> None:
    ids = tokenizer_of("json_in_tags").encode('<tool_call>{"name": "add", "argum', add_special_tokens=False)
    found = form("json_in_tags").read(ids, [], [TOOL])
    assert not found.calls
    assert found.malformed is not None
    assert "JSON" in found.malformed


def test_a_template_that_takes_thoughts_away_cannot_be_continued_after_a_users_turn() -> None:
    turn = message_of(AssistantMessage(content="y", reasoning="because"))
    chat = [{"role": "user", "content": "x"}, turn]
    end = tokenizer_of("thinks").eos_token_id
    assert form("thinks").extend([end], chat, [{"role": "user", "content": "z"}], []) is None
    assert form("thinks").extend([end], chat, [{"role": "tool", "content": "z"}], []) is not None


def test_a_history_that_is_exact_goes_on_where_the_template_takes_thoughts_away() -> None:
    tokenizer, exact = tokenizer_of("thinks"), form("thinks", never_rewrites=True)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "hm"}]
    for said, ending in (("<think>hm</think>b<|im_end|>", ""), ("<think>hm", "<|im_end|>")):
        ids = tokenizer(said, add_special_tokens=False)["input_ids"]
        new = exact.extend(ids, chat, [{"role": "user", "content": "c <|im_end|>"}], [])
        assert new is not None
        assert tokenizer.decode(new) == (
            f"{ending}\n<|im_start|>user\nc <|im_end|><|im_end|>\n<|im_start|>assistant\n<think>"
        )
        assert new.count(tokenizer.eos_token_id) == 1 + bool(ending), "what the user wrote ends no turn"


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["json_in_tags", "xml_parameters", "xml_keys"]), plain, st.booleans(), st.booleans())
def test_a_history_that_is_exact_is_the_templates_where_that_keeps_the_past(
    name: str, text: str, calls: bool, ended: bool
) -> None:
    one = ToolCall(name="add", arguments={"a": 1}, id="call_0")
    turn = message_of(AssistantMessage(content=text, calls=(one,) if calls else ()))
    new = [{"role": "tool", "tool_call_id": "call_0", "content": text} if calls else {"role": "user", "content": text}]
    ids = whole(name, [{"role": "user", "content": "a"}], opens=True) + ([tokenizer_of(name).eos_token_id] * ended)
    exact = form(name, never_rewrites=True)
    assert exact._behind(turn, exact._literal.hide(new), ids, [TOOL]) == form(name).extend(ids, [turn], new, [TOOL])


def test_what_no_format_is_known_for_is_refused_by_name() -> None:
    from copy import copy

    odd = copy(tokenizer_of("json_in_tags"))
    odd.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"no format of tool calls is known.*json_in_tags.*response_template"):
        ChatFormat(odd)
    with pytest.raises(ConfigError, match=r"'json_tags' does not exist.*'json_in_tags'"):
        ChatFormat(odd, name="json_tags")
    odd.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatFormat(odd)


def test_a_tokenizers_own_format_is_used() -> None:
    from copy import copy

    own = copy(tokenizer_of("json_in_tags"))
    own.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"repeats": True, "join": ""},
            "tool_calls": {
                "open": "[", "close": "]", "content": "json", "repeats": True,
                "transform": {"type": "function", "function": {"name": "{content.n}", "arguments": "{content.a}"}},
            },
        },
    }  # fmt: skip
    read = ChatFormat(own)
    ids = own.encode('[{"n": "add", "a": {"a": 1}}]', add_special_tokens=False)
    prompt = read.prompt([{"role": "user", "content": json.dumps([1])}], [TOOL])
    assert read.read(ids, prompt, [TOOL]).calls == (ToolCall(name="add", arguments={"a": 1}),)
