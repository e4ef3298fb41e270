"""The calculator through a stock client: an agent that knows the policy as an OpenAI-compatible endpoint, and no more.

In a run, as a function: `--rollout.agent examples/calculator/agent.py:calculate`; or in a process of its own:
`--rollout.command '[python, examples/calculator/agent.py]'`. The tokenizer needs a chat template: `prepare.py --chat`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai

sys.path.append(str(Path(__file__).parent))
from calculator import ANSWER, CALL, operate

from rlsdk.interfaces import Outcome

if TYPE_CHECKING:
    from rlsdk.interfaces import AgentSession, PromptView


async def calculate(prompt: PromptView, session: AgentSession, *, max_turns: int = 4, turn_tokens: int = 20) -> Outcome:
    """One episode; the options are those of the rollouter."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        return Outcome(extra={"given_answer": await answer_of(client, prompt.text, max_turns, turn_tokens)})


async def answer_of(client: openai.AsyncOpenAI, question: str, max_turns: int, turn_tokens: int) -> str | None:
    """The model's answer; None: it gave none."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(max_turns):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=turn_tokens)
        choice = reply.choices[0]
        said = choice.message.content or ""
        asked = CALL.search(said)
        if asked is None or choice.finish_reason != "stop":
            break
        value = operate(asked[1])
        result = "=?;" if value is None else f"={value};"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
    answer = ANSWER.search(said) if choice.finish_reason == "stop" else None
    return None if answer is None else answer[1]


async def main() -> None:
    """One episode, in a process of its own."""
    task = json.loads(Path(os.environ["RLSDK_TASK"]).read_text(encoding="utf-8"))
    async with openai.AsyncOpenAI() as client:
        answer = await answer_of(client, task["prompt"], **{"max_turns": 4, "turn_tokens": 20, **task["options"]})
        async with httpx.AsyncClient() as http:
            await http.post(f"{client.base_url}finish", json={"extra": {"given_answer": answer}})


if __name__ == "__main__":
    asyncio.run(main())
