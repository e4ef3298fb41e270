"""Responses: `POST /v1/responses`, without state on the server."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlsdk.agents.dialects import reading
from rlsdk.agents.dialects.dialect import Form, sse
from rlsdk.agents.sessions.requests import Answer, Ask, Choice, Refusal

_FIELDS = frozenset({"input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "stream_options",
                     "text"})  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant")
_PARTS = ("input_text", "output_text", "text")
_ECHOED = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "top_p", "tools",
           "tool_choice", "user")  # fmt: skip


class Responses:
    """Satisfies `Dialect`."""

    def read(self, body: Mapping[str, Any], lenient: Collection[str]) -> tuple[Ask, Form]:
        """See `Dialect`."""
        if body.get("previous_response_id") is not None:
            reading.refuse("previous_response_id", body["previous_response_id"], "null: nothing is stored; send all "
                           "items of the conversation as input", code="unsupported_parameter")  # fmt: skip
        reading.check_fields(body, _FIELDS, lenient)
        text = body.get("text") or {}
        if (kind := (text.get("format") or {}).get("type", "text")) != "text":
            reading.refuse("text.format", kind, "text: a model that is trained is not forced into a format")
        ask = Ask(
            messages=tuple(_messages(body)),
            tools=tuple(_tool(tool, f"tools.{at}") for at, tool in enumerate(reading.objects(body, "tools"))),
            reads_calls=reading.reads_calls(body),
            max_tokens=reading.positive(body, "max_output_tokens"),
            overridden=reading.overridden(body),
        )
        echo = {name: body.get(name) for name in _ECHOED}
        return ask, Form(streams=reading.flag(body, "stream"), echo=echo)

    def whole(self, answer: Answer, form: Form) -> Mapping[str, Any]:
        """See `Dialect`."""
        (choice,) = answer.choices
        cut = choice.finish_reason == "length"
        return {
            **_head(answer, form),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(answer, choice),
            "usage": _usage(answer),
        }

    def events(self, answer: Answer, form: Form) -> Iterator[bytes]:
        """See `Dialect`."""
        numbers = iter(range(1_000_000_000))

        def event(kind: str, **fields: Any) -> bytes:
            return sse({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        begun = {**_head(answer, form), "status": "in_progress", "incomplete_details": None, "output": [],
                 "usage": None}  # fmt: skip
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        whole = self.whole(answer, form)
        for at, item in enumerate(whole["output"]):
            place = {"item_id": item["id"], "output_index": at}
            yield event("response.output_item.added", output_index=at, item=_empty(item))
            if item["type"] == "message":
                part = item["content"][0]
                inner = {**place, "content_index": 0}
                yield event("response.content_part.added", **inner, part={**part, "text": ""})
                yield event("response.output_text.delta", **inner, delta=part["text"], logprobs=[])
                yield event("response.output_text.done", **inner, text=part["text"], logprobs=[])
                yield event("response.content_part.done", **inner, part=part)
            elif item["type"] == "function_call":
                written = item["arguments"]
                yield event("response.function_call_arguments.delta", **place, delta=written)
                yield event("response.function_call_arguments.done", **place, name=item["name"], arguments=written)
            yield event("response.output_item.done", output_index=at, item=item)
        yield event(f"response.{whole['status']}", response=whole)

    def error(self, refusal: Refusal) -> Mapping[str, Any]:
        """See `Dialect`."""
        return {"error": refusal.body}


def _messages(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Items as messages: calls of one turn, and the text before them, are one message of the assistant."""
    if body.get("instructions") is not None:
        yield {"role": "system", "content": reading.content(body["instructions"], "instructions", _PARTS)}
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else reading.objects(body, "input")
    if not items:
        reading.refuse("input", given, "a text, or a non-empty list of items")
    turn: dict[str, Any] | None = None
    for at, item in enumerate(items):
        made = _item(item, f"input.{at}")
        if made["role"] == "assistant":
            turn = made if turn is None else _joined(turn, made)
            continue
        if turn is not None:
            yield turn
            turn = None
        yield made
    if turn is not None:
        yield turn


def _item(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            reading.refuse(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
        text = reading.content(item.get("content"), f"{where}.content", _PARTS)
        return {"role": "system" if role == "developer" else role, "content": text}
    if kind == "function_call":
        written = reading.arguments(item.get("arguments"), f"{where}.arguments")
        call = {"id": item.get("call_id"), "type": "function", "function": {"name": item.get("name"),
                "arguments": written}}  # fmt: skip
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        text = reading.content(item.get("output"), f"{where}.output", _PARTS)
        return {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id") or "")}
    if kind == "reasoning":
        parts = item.get("content") or ()
        return {"role": "assistant", "content": "", "reasoning_content": "".join(part["text"] for part in parts)}
    reading.refuse(f"{where}.type", kind, "message, function_call, function_call_output or reasoning")


def _joined(turn: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    joined = {**turn, "content": turn["content"] + more["content"]}
    if calls := [*turn.get("tool_calls", ()), *more.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    if reasoning := turn.get("reasoning_content", "") + more.get("reasoning_content", ""):
        joined["reasoning_content"] = reasoning
    return joined


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        reading.refuse(where, tool, 'a tool {"type": "function", "name": ...}; the gateway has no tools of its own')
    return reading.tool(tool, where)


def _head(answer: Answer, form: Form) -> dict[str, Any]:
    echo = form.echo or {}
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": form.created,
        "model": form.model,
        "error": None,
        **echo,
        "parallel_tool_calls": bool(echo.get("parallel_tool_calls")),
        "tool_choice": echo.get("tool_choice") or "auto",
        "tools": echo.get("tools") or [],
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
    }


def _items(answer: Answer, choice: Choice) -> list[dict[str, Any]]:
    message = choice.message
    items: list[dict[str, Any]] = []
    if message.reasoning:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": [thought]})
    if message.content or not message.calls:
        part: dict[str, Any] = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": "completed",
                      "content": [part]})  # fmt: skip
    for call in message.calls:
        items.append({
            "type": "function_call", "id": f"fc_{call.id.removeprefix('call_')}", "call_id": call.id, "name": call.name,
            "arguments": json.dumps(dict(call.arguments), ensure_ascii=False), "status": "completed",
        })  # fmt: skip
    return items


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item before its first event."""
    contents: Mapping[str, Any] = {"message": {"content": []}, "function_call": {"arguments": ""}}
    status = {} if item["type"] == "reasoning" else {"status": "in_progress"}
    return {**item, **contents.get(item["type"], {}), **status}


def _usage(answer: Answer) -> dict[str, Any]:
    total = answer.prompt_tokens + answer.completion_tokens
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": total,
    }
