"""Makes untrusted text (of a model, data, another user's run, a plugin) harmless for terminals and pages.

Terminals obey control sequences in text: they can hide lines, change the window title, write to the clipboard or to the
input. Directional overrides make text read differently from what it is. XML allows neither, and lone surrogates cannot
be encoded. Objects of a stranger's code may also fail, or end the program, when they are turned into text.
"""

from __future__ import annotations

import json
import re

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters except tab and line feed, directional marks, separators of lines and paragraphs, lone surrogates,
and non-characters."""
NAME_CHARS = 120
"""Longest name of a stranger's object, distribution or file in a message."""
MESSAGE_CHARS = 2000
"""Longest message of a stranger's error."""
ERROR_CHARS = 20_000
"""Longest error that ends a command."""


def printable(text: str, limit: int | None = None) -> str:
    r"""The text with such characters escaped: ESC becomes `\x1b`.

    Args:
        text: any text.
        limit: of its characters before escaping; None: no limit. What a longer text has beyond is only counted.
    """
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit:,} more characters)"
    return _UNSEEN.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(text: str, limit: int = NAME_CHARS) -> str:
    r"""`printable`, with line feeds and tabs escaped too, so that a text cannot pose as more rows of a table."""
    return printable(text, limit).replace("\n", "\\n").replace("\t", "\\t")


def shown(value: object, limit: int = NAME_CHARS) -> str:
    """`repr` of a stranger's object; of an object whose `repr` fails, only the name of its type."""
    try:
        return one_line(str.__str__(repr(value)), limit)
    except BaseException as error:
        return f"<{_type_name(value)}, whose repr raises {_type_name(error)}>"


def described(error: BaseException, limit: int = MESSAGE_CHARS) -> str:
    """Type and message of an error that a stranger's code raised; of one whose `str` fails, only the type."""
    try:
        text = str.__str__(str(error))
    except BaseException as raised:
        return f"{_type_name(error)} (its text cannot be shown: it raises {_type_name(raised)})"
    return printable(f"{_type_name(error)}: {text}" if text else _type_name(error), limit)


def encodable(text: str) -> str:
    """The text with lone surrogates replaced by U+FFFD, so that UTF-8 and JSON can carry it; pairs are joined."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_line(value: object) -> str:
    """One line of JSON that is harmless in a terminal and reads back equal."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def _type_name(value: object) -> str:
    """Name of the value's type, read past what its metaclass may have put in place."""
    return one_line(type.__dict__["__name__"].__get__(type(value)))
