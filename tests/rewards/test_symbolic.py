from __future__ import annotations

import time

import pytest
from hypothesis import given as having
from hypothesis import settings
from hypothesis import strategies as st

from rlsdk.rewards.math.algebra import objection
from rlsdk.rewards.math.normalization import plain
from rlsdk.rewards.math.quantity import parse_quantity, parse_value, split_unit
from rlsdk.rewards.math.symbolic import math

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
    ("42", "6*7"), ("42", r"6 \cdot 7"), ("42", "84/2"), ("42", "41=42"), ("42", "42 or maybe not"),
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
    ("text", "spelling"),
    [
        (r"$\dfrac{1}{2}$", r"\frac{1}{2}"),
        (r"\left( 1, \, 2 \right]", "(1,2]"),
        (r"\text{even}", "even"),
        (r"5\text{ square meters}", r"5\text{square meters}"),
        (r"3 \mathrm{m}^2", r"3 \text{m}^2"),
        (r"\mathrm{e}^x", "e^x"),
        ("x = 5", "x=5"),
        (r"1 \\ 2", r"1\\2"),
        ("a b", "a b"),
        (r"x \leftarrow y", r"x\leftarrow y"),
        (r"\displaystyle\frac12", r"\frac{1}{2}"),
        ("\u22125", "-5"),
        ("**5** km", "5 km"),
        ("2**3", "2^3"),
        ("1{,}234", "1234"),
        ("1,234, 5", "1234,5"),
        ("$5$ and $6$", "5,6"),
        ("$5", r"\$5"),
        ("(5)", "5"),
        ("(5, 6)", "(5,6)"),
        ("(1)(2)", "(1)(2)"),
        (r"\boxed{\text{(B)}}", "B"),
        ("x_{1}", "x_1"),
        ("1.5 \u00d7 10^3", r"1.5\times10^3"),
    ],
)
def test_answers_have_one_spelling(text: str, spelling: str) -> None:
    assert plain(text) == spelling
    assert plain(spelling) == spelling


ALPHABET = "0123456789abxyNAB+-*/^_=<>()[]{}\\,.;:$% \n\u2212\u00b0\u20ac"
PIECES = [*ALPHABET, "\\frac", "\\text{", "\\pm", "\\boxed{", "\\sqrt", " and ", " or ", "\\$", "**", "\\left", "\\in"]


@having(
    pieces=st.lists(st.sampled_from(PIECES), max_size=40), wanted=st.sampled_from(["42", "x+1", "1,2", "(1,2)", "AB"])
)
@settings(deadline=None, max_examples=300)
def test_no_text_makes_the_grader_fail_or_pass_by_accident(pieces: list[str], wanted: str) -> None:
    text = "".join(pieces)
    reward = math(sample(f"<answer>{text}</answer>", wanted))
    assert reward in (0.0, 1.0)
    if reward == 1.0 and wanted == "42":
        assert "42" in text.replace(",", "").replace("{", "").replace("}", "") or "4.2" in text or "e" in text


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("18 dollars", 18, "dollar"),
        (r"\$18", 18, "dollar"),
        ("18%", 18, "%"),
        ("5 km", 5, "kilometer"),
        ("5km/h", 5, "kilometer/hour"),
        ("5 miles per hour", 5, "mile/hour"),
        (r"15\text{cm}^2", 15, "centimeter^2"),
        (r"15\text{square centimeters}", 15, "centimeter^2"),
        ("5 m", 5, "meter"),
        (r"90^\circ", 90, "degree"),
    ],
)
def test_a_quantity_has_its_value_and_its_unit(text: str, value: int, unit: str) -> None:
    found = parse_quantity(text)
    assert found is not None
    assert (found.value, found.unit) == (value, unit)


@pytest.mark.parametrize(
    "text",
    ["5x", "5m", "5 or 6", "5 maybe", "5 hundred", "5 million", "5 times", "5 pi", r"\$5%", "5!", "5 7", "cm", ""],
)
def test_what_changes_or_doubts_a_number_is_no_unit(text: str) -> None:
    assert parse_quantity(text) is None
    assert split_unit(text)[1] is None or text == "5%"


def test_unfinished_fractions_are_no_numbers() -> None:
    assert parse_value("2/3") == parse_value(r"\frac{2}{3}") == parse_value("+2/3")
    assert parse_value(r"1\frac{2}{3}") == parse_value("5/3") == parse_value("1 2/3")
    assert parse_value("42/1") == 42
    for text in (
        "4/6",
        "84/2",
        "1/0",
        r"1\frac{5}{3}",
        "2/3/4",
        "-2/-3",
        "4 4/0",
        "1" * 99 + "/3",
        "1e9999",
        "10^9999",
    ):
        assert parse_value(text) is None


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
    assert reason in (objection(given, r"\pi") or "")
    if reason != "power":
        assert objection(given, rf"({given},\pi)") is None


def test_solutions_are_in_any_order_unless_asked_for() -> None:
    assert math(sample("#### 2, 1", "1, 2")) == 1.0
    assert math(sample("#### 2, 1", "1, 2"), ordered=True) == 0.0
    assert math(sample("#### 1 and 2", "1, 2"), ordered=True) == 1.0


@pytest.mark.parametrize(("reference", "copied"), [("(0;1)", "(0,1)"), ("1;2;3", "1,2,3"), ("2; 345", "2,345")])
def test_a_list_copied_from_the_prompt_earns_nothing_with_other_separators(reference: str, copied: str) -> None:
    assert math(sample(f"#### {copied}", reference, f"Order {copied}.")) == 0.0
