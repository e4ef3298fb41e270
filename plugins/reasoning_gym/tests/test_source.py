"""The tasks of reasoning-gym as a data source."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlsdk.data import DataRow, check_source, load_rows
from rlsdk.interfaces import ConfigError
from rlsdk.registry import ComponentKind, Registry

REGISTRY = Registry.discover()
HOW: dict[str, Any] = {
    "kinds": REGISTRY.usable(ComponentKind.DATASET),
    "resolve": partial(REGISTRY.component, ComponentKind.DATASET),
}


def load(name: str, limit: int | None = None, **options: Any) -> list[DataRow]:
    return load_rows(name, options=options, limit=limit, **HOW)


def test_a_generated_task_is_the_same_for_the_same_seed() -> None:
    first = load("reasoning_gym:chain_sum", size=20, seed=5, min_digits=2, max_digits=2)
    again = load("reasoning_gym:chain_sum", size=20, seed=5, min_digits=2, max_digits=2)
    other = load("reasoning_gym:chain_sum", size=20, seed=6, min_digits=2, max_digits=2)
    assert first == again
    assert first != other
    assert first[3].source == "reasoning_gym:chain_sum:4"
    assert {"question", "answer", "metadata"} <= first[0].row.keys()
    json.dumps([row.row for row in first])


def test_limit_is_the_number_of_generated_rows() -> None:
    assert len(load("reasoning_gym:gcd", limit=7)) == 7
    assert len(load("reasoning_gym:gcd", limit=3, size=7)) == 3


def test_a_misspelt_task_parameter_or_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such task; did you mean 'chain_sum'"):
        load("reasoning_gym:chainsum")
    with pytest.raises(ConfigError, match="no parameter 'min_digit'; did you mean 'min_digits'"):
        load("reasoning_gym:chain_sum", min_digit=2)
    with pytest.raises(ConfigError, match=r"refuses .*'min_digits': -1.*: "):
        load("reasoning_gym:chain_sum", min_digits=-1)


def test_a_misspelt_task_is_seen_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="reasoning_gym:chain_sm: no such task; did you mean 'chain_sum'"):
        check_source("reasoning_gym:chain_sm", **HOW)


def test_known_tasks_are_checked_without_importing_them_or_what_draws(tmp_path: Path) -> None:
    script = """
import sys
from rlsdk.data import check_source
from rlsdk.registry import ComponentKind, Registry
from rlsdk_reasoning_gym.library import import_reasoning_gym, may_have_task
registry = Registry.discover()
resolve = lambda kind: registry.component(ComponentKind.DATASET, kind)
check_source("reasoning_gym:game_of_life", kinds=registry.usable(ComponentKind.DATASET), resolve=resolve)
print("reasoning_gym" in sys.modules)
library = import_reasoning_gym()
print([name for name in library.DATASETS if not may_have_task(name)], {"matplotlib", "cellpylib"} & set(sys.modules))
print(len(library.create_dataset("game_of_life", size=1, seed=1)[0]["question"]) > 100, "cellpylib" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.splitlines() == ["False", "[] set()", "True True"], done.stderr
