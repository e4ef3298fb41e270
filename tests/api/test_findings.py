"""What is wrong with a start, gathered: a check may fail over values that are refused, a defect of it may not hide."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.config import Problem
from rlsdk.config.checks.findings import Findings
from rlsdk.interfaces import ConfigError, PlacementError, RlsdkError


def raising(error: Exception) -> Callable[[], int]:
    def check() -> int:
        raise error

    return check


def test_a_defect_of_a_check_is_raised_with_what_was_found_before() -> None:
    found = Findings()
    found.add([Problem("trainer.steps", "0: expected at least 1")])
    with pytest.raises(ZeroDivisionError) as caught:
        found.run_check(raising(ZeroDivisionError("steps")), 0)
    assert caught.value.__notes__ == ["found before: trainer.steps: 0: expected at least 1"]


@pytest.mark.parametrize("error", [PlacementError("4 asked, 2 there"), RlsdkError("no such role")])
def test_what_follows_from_a_refused_value_is_not_said_beside_it(error: RlsdkError) -> None:
    found = Findings()
    with pytest.raises(type(error)):
        found.run_check(raising(error), 0)
    assert not found
    found.add([Problem("placement.roles", "'x' is no role")])
    assert found.run_check(raising(error), 7) == 7
    with pytest.raises(ConfigError, match=r"^placement.roles: 'x' is no role$"):
        found.refuse()


def test_refusals_are_all_said() -> None:
    found = Findings()
    assert found.run_check(raising(ConfigError("a")), 1) == 1
    assert found.run_check(raising(ConfigError("b")), 2) == 2
    assert found.run_check(lambda: 3, 4) == 3
    with pytest.raises(ConfigError, match="2 problems in the configuration:\n  a\n  b"):
        found.refuse()


def test_the_quickstart_is_as_short_as_asked() -> None:
    config = resolve(Settings(flags=["--trainer.steps", "4"])).config
    assert (config.trainer.steps, config.train.optim.warmup_steps) == (4, 1)
    assert resolve(Settings(flags=["--trainer.steps", "1"])).config.train.optim.warmup_steps == 0
    assert resolve(Settings()).config.train.optim.warmup_steps == 20
    with pytest.raises(ConfigError, match=r"warmup_steps: 30: expected fewer than the run's 4 .*--train.optim.warmup"):
        resolve(Settings(flags=["--trainer.steps", "1", "--train.optim.warmup_steps", "30"]))


def test_a_variable_in_the_name_of_data_is_one_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Settings(flags=["--data", "${DATA}/x.jsonl", "--reward", "gsm8k"]))
    assert str(caught.value).count("data.train") == 2  # the field, and the flag to type


def test_devices_are_not_dealt_out_by_a_placement_that_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives no pool to role 'actor'"):
        resolve(Settings(flags=["--placement.preset", "null"]))
