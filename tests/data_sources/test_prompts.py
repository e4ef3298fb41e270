from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.data import DataRow, PromptDataset, PromptFormat, PromptStream, epoch_order
from rlsdk.interfaces import CheckpointError, ConfigError, DataError

from .conftest import SLICES, make_tokenizer, rows_of


def dataset(tokenizer: Any, *prompts: str) -> PromptDataset:
    return PromptDataset(rows_of(*({"question": text, "answer": "1"} for text in prompts)), tokenizer)


def test_a_prompt_is_its_text_its_tokens_and_its_row(tokenizer: Any) -> None:
    rows = rows_of({"question": "1+1=", "answer": 2, "x": [1]})
    prompt = PromptDataset(rows, tokenizer)[0]
    assert tokenizer.decode(prompt.prompt_ids) == prompt.text == "1+1="
    assert (prompt.answer, prompt.row, prompt.source, prompt.index) == ("2", rows[0].row, "made.jsonl:1", 0)
    assert all(type(token) is int for token in prompt.prompt_ids)


def test_long_and_empty_prompts_are_left_out_and_counted(tokenizer: Any) -> None:
    texts = ["abc", "", "abcdefgh", " \n", "ab", "abcdefghijk"]
    rows = rows_of(*({"question": text} for text in texts))
    made = PromptDataset(rows, tokenizer, max_prompt_tokens=3)
    assert [prompt.text for prompt in made] == ["abc", "ab"]
    assert [prompt.index for prompt in made] == [0, 1]
    assert made.lengths.tolist() == [3, 2]
    report = made.report
    assert (report.num_rows, report.num_kept, report.num_too_long, report.num_empty) == (6, 2, 2, 2)
    assert report.line() == (
        "2 of 6 prompts kept (longest 3 tokens); 2 longer than 3 tokens (up to 11; first made.jsonl:3); "
        "2 empty (first made.jsonl:2); 2 without an answer"
    )


def test_an_empty_message_is_left_out_although_the_chat_template_adds_text(chat_tokenizer: Any) -> None:
    made = PromptDataset(rows_of({"question": " "}, {"question": "hi"}), chat_tokenizer)
    assert [prompt.text for prompt in made] == ["<user>hi</user><assistant>"]
    assert made.report.num_empty == 1


def test_no_prompt_left_is_an_error_that_says_how_long_they_are(tokenizer: Any) -> None:
    with pytest.raises(
        DataError, match=r"no prompt is left: 0 of 1 .*The shortest has 4 tokens; raise max_prompt_tokens"
    ):
        PromptDataset(rows_of({"question": "abcd"}), tokenizer, max_prompt_tokens=3)


def test_an_end_token_that_the_tokenizer_adds_does_not_end_the_prompt() -> None:
    tokenizer = make_tokenizer(end_behind_texts=True)
    assert tokenizer("ab")["input_ids"][-1] == tokenizer.eos_token_id
    assert dataset(tokenizer, "ab", "c")[0].prompt_ids == tuple(tokenizer("ab", add_special_tokens=False)["input_ids"])


def test_the_gsm8k_slice_becomes_prompts(tokenizer: Any, load: Callable[..., list[DataRow]]) -> None:
    form = PromptFormat(prompt_template="Q: {prompt}\nA:")
    made = PromptDataset(load(SLICES / "gsm8k" / "train.jsonl"), tokenizer, form, max_prompt_tokens=400)
    assert made.report.num_kept + made.report.num_too_long == 40
    assert made.report.num_too_long > 0
    for prompt in made:
        assert prompt.text == f"Q: {prompt.row['question']}\nA:"
        assert len(prompt.prompt_ids) == len(prompt.text.encode()) <= 400
        assert prompt.answer is not None
        assert "####" in prompt.answer


def test_the_fingerprint_changes_with_prompts_answers_and_order(tokenizer: Any) -> None:
    base = dataset(tokenizer, "a", "b").fingerprint()
    assert dataset(tokenizer, "a", "b").fingerprint() == base
    others = [
        dataset(tokenizer, "b", "a"),
        dataset(tokenizer, "ab"),
        dataset(tokenizer, "a", "c"),
        PromptDataset(rows_of({"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}), tokenizer),
        PromptDataset(rows_of({"question": "a", "answer": "1"}, {"question": "b"}), tokenizer),
    ]
    assert base not in {other.fingerprint() for other in others}
    assert 0 <= base < 2**63


@given(size=st.integers(1, 200), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**31))
def test_an_epoch_order_is_a_permutation_that_depends_on_seed_and_epoch_alone(size: int, seed: int, epoch: int) -> None:
    order = epoch_order(size, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(size))
    assert np.array_equal(order, epoch_order(size, seed=seed, epoch=epoch))


def test_the_epoch_order_is_the_one_that_earlier_versions_gave() -> None:
    # A change here makes every saved run resume in another order.
    assert epoch_order(8, seed=0, epoch=0).tolist() == GOLDEN_ORDER
    orders = {tuple(epoch_order(8, seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


GOLDEN_ORDER = [4, 0, 1, 7, 6, 2, 5, 3]


@settings(max_examples=30)
@given(size=st.integers(1, 20), takes=st.lists(st.integers(1, 30), min_size=1, max_size=8), shuffle=st.booleans())
def test_every_epoch_gives_each_prompt_once_whatever_the_batches(size: int, takes: list[int], shuffle: bool) -> None:
    made = dataset(TOKENIZER, *(f"q{at}" for at in range(size)))
    stream = PromptStream(made, seed=3, shuffle=shuffle)
    given_out = [prompt.index for count in takes for prompt in stream.take(count)]
    assert len(given_out) == sum(takes)
    for start in range(0, len(given_out), size):
        epoch = given_out[start : start + size]
        assert len(set(epoch)) == len(epoch)
    assert stream.epoch * size + stream.position == len(given_out)


@settings(max_examples=30)
@given(before=st.integers(0, 25), after=st.integers(1, 25))
def test_a_restored_stream_goes_on_with_the_same_prompts(before: int, after: int) -> None:
    made = dataset(TOKENIZER, *(f"q{at}" for at in range(7)))
    stream = PromptStream(made, seed=9)
    stream.take(before)
    state = stream.state_dict()
    expected = stream.take(after)
    resumed = PromptStream(made, seed=9)
    resumed.load_state_dict(state)
    assert resumed.take(after) == expected
    assert all(type(value) is int for value in state.values())


def test_a_resume_with_other_data_is_refused_and_says_what_differs(tokenizer: Any) -> None:
    stream = PromptStream(dataset(tokenizer, "a", "b", "c"), seed=1)
    stream.take(2)
    changed = PromptStream(dataset(tokenizer, "a", "b"), seed=2)
    differs = r"number of prompts 3 then, 2 now; seed 1 then, 2 now; content"
    with pytest.raises(
        CheckpointError, match=rf"{differs}.*--model RUN/checkpoints/STEP/model --trainer.run_name NAME"
    ):
        changed.load_state_dict(stream.state_dict())
    with pytest.raises(CheckpointError, match=r"lacks \['fingerprint', .*\]; it has \['epoch'\]"):
        changed.load_state_dict({"epoch": 0})


def test_a_seed_outside_its_range_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="expected 0 <= seed"):
        PromptStream(dataset(tokenizer, "a"), seed=-1)


TOKENIZER = make_tokenizer()
