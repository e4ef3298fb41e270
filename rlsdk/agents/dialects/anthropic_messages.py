"""Anthropic's messages: `POST /v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlsdk.agents.dialects import reading
from rlsdk.agents.dialects.dialect import Form, sse
from rlsdk.agents.sessions.requests import Answer, Ask, Choice, Refusal

_FIELDS = frozenset({"messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"})
_KINDS = {400: "invalid_request_error", 404: "not_found_error", 410: "invalid_request_error", 413: "request_too_large"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessages:
    """Satisfies `Dialect`."""

    def read(self, body: Mapping[str, Any], lenient: Collection[str]) -> tuple[Ask, Form]:
        """See `Dialect`."""
        reading.check_fields(body, _FIELDS, lenient)
        messages: list[dict[str, Any]] = []
        if body.get("system") is not None:
            messages.append({"role": "system", "content": reading.content(body["system"], "system")})
        given = reading.objects(body, "messages")
        if not given:
            reading.refuse("messages", body.get("messages"), "a non-empty list of messages")
        for at, message in enumerate(given):
            messages += _messages(message, f"messages.{at}")
        choice = body.get("tool_choice") or {}
        ask = Ask(
            messages=tuple(messages),
            tools=tuple(_tool(tool, f"tools.{at}") for at, tool in enumerate(reading.objects(body, "tools"))),
            reads_calls=choice.get("type") != "none",
            max_tokens=reading.positive(body, "max_tokens"),
            stop=reading.texts(body, "stop_sequences"),
            overridden=reading.overridden(body),
        )
        return ask, Form(streams=reading.flag(body, "stream"))

    def whole(self, answer: Answer, form: Form) -> Mapping[str, Any]:
        """See `Dialect`."""
        (choice,) = answer.choices
        return {
            **_head(answer, form),
            "content": _blocks(choice),
            "stop_reason": _REASONS[choice.finish_reason],
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        }

    def events(self, answer: Answer, form: Form) -> Iterator[bytes]:
        """See `Dialect`."""
        whole = self.whole(answer, form)
        used = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
        begun = {**whole, "content": [], "stop_reason": None, "usage": used}
        yield _event("message_start", message=begun)
        for at, block in enumerate(whole["content"]):
            empty, delta = _pieces(block)
            yield _event("content_block_start", index=at, content_block=empty)
            yield _event("content_block_delta", index=at, delta=delta)
            yield _event("content_block_stop", index=at)
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage=whole["usage"])
        yield _event("message_stop")

    def error(self, refusal: Refusal) -> Mapping[str, Any]:
        """See `Dialect`."""
        kind = _KINDS.get(refusal.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.body["message"]}}


def _messages(message: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """A message as chat templates take it: results of tools are messages of their own, before the text beside them."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        reading.refuse(f"{where}.role", role, "user or assistant")
    if content is None or isinstance(content, str):
        yield {"role": role, "content": content or ""}
        return
    texts: list[Mapping[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    results = 0
    for at, block in enumerate(reading.objects(message, "content")):
        place = f"{where}.content.{at}"
        match block.get("type"):
            case "tool_result":
                results += 1
                said = reading.content(block.get("content"), f"{place}.content")
                yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": said}
            case "tool_use":
                calls.append(_call(block, place))
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case _:
                texts.append(block)
    made = {"role": role, "content": reading.content(texts, f"{where}.content")}
    if calls:
        made["tool_calls"] = calls
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    if texts or calls or thoughts or not results:
        yield made


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        reading.refuse(where, block, "a tool_use with a name and an object as input")
    return {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        reading.refuse(where, tool, "a tool with a name and an input_schema; the gateway has no tools of its own")
    return reading.tool({**tool, "parameters": tool.get("input_schema")}, where)


def _head(answer: Answer, form: Form) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": form.model, "stop_sequence": None,
    }  # fmt: skip


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    message = choice.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
    return blocks


def _pieces(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block before its first delta, and all of it as one delta."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    name = "thinking" if block["type"] == "thinking" else "text"
    return {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
