"""Records through a grading process: scores of tokens, metrics, rewards that do not apply, and nonsense named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.kit.model.tokenizers import write_byte_tokenizer
from rlsdk.rewards import RewardDef, RewardLimits, RewardResult, RewardRunner, check_routes, merge, name_inapplicable

FUNCTIONS = Path(__file__).with_name("recording.py")


def made(response: str, ids: tuple[int, ...] = (5, 7), row: Mapping[str, Any] | None = None) -> RewardSample:
    return RewardSample(
        prompt="p", response=response, answer=None, row=row or {}, truncated=False, response_ids=np.array(ids, np.int64)
    )


def term(name: str, **fields: Any) -> RewardDef:
    return RewardDef(name=fields.pop("label", name), target=f"{FUNCTIONS}:{name}", **fields)


@pytest.fixture(scope="module")
def faulty() -> Iterator[RewardRunner]:
    with RewardRunner([term("wrong")], RewardLimits(max_metrics=4, max_record_bytes=2048)) as runner:
        yield runner


@pytest.mark.parametrize("function", ["by_token", "evaluating_by_token"])
def test_a_record_comes_back_as_it_was_given(function: str) -> None:
    """Also from the fork in which functions run that run text."""
    rewards = [term(function, label="steps", weight=2.0), term("sees_tokens")]
    with RewardRunner(rewards) as runner:
        result = runner.score([made("a", (3, 4, 5)), made("b", ()), made("c", (100,))])
    assert result.valid.all()
    assert result.scores.tolist() == [1.0, 1.0, 1.0]  # `sees_tokens` did not ask for tokens and gave 0
    assert {at: scores.tolist() for at, scores in result.token_scores.items()} == {
        0: pytest.approx([0.06, 0.08, 0.1]),
        1: [],
        2: [2.0],
    }
    assert result.metrics[0] == {"steps/tokens": 3.0, "steps/prompt.chars": 3.0}


def test_what_does_not_apply_leaves_no_term_and_is_no_failure() -> None:
    with RewardRunner([term("some"), term("sees_tokens", label="always", weight=3.0)]) as runner:
        result = runner.score([made("none"), made("skip"), made("else"), made("raise")])
    assert result.graded["some"].tolist() == [False, False, True, False]
    assert result.failed["some"].tolist() == [False, False, False, True]
    assert result.valid.tolist() == [True, True, True, False]
    assert result.scores.tolist() == [0.0, 0.0, 2.0, 0.0]
    assert result.metrics == {1: {"some/skipped": 1.0}}
    assert result.failures == {"exception": 1}


def test_a_sample_to_which_no_reward_applies_has_failed_in_words() -> None:
    with RewardRunner([term("some"), term("sees_tokens", weight=0.0)]) as runner:
        result = runner.score([made("none"), made("else")])
    assert result.valid.tolist() == [False, True]
    assert result.failures == {"inapplicable": 1}
    assert result.examples[0].message.startswith("no reward applies to this sample: each of ['some'] is for other rows")


def test_with_a_score_from_elsewhere_such_a_sample_is_valid() -> None:
    with RewardRunner([term("some")], is_whole=False) as runner:
        part = runner.score([made("none"), made("raise"), made("else")])
    result = name_inapplicable(merge([part], ["some"]), scored_elsewhere=True)
    assert (result.valid.tolist(), result.scores.tolist()) == ([True, False, True], [0.0, 0.0, 2.0])
    assert result.failures == {"exception": 1}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("mapping", "the function gave a dict, expected a number, a RewardRecord, or None where the reward does not"),
        ("text score", "the record has a score of a str, expected a number: '1'"),
        ("nan score", "the record has a score of nan"),
        ("text tokens", "the record has token_scores of 'abc'; expected a flat list of numbers"),
        ("nested tokens", r"token_scores of \[\[1.0\], \[2.0\]\]; expected a flat list"),
        ("nan token", "the record has inf in token_scores, at position 1"),
        ("three tokens", "the record has 3 token_scores; expected 2, one for each of the sample's response_ids"),
        ("tokens alone", "token_scores without a score; expected a score too, such as 0.0"),
        ("many tokens", r"the record has \d+ bytes, more than reward_limits.max_record_bytes 2048"),
        ("list metrics", r"metrics of \[1.0\]; expected names and numbers"),
        ("nan metric", "metric 'm' is nan"),
        ("bad name", "a metric named 'a/b'; expected letters, digits"),
        ("own name", "a metric named 'failed_share'"),
        ("many metrics", "5 metrics, more than reward_limits.max_metrics 4"),
    ],
)
def test_nonsense_costs_its_sample_and_is_named(faulty: RewardRunner, fault: str, message: str) -> None:
    result = faulty.score([made("fine"), made(fault)])
    assert result.valid.tolist() == [True, False]
    (example,) = result.examples
    assert (example.reward, example.sample) == ("wrong", 1)
    assert re.search(message, example.message), example.message


def test_batched_functions_give_records_and_get_at_most_so_many_samples() -> None:
    limits = RewardLimits(max_batch_samples=3)
    with RewardRunner([term("counts_calls")], limits, num_workers=2) as runner:
        result = runner.score([made(str(at)) for at in range(7)])
    assert result.by_reward["counts_calls"].tolist() == [0, 3, 3, 0, 3, 3, 0]
    assert result.valid.tolist() == [False, True, True, False, True, True, False]


def test_the_log_is_as_long_as_it_may_be(tmp_path: Path) -> None:
    log = tmp_path / "rewards.log"
    with RewardRunner([term("prints_much")], RewardLimits(log_mb=0.005), log_path=log) as runner:
        assert runner.score([made("a")] * 5).valid.all()
    assert 3000 < log.stat().st_size <= 5243
    assert "the log is full" in log.read_text()


def test_a_value_beyond_the_limit_is_a_failure() -> None:
    with RewardRunner([term("some")], RewardLimits(max_value=1.5)) as runner:
        result = runner.score([made("else")])
    assert result.failures == {"nan": 1}
    assert "the function gave 2, which exceeds reward_limits.max_value 1.5" in result.examples[0].message


def graded_by(rewards: list[RewardDef], rows: list[Mapping[str, Any]]) -> RewardResult:
    with RewardRunner(rewards) as runner:
        return runner.score([made("else", row=row) for row in rows])


def test_a_row_is_graded_by_the_rewards_that_are_for_it() -> None:
    rewards = [
        term("some", label="twos", rows={"source": ["a", "b"]}),
        term("sees_tokens", label="zeros", rows={"meta.task": ["c", None], "flag": [1]}),
    ]
    rows: list[Mapping[str, Any]] = [
        {"source": "a"},
        {"source": "b", "flag": 1},
        {"source": "z", "flag": 1, "meta": {"task": "c"}},
        {"flag": True},
        {"flag": 1.0},
    ]
    result = graded_by(rewards, rows)
    assert result.graded["twos"].tolist() == [True, True, False, False, False]
    assert result.graded["zeros"].tolist() == [False, True, True, False, True]
    assert result.valid.tolist() == [True, True, True, False, True]
    assert result.scores.tolist() == [2.0, 2.0, 0.0, 0.0, 0.0]


DATA: list[tuple[str, Mapping[str, Any]]] = [
    ("d.jsonl:1", {"source": "gsm8k", "n": 1}),
    ("d.jsonl:2", {"source": "code"}),
]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"sorce": ["gsm8k"]}, "rewards.0.rows.sorce: no data row has a field 'sorce'; did you mean 'source'?"),
        ({"source": ["gsm8"]}, "rewards.0.rows.source: no data row has 'gsm8' there; did you mean 'gsm8k'"),
        ({"n": [True]}, r"rewards.0.rows.n: no data row has True there; rows have \[1\]"),
        ({"source": ["gsm8k"]}, "no reward of non-zero weight applies to 1 of 2 data rows, the first is d.jsonl:2"),
    ],
)
def test_routes_that_do_not_fit_the_data_are_refused_before_a_sample_is_made(
    rows: Mapping[str, list[Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_routes([term("some", rows=rows), term("sees_tokens", weight=0.0)], DATA, whole=True)


def test_routes_that_fit_the_data_pass() -> None:
    check_routes([term("some", rows={"source": ["gsm8k"]}), term("wrong", rows={"n": [None]})], DATA, whole=True)
    check_routes([term("some", rows={"source": ["gsm8k"]})], DATA, whole=False)
    check_routes([term("some")], [], whole=True)


def test_the_example_scores_lines_where_they_end(tmp_path: Path) -> None:
    tokenizer = write_byte_tokenizer(tmp_path)
    example = Path(__file__).parents[2] / "examples" / "reward_lines.py"
    reward = RewardDef(name="lines", target=f"{example}:correct_lines", options={"tokenizer": str(tmp_path)})
    texts = ["2+2=4\n3*3=8\nso 7", "nothing", "1 + 1 = 2"]
    with RewardRunner([reward], is_whole=False) as runner:
        result = runner.score([made(text, tuple(tokenizer(text)["input_ids"])) for text in texts])
    assert result.graded["lines"].tolist() == [True, False, True]
    found = {at: {i: round(float(x), 3) for i, x in enumerate(s) if x} for at, s in result.token_scores.items()}
    assert found == {0: {5: 0.1, 11: -0.1}, 2: {8: 0.1}}
