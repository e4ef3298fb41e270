"""Preference pairs: the prompt is what both conversations begin with, whatever form the row has."""

from __future__ import annotations

from typing import Any

import pytest

from rlsdk.data import AnswerEncoder, AnswerEnds, PairFields, PromptDataset, PromptFormat
from rlsdk.interfaces import DataError

from .chat_families import FAMILIES, end_of, reference_ids, tokenizer_of
from .conftest import make_tokenizer, rows_of


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


TURNS = [user("q1"), assistant("a1"), user("q2")]
GOOD, BAD = assistant("good"), assistant("bad")
EARLIER = [*TURNS, GOOD]


def form_of(**fields: Any) -> PromptFormat:
    return PromptFormat(pair=PairFields(chosen="chosen", rejected="rejected"), **{"prompt_field": "prompt", **fields})


def ids_of(row: dict[str, Any], name: str = "chatml", **fields: Any) -> list[list[int]]:
    """Tokens of prompt and answer, of the better one and of the worse one."""
    form, end, tokenizer = form_of(**fields), end_of(name), tokenizer_of(name)
    prompts = PromptDataset(rows_of(row), tokenizer, form)
    encoder = AnswerEncoder(tokenizer, 999, AnswerEnds(learned=end, stops=(end,)), form=form)
    pair = prompts.rows[0].pair
    assert pair is not None
    found = [encoder.encode_replies(prompts.rows, [reply], "{answer}")[0] for reply in (pair.chosen, pair.rejected)]
    return [[*prompts[0].prompt_ids, *answer.token_ids] for answer in found]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "nothing"])
@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
        {"prompt": TURNS, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": TURNS, "chosen": "good", "rejected": "bad"},
        {"prompt": TURNS, "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
        {"prompt": TURNS[-1:], "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
        {"prompt": TURNS[:1], "chosen": [*TURNS[1:], GOOD], "rejected": [*TURNS[1:], BAD]},
        {"prompt": "q1", "chosen": [*TURNS[1:], GOOD], "rejected": [*TURNS[1:], BAD]},
        {"prompt": "q1", "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
        {"prompt": "q2", "chosen": [*TURNS, GOOD], "rejected": "bad"},
        {"chosen": "good", "rejected": [*TURNS, {**BAD, "tool_calls": None}]},
    ],
)
def test_both_rows_are_the_conversations_that_the_template_makes(row: dict[str, Any], name: str) -> None:
    for ids, answer in zip(ids_of(row, name), (GOOD, BAD), strict=True):
        whole = reference_ids(tokenizer_of(name), [*TURNS, answer])
        if isinstance(row["chosen"], str) or isinstance(row["rejected"], str):  # text is not the template's to change
            whole = [*reference_ids(tokenizer_of(name), TURNS, add_generation_prompt=True)]
            assert ids[: len(whole)] == whole
        else:
            assert whole[: len(ids)] == ids
            assert ids[-1] == end_of(name)


def test_one_turn_is_the_rows_prompt_with_its_template() -> None:
    pair = {"chosen": [user("1+1?"), GOOD], "rejected": [user("1+1?"), BAD]}
    texts = [
        PromptDataset(rows_of(row), tokenizer_of("gemma"), form_of(prompt_template="Solve: {prompt}"))[0].text
        for row in ({"prompt": "1+1?", **pair}, {"prompt": "1+1?", "chosen": "good", "rejected": "bad"})
    ]
    assert texts[0] == texts[1]
    assert "Solve: 1+1?" in texts[0]
    with pytest.raises(DataError, match="holds chat messages, which prompt_template"):
        ids_of(pair, prompt_template="Solve: {prompt}")


def test_a_system_prompt_comes_before_the_conversation() -> None:
    row = {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]}
    good, _ = ids_of(row, system_prompt="be kind")
    whole = reference_ids(tokenizer_of("chatml"), [{"role": "system", "content": "be kind"}, *TURNS, GOOD])
    assert whole[: len(good)] == good


def test_tools_belong_to_the_prompt_of_a_pair() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    good, bad = ids_of({"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD], "tools": tools})
    assert reference_ids(tokenizer_of("chatml"), [*TURNS, GOOD], tools=tools)[: len(good)] == good
    assert reference_ids(tokenizer_of("chatml"), [*TURNS, BAD], tools=tools)[: len(bad)] == bad


def test_equal_conversations_have_equal_answers() -> None:
    good, bad = ids_of({"chosen": [*TURNS, GOOD], "rejected": [*TURNS, GOOD]})
    assert good == bad


@pytest.mark.parametrize(
    ("chosen", "rejected", "said"),
    [
        ([user("q1"), GOOD], [user("other"), BAD], "differ from message 1 on, with 2 and 2 messages"),
        (EARLIER, [user("q1"), assistant("A1"), user("q2"), BAD], "differ from message 2 on, with 4 and 4"),
        ([user("q"), GOOD, user("and"), GOOD], [user("q"), BAD, user("and"), GOOD], "differ from message 2 on"),
        ([user("q"), assistant("one"), GOOD], [user("q"), BAD], "differ from message 2 on, with 3 and 2"),
        (EARLIER, EARLIER[:2], "differ from message 3 on, with 4 and 2 messages"),
        (
            EARLIER,
            TURNS,
            "field 'rejected' (preferences.rejected_field) must be a text, or a list of messages that ends",
        ),
        (TURNS, EARLIER, "field 'chosen' (preferences.chosen_field) must be a text, or a list of messages that ends"),
        ([GOOD], EARLIER, "differ from message 1 on, with 1 and 4"),
        ([], EARLIER, "field 'chosen' (preferences.chosen_field) must be"),
        (3, EARLIER, "got '3'"),
        (None, EARLIER, "got 'None'"),
    ],
)
def test_a_pair_that_is_none_is_refused_by_its_row(chosen: Any, rejected: Any, said: str) -> None:
    with pytest.raises(DataError) as caught:
        form_of().select(rows_of({"chosen": chosen, "rejected": rejected}))
    assert str(caught.value).startswith("made.jsonl:1: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("prompt", ["another", [user("another")]])
def test_a_prompt_that_the_conversations_do_not_hold_is_refused(prompt: Any) -> None:
    with pytest.raises(
        DataError, match=r"made.jsonl:1: the conversations of the pair do not hold the prompt .*another"
    ):
        form_of().select(rows_of({"prompt": prompt, "chosen": EARLIER, "rejected": EARLIER}))


def test_texts_without_a_prompt_are_refused_by_the_field_that_is_missing() -> None:
    with pytest.raises(DataError, match=r"made.jsonl:1: row has no field 'prompt'.*--data.prompt_field FIELD"):
        form_of().select(rows_of({"chosen": "a", "rejected": "b"}))
    with pytest.raises(
        DataError, match=r"made.jsonl:1: row has no field 'rejected'.*--preferences.rejected_field FIELD"
    ):
        form_of().select(rows_of({"prompt": "q", "chosen": "a"}))
    with pytest.raises(DataError, match="ends in a turn of the assistant"):
        form_of().select(rows_of({"prompt": [*TURNS, GOOD], "chosen": "a", "rejected": "b"}))


def test_without_a_chat_template_one_turn_is_the_rows_prompt() -> None:
    row = {"prompt": "q", "chosen": [user("q"), GOOD], "rejected": [user("q"), BAD]}
    assert PromptDataset(rows_of(row), make_tokenizer(), form_of())[0].text == "q"
