from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.rewards import final_answer, parse_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 42", "42"),
        ("#### 1\nno:\n#### 42 \nbecause 7", "42"),
        (r"it is \boxed{7}, no \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed{1} then #### 2", "2"),
        (r"#### 1 then \boxed{2}", "2"),
        ("<answer>\n 5 \n</answer> done", "5"),
        (r"<answer>\boxed{5}</answer>", "5"),
        (r"\boxed {5}", "5"),
        ("####", ""),
        ("just 42", None),
        ("", None),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed 5", "5"),
        (r"so \boxed 18.", "18"),
        (r"$\boxed 1,234$", "1,234"),
        (r"\boxed B", "B"),
        (r"\boxed 5x", None),
        (r"\boxed 5/6", None),
        (r"\boxed five", None),
        (r"\fbox{5}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        ("<answer>1</answer> <answer>2", None),
    ],
)
def test_the_final_answer_is_what_the_last_mark_holds(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-7", -7),
        ("+7", 7),
        ("1,234", 1234),
        ("12,345,678.50", Fraction("12345678.5")),
        ("0.1", Fraction(1, 10)),
        (".5", Fraction(1, 2)),
        ("42.", 42),
        (" 42 ", 42),
        ("$18", 18),
        (r"\$18.00", 18),
        ("$-3", -3),
        ("007", 7),
    ],
)
def test_a_plain_number_has_its_exact_value(text: str, value: Fraction | int) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ".", "-", "12,34", "1,2345", "1234,567", ",123", "1,,234", "6*7", "40+2", "84/2", "=42", "x=42", "42%",
        "nan", "inf", "-inf", "1e3", "4_2", "0x2a", "42 7", "4 2", "42..", "42 apples", "--42", "$", "1.2.3", "42\n7",
        "9" * 65, "\u0664\u0662", "\uff14\uff12", "\u096a\u0968", "\u2460", "\u221242", "\u200b42",
        "1,\u0660\u0660\u0660",
    ],
)  # fmt: skip
def test_anything_else_is_no_number(text: str) -> None:
    assert parse_number(text) is None


@given(value=st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**12), max_value=10**12))
def test_numbers_survive_being_written_with_and_without_commas(value: Decimal) -> None:
    assert parse_number(f"{value:f}") == Fraction(value)
    assert parse_number(f"{value:,f}") == Fraction(value)


@given(text=st.text(max_size=80))
def test_whatever_is_taken_for_a_number_python_reads_the_same_way(text: str) -> None:
    value = parse_number(text)
    if value is not None:
        assert value == Fraction(text.strip().removesuffix(".").replace(",", "").replace("$", "").replace("\\", ""))
