"""smolagents: `smol_agents.py chat whole|stream`. Calls and results become texts: each turn is a row."""

import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one of them.
        b: the other.
    """
    return a + b


model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[add], model=model, stream_outputs=sys.argv[2] == "stream", verbosity_level=0)
print(agent.run("40 + 2?"))
