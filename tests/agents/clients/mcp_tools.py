"""Tools of an MCP server with the openai client: `mcp_tools.py chat whole|stream`."""

import asyncio
import json
import sys

from mcp import Client
from mcp.server.mcpserver import MCPServer
from openai import AsyncOpenAI

server = MCPServer("adder")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def main(mode: str) -> None:
    messages = [{"role": "user", "content": "40 + 2?"}]
    async with Client(server) as tools, AsyncOpenAI() as model:
        listed = (await tools.list_tools()).tools
        schemas = [
            {"type": "function", "function": {
                "name": one.name, "description": one.description, "parameters": one.input_schema}}
            for one in listed
        ]  # fmt: skip
        while True:
            given = {"model": "policy", "messages": messages, "tools": schemas, "max_tokens": 100}
            if mode == "whole":
                message = (await model.chat.completions.create(**given)).choices[0].message
            else:
                async with model.chat.completions.stream(**given) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls:
                result = await tools.call_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content[0].text})
    print(message.content)


asyncio.run(main(sys.argv[2]))
