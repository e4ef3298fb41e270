"""Text that others wrote (a model, data, somebody else's run), made harmless for a terminal and for a page.

A terminal obeys control sequences in what it is shown: they can hide lines, retitle the window, put text on the
clipboard or into the input. Directional overrides make a text read differently from what it is. XML takes neither, and
half of a surrogate pair cannot be written at all.
"""

from __future__ import annotations

import json
import re

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters but tab and line feed, directional marks, lone surrogates, and what is no character."""


def printable(text: str) -> str:
    """The text with such characters written out: ESC becomes `\\x1b`."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def json_line(value: object) -> str:
    """One line of JSON that is harmless to look at and reads back equal."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
