"""Functions of a script or a notebook as files that stand alone: what they compute there is what they compute here."""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlsdk.api.functions import standalone_source
from rlsdk.interfaces import ConfigError

NUMBER = re.compile(r"-?\d+", re.IGNORECASE)
WEIGHTS = {"right": 1.0, "near": 0.5, "nested": [1, (2, None)]}
BROKEN = object()


def numbers_of(text: str) -> list[int]:
    return [int(found) for found in NUMBER.findall(text)]


def uses_much(text: str, limit: int = len(WEIGHTS)) -> float:
    counts: Counter[str] = Counter(text)
    return math.sqrt(sum(numbers_of(text)[:limit])) * WEIGHTS["near"] + counts["1"]


def closure(scale: float) -> Callable[[str], float]:
    def scaled(text: str) -> float:
        return scale * uses_much(text)

    return scaled


def marked(function: Callable[..., Any]) -> Callable[..., Any]:
    function.batched = True
    return function


@marked
def batched(text: str) -> float:
    return float(len(text))


for of_main in (numbers_of, uses_much, marked, batched):
    of_main.__module__ = "__main__"  # as a script or a notebook holds it


def as_of_main(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a script or notebook would hold it."""
    function.__module__ = "__main__"
    return function


def run_alone(source: str, call: str, tmp_path: Path) -> str:
    """What a call gives in a fresh interpreter that has this file and nothing of this test."""
    (tmp_path / "alone.py").write_text(source)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; from alone import *; import alone; print({call})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + source
    return done.stdout.strip()


def test_what_a_function_uses_goes_with_it(tmp_path: Path) -> None:
    assert run_alone(standalone_source(uses_much), "uses_much('11 and 5')", tmp_path) == str(uses_much("11 and 5"))


def test_values_of_a_closure_are_written_down(tmp_path: Path) -> None:
    function = closure(2.5)
    assert run_alone(standalone_source(function), "scaled('16')", tmp_path) == str(function("16"))


def test_marks_on_a_function_and_its_decorators_are_kept(tmp_path: Path) -> None:
    assert run_alone(standalone_source(batched), "alone.batched.batched", tmp_path) == "True"


def test_a_file_says_where_it_is_read_what_it_imports() -> None:
    source = standalone_source(uses_much)
    assert "import math as math" in source
    assert "from collections import Counter as Counter" in source
    assert "WEIGHTS = {'right': 1.0, 'near': 0.5, 'nested': [1, (2, None)]}" in source


def uses_object(text: str) -> float:
    return float(text == BROKEN)


def uses_nothing_known(text: str) -> float:
    return undefined_name(text)  # type: ignore[name-defined,no-any-return]  # noqa: F821


class Scorer:
    def __call__(self, text: str) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (as_of_main(uses_object), r"uses 'BROKEN', a object, which cannot be written as Python"),
        (as_of_main(uses_nothing_known), r"uses 'undefined_name', which is not defined"),
        (lambda text: 1.0, r"a lambda or an object has no source"),
        (Scorer(), r"a lambda or an object has no source"),
        (functools.partial(uses_much, limit=1), r"a lambda or an object has no source"),
    ],
    ids=["object", "undefined", "lambda", "callable", "partial"],
)
def test_what_cannot_be_written_down_is_refused_by_name(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        standalone_source(function)


@dataclass
class Config:
    scale: int = 3


def of_a_class(text: str) -> float:
    return float(Config().scale * len(text))


def test_classes_of_importable_modules_are_imported_and_others_written() -> None:
    """`Config` belongs to this test module, which can be imported."""
    assert f"from {__name__} import Config as Config" in standalone_source(as_of_main(of_a_class))
