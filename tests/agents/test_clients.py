"""Clients of others in their stock form, in an environment of their own (`make environment-clients`)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from scripted_sampler import Script, form_of

from rlsdk.agents.gateway.server import Gateway
from rlsdk.agents.sessions.limits import EpisodeLimits
from rlsdk.agents.sessions.rows import rows_of
from rlsdk.agents.sessions.session import Session

SCRIPTS = Path(__file__).parent / "clients"
PYTHON = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
CALL = 'Let me see.\n\n<tool_call>\n{"name": "add", "arguments": {"b":2,  "a": 40}}\n</tool_call>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "It is 42."}}\n</tool_call>'
CLIENTS = [
    ("openai_agents", ("chat", "responses"), [CALL, "It is 42."], 1),
    ("smol_agents", ("chat",), [CALL, FINAL], 2),
    ("lite_llm", ("chat",), [CALL, "It is 42."], 1),
    ("lang_graph", ("chat",), [CALL, "It is 42."], 1),
    ("pydantic_agents", ("chat", "responses"), [CALL, "It is 42."], 1),
    ("mcp_tools", ("chat",), [CALL, "It is 42."], 1),
]
"""Script, endpoints, what the model says, and the rows that come of it: smolagents rewrites its history."""
CASES = [(name, endpoint, texts, rows) for name, endpoints, texts, rows in CLIENTS for endpoint in endpoints]

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="run `make environment-clients`")


@pytest.mark.parametrize(("name", "endpoint", "texts", "rows"), CASES)
def test_a_stock_client_plays_an_episode(name: str, endpoint: str, texts: list[str], rows: int) -> None:
    """Streaming and not, with the session in the path and as the key, at once."""

    async def play(gateway: Gateway, mode: str, *, by_key: bool) -> Session:
        script = Script(texts, max_model_tokens=60_000)
        session = Session(form_of(), script, EpisodeLimits())
        opened = await gateway.open(session)
        url = f"{gateway.url}/v1" if by_key else gateway.base_url(opened)
        process = await asyncio.create_subprocess_exec(
            str(PYTHON), "-I", str(SCRIPTS / f"{name}.py"), endpoint, mode,
            env={"PATH": os.environ["PATH"], "OPENAI_BASE_URL": url, "OPENAI_API_KEY": opened.token, "HOME": "/"},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, errors = await asyncio.wait_for(process.communicate(), 120)
        finally:
            await gateway.close_session(opened)
        assert process.returncode == 0, errors.decode()[-4000:]
        assert out.decode().strip().endswith("It is 42.")
        assert len(script.asked) == 2
        return session

    async def both() -> list[Session]:
        gateway = Gateway()
        try:
            return [await play(gateway, "whole", by_key=False), await play(gateway, "stream", by_key=True)]
        finally:
            gateway.close()

    for session in asyncio.run(both()):
        made = rows_of(session.tree, EpisodeLimits(), overlapped=session.overlapped)
        sampled = sum(len(node.span) for node in session.tree.nodes)
        assert len(made.rows) == rows
        assert made.receipt(sampled, session.rendered_again, session.counts).trained == sampled
        assert session.counts["refused"] == 0
