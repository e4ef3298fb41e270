"""Problems of a configuration are data; their text is for the command line, or for a call from Python."""

from __future__ import annotations

import pickle

import pytest

from rlsdk.config import load_config
from rlsdk.config.problem import Problem, config_error, unknown_key
from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.spelling import PythonCall, Setting, spelled_for
from rlsdk.registry import Registry


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (Problem("a.b", "is required"), "a.b: is required"),
        (Problem("a.b", value=3, expected="at most 2"), "a.b: 3: expected at most 2"),
        (Problem("a.b", value="x", suggestions=("xy",), expected="a name"), "a.b: 'x': expected a name; did you mean "
         "'xy'?"),
        (Problem("a", "is odd", "run.yaml:3", value=3, hint="see c"), "a: 3: is odd; see c (run.yaml:3)"),
        (Problem("", "argument 'x': expected a flag"), "argument 'x': expected a flag"),
        (Problem("a", value=9), "a: 9"),
        (unknown_key("a.stepz", "stepz", ["steps", "seed"]), "a.stepz: unknown key; did you mean 'steps'?"),
        (unknown_key("a.q", "q", ["steps", "seed"]), "a.q: unknown key; expected one of seed, steps"),
    ],
)  # fmt: skip
def test_the_line_of_a_problem(problem: Problem, line: str) -> None:
    assert str(problem) == line


def test_commands_are_flags_or_keywords() -> None:
    problem = Problem("trainer.steps", "0: trains nothing", commands=(Setting("trainer.steps", 5),))
    leads = Problem("sft.lr", "is not read, but this:", commands=(Setting("train.optim.lr", 0.1), Setting("critic")))
    assert str(problem) == "trainer.steps: 0: trains nothing; give `--trainer.steps 5`"
    assert str(leads) == "sft.lr: is not read, but this: `--train.optim.lr 0.1` or `--critic`"
    with spelled_for(PythonCall()):
        assert str(problem) == "trainer.steps: 0: trains nothing; give `steps=5`"


def test_an_error_of_a_configuration_holds_its_problems() -> None:
    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    with pytest.raises(ConfigError, match="3 problems in the configuration") as raised:
        load_config([], ["--trainer.steps", "-1", "--trainer.stepz", "3", "--train.optim.betas", "[1, 2]"], registry)
    found = {problem.path: problem for problem in raised.value.problems}
    assert found["trainer.steps"].value == -1
    assert found["trainer.steps"].expected.startswith(("more than 0", "at least"))
    assert found["trainer.steps"].origin == "--trainer.steps"
    assert found["trainer.stepz"].suggestions[0].rpartition(".")[2] == "steps"
    assert found["trainer.stepz"].is_unknown_key
    assert found["train.optim.betas"].expected == "two numbers of at least 0 and less than 1"
    assert pickle.loads(pickle.dumps(raised.value)).problems == raised.value.problems


def test_a_short_run_is_told_the_setting_that_solves_it() -> None:
    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    flags = ["--train.optim.schedule", "linear", "--train.optim.warmup_steps", "50", "--trainer.steps", "5"]
    with pytest.raises(ConfigError, match=r"give `--train\.optim\.warmup_steps 0`") as raised:
        load_config([], flags, registry)
    (problem,) = raised.value.problems
    assert problem.commands == (Setting("train.optim.warmup_steps", 0),)


def test_equal_problems_of_any_value_are_one() -> None:
    made = [Problem("a", value=[3], commands=(Setting("b", {"c": 1}),)) for _ in range(2)]
    assert list(dict.fromkeys([*made, Problem("a", value=[4])])) == [made[0], Problem("a", value=[4])]


def test_one_problem_is_the_whole_message() -> None:
    error = config_error([Problem("a", "b")])
    assert str(error) == "a: b"
    assert error.problems == (Problem("a", "b"),)


def test_a_key_and_value_without_a_space_between_them_are_told_so() -> None:
    found = str(unknown_key("teachers.0.log_probs:x", "log_probs:x", ["log_probs", "model"]))
    assert found == "teachers.0.log_probs:x: unknown key; expected `log_probs: x`, with a space behind the colon"
