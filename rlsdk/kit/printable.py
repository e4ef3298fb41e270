"""Makes untrusted text (of a model, data, another user's run) harmless for terminals and pages.

Terminals obey control sequences in text: they can hide lines, change the window title, write to the clipboard or to the
input. Directional overrides make text read differently from what it is. XML allows neither, and lone surrogates cannot
be encoded.
"""

from __future__ import annotations

import json
import re

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters except tab and line feed, directional marks, lone surrogates, and non-characters."""


def printable(text: str) -> str:
    """The text with such characters escaped: ESC becomes `\x1b`."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def json_line(value: object) -> str:
    """One line of JSON that is harmless in a terminal and reads back equal."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
