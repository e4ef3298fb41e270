"""pydantic-ai: `pydantic_agents.py chat|responses whole|stream`."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def main(endpoint: str, mode: str) -> None:
    model = (OpenAIResponsesModel if endpoint == "responses" else OpenAIChatModel)("policy")
    agent = Agent(model, instructions="Be short.", tools=[add])
    # With a handler of events it streams; `run_stream` ends at the first text, also before a call.
    print((await agent.run("40 + 2?", event_stream_handler=watch if mode == "stream" else None)).output)


async def watch(context: object, events: object) -> None:
    async for _ in events:
        pass


asyncio.run(main(*sys.argv[1:]))
