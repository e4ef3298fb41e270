"""The chat of one model by its tokenizer: written by its template, continued by ids, read by its format of calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlsdk.agents.chats.response_templates import RESPONSE_TEMPLATES, loaded, named_by
from rlsdk.data import ChatTemplate, LiteralEncoder, special_ids
from rlsdk.interfaces import AssistantMessage, ConfigError, DataError, Message, Tool, ToolCall, nearest

PREFIX_TOKENS = 64
"""Last tokens of a prompt in which the beginning of the model's turn is looked for."""
CALLS = "tool_calls"
"""Field of calls in response templates."""
_ASKED = "x"
_SAID = "what-the-model-said"
"""Stands in for a turn, to be found again in what a template writes."""
_WHERE = "rollout.tool_format"


class ChatFormat:
    """Satisfies `rlsdk.interfaces.ToolFormat` for a tokenizer with a chat template."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str | None = None,
        variables: Mapping[str, Any] | None = None,
        stop_token_ids: Collection[int] = (),
        needs_calls: bool = True,
        never_rewrites: bool = False,
    ) -> None:
        """Looks the format of calls up.

        Args:
            tokenizer: of the policy.
            name: one of `RESPONSE_TEMPLATES`; None: the tokenizer's `response_template`, else by its chat template.
            variables: of the chat template (`enable_thinking`).
            stop_token_ids: tokens that end a turn, beside the one of the template.
            needs_calls: whether a format of calls must be known; otherwise turns may be plain text.
            never_rewrites: a turn is also continued where the template would write the chat before it in another way
                once more follows, such as without its reasoning.

        Raises:
            ConfigError: the tokenizer has no chat template, no such format exists, or none is known that fits.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "rollout: the tokenizer has no chat template, which environments and agents need: it writes messages, "
                "tools and their results; take a tokenizer that has one"
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, dict(variables or {}))
        self._literal = LiteralEncoder(tokenizer)
        self._never_rewrites = never_rewrites
        ends = {*stop_token_ids, *([] if self._template.end is None else [self._template.end])}
        self._ends = ends & special_ids(tokenizer)
        """A stop token that is text is part of the turn, like a stop string."""
        own = getattr(tokenizer, "response_template", None)
        self._own = name is None and own is not None
        chosen = None if self._own else _chosen(tokenizer, name, needs_calls=needs_calls)
        template = own if self._own else RESPONSE_TEMPLATES.get(chosen or "")
        self._calls = None if template is None else loaded(template)
        self._text_only = None if template is None else loaded(_without_calls(template))

    @property
    def reads_calls(self) -> bool:
        """Whether calls of tools can be read."""
        return self._calls is not None and CALLS in self._calls.fields

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """See `ToolFormat`.

        Raises:
            DataError: the chat template refuses the messages.
        """
        return self._encoded(self._text(self._literal.hide([*messages]), tools, opens=True))

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """See `ToolFormat`.

        What follows a turn is what the template writes behind a turn like it, of a chat with nothing else: a call of
        the same tools, without arguments.
        """
        turn, hidden = messages[-1], self._literal.hide([*new])
        # Templates write a turn without reasoning in another way where it is the last one, some with it, too.
        for reasoning in dict.fromkeys((turn.get("reasoning_content"), _ASKED)):
            short = [{"role": "user", "content": _ASKED}, _stand_in(turn, reasoning)]
            try:
                before = self._text(short, tools, opens=False)
                after = self._text([*short, *hidden], tools, opens=True)
            except DataError:
                return None
            if after.startswith(before):
                return self._encoded(self._ending(before, ids) + after[len(before) :])
        return self._behind(turn, hidden, ids, tools) if self._never_rewrites else None

    def _behind(
        self, turn: Message, hidden: Sequence[Message], ids: Sequence[int], tools: Sequence[Tool]
    ) -> list[int] | None:
        """What the template writes behind a turn, whatever it makes of the turn; None: it cannot be told where the turn
        ends, because the template writes no token there."""
        stand_in = {**_stand_in(turn, None), "content": _SAID}
        try:
            text = self._text([{"role": "user", "content": _ASKED}, stand_in, *hidden], tools, opens=True)
        except DataError:
            return None
        said = text.find(_SAID)
        names = [self._tokenizer.convert_ids_to_tokens(token) for token in self._ends]
        found = [(at, name) for name in names if (at := text.find(name, said)) >= 0]
        if said < 0 or not found:
            return None
        at, name = min(found)
        return self._encoded(text[at + len(name) :] if len(ids) and ids[-1] in self._ends else text[at:])

    def texts_with_control(self, messages: Sequence[Message]) -> int:
        """Number of messages that hold the text of a control token, which is encoded as text."""
        return sum(self._literal.found_in(dict(message)) for message in messages)

    def read(self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Tool]) -> AssistantMessage:
        """See `ToolFormat`."""
        said = [*ids][:-1] if len(ids) and ids[-1] in self._ends else [*ids]
        text = self._decoded(said)
        template = self._calls if tools else self._text_only
        if template is None:
            return AssistantMessage(content=text)
        before = self._decoded([*prompt_ids][-PREFIX_TOKENS:])
        prefix = before if self._own else ("<think>" if before.rstrip().endswith("<think>") else "")
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(text, template, prefix=prefix, tools=[dict(tool) for tool in tools])
            calls = tuple(_call(each) for each in message.get(CALLS) or ())
        except Exception as error:  # of text that a model wrote: a call that is cut off, or no JSON
            return AssistantMessage(content=text, malformed=f"{error}"[:200])
        reasoning = message.get("reasoning_content") or message.get("thinking")
        return AssistantMessage(content=str(message.get("content") or ""), calls=calls, reasoning=reasoning)

    def _ending(self, text: str, ids: Sequence[int]) -> str:
        """What of a chat's text is behind the last token of `ids`, which ends or breaks off in the model's turn."""
        names = [self._tokenizer.convert_ids_to_tokens(token) for token in self._ends]
        end, name = max(((text.rfind(name), name) for name in names), default=(-1, ""))
        if end < 0:
            return ""
        return text[end + len(name) :] if len(ids) and ids[-1] in self._ends else text[end:]

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opens: bool) -> str:
        return self._template.render([*messages], [*tools] or None, _WHERE, opens_answer=opens)

    def _encoded(self, text: str) -> list[int]:
        return self._literal.encode(text, add_special_tokens=False, where=_WHERE)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([*ids], skip_special_tokens=False))


def message_of(turn: AssistantMessage) -> Message:
    """A turn that was read, as a message for a chat template."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in turn.calls
        ]
    return message


def _stand_in(turn: Message, reasoning: Any) -> dict[str, Any]:
    """A turn of the same calls, without arguments."""
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    if reasoning is not None:
        made["reasoning_content"] = reasoning
    if calls := turn.get("tool_calls"):
        made["tool_calls"] = [
            {
                "id": call.get("id", ""),
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": {}},
            }
            for call in calls
        ]
    else:
        made["content"] = _ASKED
    return made


def _call(found: Any) -> ToolCall:
    """A call as it was parsed.

    Raises:
        ValueError: it is none.
    """
    function = found.get("function") if isinstance(found, Mapping) else None
    name, arguments = (function.get(key) for key in ("name", "arguments")) if isinstance(function, Mapping) else (0, 0)
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError(f"a call has a name and an object of arguments, got {str(found)[:80]!r}")
    return ToolCall(name=name.strip(), arguments=arguments)


def _chosen(tokenizer: Any, name: str | None, *, needs_calls: bool) -> str | None:
    """The name of the tokenizer's format of calls; None: it is not known."""
    if name is not None:
        if name not in RESPONSE_TEMPLATES:
            valid = sorted(RESPONSE_TEMPLATES)
            raise ConfigError(
                f"rollout.tool_format {name!r} does not exist{nearest(name, valid)}; choose one of {valid}"
            )
        return name
    template = tokenizer.chat_template
    found = named_by(template if isinstance(template, str) else json.dumps(template))
    if found is None and needs_calls:
        raise ConfigError(
            "rollout.tool_format: no format of tool calls is known that fits the tokenizer's chat template; choose one "
            f"of {sorted(RESPONSE_TEMPLATES)}, or give the tokenizer a `response_template` "
            "(transformers.utils.chat_parsing)"
        )
    return found


def _without_calls(template: Any) -> Any:
    """A response template of text and reasoning only."""
    if not isinstance(template, Mapping) or not isinstance(template.get("fields"), Mapping):
        return template
    return {**template, "fields": {name: field for name, field in template["fields"].items() if name != CALLS}}
