"""A class that plays an environment of an OpenEnv server; each of its objects has a session of its own."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal

from rlsdk.interfaces import ConfigError
from rlsdk_openenv.connection import Connection, ServerError, action_schema

LIST_S = 60.0
"""Seconds for asking the server, before a run, what its actions are."""
STEP = "step"
"""Name of the tool of an environment that has no tools of its own: its fields are those of the action."""
_RESERVED = ("reset", "get_reward", "turn_reward", "close", "done")
_APART = ("done", "reward", "metadata")
"""Fields of an observation that the model does not see."""


class OpenEnv:
    """An environment of a server. Its other methods are those of `environment_class`."""

    url = ""

    def __init__(self, reward: Literal["sum", "last"] = "sum", fields: Sequence[str] = ()) -> None:
        """Args:
            reward: the score of an episode: the sum of its steps' rewards, or the last of them.
            fields: of the data row, that the server's `reset` gets, besides the seed.

        Raises:
            ConfigError: `reward` is neither.
        """  # fmt: skip
        if reward not in ("sum", "last"):
            raise ConfigError(f"rollout.environment_options.reward is {reward!r}; expected 'sum' or 'last'")
        self._sum, self._fields = reward == "sum", tuple(fields)
        self._connection: Connection | None = None
        self._rewards: list[float] = []
        self.done = False

    async def reset(self, seed: int, **row: Any) -> str:
        """Opens a session, and begins an episode."""
        await self.close()
        missing = [name for name in self._fields if name not in row]
        if missing:
            raise ValueError(f"the row has no field {missing[0]!r} (rollout.environment_options.fields)")
        self._connection = await Connection.open(self.url)
        self._rewards, self.done = [], False
        return text_of(await self._ask("reset", {"seed": seed, **{name: row[name] for name in self._fields}}))

    def get_reward(self) -> float | None:
        """The score; None if no step had one."""
        if not self._rewards:
            return None
        return math.fsum(self._rewards) if self._sum else self._rewards[-1]

    async def close(self) -> None:
        """Ends the session."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _step(self, action: dict[str, Any]) -> str:
        return text_of(await self._ask("step", action))

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The observation of an answer; its reward and end are noted."""
        if self._connection is None:
            raise ConnectionError("the session with the OpenEnv server is closed")
        said = await self._connection.ask(kind, data)
        reward = said.get("reward")
        if kind == STEP and isinstance(reward, int | float) and math.isfinite(reward):
            self._rewards.append(float(reward))
        self.done = self.done or said.get("done") is True
        seen = said.get("observation")
        return seen if isinstance(seen, dict) else {"observation": seen}


@cache
def environment_class(url: str) -> type[OpenEnv]:
    """The class for a server, which is asked once what its actions are.

    Args:
        url: of the server: http or https.

    Raises:
        ConfigError: nothing answers there, or what it offers cannot be a tool.
    """
    said = f"environment 'openenv:{url}'"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{said}: expected the URL of a server, such as openenv:http://127.0.0.1:8000")
    try:
        tools = _in_thread(lambda: _tools(url))
        methods = {one["name"]: _tool(one) for one in tools} or {STEP: _whole_step(action_schema(url))}
    except Exception as error:
        raise ConfigError(f"{said}: it cannot be asked for its actions: {type(error).__name__}: {error}") from error
    for name in methods:
        if name.startswith("_") or name in _RESERVED:
            raise ConfigError(f"{said}: tool {name!r} cannot be offered: the name means something else here")
    return type("OpenEnvEnvironment", (OpenEnv,), {**methods, "url": url, "__doc__": f"The environment at {url}."})


def text_of(seen: Mapping[str, Any]) -> str:
    """What a model sees of an observation: the result of a tool, the one text that it is, or its fields as JSON."""
    if seen.get("error") and "tool_name" in seen:
        error = seen["error"]
        return f"Error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    shown = seen.get("result") if "tool_name" in seen else {k: v for k, v in seen.items() if k not in _APART}
    if isinstance(shown, Mapping) and "data" in shown:
        shown = shown["data"]
    if isinstance(shown, Mapping) and len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        shown = only
    if shown is None or shown == {}:
        return ""
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def _tool(tool: Mapping[str, Any]) -> Callable[..., Any]:
    name = str(tool["name"])

    async def call(self: OpenEnv, **arguments: Any) -> str:
        return await self._step({"type": "call_tool", "tool_name": name, "arguments": arguments})

    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    return _described(call, name, tool.get("description") or name, parameters)


def _whole_step(schema: Mapping[str, Any]) -> Callable[..., Any]:
    async def call(self: OpenEnv, **action: Any) -> str:
        return await self._step(action)

    properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
    parameters = {**schema, "type": "object", "properties": properties}
    return _described(call, STEP, str(schema.get("description") or "Takes an action."), parameters)


def _described(
    call: Callable[..., Any], name: str, description: str, parameters: Mapping[str, Any]
) -> Callable[..., Any]:
    call.__name__, call.__doc__ = name, description
    call.tool_schema = {"description": description, "parameters": dict(parameters)}  # type: ignore[attr-defined]
    return call


async def _tools(url: str) -> list[dict[str, Any]]:
    """Tools of an environment of tools; none: it has actions of another kind."""
    async with asyncio.timeout(LIST_S):
        connection = await Connection.open(url)
        try:
            await connection.ask("reset", {})
            said = await connection.ask(STEP, {"type": "list_tools"})
        except ServerError:
            return []
        finally:
            await connection.close()
    seen = said.get("observation")
    listed = seen.get("tools") if isinstance(seen, dict) else None
    return listed if isinstance(listed, list) else []


def _in_thread(work: Callable[[], Any]) -> Any:
    """Runs a coroutine to its end, on a loop of its own: the caller may be on one already."""
    with ThreadPoolExecutor(1, thread_name_prefix="rlsdk-openenv-list") as thread:
        return thread.submit(lambda: asyncio.run(work())).result()
