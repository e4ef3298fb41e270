"""openai-agents: `openai_agents.py chat|responses whole|stream`."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def main(endpoint: str, mode: str) -> None:
    kind = OpenAIResponsesModel if endpoint == "responses" else OpenAIChatCompletionsModel
    model = kind(model="policy", openai_client=AsyncOpenAI())
    agent = Agent(name="adder", instructions="Be short.", tools=[add], model=model)
    if mode == "stream":
        result = Runner.run_streamed(agent, "40 + 2?")
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "40 + 2?")
    print(result.final_output)


asyncio.run(main(*sys.argv[1:]))
