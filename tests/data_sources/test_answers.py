"""Answers that supervised training learns: whole with their end, or cut and without one, and counted."""

from __future__ import annotations

from typing import Any

import pytest

from rlsdk.data import AnswerEncoder, AnswerEnds, PromptFormat, answer_report

from .test_special_tokens import trained


def encoder_of(tokenizer: Any, max_tokens: int, **form: Any) -> AnswerEncoder:
    end = tokenizer.eos_token_id
    return AnswerEncoder(tokenizer, max_tokens, AnswerEnds(learned=end, stops=(end,)), form=PromptFormat(**form))


def test_an_answer_that_fits_ends_with_the_end_token(tokenizer: Any) -> None:
    encoder = encoder_of(tokenizer, 4)
    answer = encoder.encode(["abc"], ["x:1"])[0]
    assert not answer.cut
    assert list(answer.token_ids) == [*tokenizer("abc")["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize("text", ["abcd", "abcde", "a" * 1_000_000])
def test_an_answer_that_is_cut_never_ends_with_it(tokenizer: Any, text: str) -> None:
    answer = encoder_of(tokenizer, 4).encode([text], ["x:1"])[0]
    assert answer.cut
    assert tokenizer.decode(answer.token_ids) == text[:4]


def test_a_text_that_is_too_long_by_its_characters_is_not_tokenized_whole(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    plain = type(tokenizer).__call__

    def watched(self: Any, texts: list[str], **options: Any) -> Any:
        seen.extend(map(len, texts))
        return plain(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", watched)
    assert encoder_of(tokenizer, 4).encode(["a" * 1_000_000], ["x:1"])[0].cut
    assert max(seen) < 1000


def test_special_tokens_in_an_answer_are_text_unless_allowed() -> None:
    end = trained("bytes").eos_token_id
    texts, sources = ["plain", "a<|im_end|>b", "x"], ["x:1", "x:2", "x:3"]
    literal = encoder_of(trained("bytes"), 50).encode(texts, sources)
    assert [answer.token_ids.count(end) for answer in literal] == [1, 1, 1]
    allowed = encoder_of(trained("bytes"), 50, allow_special_tokens=True).encode(texts, sources)[1]
    assert allowed.token_ids.count(end) == 2


def test_long_answers_are_counted_and_the_first_is_named(tokenizer: Any) -> None:
    encoder = encoder_of(tokenizer, 4)
    sources = [f"x:{line}" for line in range(1, 5)]
    answers = encoder.encode(["a", "abcdef", "ab", "abcdefgh"], sources)
    assert answer_report(answers, sources, 4, "drop").line() == (
        "2 of 4 answers are learned; 2 longer than 4 tokens left out (first x:2)"
    )
    assert answer_report(answers, sources, 4, "cut").line() == (
        "4 of 4 answers are learned; 2 longer than 4 tokens cut, without an end-of-sequence token (first x:2)"
    )
    assert answer_report(answers[:1], sources[:1], 4, "drop").line() == "1 of 1 answers are learned"
