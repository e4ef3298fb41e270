"""Renders a row to the text that the model gets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from rlsdk.data.control_tokens import LiteralEncoder
from rlsdk.data.rows import DataRow, JsonValue, Messages, lookup, missing_field
from rlsdk.interfaces import ConfigError, DataError

_FIELD = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any
    eos_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(
        self, conversation: list[list[dict[str, Any]]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any: ...


@dataclass(frozen=True)
class Template:
    """Text with `{field}` placeholders. Only names are replaced and nothing is evaluated: attributes, indices and
    formats are not supported, other braces are kept, and `{{field}}` means a literal `{field}`."""

    text: str

    @property
    def fields(self) -> list[str]:
        """Names of the placeholders, in order."""
        return [name for _, name in _FIELD.findall(self.text) if name]

    def fill(self, row: DataRow, **extra: str) -> str:
        """The text with the fields of the row, or of `extra`, filled in.

        Raises:
            DataError: the row lacks a field; names file and line.
        """

        return "".join(text for text, _ in self.parts(row, **extra))

    def parts(self, row: DataRow, **extra: str) -> list[tuple[str, bool]]:
        """As `fill`, in pieces: (text, whether it is the template's own)."""
        found: list[tuple[str, bool]] = []
        at = 0
        for match in _FIELD.finditer(self.text):
            literal, name = match.groups()
            found.append((self.text[at : match.start()], True))
            found.append(("{" + literal + "}", True) if literal else (self._value(row, name, extra), False))
            at = match.end()
        return [*found, (self.text[at:], True)]

    def _value(self, row: DataRow, name: str, extra: Mapping[str, str]) -> str:
        if name in extra:
            return extra[name]
        try:
            return as_text(lookup(row.row, name))
        except KeyError:
            raise missing_field(
                name, row, f"asked for by the template {self.text[:60]!r}", others=list(extra)
            ) from None


def as_text(value: JsonValue) -> str:
    """A field's value as text: a list of strings as lines, other lists and objects as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(str(item) for item in value)
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """The fields of a row for prompt and answer, and the templates of the prompt."""

    prompt_field: str = "question"
    """Field with a text, or a list of chat messages. A dot reads nested objects."""
    answer_field: str = "answer"
    """Field with the reference answer; it may be missing."""
    prompt_template: str = "{prompt}"
    """Text of the user message: `{prompt}` is the text of the prompt field, any other name a field of the row."""
    system_prompt: str | None = None
    """System message; needs a chat template. A row whose messages begin with a system message keeps its own."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: use the chat template if the tokenizer has one."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for instance `enable_thinking`."""
    allow_special_tokens: bool = False
    """Whether special tokens in the text of rows become control tokens. False: they are encoded as text."""

    def select(self, rows: Sequence[DataRow]) -> list[DataRow]:
        """The rows with `prompt` and `answer` filled in.

        Raises:
            DataError: a row without its prompt, or with one of the wrong type, with file and line; or an
                `answer_field` that was named and that no row has.
        """
        selected = [replace(row, prompt=self._prompt(row), answer=self._answer(row)) for row in rows]
        if selected and self.answer_field != "answer" and all(row.answer is None for row in selected):
            raise missing_field(self.answer_field, selected[0], "answer_field; no row has it", flag="data.answer_field")
        return selected

    def uses_chat_template(self, tokenizer: Tokenizer) -> bool:
        """Whether prompts go through the tokenizer's chat template.

        Raises:
            ConfigError: one is needed, but the tokenizer has none.
        """
        present = bool(tokenizer.chat_template)
        if self.chat_template == "always" and not present:
            raise ConfigError("chat_template is 'always', but the tokenizer has no chat template; use 'never'")
        use = present and self.chat_template != "never"
        if self.system_prompt is not None and not use:
            raise ConfigError(
                f"system_prompt {self.system_prompt[:40]!r} needs a chat template, but "
                + ("chat_template is 'never'" if present else "the tokenizer has none")
                + "; put the text into prompt_template"
            )
        return use

    def messages(self, row: DataRow) -> list[dict[str, Any]]:
        """The row's prompt as a conversation, system message first."""
        prompt = row.prompt
        turns: list[dict[str, Any]]
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
        if self.system_prompt is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system_prompt})
        return turns

    def holds_special_tokens(self, row: DataRow, literal: LiteralEncoder) -> bool:
        """Whether the data's part of a selected row's prompt contains a special token."""
        if not literal.found_in(row.prompt):
            return False
        return literal.found_normalized(row.prompt) or self.hide(row, literal).prompt != row.prompt

    def hide(self, row: DataRow, literal: LiteralEncoder) -> DataRow:
        """A selected row with a placeholder for every special token from the data; those of `prompt_template` and
        `system_prompt` are kept."""
        if not isinstance(row.prompt, str):
            return replace(row, prompt=literal.hide(row.prompt))
        template = Template(self.prompt_template)
        value = str(lookup(row.row, self.prompt_field)) if "prompt" in template.fields else ""
        return replace(row, prompt=literal.hide_parts(template.parts(row, prompt=value)))

    def _prompt(self, row: DataRow) -> str | Messages:
        template = Template(self.prompt_template)
        needed = "prompt" in template.fields
        try:
            value = lookup(row.row, self.prompt_field) if needed else ""
        except KeyError:
            raise missing_field(self.prompt_field, row, "prompt_field", flag="data.prompt_field") from None
        if isinstance(value, list):
            return self._checked_messages(value, row)
        if not isinstance(value, str):
            shown = "null" if value is None else f"{type(value).__name__}: {str(value)[:60]!r}"
            raise DataError(
                f"{row.source}: prompt field {self.prompt_field!r} must be a text or a list of chat messages, got "
                f"{shown}; fix the row, or name another field (`--data.prompt_field FIELD`)"
            )
        return template.fill(row, prompt=value)

    def _checked_messages(self, value: Sequence[JsonValue], row: DataRow) -> Messages:
        if self.prompt_template != "{prompt}":
            raise DataError(
                f"{row.source}: prompt field {self.prompt_field!r} holds chat messages, which prompt_template "
                f"{self.prompt_template[:40]!r} cannot take in; leave prompt_template at '{{prompt}}'"
            )
        turns = [turn for turn in value if isinstance(turn, Mapping)]
        good = all(isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str) for turn in turns)
        if not turns or len(turns) != len(value) or not good:
            raise DataError(
                f"{row.source}: prompt field {self.prompt_field!r} must be a non-empty list of messages "
                f'{{"role": text, "content": text}}, got {str(value)[:80]!r}'
            )
        return turns

    def _answer(self, row: DataRow) -> str | None:
        try:
            value = lookup(row.row, self.answer_field)
        except KeyError:
            return None
        return None if value is None else as_text(value)


def render(rows: Sequence[DataRow], tokenizer: Tokenizer, form: PromptFormat) -> list[str]:
    """The text of each prompt, chat template included; selected rows in, same order out.

    Raises:
        ConfigError: messages, or a system prompt, without a chat template.
        DataError: the chat template refuses a row; names file and line.
    """
    if form.uses_chat_template(tokenizer):
        return [_through_template(row, tokenizer, form) for row in rows]
    return [_plain_text(row) for row in rows]


def _plain_text(row: DataRow) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    raise ConfigError(
        f"{row.source}: the prompt is a list of chat messages, but no chat template is in use; take a tokenizer that "
        f"has one, or name a text field in prompt_field"
    )


def _through_template(row: DataRow, tokenizer: Tokenizer, form: PromptFormat) -> str:
    try:
        made = tokenizer.apply_chat_template(
            [form.messages(row)], tokenize=False, add_generation_prompt=True, **form.chat_template_kwargs
        )
        return str(made[0])
    except Exception as error:  # templates are programs that come with the model, and may raise any exception
        raise DataError(f"{row.source}: the chat template refuses this row: {type(error).__name__}: {error}") from error
