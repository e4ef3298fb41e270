"""Supervised training on conversations: every turn of the assistant is learned, after what a rollout would see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.data import AnswerEnds, LearnedRow, PromptDataset, PromptFormat, TurnTokens, learned_rows
from rlsdk.trainer.inputs.answers import AnswerSettings, learned_conversations
from rlsdk.trainer.learner.mini_batches import make_rows_batch, make_sft_batch

from .chat_families import FAMILIES, end_of, reference_ids, tokenizer_of
from .conftest import rows_of

TALK = [
    {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 3?"}, {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes"},
]  # fmt: skip


def rows_for(
    name: str, talk: list[dict[str, str]], said: list[str], *, every: bool = True, **options: Any
) -> list[list[LearnedRow]]:
    tokenizer, end = tokenizer_of(name), end_of(name)
    form = PromptFormat(prompt_field="messages", chat_template_kwargs=options.pop("variables", {}))
    asked: dict[str, Any] = {"template": "{answer}", "max_tokens": 999, "long_answers": "drop", **options}
    ends = AnswerEnds(learned=end, stops=(end,))
    prompts = PromptDataset(rows_of({"messages": talk}), tokenizer, form)
    found = learned_conversations(
        prompts, tokenizer, AnswerSettings(form=form, ends=ends, **asked), said.append, every=every
    )
    return [list(rows) for rows in found[1]]


def learned_texts(name: str, row: LearnedRow) -> list[str]:
    tokenizer, end = tokenizer_of(name), end_of(name)
    spans = [row.token_ids[first:last] for first, last in row.learned]
    assert all(span[-1] == end for span in spans)
    return [tokenizer.decode(span[:-1]).strip() for span in spans]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "nothing"])
def test_every_turn_of_the_assistant_is_learned_in_one_row_where_the_template_keeps_it(name: str) -> None:
    said: list[str] = []
    ((row,),) = rows_for(name, TALK, said)
    assert learned_texts(name, row) == ["2", "It is 5.", "Yes"]
    whole = reference_ids(tokenizer_of(name), TALK)
    assert list(row.token_ids) == whole[: len(row.token_ids)], "the conversation as the template writes it"
    for at, (first, _) in enumerate(row.learned):
        asked = reference_ids(tokenizer_of(name), TALK[: 2 * at + 1], add_generation_prompt=True)
        assert list(row.token_ids[:first]) == asked, "a turn is learned after what a rollout of it would begin with"
    assert said == ["sft: 2 earlier turns of the assistant are learned, too (sft.turns)"]


def test_the_last_turn_alone_is_learned_on_demand() -> None:
    said: list[str] = []
    ((row,),) = rows_for("chatml", TALK, said, every=False)
    assert learned_texts("chatml", row) == ["Yes"]
    assert not said


def test_a_template_that_changes_earlier_turns_gives_a_row_a_turn() -> None:
    """As templates of reasoning models, which drop the reasoning of all turns but the last."""
    said: list[str] = []
    (rows,) = rows_for("chatml", TALK, said, variables={"thinking": True})
    texts = [learned_texts("chatml", row) for row in rows]
    assert [len(each) for each in texts] == [1, 1, 1]
    assert [text[0].rpartition("</think>")[2].strip() for text in texts] == ["2", "It is 5.", "Yes"]
    assert "1 conversation in several rows each, as the chat template changes earlier turns" in said[0]


def test_a_turn_that_is_too_long_is_context_and_the_others_are_learned() -> None:
    talk = [*TALK[:3], {"role": "assistant", "content": "five " * 40}, *TALK[4:]]
    said: list[str] = []
    rows = rows_for("chatml", talk, said, max_tokens=20)
    assert [text for row in rows[0] for text in learned_texts("chatml", row)] == ["2", "Yes"]
    assert "2 of 3 answers are learned; 1 longer than 20 tokens left out" in said[0]
    ((row,),) = rows_for("chatml", TALK, said, template="It says {answer}")
    assert learned_texts("chatml", row) == ["2", "It is 5.", "It says Yes"], "a template is for the answer"


IDS = st.lists(st.integers(0, 2), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.booleans(), IDS, IDS, st.booleans()), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_however_a_conversation_is_cut_each_turn_is_learned_once_after_the_same_tokens(
    parts: list[tuple[bool, tuple[int, ...], tuple[int, ...], bool]],
) -> None:
    """Equal tokens after equal contexts: equal loss and gradient, up to rounding, and an equal weight."""
    turns, before = list[TurnTokens](), tuple[int, ...]()
    for keeps, new, answer, is_learned in parts:
        asked = (before if keeps else ()) + new
        turns.append(TurnTokens(prompt_ids=asked, answer_ids=answer, is_learned=is_learned))
        before = asked + answer
    rows = learned_rows(turns)
    apart = [turn for turn in turns if turn.is_learned and turn.answer_ids]
    assert seen([(row.token_ids, row.learned) for row in rows]) == seen(
        [(t.prompt_ids + t.answer_ids, [(len(t.prompt_ids), len(t.prompt_ids + t.answer_ids))]) for t in apart]
    )
    assert all(row.learned for row in rows)
    if rows:
        batch = make_rows_batch(rows)
        assert int(batch["response_mask"].sum()) == sum(len(turn.answer_ids) for turn in apart)


def seen(rows: Sequence[tuple[tuple[int, ...], Sequence[tuple[int, int]]]]) -> Counter[tuple[tuple[int, ...], int]]:
    """What is learned: each token with all that stands before it."""
    return Counter((ids[:at], ids[at]) for ids, spans in rows for first, end in spans for at in range(first, end))


def test_a_row_of_one_answer_gives_the_batch_that_it_gave() -> None:
    prompts, answers = [[1, 2], [3]], [[4], [5, 6]]
    rows = [
        LearnedRow(token_ids=(*p, *a), learned=((len(p), len(p) + len(a)),))
        for p, a in zip(prompts, answers, strict=True)
    ]
    one, other = make_rows_batch(rows), make_sft_batch(prompts, answers)
    assert one["input_ids"].tolist() == other["input_ids"].tolist()
    assert one["response_mask"].tolist() == other["response_mask"].tolist()
