"""A harness of verifiers: a chat with the task's tools, on the loop that plays the episode. It starts no process."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

from mcp import Client
from openai import AsyncOpenAI
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace


class ChatConfig(HarnessConfig):
    """Of this harness: nothing more than of every one."""


class ChatHarness(Harness[ChatConfig]):
    """What the model says is a turn, until it calls no tool. verifiers counts and bounds the turns."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """See `Harness.launch`."""
        async with AsyncExitStack() as stack:
            model = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0))
            servers = {name: await stack.enter_async_context(Client(url)) for name, url in mcp_urls.items()}
            await _chat(model, ctx.model, self._messages(data), servers, self.config.tool_timeout)
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _messages(self, data: TaskData) -> list[Any]:
        system, prompt = self.resolve_prompt(data)
        first = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*first, {"role": "user", "content": prompt}]
        return [*first, *(message_to_wire(message) for message in prompt or ())]


async def _chat(model: AsyncOpenAI, name: str, messages: list[Any], servers: dict[str, Client], tool_s: float) -> None:
    owners, tools = {}, []
    for server in servers.values():
        for tool in (await server.list_tools()).tools:
            owners[tool.name] = server
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            tools.append({"type": "function", "function": function})
    given: dict[str, Any] = {"tools": tools} if tools else {}
    while True:
        answer = await model.chat.completions.create(model=name, messages=messages, **given)
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return
        for call in said.tool_calls:
            text = await _result(owners, call, tool_s)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def _result(owners: dict[str, Client], call: Any, tool_s: float) -> str:
    """What a tool says; its failure is text for the model."""
    server = owners.get(call.function.name)
    if server is None:
        return f"Error: no tool {call.function.name!r}; expected one of {sorted(owners)}"
    try:
        arguments = json.loads(call.function.arguments or "{}")
        result = await server.call_tool(call.function.name, arguments, read_timeout_seconds=tool_s)
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}"
    text = "\n".join(block.text for block in result.content if block.type == "text")
    return f"Error: {text}" if result.is_error else text
