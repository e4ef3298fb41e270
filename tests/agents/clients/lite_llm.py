"""litellm: `lite_llm.py chat whole|stream`."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
messages = [{"role": "user", "content": "40 + 2?"}]


def say():
    given = {"model": "openai/policy", "messages": messages, "tools": TOOLS, "max_tokens": 100,
             "api_base": os.environ["OPENAI_BASE_URL"]}  # fmt: skip
    if sys.argv[2] == "whole":
        return litellm.completion(**given).choices[0].message
    chunks = list(litellm.completion(**given, stream=True))
    return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


message = say()
while message.tool_calls:
    messages.append(message)
    for call in message.tool_calls:
        given = json.loads(call.function.arguments)
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "name": "add", "content": str(given["a"] + given["b"])}
        )
    message = say()
print(message.content)
