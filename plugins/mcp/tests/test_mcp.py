"""Tools of real MCP servers: what an object sees of them, and a run that trains on them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError

from rlsdk.agents.environments.naming import find_environment
from rlsdk.agents.environments.tools import EnvironmentClass
from rlsdk.interfaces import ConfigError
from rlsdk.testing.process.callers import run_arguments, steps_of, write_caller
from rlsdk_mcp.environment import environment_class, text_of
from rlsdk_mcp.servers import read_servers

SERVER = Path(__file__).with_name("server.py")
STDIO = f"{sys.executable} {SERVER}"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server over streamable HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_tools_become_schemas_and_each_object_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSDK_TEST_SECRET", "s3cret")
    make = find_environment(f"mcp:{STDIO}")
    tools = {tool["function"]["name"]: tool["function"] for tool in EnvironmentClass.of(make, "mcp").tools}
    assert [*tools] == ["say", "fail", "variables", "leave"]
    assert tools["say"]["parameters"]["required"] == ["text"]
    assert tools["say"]["description"].startswith("Notes a text.")

    async def play() -> list[Any]:
        one, other = make(), make()
        said = []
        try:
            await asyncio.gather(one.reset(), other.reset())
            said += [
                await one.say(text="a"),
                await one.say(text="b"),
                await other.say(text="c"),
                await one.fail(code=3),
            ]
            said.append("RLSDK_TEST_SECRET" in await one.variables())
            await one.reset()
            said.append(await one.say(text="d"))
        finally:
            await asyncio.gather(one.close(), other.close())
        await one.close()
        with pytest.raises(ConnectionError, match="closed"):
            await one.say(text="e")
        return said

    first, second, third, failed, leaked, anew = asyncio.run(play())
    assert (first, second, third, leaked, anew) == ("[1]", "[2]", "[1]", False, "[1]")
    assert failed.startswith("Error: ")


def test_a_server_that_dies_is_a_failure_of_the_tool_and_close_returns() -> None:
    make = environment_class(STDIO)

    async def play() -> None:
        one = make()
        await one.reset()
        async with asyncio.timeout(30):
            with pytest.raises(MCPError, match="closed"):
                await one.leave()
            await one.close()

    asyncio.run(play())


def test_a_run_trains_on_the_tools_of_a_server(url: str, tmp_path: Path) -> None:
    write_caller(tmp_path, "say", "text")
    (tmp_path / "graded.py").write_text("def graded(sample):\n    return sum(map(str.islower, sample.response)) / 20\n")
    command = [sys.executable, "-m", "rlsdk", *run_arguments(tmp_path, f"mcp:{url}"), "--reward"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"{tmp_path / 'graded.py'}:graded"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    steps = steps_of(tmp_path)
    assert len(steps) == 2
    for line in steps:
        assert line["rollout/tool_calls"] > 1
        assert line["rollout/tool_failures"] == line["rollout/tool_errors"] == 0


def test_results_without_text_are_named() -> None:
    class Block:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    blocks = [Block(type="text", text="a"), Block(type="image", mime_type="image/png")]
    assert text_of(blocks, None) == "a\n[image left out: image/png]"
    assert text_of([], {"value": 3}) == '{"value": 3}'
    assert text_of([], None) == ""


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("[", "no JSON"),
        ("{}", "expected {.mcpServers"),
        ('{"mcpServers": {"a": 3}}', "expected an object with `command` or `url`"),
        ('{"mcpServers": {"a": {"comand": "x"}}}', "unknown field 'comand'; did you mean 'command'"),
        ('{"mcpServers": {"a": {"command": ["x"]}}}', "command is .*expected str"),
        ('{"mcpServers": {"a": {"command": "x", "url": "y"}}}', "either `url` or `command`"),
        ('{"mcpServers": {"a": {"url": "y", "headers": {"K": "${RLSDK_NONE}"}}}}', "RLSDK_NONE is not set"),
    ],
)
def test_a_file_of_servers_is_checked(tmp_path: Path, content: str, match: str) -> None:
    (tmp_path / "servers.json").write_text(content)
    with pytest.raises(ConfigError, match=match):
        read_servers(str(tmp_path / "servers.json"))


def test_a_file_names_several_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSDK_TOKEN", "t")
    web = {"url": "https://h/mcp", "headers": {"Authorization": "Bearer ${RLSDK_TOKEN}"}}
    servers = {"notes": {"command": "python", "args": ["a.py"], "env": {"A": "1"}, "cwd": "/"}, "web": web}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    notes, second = read_servers(str(tmp_path / "servers.json"))
    assert (notes.command, notes.environment, notes.folder) == (("python", "a.py"), {"A": "1"}, "/")
    assert (second.url, second.headers) == ("https://h/mcp", {"Authorization": "Bearer t"})


@pytest.mark.parametrize(
    "rest", ["/nonexistent/server", f"{sys.executable} -c pass", "http://127.0.0.1:9/mcp", "none.json"]
)
def test_a_server_that_is_not_there_is_refused_before_a_run(rest: str) -> None:
    with pytest.raises(ConfigError, match="environment 'mcp:"):
        environment_class(rest)
