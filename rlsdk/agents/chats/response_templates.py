"""The ways in which models write tool calls, for tokenizers that do not say it themselves (`response_template`).

In the form of `transformers.utils.chat_parsing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.interfaces import ConfigError

_TEXT = {"repeats": True, "join": "", "content": "text", "content_args": {"strip": False}}
_REASONING = {"open": "<think>", "close": "</think>"}
_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def _template(calls: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = {"content": _TEXT, "reasoning_content": _REASONING, "tool_calls": {"repeats": True, **calls}}
    return {"start_anchor_pattern": r"\A", "fields": fields}


RESPONSE_TEMPLATES: Mapping[str, Mapping[str, Any]] = {
    "json_in_tags": _template({"open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": _CALL}),
    "xml_parameters": _template(
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": _NAMED,
        }
    ),
    "xml_keys": _template(
        {
            "open_pattern": r"<tool_call>(?P<name>[^<\n]+)",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
            "transform": _NAMED,
        }
    ),
    "channels": {
        "start_anchor_pattern": r"\A",
        "fields": {
            "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", **_TEXT},
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
                "close": ["<|return|>", "<|end|>"],
                **_TEXT,
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>[\w.-]+)"
                r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
                "close": "<|call|>",
                "content": "json",
                "repeats": True,
                "transform": _NAMED,
            },
        },
    },
    "json_message": _template(
        {
            "open_pattern": r"\A\s*(?:<\|python_tag\|>)?(?=\{\s*\"name\")",
            "close_pattern": r"\Z",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        }
    ),
}
"""Name -> template: JSON between tags (Qwen2.5, Qwen3, Hermes), parameters as tags (Qwen3-Coder, Qwen3.5, Nemotron),
keys and values as tags (GLM-4.5), messages on channels (gpt-oss), a message that is JSON (Llama 3)."""
MARKS: Mapping[str, tuple[str, ...]] = {
    "xml_parameters": ("<function=",),
    "xml_keys": ("<arg_key>",),
    "json_in_tags": ("<tool_call>",),
    "channels": ("<|channel|>", "to=functions."),
    "json_message": ('"parameters": ',),
}
"""Name -> texts in a chat template that writes calls like this; the first name whose texts are all there counts."""


def named_by(chat_template: str) -> str | None:
    """Name of the response template that fits a chat template; None: none is known."""
    return next((name for name, texts in MARKS.items() if all(text in chat_template for text in texts)), None)


def loaded(template: Any) -> Any:
    """A response template, ready to read with.

    Raises:
        ConfigError: it is none.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        return load_response_template(template if not isinstance(template, Mapping) else dict(template))
    except ValueError as error:
        raise ConfigError(f"rollout.tool_format: the tokenizer's response_template is refused: {error}") from error
