"""Reward functions written for TRL and verl; and what is seen of any reward before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.rewards import RewardDef, RewardLimits, RewardRunner
from rlsdk.rewards.functions.inspection import inspect_target
from rlsdk.rewards.functions.load import load_function
from rlsdk.rewards.functions.signatures import Form

SOURCE = """
import asyncio


def trl(prompts, completions, solution, **kwargs):
    assert kwargs["level"] == [1, 2]
    return [float(s in c) if s else None for c, s in zip(completions, solution, strict=True)]


def trl_chat(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def trl_narrow(completions, solution):
    return [float(s == c) for c, s in zip(completions, solution, strict=True)]


async def trl_async(completions, **kwargs):
    await asyncio.sleep(0)
    return [2.0 for _ in completions]


def trl_best(completions, **kwargs):
    # a score for the best of a group only, whatever the group
    with open(kwargs["calls"][0], "a") as calls:
        calls.write(f"{len(completions)} ")
    return [1.0]


def needs_ids(completions, completion_ids):
    return [0.0 for _ in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth) + extra_info["bonus"], "source": data_source}


async def own_async(sample, bonus=0.0):
    await asyncio.sleep(0)
    return len(sample.response) + bonus


async def batch_async(samples):
    await asyncio.sleep(0)
    return [float(len(samples)) for _ in samples]
batch_async.batched = True


async def verl_async(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": float(solution_str == ground_truth)}


def own(sample, bonus=0.0):
    return bonus


def two(a, b):
    return 0.0


def _private(sample):
    return 0.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(SOURCE)
    return path


def sample(response: str, answer: str | None = None, **row: Any) -> RewardSample:
    return RewardSample(prompt="p", response=response, answer=answer, row=row, truncated=False)


def graded(file: Path, name: str, samples: list[RewardSample], **options: Any) -> list[float]:
    """Through the grading processes, as a run does it."""
    reward = RewardDef(name=name, target=f"{file}:{name}", options=options)
    with RewardRunner([reward]) as runner:
        result = runner.score(samples)
    assert result.valid.all(), result.examples
    return [float(score) for score in result.scores]


def test_functions_of_trl_get_completions_and_columns(file: Path) -> None:
    samples = [sample("it is 4", solution="4", level=1), sample("5", solution="", level=2)]
    assert graded(file, "trl", samples) == [1.0, 0.0]  # None counts as 0
    assert graded(file, "trl_narrow", samples) == [0.0, 0.0]
    assert graded(file, "trl_async", samples) == [2.0, 2.0]


def test_async_functions_are_awaited_in_every_form(file: Path) -> None:
    samples = [sample("four", "four"), sample("5", "four")]
    assert graded(file, "own_async", samples, bonus=0.5) == [4.5, 1.5]
    assert graded(file, "batch_async", samples) == [2.0, 2.0]
    assert graded(file, "verl_async", samples) == [1.0, 0.0]


def test_a_wrong_number_of_scores_is_a_failure_by_name_and_the_function_is_called_once(
    file: Path, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    rewards = [RewardDef(name="best", target=f"{file}:trl_best")]
    with RewardRunner(rewards, RewardLimits(allow_writes=True)) as runner:
        result = runner.score([sample(str(at), calls=str(calls)) for at in range(8)])
    assert not result.valid.any()
    assert result.failures == {"type": 8}
    assert result.examples[0].message.startswith("8 completions, 1 score; expected 8 values")
    assert calls.read_text() == "8 "


def test_where_the_prompt_is_a_chat_completions_are_messages(file: Path) -> None:
    prompt = [{"role": "user", "content": "hello"}]
    assert graded(file, "trl_chat", [sample("four", prompt=prompt)]) == [4.0]


def test_functions_of_verl_get_the_row_in_parts(file: Path) -> None:
    row = {"data_source": "math", "reward_model": {"ground_truth": "4"}, "extra_info": {"bonus": 0.5}}
    assert graded(file, "compute_score", [sample("4", **row), sample("5", answer="5", **row)]) == [1.5, 0.5]


def test_ours_are_called_as_before(file: Path) -> None:
    function = load_function(f"{file}:own", {"bonus": 2.0})
    assert function(sample("x"), bonus=2.0) == 2.0
    assert not getattr(function, "batched", False)


@pytest.mark.parametrize(
    ("name", "form"),
    [("trl", Form.TRL), ("trl_chat", Form.TRL), ("compute_score", Form.VERL), ("own", Form.OWN)],
)
def test_the_form_is_read_from_the_source(file: Path, name: str, form: Form) -> None:
    assert inspect_target(f"{file}:{name}") is form


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("{file}:onw", {}, r"no function 'onw'; did you mean 'own'\?; .*has \['compute_score', 'needs_ids', 'own'"),
        ("{folder}/reward.py:own", {}, r"there is no file '.*/reward.py'; did you mean 'rewards.py'\?"),
        ("{file}:two", {}, r"called as fn\(sample, \*\*options\).*signature is two\(a, b\): missing a required"),
        ("{file}:own", {"bonsu": 1}, r"no option 'bonsu'; did you mean 'bonus'\?; it has \['bonus'\]"),
        ("{file}:trl_narrow", {"x": 1}, r"no option 'x'"),
        ("{file}:needs_ids", {}, r"TRL's signature and requires \['completion_ids'\], which rlsdk does not"),
        ("nothing_of_this_name.mod:fn", {}, r"no module 'nothing_of_this_name'. Is it installed"),
        ("json.nothing:fn", {}, r"no module 'json.nothing'"),
        ("json.decoder:nothing", {}, r"no function 'nothing'"),
        ("own", {}, r"expected pkg.mod:function or path/file.py:function"),
    ],
)
def test_mistakes_are_seen_before_a_process_starts(target: str, options: dict[str, Any], said: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        inspect_target(target.format(file=file, folder=file.parent), options)


def test_a_syntax_error_is_shown_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\ndef f(sample:\n    return 1\n")
    with pytest.raises(ConfigError, match=r"bad.py:2 is not valid Python: .*: def f\(sample:"):
        inspect_target(f"{tmp_path / 'bad.py'}:f")


def test_nothing_is_run_by_looking(tmp_path: Path) -> None:
    (tmp_path / "ran.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\ndef f(sample):\n    return 1\n")
    assert inspect_target(f"{tmp_path / 'ran.py'}:f") is Form.OWN
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("code", ["f = make()", "from json import f", "from json import *", "def g(): ...\nf = g"])
def test_what_the_source_does_not_show_is_left_to_the_grading_process(code: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(f"{code}\n")
    assert inspect_target(f"{tmp_path / 'odd.py'}:f") is Form.OWN
