"""The `math` reward on text that would run: math-verify's way through sympy's `parse_expr` is never taken."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsdk.rewards.math.algebra import _parse, equal
from rlsdk.rewards.math.symbolic import math

from .conftest import sample


@pytest.fixture(autouse=True)
def only_numbers_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`parse_expr` is `eval`. sympy calls it for the digits of a number, which the LaTeX lexer has cut out; a call with
    any other text fails the test."""
    import math_verify.parser
    import sympy.physics.units  # noqa: F401  # it evaluates its own names, which must not happen while the test watches
    from sympy.parsing import sympy_parser

    evaluated: list[str] = []
    evaluate = sympy_parser.eval_expr

    def watched(code: str, *arguments: Any) -> Any:
        evaluated.append(code)
        return evaluate(code, *arguments)

    def refuse(*arguments: object, **options: object) -> None:
        evaluated.append(f"math-verify's parse_expr{arguments}")

    monkeypatch.setattr(math_verify.parser, "parse_expr", refuse)
    monkeypatch.setattr(sympy_parser, "eval_expr", watched)
    _parse.cache_clear()
    equal.cache_clear()
    yield
    assert [
        code for code in evaluated if not re.fullmatch(r"(Integer|Float|Rational) ?\('?[0-9./]+ ?'?\) *", code)
    ] == []


@pytest.mark.parametrize("answer", ["42", r"\frac{1}{2}+x", r"x^2+1", r"\sqrt{2}", "(1, 2)", "3*(4+5)*y"])
def test_no_payload_runs_or_scores(answer: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    write = f"open('{mark}','w').write('x')"
    before = time.monotonic()
    for payload in (
        write, f"__import__('os').system('touch {mark}')", rf"\operatorname{{eval}}({write})", rf"\text{{{write}}}",
        f"eval({write})", f"x**2+{write}", f"{answer}+0*{write}", f"exec({write!r})", f"({answer}).subs(x,{write})",
        f"S({write!r})", "9^9^9^9", "9**9**9", "10^{10^{10}}", "(1+1)*(2+2)/(3+3)", "3*4*9", "1/2+3/4-(5*6)",
        r"\frac{9^{999}}{9^{998}}", r"\sum_{i=1}^{10^{9}} i", "{" * 3000 + "x" + "}" * 3000, "(" * 3000, "9!!!!!!",
        "1E999999999", "1.5E+999999999", "x+2E-999999999", "1 E 999999999",
    ):  # fmt: skip
        for response in (payload, rf"\boxed{{{payload}}}", f"<answer>{payload}</answer>"):
            assert math(sample(response, answer, "q")) == 0.0, response[:200]
    assert not mark.exists()
    assert "RLSDK_TEST_RAN" not in os.environ
    assert time.monotonic() - before < 20


@pytest.mark.parametrize(
    "infinite", [r"|\ln 0|", r"|\infty|", r"-|\infty|", r"\sqrt{\infty}", r"|\infty|+1", r"2|\log_{2} 0|"]
)
def test_what_is_infinite_equals_no_number(infinite: str) -> None:
    """A difference of infinity is not larger than a part of infinity, and math-verify rounds both to the same."""
    for answer in (r"\sqrt{2}", r"3\pi", r"e^2", r"\log_2 3", r"\pi+\ln 2", r"x=2\sqrt{3}", r"(1,\sqrt{2})",
                   r"x>\sqrt{2}", r"\begin{pmatrix}1\\\sqrt{2}\end{pmatrix}", "x+1", r"2\sqrt{x}"):  # fmt: skip
        for given in {infinite, answer.replace(r"\sqrt{2}", infinite)} - {answer}:
            assert math(sample(rf"\boxed{{{given}}}", answer, "q")) == 0.0, (given, answer)


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (r"-\infty", r"-|\infty|"),
        (r"\frac{1}{2}+x", "x+1/2"),
        ("x^2+1", "1+x^2"),
        ("x^2+1", "1+x**2"),
        ("(1, 2)", "(1,2)"),
        ("2x", "x*2"),
    ],
)
def test_right_answers_in_another_form_still_score(answer: str, given: str) -> None:
    assert math(sample(rf"\boxed{{{given}}}", answer, "q")) == 1.0


def test_the_whole_table_of_cases_runs_nothing() -> None:
    table = (Path(__file__).parent / "cases" / "math.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, table):
        assert math(sample(rf"\boxed{{{row['answer']}}}", row["reference"], "q")) == row["right"]
