"""Old names of requirements are answered with the new ones."""

from __future__ import annotations

from typing import Any

import pytest

from rlsdk.interfaces import ConfigError
from rlsdk.testing import RolloutConformance, ShardingConformance, TrainConformance
from rlsdk.testing.check import check_backend
from rlsdk.testing.suites.renamed import FAMILIES, IRREGULAR, RENAMED, check_expression, new_name
from rlsdk.testing.suites.requirements import MARK

SUITES: tuple[type[Any], ...] = (RolloutConformance, TrainConformance, ShardingConformance)


def names() -> set[str]:
    tests = [getattr(suite, name) for suite in SUITES for name in dir(suite) if name.startswith("test_")]
    return {mark.args[0] for test in tests for mark in test.pytestmark if mark.name == MARK}


def test_new_names_are_those_of_requirements_and_old_ones_are_not() -> None:
    assert set(RENAMED.values()) <= names()
    assert not names() & {*RENAMED, *FAMILIES}
    assert not [name for name in names() for family in FAMILIES if name.startswith(f"{family}.")]
    assert set(IRREGULAR.values()) <= RENAMED.keys()
    assert not [name for suite in SUITES for name in IRREGULAR if hasattr(suite, name) and new_name(name) is None]


def test_an_expression_with_an_old_name_is_given_back_with_the_new_one() -> None:
    with pytest.raises(ConfigError) as raised:
        check_backend("torch", only="life.heads or (update and not looks)")
    assert str(raised.value) == (
        "--only 'life.heads or (update and not looks)' has old names of requirements: 'life.heads' is now "
        "'random_calls.heads'; 'looks' is now 'polling_is_cheap'. Run it with --only "
        "'random_calls.heads or (update and not polling_is_cheap)'"
    )
    with pytest.raises(ConfigError, match=r"--only '\(read_only or offload\)'"):
        check_expression("steady")
    check_expression("random_calls or lifetime or slow_caller")


def test_an_omission_by_an_old_name_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"TestMine.test_life_heads = None .* is now 'random_calls.heads'"):
        type("TestMine", (TrainConformance,), {"test_life_heads": None})
    with pytest.raises(TypeError, match="is now 'streaming'"):
        type("TestMine", (RolloutConformance,), {"test_as_they_finish": None})
    type("TestMine", (RolloutConformance,), {"test_streaming": None, "test_life": lambda self: None})
