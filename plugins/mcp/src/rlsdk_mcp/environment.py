"""A class whose tools are those of MCP servers; each of its objects has connections of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

from mcp import Client

from rlsdk.interfaces import ConfigError
from rlsdk_mcp.servers import Server, connect, read_servers

LIST_S = 30.0
"""Seconds for starting the servers and listing their tools, before a run."""
_MOST_PAGES = 100
_RESERVED = ("reset", "get_reward", "turn_reward", "close", "done")


class McpTools:
    """Tools of MCP servers. A subclass may add what an episode is about: `reset`, which awaits this one's, tools of its
    own, `get_reward`.

    Its own methods are those of `environment_class`.
    """

    servers: Sequence[Server] = ()

    async def reset(self) -> None:
        """Connects to the servers: stdio starts new processes, streamable HTTP a new session."""
        await self.close()
        self._connections = _Connections(self.servers)
        await self._connections.open()

    async def close(self) -> None:
        """Ends connections and processes."""
        connections: _Connections | None = getattr(self, "_connections", None)
        if connections is not None:
            await connections.close()


@cache
def environment_class(rest: str) -> type[McpTools]:
    """The class for servers, which are started once to list their tools.

    Args:
        rest: see `read_servers`.

    Raises:
        ConfigError: no server is named or answers in 30 s, or a tool cannot be offered.
    """
    servers = read_servers(rest)
    methods: dict[str, Any] = {}
    for server, tools in zip(servers, _in_thread(lambda: _listed(servers), rest), strict=True):
        for tool in tools:
            said = f"environment 'mcp:{rest}': tool {tool['name']!r} of {server.name!r}"
            if tool["name"] in methods:
                raise ConfigError(f"{said} has the name of another server's; offer one of them")
            if tool["name"].startswith("_") or tool["name"] in _RESERVED:
                raise ConfigError(f"{said} cannot be offered: the name means something else in an environment")
            methods[tool["name"]] = _method(server.name, tool)
    return type("McpEnvironment", (McpTools,), {**methods, "servers": servers, "__doc__": f"Tools of {rest}."})


def text_of(content: Sequence[Any], structured: Any) -> str:
    """What a model sees of a result: its texts, and the names of what is no text."""
    parts = []
    for block in content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        else:
            kind = getattr(block, "mime_type", None) or getattr(block, "uri", None) or block.type
            parts.append(f"[{block.type} left out: {kind}]")
    return "\n".join(parts) if parts or structured is None else json.dumps(structured, ensure_ascii=False)


def _method(server: str, tool: Mapping[str, Any]) -> Callable[..., Any]:
    name = tool["name"]

    async def call(self: McpTools, **arguments: Any) -> str:
        return await self._connections.call(server, name, arguments)

    call.__name__, call.__doc__ = name, tool["description"]
    call.tool_schema = {"description": tool["description"], "parameters": tool["parameters"]}  # type: ignore[attr-defined]
    return call


class _Connections:
    """Connections of one object. The library wants each to be opened and closed by one task."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._clients: dict[str, Client] = {}
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready))
        try:
            await ready
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        self._closing.set()
        task, self._task = self._task, None
        if task is not None:
            if not self._clients:  # still being opened
                task.cancel()
            await asyncio.wait([task])
        self._clients.clear()

    async def call(self, server: str, tool: str, arguments: dict[str, Any]) -> str:
        if server not in self._clients:
            raise ConnectionError(f"the connection to MCP server {server!r} is closed")
        result = await self._clients[server].call_tool(tool, arguments)
        text = text_of(result.content, result.structured_content)
        return f"Error: {text}" if result.is_error else text

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        try:
            async with AsyncExitStack() as stack:
                clients = {one.name: await stack.enter_async_context(Client(connect(one))) for one in self._servers}
                self._clients.update(clients)
                if not ready.done():
                    ready.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(ConnectionError(f"no connection to the MCP servers: {error}"))


async def _listed(servers: Sequence[Server]) -> list[list[dict[str, Any]]]:
    found = []
    async with asyncio.timeout(LIST_S):
        for server in servers:
            async with Client(connect(server)) as client:
                found.append(await _tools(client))
    return found


async def _tools(client: Client) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += [
            {"name": one.name, "description": one.description or one.title or one.name, "parameters": one.input_schema}
            for one in page.tools
        ]
        if (cursor := page.next_cursor) is None:
            break
    return tools


def _in_thread(work: Callable[[], Any], rest: str) -> Any:
    """Runs a coroutine to its end, on a loop of its own: the caller may be on one already."""
    with ThreadPoolExecutor(1, thread_name_prefix="rlsdk-mcp-list") as thread:
        try:
            return thread.submit(lambda: asyncio.run(work())).result()
        except BaseException as error:
            raise ConfigError(f"environment 'mcp:{rest}': its tools cannot be listed: {_why(error)}") from error


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {LIST_S:g} s"
    return f"{type(error).__name__}: {error}"
