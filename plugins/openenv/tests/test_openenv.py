"""Environments of a real OpenEnv server, in its own interpreter (`make environment-openenv`), and a run in one."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsdk.agents.environments.naming import find_environment
from rlsdk.agents.environments.tools import EnvironmentClass
from rlsdk.interfaces import ConfigError
from rlsdk.testing.process.callers import run_arguments, steps_of, write_caller
from rlsdk_openenv.environment import environment_class, text_of

PYTHON = Path(__file__).parents[3] / ".venv-openenv" / "bin" / "python"
SERVERS = Path(__file__).with_name("servers.py")
WAIT_S = 120.0
needs_server = pytest.mark.skipif(not PYTHON.exists(), reason="run `make environment-openenv`")


def serve(kind: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [str(PYTHON), str(SERVERS), kind, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def tools() -> Iterator[str]:
    yield from serve("tools")


@pytest.fixture(scope="module")
def action() -> Iterator[str]:
    yield from serve("action")


def played(make: Any, calls: list[tuple[str, dict[str, Any]]], row: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    async def play() -> tuple[Any, ...]:
        one = make(**options)
        try:
            seen = await one.reset(seed=3, **row)
            said = [await getattr(one, name)(**arguments) for name, arguments in calls]
            return seen, said, one.done, one.get_reward()
        finally:
            await one.close()
            await one.close()

    return asyncio.run(play())


@needs_server
def test_tools_of_an_environment_are_the_models_tools(tools: str) -> None:
    make = find_environment(f"openenv:{tools}")
    schemas = {tool["function"]["name"]: tool["function"] for tool in EnvironmentClass.of(make, "o").tools}
    assert [*schemas] == ["say", "fail"]
    assert schemas["say"]["parameters"]["required"] == ["text"]
    seen, said, done, reward = played(make, [("say", {"text": "abc"}), ("fail", {})], {})
    assert (seen, said[0], done, reward) == ("", "[3]", False, None)
    assert said[1].startswith("Error: ")


@needs_server
def test_an_action_is_a_tool_and_rewards_are_summed(action: str) -> None:
    make = environment_class(action)
    (schema,) = EnvironmentClass.of(make, "o").tools
    assert (schema["function"]["name"], schema["function"]["parameters"]["required"]) == ("step", ["text"])
    calls = [("step", {"text": text}) for text in ("ab", "A", "abc")]
    assert played(make, calls, {"topic": "x"}) == ("", ["[1]", "[2]", "[3]"], True, pytest.approx(0.25))
    seen, _, _, reward = played(make, calls, {"topic": "x"}, reward="last", fields=["topic"])
    assert (seen, reward) == ("about x", pytest.approx(0.15))
    with pytest.raises(ValueError, match="no field 'topic'"):
        played(make, [], {}, fields=["topic"])
    with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
        played(make, [("step", {"text": 3})], {})
    with pytest.raises(ConfigError, match="expected 'sum' or 'last'"):
        make(reward="mean")


@needs_server
def test_a_run_trains_in_an_environment_of_a_server(action: str, tmp_path: Path) -> None:
    write_caller(tmp_path, "step", "text")
    command = [sys.executable, "-m", "rlsdk", *run_arguments(tmp_path, f"openenv:{action}")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    steps = steps_of(tmp_path)
    assert len(steps) == 2
    for line in steps:
        assert line["rollout/tool_calls"] > 1
        assert line["rollout/tool_failures"] == line["rollout/tool_errors"] == 0


def test_what_a_model_sees_of_an_observation() -> None:
    assert text_of({"text": "hello", "done": True, "reward": 1, "metadata": {"answer": 3}}) == "hello"
    assert text_of({"a": 1, "b": "x"}) == '{"a": 1, "b": "x"}'
    assert text_of({"done": False}) == ""
    assert text_of({"tool_name": "t", "result": {"data": [1, 2]}}) == "[1, 2]"
    assert text_of({"tool_name": "t", "result": None, "error": {"message": "no"}}) == "Error: no"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:9"])
def test_a_server_that_is_not_there_is_refused_before_a_run(url: str) -> None:
    with pytest.raises(ConfigError, match="environment 'openenv:"):
        environment_class(url)
