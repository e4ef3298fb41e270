"""A tokenizer's chat template: what it makes of messages, what it leaves out, and how it ends an assistant's turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from rlsdk.data.messages import content_text, own_fields, without_nulls
from rlsdk.data.rows import JsonValue, Messages
from rlsdk.interfaces import DataError

_ASKED, _FIRST, _SECOND = "rlsdkasked", "rlsdkfirst", "rlsdksecond"
"""Contents of messages that are rendered to learn about a template."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any
    eos_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(
        self, conversation: list[list[dict[str, Any]]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any: ...


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, with the variables that a run sets."""

    tokenizer: Tokenizer
    variables: Mapping[str, Any] = field(default_factory=dict)

    def render(self, turns: Messages, tools: Messages | None, source: str, *, opens_answer: bool) -> str:
        """The text of a conversation.

        Args:
            turns: messages.
            tools: JSON schemas; None: the template receives no `tools`.
            source: of the row, for messages.
            opens_answer: begin an assistant's turn at the end.

        Raises:
            DataError: the template refuses the conversation.
        """
        try:
            return self._made([self._as_read(turn) for turn in turns], tools, opens_answer=opens_answer)
        except Exception as error:  # templates are programs that come with the model, and may raise any exception
            raise DataError(f"{source}: the chat template refuses this row: {type(error).__name__}: {error}") from error

    def unread(self, turns: Messages, tools: Messages | None, source: str, *, since: int = 0) -> list[str]:
        """Names of the fields of messages beyond role and content, and `tools`, without which the text is the same.

        Args:
            turns: messages.
            tools: as for `render`.
            source: of the row, for messages.
            since: index of the first message to look at.

        Raises:
            DataError: a message has no content, and the template reads none of its fields.
        """
        names = list(dict.fromkeys(name for turn in turns[since:] for name in own_fields(turn)))
        if not names and tools is None:
            return []
        whole = self.render(turns, tools, source, opens_answer=False)

        def is_unread(names: Sequence[str], tools: Messages | None) -> bool:
            left = [*turns[:since], *(_without(turn, names) for turn in turns[since:])]
            try:
                return self.render(left, tools, source, opens_answer=False) == whole
            except DataError:  # it needs the field
                return False

        unread = [name for name in names if is_unread([name], tools)]
        for number, turn in enumerate(turns[since:], since + 1):
            own = own_fields(turn)
            if own and not content_text(turn).strip() and set(own) <= set(unread):
                raise DataError(
                    f"{source}: message {number} has no content, and the chat template does not read its {own}; take a "
                    "tokenizer whose template does, or leave the row out"
                )
        return [*unread, *(["tools"] if since == 0 and tools is not None and is_unread([], None) else [])]

    @cached_property
    def ending(self) -> str:
        """The text behind an assistant's turn that ends a conversation; empty if that cannot be found out."""
        asked, answered = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _FIRST}
        made = self._tried([self._as_read(asked), self._as_read(answered)])
        return made.rpartition(_FIRST)[2] if _FIRST in made else ""

    @cached_property
    def end(self) -> int | None:
        """Id of the token that ends an assistant's turn: the first token behind its text that is not text itself (white
        space behind it is not part of the turn). None: the template ends turns with text, or with nothing."""
        if not self.ending.strip():
            return None
        control = _control_tokens(self.tokenizer)
        ids = self.tokenizer([self.ending], add_special_tokens=False)["input_ids"][0]
        return next((int(token) for token in ids if int(token) in control), None)

    @cached_property
    def _content(self) -> Literal["text", "parts", "both"]:
        """The forms of a message's content that the template reads."""
        text = self._tried([{"role": "user", "content": _FIRST}])
        parts = self._tried([{"role": "user", "content": [_part(_FIRST), _part(_SECOND)]}])
        # A template that expects text shows the list of parts as Python or JSON does, or fails.
        shown_as_list = any(quoted in parts for quoted in ("'type'", '"type"'))
        if shown_as_list or _FIRST not in parts or _SECOND not in parts:
            return "text"
        return "both" if _FIRST in text else "parts"

    def _as_read(self, turn: Mapping[str, JsonValue]) -> dict[str, Any]:
        """The message with its content in a form that the template reads."""
        made = without_nulls(turn)
        content = made.get("content")
        if isinstance(content, list) and self._content == "text":
            made["content"] = content_text(turn)
        elif isinstance(content, str) and self._content == "parts":
            made["content"] = [_part(content)]
        return made

    def _tried(self, turns: list[dict[str, Any]]) -> str:
        """The text of a conversation, empty if the template refuses it."""
        try:
            return self._made(turns, None, opens_answer=False)
        except Exception:
            return ""

    def _made(self, turns: list[dict[str, Any]], tools: Messages | None, *, opens_answer: bool) -> str:
        given = dict(self.variables) if tools is None else {**self.variables, "tools": [dict(tool) for tool in tools]}
        made = self.tokenizer.apply_chat_template([turns], tokenize=False, add_generation_prompt=opens_answer, **given)
        return str(made[0])


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _without(turn: Mapping[str, JsonValue], names: Sequence[str]) -> Mapping[str, JsonValue]:
    return {name: value for name, value in turn.items() if name not in names}


def _control_tokens(tokenizer: Any) -> set[int]:
    """Ids of tokens that are not pieces of text: added ones, and those with a role (end of sequence)."""
    added: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return {*added.values(), *getattr(tokenizer, "all_special_ids", ())}
