from __future__ import annotations

import time

import pytest

from rlsdk.rewards.symbolic import math, normalise, objection, parse_rational

from .conftest import sample

RIGHT = [
    ("42", "42"), ("42", "$42$"), ("42", r"\(42\)"), ("42", "42.0"), ("42", r"42\text{ cm}"), ("42", r"x = 42"),
    ("1/3", r"\frac13"), (r"\frac{1}{3}", "1/3"), (r"\frac{3}{2}", r"1\frac{1}{2}"), (r"-\frac{1}{2}", "-0.5"),
    (r"11,\!111", "11111"), ("1{,}000", "1000"), (r"90^\circ", "90"), (r"50\%", r"50\%"),
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"2\sqrt3", r"2\sqrt{3}"), (r"\frac{\pi}{2}", r"\pi/2"), ("x^2+2x+1", "(x+1)^2"),
    ("y=2x+1", "y=1+2x"), ("3+4i", "4i+3"), (r"\{1,2\}", r"\{2,1\}"), ("1,2", "2, 1"), ("(1,2)", "(1, 2)"),
    (r"(\frac{1}{2},3)", "(1/2,3)"), ("x<5", "5>x"), (r"\text{Tuesday}", "Tuesday"), ("2^{10}", "1024"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), ("[0,1)", "[0, 1)"),
]  # fmt: skip
WRONG = [
    ("42", "6*7"), ("42", r"6 \cdot 7"), ("42", "84/2"), ("42", "42%"), ("42", "41=42"), ("42", "42 or maybe not"),
    ("42", r"42\text{ or maybe not}"), ("42", "x=6*7"), ("42", "4 2"), ("42", "4_2"), ("42", "nan"), ("42", "٤٢"),
    ("42", "42, 7"), ("42", "41"), ("1/3", "0.333333"), ("1/3", "0.33333333333333333333"), ("1/3", "2/6"),
    (r"\frac{\pi}{2}", "1.570796"), (r"\frac{\pi}{2}", "1.5707963267948966"), (r"2\sqrt{3}", "3.464101615"),
    (r"\pi", r"\pi=3"), (r"\pi", r"\pi or e"), (r"\pi", r"\pi\text{ or so}"), (r"\pi", "22/7"), ("(1,2)", "(2,1)"),
    ("[0,1]", "(0,1)"), ("y=2x+1", "y=2x+2"), ("x^2+2x+1", "(x+2)^2"), (r"2\sqrt{3}", "12^{0.5}"), ("3+4i", "3-4i"),
]  # fmt: skip
HANGS = [
    "9**9**9**9", "10^10^10", "10^{10^{10}}", "9^{9^{9}}", "1000000!", "((9^{999})^{999})^{999}", "9" * 200,
    r"\frac{1}{" * 200 + "2" + "}" * 200, "(" * 100 + "1" + ")" * 100, r"\sum_{n=1}^{10^9} n", r"\binom{10^6}{500000}",
    r"\prod_{n=1}^{999999} n", r"\int_0^{10^9} x^x dx", "2^{99999}", "e^{e^{e^{e^{e}}}}",
    r"\sqrt{" * 50 + "2" + "}" * 50,
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "given"), RIGHT)
def test_an_equal_expression_is_right(wanted: str, given: str) -> None:
    assert math(sample(rf"so \boxed{{{given}}}", wanted)) == 1.0
    assert math(sample(f"#### {given}\nand 7 more", rf"work \boxed{{{wanted}}}")) == 1.0


@pytest.mark.parametrize(("wanted", "given"), WRONG)
def test_anything_else_is_wrong(wanted: str, given: str) -> None:
    assert math(sample(rf"so \boxed{{{given}}}", wanted)) == 0.0
    assert math(sample(given, wanted)) == 0.0


@pytest.mark.parametrize("given", HANGS)
@pytest.mark.parametrize("wanted", ["42", r"\pi"])
def test_what_makes_math_verify_hang_is_refused_at_once(wanted: str, given: str) -> None:
    before = time.process_time()
    assert math(sample(rf"\boxed{{{given}}}", wanted)) == 0.0
    assert math(sample(given, wanted)) == 0.0
    assert time.process_time() - before < 0.5


def test_a_bare_answer_counts_only_when_it_is_the_whole_response() -> None:
    assert math(sample("42")) == 1.0
    assert math(sample(" $42$ \n")) == 1.0
    assert math(sample("The answer is 42")) == 0.0
    assert math(sample("42\n43")) == 0.0
    assert math(sample(r"42 \boxed{41")) == 0.0
    assert math(sample(r"\boxed{41} \boxed{42}")) == 1.0


def test_repeating_the_question_earns_nothing_even_where_it_is_equal() -> None:
    prompt = "Expand $(x + 1)^2$."
    assert math(sample(r"\boxed{(x+1)^2}", "x^2+2x+1", prompt)) == 0.0
    assert math(sample(r"\boxed{1+2x+x^2}", "x^2+2x+1", prompt)) == 1.0


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"$\dfrac{1}{2}$", r"\frac{1}{2}"),
        (r"\left( 1, \, 2 \right]", "(1,2]"),
        (r"\text{even}", "even"),
        (r"5\text{ square meters}", "5"),
        (r"3 \mathrm{m}^2", "3"),
        ("x = 5", "5"),
        ("x = y = 5", "x=y=5"),
        (r"1 \\ 2", r"1\\2"),
        ("a b", "a b"),
        (r"x \leftarrow y", r"x\leftarrow y"),
    ],
)
def test_expressions_have_one_spelling(text: str, plain: str) -> None:
    assert normalise(text) == plain
    assert normalise(plain) == plain


def test_unfinished_fractions_are_no_numbers() -> None:
    assert parse_rational("2/3") == parse_rational(r"\frac{2}{3}")
    assert parse_rational(r"1\frac{2}{3}") == parse_rational("5/3")
    for text in ("4/6", "42/1", "1/0", r"1\frac{5}{3}", "2/3/4", "-2/-3", "1" * 50 + "/3"):
        assert parse_rational(text) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("42%", "sign"),
        ("1.5", "approximate"),
        ("two", "words"),
        ("9^9^9", "power"),
        (r"\sum n", "commands"),
        ("3+4", "unfinished"),
    ],
)
def test_an_objection_says_why_unless_the_reference_holds_the_same(given: str, reason: str) -> None:
    assert reason in (objection(given, r"\pi", "") or "")
    if reason != "power":
        assert objection(given, rf"({given},\pi)", "") is None
