"""The server, as stock clients use it: the openai package, unchanged, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import anthropic
import httpx
import openai
import pytest
from scripted_sampler import Script, form_of

from rlsdk.agents.gateway.server import Gateway
from rlsdk.agents.sessions.limits import EpisodeLimits
from rlsdk.agents.sessions.session import Session
from rlsdk.interfaces import ConfigError

CALL = 'Let me see.\n\n<tool_call>\n{"name": "add", "arguments": {"b":2,  "a": 40}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
FLAT = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with closing(Gateway(max_sessions=4, lenient=["own_field"])) as made:
        yield made


Work = Callable[["Wire"], Awaitable[Any]]


class Wire:
    """One session, and what reaches it."""

    def __init__(self, gateway: Gateway, session: Session, script: Script, token: str) -> None:
        self.gateway, self.session, self.script, self.token = gateway, session, script, token
        self.url = f"{gateway.url}/sessions/{token}/v1"

    def client(self, *, by_key: bool = False, **options: Any) -> openai.AsyncOpenAI:
        url, key = (f"{self.gateway.url}/v1", self.token) if by_key else (self.url, "any")
        return openai.AsyncOpenAI(base_url=url, api_key=key, **options)

    async def post(self, action: str, body: Any, **options: Any) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with httpx.AsyncClient() as client:
            return await client.post(f"{self.url}/{action}", content=data, **options)


def play(gateway: Gateway, texts: Sequence[str], work: Work, *, may_score: bool = False, **script: Any) -> Wire:
    async def run() -> Wire:
        said = Script(texts, **script)
        session = Session(form_of(), said, EpisodeLimits())
        opened = await gateway.open(session, may_score=may_score)
        wire = Wire(gateway, session, said, opened.token)
        try:
            await asyncio.wait_for(work(wire), 60)
        finally:
            await gateway.close_session(opened)
        return wire

    return asyncio.run(run())


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_chat_completions_with_a_tool(gateway: Gateway, streams: bool, by_key: bool) -> None:
    async def work(wire: Wire) -> None:
        messages: list[Any] = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "40 + 2?"}]
        async with wire.client(by_key=by_key) as client:

            async def say() -> Any:
                if not streams:
                    return await client.chat.completions.create(model="gpt-x", messages=messages, tools=[ADD])
                async with client.chat.completions.stream(
                    model="gpt-x", messages=messages, tools=[ADD], stream_options={"include_usage": True}
                ) as stream:
                    async for _ in stream:
                        pass
                    return await stream.get_final_completion()

            first = await say()
            choice = first.choices[0]
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 40, "b": 2})
            assert choice.message.content == "Let me see.\n\n"
            assert first.usage.completion_tokens == len(CALL) + 1
            assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
            messages += [choice.message.model_dump(exclude_none=True),
                         {"role": "tool", "tool_call_id": call.id, "content": "42"}]  # fmt: skip
            second = await say()
            assert second.choices[0].message.content == "It is 42."
            assert second.choices[0].finish_reason == "stop"
            assert (second.model, second.id.startswith("chatcmpl-")) == ("policy", True)
            assert second.id != first.id

    wire = play(gateway, [CALL, "It is 42."], work)
    assert wire.session.counts["continued"] == 1
    assert len(wire.session.tree.roots) == 1
    assert wire.session.counts["overridden"] == 0


@pytest.mark.parametrize("streams", [False, True])
def test_responses_with_a_tool(gateway: Gateway, streams: bool) -> None:
    async def work(wire: Wire) -> None:
        items: list[Any] = [{"role": "user", "content": "40 + 2?"}]
        async with wire.client() as client:

            async def say() -> Any:
                given: Any = {"model": "gpt-x", "instructions": "Be short.", "input": items, "tools": [FLAT]}
                if not streams:
                    return await client.responses.create(**given)
                async with client.responses.stream(**given) as stream:
                    async for _ in stream:
                        pass
                    return await stream.get_final_response()

            first = await say()
            assert first.status == "completed"
            assert [item.type for item in first.output] == ["message", "function_call"]
            call = first.output[1]
            assert json.loads(call.arguments) == {"a": 40, "b": 2}
            items += [item.model_dump(exclude_none=True) for item in first.output]
            for item in items[1:]:
                item.pop("parsed_arguments", None)
                for part in item.get("content", ()):
                    part.pop("parsed", None)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
            second = await say()
            assert second.output_text == "It is 42."
            assert second.usage.output_tokens == len("It is 42.") + 1

    wire = play(gateway, [CALL, "It is 42."], work)
    assert wire.session.counts["continued"] == 1
    assert len(wire.session.tree.roots) == 1


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_messages_with_a_tool(gateway: Gateway, streams: bool) -> None:
    async def work(wire: Wire) -> None:
        messages: list[Any] = [{"role": "user", "content": "40 + 2?"}]
        tool: Any = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
        url = wire.url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="any") as client:

            async def say() -> Any:
                given: Any = {"model": "m", "system": "Be short.", "messages": messages, "tools": [tool],
                              "max_tokens": 100}  # fmt: skip
                if not streams:
                    return await client.messages.create(**given)
                async with client.messages.stream(**given) as stream:
                    return await stream.get_final_message()

            first = await say()
            assert (first.stop_reason, [block.type for block in first.content]) == ("tool_use", ["text", "tool_use"])
            call = first.content[1]
            assert (call.name, call.input) == ("add", {"a": 40, "b": 2})
            assert first.usage.output_tokens == len(CALL) + 1
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await say()
            assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is 42.")
            with pytest.raises(anthropic.BadRequestError, match="non-empty list"):
                await client.messages.create(model="m", max_tokens=5, messages=[])

    wire = play(gateway, [CALL, "It is 42."], work)
    assert wire.session.counts["continued"] == 1
    assert len(wire.session.tree.roots) == 1


def test_all_dialects_ask_for_the_same_tokens(gateway: Gateway) -> None:
    asked: list[list[int]] = []
    for action, body in (
        ("chat/completions", {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
                              "tools": [ADD]}),
        ("responses", {"instructions": "s", "input": "a", "tools": [FLAT]}),
        ("messages", {"system": "s", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "tools": [
            {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]}),
    ):  # fmt: skip

        async def work(wire: Wire, action: str = action, body: Any = body) -> None:
            answer = await wire.post(action, body)
            assert answer.status_code == 200, answer.text

        asked += [ids for ids, _, _ in play(gateway, ["x"], work).script.asked]
    assert len(asked) == 3
    assert asked[0] == asked[1] == asked[2]


def test_sampling_is_the_runs(gateway: Gateway) -> None:
    async def work(wire: Wire) -> None:
        async with wire.client() as client:
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "a"}], temperature=0.0, seed=7, top_p=0.1,
                max_completion_tokens=3, n=2, logprobs=True, stop=["ee"], user="me",
                extra_body={"return_token_ids": True, "own_field": 1},
            )  # fmt: skip
            assert [choice.message.content for choice in answer.choices] == ["fiv", "s"]
            assert [choice.finish_reason for choice in answer.choices] == ["length", "stop"]
            content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
            assert [part.token for part in content or ()] == ["f", "i", "v"]
            assert [round(part.logprob, 4) for part in content or ()] == [-0.01, -0.02, -0.03]
            assert len(answer.choices[0].token_ids) == 3  # type: ignore[attr-defined]
            assert [one.id async for one in client.models.list()] == ["policy"]

    wire = play(gateway, ["five", "see"], work)
    assert wire.session.counts["overridden"] == 3
    assert [most for _, most, _ in wire.script.asked] == [3, 3]


@pytest.mark.parametrize(
    ("action", "body", "status", "param", "says"),
    [
        ("chat/completions", {"messages": []}, 400, "messages", "non-empty"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role", "robot"),
        ("chat/completions", {"mesages": []}, 400, "mesages", "did you mean 'messages'"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, 400, "max_tokens", "0"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 9}, 400, "n", "at most 8"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs",
         "sampled token"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}],
                              "response_format": {"type": "json_object"}}, 400, "response_format", "json_object"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
         "messages.0.content.0", "only text"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "c", "function": {"name": "add", "arguments": "{"}}]}]}, 400,
         "messages.0.tool_calls.0.function.arguments", "JSON text of an object"),
        ("chat/completions", b"{", 400, None, "not JSON"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None, "UTF-8"),
        ("chat/completions", b"[" * 100_000, 400, None, "not JSON"),
        ("chat/completions", b"[]", 400, None, "list"),
        ("responses", {"input": "a", "previous_response_id": "r"}, 400, "previous_response_id", "nothing is stored"),
        ("responses", {"input": []}, 400, "input", "non-empty"),
        ("responses", {"input": [{"type": "image"}]}, 400, "input.0.type", "image"),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}]}, 400, "tools.0", "tools of its own"),
        ("embeddings", {}, 404, None, "chat/completions"),
        ("finish", {"reward": 1.0}, 403, None, "agent_may_score"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(
    gateway: Gateway, action: str, body: Any, status: int, param: str | None, says: str
) -> None:
    async def work(wire: Wire) -> None:
        answer = await wire.post(action, body)
        assert answer.status_code == status, answer.text
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert says in error["message"]

    assert not play(gateway, ["x"], work).script.asked


def test_a_session_is_not_guessed_and_does_not_outlive_its_episode(gateway: Gateway) -> None:
    async def work(wire: Wire) -> None:
        assert len(wire.token) == 32
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="guess") as client:
            with pytest.raises(openai.NotFoundError, match="no such session"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{gateway.url}/")).status_code == 404

    wire = play(gateway, ["x"], work)

    async def late() -> None:
        async with wire.client() as client:
            with pytest.raises(openai.APIStatusError, match="closed") as gone:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
            assert gone.value.status_code == 410

    asyncio.run(late())


def test_a_client_that_leaves_gets_its_answer_when_it_asks_again(gateway: Gateway) -> None:
    """The openai client's own retry, after its timeout; one draw."""

    async def work(wire: Wire) -> None:
        wire.script.gate = asyncio.Event()

        async def open_later() -> None:
            while not wire.session.counts["delivered_again"]:
                await asyncio.sleep(0.01)
            gateway._thread._loop.call_soon_threadsafe(wire.script.gate.set)  # type: ignore[union-attr]

        opening = asyncio.create_task(open_later())
        async with wire.client(timeout=0.5, max_retries=3) as client:
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        await opening
        assert answer.choices[0].message.content == "one"

    wire = play(gateway, ["one", "two"], work)
    assert len(wire.script.asked) == 1
    assert all(node.is_delivered for node in wire.session.tree.nodes)


def test_a_stream_is_kept_alive(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsdk.agents.gateway.app.KEEP_ALIVE_S", 0.05)

    async def work(wire: Wire) -> None:
        wire.script.gate = asyncio.Event()
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        async with httpx.AsyncClient() as client, client.stream("POST", f"{wire.url}/chat/completions", json=body) as s:
            lines = []
            async for line in s.aiter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 2:
                    gateway._thread._loop.call_soon_threadsafe(wire.script.gate.set)
        assert lines[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in lines
        assert any('"content": "one"' in line for line in lines)

    play(gateway, ["one"], work)


def test_an_agent_may_score_itself_where_it_is_allowed(gateway: Gateway) -> None:
    async def work(wire: Wire) -> None:
        assert (await wire.post("finish", {"reward": 0.5, "extra": {"a": 1}})).status_code == 200
        assert (await wire.post("finish", {"reward": "much"})).status_code == 400
        found = gateway._sessions.find(wire.token).finished
        assert found is not None
        assert (found.reward, found.extra) == (0.5, {"a": 1})

    play(gateway, ["x"], work, may_score=True)


def test_sessions_beyond_the_limit_wait(gateway: Gateway) -> None:
    async def run() -> None:
        sessions = [Session(form_of(), Script(["x"]), EpisodeLimits()) for _ in range(5)]
        opened = [await gateway.open(session) for session in sessions[:4]]
        waiting = asyncio.create_task(gateway.open(sessions[4]))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await gateway.close_session(opened.pop())
        opened.append(await asyncio.wait_for(waiting, 10))
        for one in opened:
            await gateway.close_session(one)

    asyncio.run(run())
    assert len(gateway._sessions) == 0


def test_an_address_that_is_taken_is_refused_by_name(gateway: Gateway) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.port .* cannot listen there"):
        Gateway(port=int(gateway.url.rpartition(":")[2]))
