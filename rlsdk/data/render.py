"""Renders a row to the text that the model gets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlsdk.data.chat import ChatTemplate, Tokenizer
from rlsdk.data.control_tokens import LiteralEncoder
from rlsdk.data.messages import ASSISTANT, check_messages, content_text, holds_messages, own_fields, tool_schemas
from rlsdk.data.pairs import PairFields, read_pair, with_context
from rlsdk.data.rows import DataRow, Fields, JsonValue, Messages, lookup, missing_field
from rlsdk.data.steps import StepFields, read_steps, with_prompt
from rlsdk.interfaces import ConfigError, DataError
from rlsdk.interfaces.spelling import Setting

TOOLS = "tools"
"""Column with the JSON schemas of a row's tools, under the name of the template's variable."""
_FIELD = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")


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

    prompt_field: str | None = None
    """Field with a text, or a list of chat messages. A dot reads nested objects. If the messages end in the
    assistant's, that one is the answer. None: the one that was found in the row's source."""
    answer_field: str | None = None
    """Field with the reference answer, a text or one message of the assistant; it may be missing. None: the one that
    was found in the row's source."""
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
    pair: PairFields | None = None
    """Read rows as preference pairs, with their answers in these fields."""
    steps: StepFields | None = None
    """Read rows as solutions in steps, with steps and labels in these fields."""

    def select(self, rows: Sequence[DataRow]) -> list[DataRow]:
        """The rows with `prompt`, `answer` and the fields after them filled in.

        Raises:
            DataError: a row without its prompt, or with one of the wrong type, with file and line; or an
                `answer_field` that was named and that no row has.
            ConfigError: `prompt_template` takes no field.
        """
        if rows and not Template(self.prompt_template).fields:
            raise ConfigError(
                f"prompt_template {self.prompt_template[:40]!r} holds no field of a row, so all prompts would be the "
                f"same: write {{prompt}} where the prompt belongs, or {{FIELD}}, one of {sorted(rows[0].row)}"
            )
        selected = [self._selected(row) for row in rows]
        if selected and self.answer_field is not None and all(row.answer is None for row in selected):
            raise missing_field(self.answer_field, selected[0], "answer_field; no row has it", flag="data.answer_field")
        return selected

    def prompt_name(self, row: DataRow) -> str:
        """The field of a row that holds its prompt."""
        return row.fields.prompt if self.prompt_field is None else self.prompt_field

    def answer_name(self, row: DataRow) -> str:
        """The field of a row that holds its answer."""
        return row.fields.answer if self.answer_field is None else self.answer_field

    def chosen_fields(self, rows: Sequence[DataRow]) -> Fields | None:
        """The fields of rows of one source, if they were found by themselves and are not the usual ones."""
        if not rows or (self.prompt_field, self.answer_field) != (None, None) or rows[0].fields == Fields():
            return None
        return rows[0].fields

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

    def template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """The chat template with the variables of this format."""
        return ChatTemplate(tokenizer, self.chat_template_kwargs)

    def messages(self, row: DataRow) -> list[Mapping[str, JsonValue]]:
        """The row's prompt as a conversation, system message first."""
        prompt = row.prompt
        asked: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        turns = [*asked]
        if self.system_prompt is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system_prompt})
        return turns

    def holds_special_tokens(self, row: DataRow, literal: LiteralEncoder) -> bool:
        """Whether the data's part of a selected row's prompt contains a special token."""
        if literal.found_in(row.tools):
            return True
        if not literal.found_in(row.prompt):
            return False
        return literal.found_normalized(row.prompt) or self.hide(row, literal).prompt != row.prompt

    def hide(self, row: DataRow, literal: LiteralEncoder) -> DataRow:
        """A selected row with a placeholder for every special token from the data; those of `prompt_template` and
        `system_prompt` are kept."""
        row = replace(row, tools=literal.hide(row.tools))
        if not isinstance(row.prompt, str):
            return replace(row, prompt=literal.hide(row.prompt))
        template = Template(self.prompt_template)
        value = str(lookup(row.row, self.prompt_name(row))) if self._reads_prompt else ""
        return replace(row, prompt=literal.hide_parts(template.parts(row, prompt=value)))

    def _selected(self, row: DataRow) -> DataRow:
        if self.steps is not None:
            row = with_prompt(row, self.steps)
            row = replace(row, steps=read_steps(row, self.steps))
        prompt, answer, pair = self._prompt(row), self._answer(row), None
        tools = tool_schemas(row.row.get(TOOLS))
        if self.pair is not None:
            pair = read_pair(row, self.pair)
            if pair.context:
                prompt = self._with_context(row, prompt, pair.context)
        if prompt is None:
            raise missing_field(self.prompt_name(row), row, "prompt_field", flag="data.prompt_field")
        reply = None if isinstance(answer, str) else answer
        is_split = not isinstance(prompt, str) and prompt[-1]["role"] == ASSISTANT
        if not isinstance(prompt, str) and is_split:
            if answer is not None or pair is not None or len(prompt) == 1:
                raise self._ends_in_answer(row, prompt)
            prompt, reply = prompt[:-1], prompt[-1:]
        made = replace(row, prompt=prompt, answer=_answer_text(answer if reply is None else reply))
        return replace(made, reply=reply, is_split=is_split, tools=tools or None, pair=pair)

    def _prompt(self, row: DataRow) -> str | Messages | None:
        """The row's own prompt; None: it has none."""
        try:
            value = lookup(row.row, self.prompt_name(row)) if self._reads_prompt else ""
        except KeyError:
            return None
        if isinstance(value, list):
            return self._checked_messages(value, row)
        if not isinstance(value, str):
            shown = "null" if value is None else f"{type(value).__name__}: {str(value)[:60]!r}"
            raise DataError(
                f"{row.source}: prompt field {self.prompt_name(row)!r} must be a text or a list of chat messages, got "
                f"{shown}; fix the row, or name another field (`{Setting('data.prompt_field', 'FIELD')}`)"
            )
        return Template(self.prompt_template).fill(row, prompt=value)

    def _with_context(self, row: DataRow, prompt: str | Messages | None, context: Messages) -> str | Messages:
        """The prompt of a pair whose answers are the last turns of conversations."""
        asked = lookup(row.row, self.prompt_name(row)) if isinstance(prompt, str) and self._reads_prompt else ""
        found = with_context(row, prompt, str(asked), context)
        return found if isinstance(found, str) else self._checked_messages(found, row)

    @property
    def _reads_prompt(self) -> bool:
        return "prompt" in Template(self.prompt_template).fields

    def _checked_messages(self, value: Sequence[JsonValue], row: DataRow) -> Messages:
        if self.prompt_template != "{prompt}":
            raise DataError(
                f"{row.source}: prompt field {self.prompt_name(row)!r} holds chat messages, which prompt_template "
                f"{self.prompt_template[:40]!r} cannot take in; leave prompt_template at '{{prompt}}'"
            )
        return check_messages(value, row.source, f"prompt field {self.prompt_name(row)!r}")

    def _ends_in_answer(self, row: DataRow, prompt: Messages) -> DataError:
        why = "and nothing stands before it" if len(prompt) == 1 else "but the row has its answer in another field"
        return DataError(
            f"{row.source}: prompt field {self.prompt_name(row)!r} ends in a turn of the assistant, {why}. The model "
            "answers a prompt in a turn of its own: end the prompt with the user's turn"
        )

    def _answer(self, row: DataRow) -> str | Messages | None:
        try:
            value = lookup(row.row, self.answer_name(row))
        except KeyError:
            return None
        if value is None:
            return None
        if holds_messages(value):
            return check_messages(value, row.source, f"answer field {self.answer_name(row)!r}")
        return as_text(value)


def _answer_text(answer: str | Messages | None) -> str | None:
    """A reference answer as rewards receive it: of one plain message its text, of other messages their JSON."""
    if answer is None or isinstance(answer, str):
        return answer
    is_plain = len(answer) == 1 and answer[0]["role"] == ASSISTANT and not own_fields(answer[0])
    return content_text(answer[0]) if is_plain else as_text(answer)


def render(rows: Sequence[DataRow], tokenizer: Tokenizer, form: PromptFormat) -> list[str]:
    """The text of each prompt, chat template included; selected rows in, same order out.

    Raises:
        ConfigError: messages, or a system prompt, without a chat template.
        DataError: the chat template refuses a row; names file and line.
    """
    if not form.uses_chat_template(tokenizer):
        return check_plain(rows)
    template = form.template(tokenizer)
    return [template.render(form.messages(row), row.tools, row.source, opens_answer=True) for row in rows]


def unread_fields(rows: Sequence[DataRow], tokenizer: Tokenizer, form: PromptFormat) -> dict[str, list[str]]:
    """Fields of the prompts' messages, and the column `tools`, that do not reach the model -> sources of the rows.

    Raises:
        DataError: a message has no content, and nothing else of it is read either; names file and line.
    """
    found: dict[str, list[str]] = {}
    template = form.template(tokenizer) if form.uses_chat_template(tokenizer) else None
    used = Template(form.prompt_template).fields
    for row in rows:
        names: Sequence[str] = ()
        if template is not None and not (isinstance(row.prompt, str) and row.tools is None):
            names = template.unread(form.messages(row), row.tools, row.source)
        given = tool_schemas(row.row.get(TOOLS))
        if given is None or (template is None and given):
            names = [*names, TOOLS]
        for name in names:
            if name != TOOLS or TOOLS not in used:
                found.setdefault(name, []).append(row.source)
    return found


def check_plain(rows: Sequence[DataRow]) -> list[str]:
    """The prompts of selected rows, for a tokenizer without a chat template.

    Raises:
        ConfigError: one is a list of messages; names file and line.
    """
    texts = [row.prompt for row in rows if isinstance(row.prompt, str)]
    if len(texts) < len(rows):
        row = next(row for row in rows if not isinstance(row.prompt, str))
        raise ConfigError(
            f"{row.source}: the prompt is a list of chat messages, but no chat template is in use; take a tokenizer "
            f"that has one, or name a text field in prompt_field"
        )
    return texts
