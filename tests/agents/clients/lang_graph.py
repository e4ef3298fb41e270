"""langgraph: `lang_graph.py chat whole|stream`."""

import sys

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


agent = create_react_agent(ChatOpenAI(model="policy", streaming=sys.argv[2] == "stream"), [add])
print(agent.invoke({"messages": [("user", "40 + 2?")]})["messages"][-1].content)
