from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.interfaces import ConfigError
from rlsdk.rewards import load_function, target_of

from . import functions
from .conftest import FUNCTIONS, sample


def test_a_function_is_found_by_module_or_by_file() -> None:
    assert load_function("rlsdk.rewards.math.graders:gsm8k")(sample("#### 42", "#### 42")) == 1.0
    assert load_function(f"{FUNCTIONS}:length")(sample("abc")) == 3.0


def test_a_relative_file_is_found_and_may_import_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights_of_mine.py").write_text("SEVEN = 7.0\n")
    (tmp_path / "mine.py").write_text("from weights_of_mine import SEVEN\ndef score(sample): return SEVEN\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("mine.py:score")(sample("")) == 7.0


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def score(sample): return {value}\n")
    assert [load_function(f"{tmp_path}/{folder}/mine.py:score")(sample("")) for folder in "ab"] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("gsm8k", "expected pkg.mod:function or path/file.py:function"),
        (f"{FUNCTIONS}:lenght", "no function 'lenght'; did you mean 'length'"),
        (f"{FUNCTIONS}:not_a_function", "'not_a_function' is a int, not a function"),
        ("rlsdk.rewards.math.graders:gsm8", "did you mean 'gsm8k'.; .* has ..choice., .gsm8k.."),
        (
            "rlsdk.reward.graders:gsm8k",
            "importing 'rlsdk.reward.graders' failed: ModuleNotFoundError.* Is it installed",
        ),
        (f"{FUNCTIONS.parent}/function.py:length", "there is no file .*; did you mean 'functions.py'"),
        ("/nowhere/at/all.py:f", "there is no file '/nowhere/at/all.py'"),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error_with_the_nearest(target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_function(target)


def test_a_module_that_fails_to_import_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_here\n")
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'no_such_module_here'"):
        load_function(f"{tmp_path}/broken.py:score")


def test_options_are_checked_against_the_signature() -> None:
    load_function(f"{FUNCTIONS}:answer_is_right", {"right": 2.0})
    with pytest.raises(ConfigError, match="has no option 'rigth'; did you mean 'right'"):
        load_function(f"{FUNCTIONS}:answer_is_right", {"rigth": 2.0})
    with pytest.raises(ConfigError, match=r"is called as fn\(sample, \*\*options\)"):
        load_function(f"{FUNCTIONS}:loop")


def test_a_function_in_hand_has_a_name_for_another_process() -> None:
    assert target_of(functions.length) == f"{functions.__name__}:length"
    for nameless in (lambda sample: 1.0, sample("").row.get):
        with pytest.raises(ConfigError, match="cannot be loaded in the grading process"):
            target_of(nameless)
