"""Tasks of a real taskset: rows, the harness with a real model behind the gateway, and a run that trains on them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsdk.interfaces import ConfigError
from rlsdk.registry import ComponentKind, Registry
from rlsdk.testing.process.callers import agent_arguments, steps_of, write_caller
from rlsdk_verifiers import ChatHarness, play
from rlsdk_verifiers.tasks import load_rows, task_of

sys.path.insert(0, str(Path(__file__).parent))


def test_rows_stand_for_tasks() -> None:
    source = Registry.discover().component(ComponentKind.DATASET, "verifiers")
    assert source is load_rows
    rows = list(load_rows("letters", count=3))
    assert [(row["prompt"], row["task"]) for row in rows] == [("AA:", 0), ("BB:", 1), ("CC:", 2)]
    assert len(list(load_rows("letters", limit=2))) == 2
    assert task_of(rows[2]).data.prompt == "CC:"
    assert task_of(rows[0]).data.prompt == "AA:"


def test_what_is_no_taskset_and_what_it_refuses_is_named() -> None:
    with pytest.raises(ConfigError, match=r"verifiers:leters: .*not found"):
        list(load_rows("leters"))
    with pytest.raises(ConfigError, match=r"(?s)verifiers:letters: .*cont"):
        list(load_rows("letters", cont=3))
    with pytest.raises(ConfigError, match="needs rows of --data verifiers:TASKSET"):
        task_of({"prompt": "x"})


def _played(**options: Any) -> None:
    row = next(iter(load_rows("letters")))
    session = SimpleNamespace(base_url="http://127.0.0.1:9/v1", api_key="k", model="policy")
    asyncio.run(play(SimpleNamespace(row=row), session, **options))  # type: ignore[arg-type]


def test_options_of_the_agent_are_checked() -> None:
    with pytest.raises(ConfigError, match="agent_options of rlsdk_verifiers:play"):
        _played(runtime={"type": "nowhere"})
    with pytest.raises(ConfigError, match="agent_options of rlsdk_verifiers:play"):
        _played(harness_options={"turns": 3})
    with pytest.raises(RuntimeError):
        _played()


def test_a_run_trains_on_the_tasks_of_a_taskset(tmp_path: Path) -> None:
    write_caller(tmp_path, "say", "text")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "rlsdk", *agent_arguments(tmp_path, "verifiers:letters", "rlsdk_verifiers:play")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    steps = steps_of(tmp_path)
    assert len(steps) == 2
    for line in steps:
        assert line["rollout/verifiers/reward_lower"] == pytest.approx(line["reward/mean"])
        assert 0 < line["reward/mean"] <= 0.4
        assert line["rollout/verifiers/length"] > 0


def test_the_harness_is_found_by_its_package() -> None:
    from verifiers.v1.utils.loaders import harness_class

    assert harness_class("rlsdk_verifiers") is ChatHarness
