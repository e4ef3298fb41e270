"""GSM8K, SVAMP and AQuA against every reference answer of the slices, and against what must not earn anything."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsdk.config.loading.load import load_config
from rlsdk.data.render import PromptFormat
from rlsdk.data.rows import DataRow
from rlsdk.rewards.code.programs import program_of
from rlsdk.rewards.math.graders import choice, gsm8k
from rlsdk.rewards.math.symbolic import math
from rlsdk.rewards.text.answer import announced, final_answer
from rlsdk.rewards.text.schema import json_schema
from rlsdk.rewards.text.texts import fuzzy

from .conftest import SLICES, sample


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SLICES / name).read_text(encoding="utf-8").splitlines()]


WORD_PROBLEMS = [*lines("gsm8k/train.jsonl"), *lines("gsm8k/test.jsonl")]
NUMBERS = [row["answer"].split("####")[1].strip() for row in WORD_PROBLEMS]
SVAMP = json.loads((SLICES / "svamp" / "SVAMP.json").read_text(encoding="utf-8"))
AQUA = lines("aqua/test.jsonl")


def test_the_slice_has_the_hard_cases() -> None:
    assert sum("," in number for number in NUMBERS) == 10
    assert sum(number.startswith("-") for number in NUMBERS) == 5


@pytest.mark.parametrize(
    "write",
    [
        lambda row, number: row["answer"],
        lambda row, number: f"#### {number}",
        lambda row, number: f"#### {number.replace(',', '')}.00\nThat is 7 more.",
        lambda row, number: f"#### 1\nno, #### ${number}",
        lambda row, number: rf"so \boxed{{{number}}}.",
        lambda row, number: rf"\boxed{{\${number}}}",
        lambda row, number: f"<think>hm</think><answer>{number}</answer>",
        lambda row, number: f"#### **{number}** dollars",
        lambda row, number: f"#### x = {number.replace('-', chr(0x2212))}",
    ],
)
@pytest.mark.parametrize("grade", [gsm8k, math])
def test_every_reference_answer_of_gsm8k_is_right(grade: Callable[..., float], write: Callable[..., str]) -> None:
    for row, number in zip(WORD_PROBLEMS, NUMBERS, strict=True):
        assert grade(sample(write(row, number), row["answer"], row["question"])) == 1.0


COMMANDS = [SLICES.parents[1] / "docs" / "running.md", SLICES.parents[1] / "README.md"]


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_a_documented_gsm8k_command_tells_the_model_which_mark_is_read(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"rlsdk train (?:.*\\\n)*?.*--reward gsm8k(?:.*\\\n)*.*", text)
    assert commands
    for command in commands:
        flag = re.search(r"--data\.prompt_template '([^']*)'", command)
        assert flag, command
        config = load_config([], ["--data.prompt_template", flag.group(1)])
        row = DataRow(row=WORD_PROBLEMS[0], source="test")
        prompt = PromptFormat(prompt_template=config.data.prompt_template).select([row])[0].prompt
        assert isinstance(prompt, str)
        assert prompt.startswith(WORD_PROBLEMS[0]["question"])
        assert "####" in prompt


def in_digits_of(number: str, zero: int) -> str:
    """`number` in the digits of the alphabet whose zero has this code point."""
    return number.translate({ord("0") + digit: zero + digit for digit in range(10)})


WRONG: dict[str, Callable[[dict[str, Any], str], str]] = {
    "the question": lambda row, number: row["question"],
    "the question as the answer": lambda row, number: f"#### {row['question']}",
    "prose": lambda row, number: f"The answer is {number}",
    "a solution without its mark": lambda row, number: row["answer"].split("####")[0],
    "a hedge": lambda row, number: f"#### {number} or maybe not",
    "two numbers": lambda row, number: f"#### {number} 7",
    "a list": lambda row, number: f"#### {number}, 7",
    "a multiple": lambda row, number: f"#### {number} thousand",
    "two units": lambda row, number: f"#### ${number}%",
    "a product": lambda row, number: f"#### {number}*1",
    "an equation": lambda row, number: f"#### 41={number}",
    "the other sign": lambda row, number: f"#### {-int(number.replace(',', ''))}",
    "one more": lambda row, number: f"#### {int(number.replace(',', '')) + 1}",
    "right, then wrong": lambda row, number: f"#### {number}\n#### 1{number}",
    "an open box": lambda row, number: rf"#### {number} \boxed{{{number}",
    "nan": lambda row, number: "#### nan",
    "an exponent": lambda row, number: f"#### {number}e1" if number != "0" else "#### 0e",
    "full-width digits": lambda row, number: f"#### {in_digits_of(number, 0xFF10)}",
    "arabic digits": lambda row, number: f"#### {in_digits_of(number, 0x0660)}",
    "nothing": lambda row, number: "",
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("grade", [gsm8k, math])
def test_nothing_but_the_answer_earns_on_gsm8k(grade: Callable[..., float], case: str) -> None:
    for row, number in zip(WORD_PROBLEMS, NUMBERS, strict=True):
        assert grade(sample(WRONG[case](row, number), row["answer"], row["question"])) == 0.0


PIECES = (
    " ", "\t", "(", "()", "{", "[", "1", "1,", ",", "\\", "\\ ", "$", "*", "`", "a ", "\\frac", "\\text{", "```", "=",
    " or ", "-",
)  # fmt: skip
SHAPES = (
    "@", "@\nx", "#### @x", r"\boxed{@}", "\\boxed{answer is@\nx\ny}", "\\boxed{answer@is@\nx}", r"\boxed @x",
    r"\boxed 1@x,,,", "<answer>x@5</answer>", "Option @\x0bx", "```@x",
)  # fmt: skip
GRADERS: dict[str, Callable[[str], object]] = {
    "math": lambda text: math(sample(text, "x+1")),
    "gsm8k": lambda text: gsm8k(sample(text)),
    "choice": lambda text: choice(sample(text, "B")),
    "fuzzy": lambda text: fuzzy(sample(text)),
    "json_schema": lambda text: json_schema(sample(text), schema={"type": "object"}),
    "code": program_of,
}


@pytest.mark.parametrize("name", GRADERS)
def test_no_long_response_takes_long(name: str) -> None:
    grade = GRADERS[name]
    grade("#### 1+x+0")  # imports
    for piece in PIECES:
        for shape in SHAPES:
            text = shape.replace("@", piece * (5_000 // len(piece)))
            before = time.process_time()
            grade(text)
            assert time.process_time() - before < 1.0, text[:40]


def test_the_cost_of_finding_an_answer_does_not_grow_with_the_square_of_the_response() -> None:
    before = time.process_time()
    assert final_answer("\\boxed " + "1" * 50_000 + "x" + "," * 50_000) is None
    assert program_of("```" + " " * 100_000 + "x") is None
    assert announced("answer is" + " " * 100_000 + "\nx\ny").endswith("y")
    assert time.process_time() - before < 1.0


def test_commas_in_the_wrong_place_are_wrong() -> None:
    assert gsm8k(sample("#### 1,234", "#### 1234")) == 1.0
    assert gsm8k(sample("#### 12,34", "#### 1234")) == 0.0


def test_every_reference_answer_of_svamp_is_right_and_its_equation_is_not() -> None:
    for row in SVAMP:
        answer = str(row["Answer"])
        assert gsm8k(sample(f"#### {answer}", answer)) == math(sample(f"#### {answer}", answer)) == 1.0
        assert (
            gsm8k(sample(f"#### {row['Equation']}", answer)) == math(sample(f"#### {row['Equation']}", answer)) == 0.0
        )


@pytest.mark.parametrize(
    "form", ["#### {}", r"\boxed{{{}}}", r"\boxed{{\text{{{}}}}}", "#### ({})", "<answer>{}.</answer>"]
)
def test_every_reference_answer_of_aqua_is_right(form: str) -> None:
    for row in AQUA:
        letters = [letter for letter in "ABCDE" if choice(sample(form.format(letter), row["correct"]))]
        assert letters == [row["correct"]]


def test_nothing_but_one_letter_earns_on_aqua() -> None:
    for row in AQUA:
        everything = f"{row['question']} {' '.join(row['options'])}"
        for response in (everything, f"#### {everything}", "#### A B C D E", "#### ABCDE", "A, B, C, D, E", "", "####"):
            assert choice(sample(response, row["correct"])) == 0.0


@pytest.mark.parametrize(
    ("grade", "answer", "said"),
    [
        (gsm8k, "#### many", "reference answer 'many' is not a number"),
        (gsm8k, None, "no reference answer"),
        (choice, "AB", "not a single letter"),
        (gsm8k, "#### 2 or 3", "not a number"),
        (math, None, "no reference answer"),
    ],
)
def test_a_reference_that_cannot_be_graded_is_an_error_and_not_a_wrong_answer(
    grade: Callable[..., float], answer: str | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        grade(sample("#### 1", answer))


@pytest.mark.parametrize("grade", [gsm8k, math])
def test_the_answer_of_another_row_is_wrong(grade: Callable[..., float]) -> None:
    answers = [(row["answer"], number) for row, number in zip(WORD_PROBLEMS, NUMBERS, strict=True)]
    answers += [(str(row["Answer"]), str(row["Answer"])) for row in SVAMP]
    pairs = list(zip(answers, answers[7:] + answers[:7], strict=True))
    for (reference, number), (_, other) in pairs:
        same = float(number.replace(",", "")) == float(other.replace(",", ""))
        assert grade(sample(rf"\boxed{{{other}}}", reference)) == grade(sample(f"#### **{other}**", reference)) == same
    assert sum(number == other for (_, number), (_, other) in pairs) < len(pairs) / 10
