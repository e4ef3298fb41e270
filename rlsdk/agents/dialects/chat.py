"""Chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlsdk.agents.dialects import reading
from rlsdk.agents.dialects.dialect import Form, sse
from rlsdk.agents.sessions.history import as_sent
from rlsdk.agents.sessions.requests import MAX_CHOICES, Answer, Ask, Choice, Refusal
from rlsdk.version import __version__

_FIELDS = frozenset({"messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "n", "stream",
                     "stream_options", "logprobs", "top_logprobs", "response_format", "return_token_ids"})  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatCompletions:
    """Satisfies `Dialect`."""

    def read(self, body: Mapping[str, Any], lenient: Collection[str]) -> tuple[Ask, Form]:
        """See `Dialect`."""
        reading.check_fields(body, _FIELDS, lenient)
        if (kind := (body.get("response_format") or {}).get("type", "text")) != "text":
            reading.refuse("response_format", kind, "text: a model that is trained is not forced into a format")
        if body.get("top_logprobs"):
            reading.refuse("top_logprobs", body["top_logprobs"], "0: only the log-prob of the sampled token is known")
        messages = [_message(message, f"messages.{at}") for at, message in enumerate(reading.objects(body, "messages"))]
        if not messages:
            reading.refuse("messages", body.get("messages"), "a non-empty list of messages")
        ask = Ask(
            messages=tuple(messages),
            tools=tuple(_tool(tool, f"tools.{at}") for at, tool in enumerate(reading.objects(body, "tools"))),
            reads_calls=reading.reads_calls(body),
            max_tokens=reading.positive(body, "max_completion_tokens") or reading.positive(body, "max_tokens"),
            stop=reading.texts(body, "stop"),
            num_choices=reading.positive(body, "n", MAX_CHOICES) or 1,
            overridden=reading.overridden(body),
            wants_log_probs=reading.flag(body, "logprobs"),
        )
        options = body.get("stream_options") or {}
        form = Form(
            streams=reading.flag(body, "stream"),
            includes_usage=bool(options.get("include_usage")),
            includes_token_ids=reading.flag(body, "return_token_ids"),
        )
        return ask, form

    def whole(self, answer: Answer, form: Form) -> Mapping[str, Any]:
        """See `Dialect`."""
        choices = []
        for at, choice in enumerate(answer.choices):
            message = {"refusal": None, **as_sent(choice.message)}
            if choice.message.calls and not choice.message.content:
                message["content"] = None
            choices.append({"index": at, "message": message, **_end(choice, form)})
        return {"object": "chat.completion", **_head(answer, form), "choices": choices, "usage": _usage(answer)}

    def events(self, answer: Answer, form: Form) -> Iterator[bytes]:
        """See `Dialect`."""
        head = {"object": "chat.completion.chunk", **_head(answer, form)}
        usage = {"usage": None} if form.includes_usage else {}

        def chunk(at: int, delta: Mapping[str, Any], **end: Any) -> bytes:
            choice = {"index": at, "delta": delta, "finish_reason": None, "logprobs": None, **end}
            return sse({**head, "choices": [choice], **usage})

        for at, choice in enumerate(answer.choices):
            message = choice.message
            yield chunk(at, {"role": "assistant", "content": "" if message.content or not message.calls else None})
            if message.reasoning:
                yield chunk(at, {"reasoning_content": message.reasoning})
            if message.content:
                yield chunk(at, {"content": message.content})
            for place, call in enumerate(as_sent(message).get("tool_calls", ())):
                yield chunk(at, {"tool_calls": [{"index": place, **call}]})
            yield chunk(at, {}, **_end(choice, form))
        if form.includes_usage:
            yield sse({**head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def error(self, refusal: Refusal) -> Mapping[str, Any]:
        """See `Dialect`."""
        return {"error": refusal.body}


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        reading.refuse(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    text = reading.content(message.get("content"), f"{where}.content")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if role == "tool":
        made["tool_call_id"] = str(message.get("tool_call_id") or "")
    if role == "assistant" and message.get("tool_calls"):
        calls = enumerate(reading.objects(message, "tool_calls"))
        made["tool_calls"] = [_call(call, f"{where}.tool_calls.{at}") for at, call in calls]
    if role == "assistant" and isinstance(message.get("reasoning_content"), str):
        made["reasoning_content"] = message["reasoning_content"]
    return made


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        reading.refuse(f"{where}.function", function, "an object with a name and arguments")
    written = reading.arguments(function.get("arguments"), f"{where}.function.arguments")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": written}}


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        reading.refuse(where, tool, 'a tool {"type": "function", "function": {...}}')
    return reading.tool(function, f"{where}.function")


def _head(answer: Answer, form: Form) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.id}",
        "created": form.created,
        "model": form.model,
        "system_fingerprint": f"rlsdk-v{__version__}",
    }


def _end(choice: Choice, form: Form) -> dict[str, Any]:
    log_probs = None
    if choice.pieces:
        log_probs = {"refusal": None, "content": [
            {"token": piece, "logprob": float(value), "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, value in zip(choice.pieces, choice.log_probs, strict=True)
        ]}  # fmt: skip
    ids = {"token_ids": choice.token_ids.tolist()} if form.includes_token_ids else {}
    return {"finish_reason": choice.finish_reason, "logprobs": log_probs, **ids}


def _usage(answer: Answer) -> dict[str, int]:
    used = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    return {**used, "total_tokens": sum(used.values())}
