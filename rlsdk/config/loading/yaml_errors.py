"""Explains errors of YAML text in plain words."""

from __future__ import annotations

import re

import yaml

_WORDS = (
    (r"mapping values are not allowed", "a second ': ' on one line, or a line that is indented too far; "
                                        "put a text that contains ': ' in quotes"),
    (r"could not find expected ':'", "a line without ': ' where 'name: value' is expected"),
    (r"found character '\\t'", "a tab; lines are indented with spaces"),
    (r"found character '(.)' that cannot start", "a plain value cannot start with {0}; put it in quotes"),
    (r"expected <block end>", "a line that is indented otherwise than those it belongs to, or a bracket without its "
                              "partner"),
    (r"expected ',' or '([]}])'", "a list or mapping in brackets that is not closed: ',' or '{0}' is missing"),
    (r"unexpected end of stream", "a quote or bracket that is not closed"),
    (r"undefined alias '([^']*)'", "'*{0}' refers to '&{0}', which is not defined; put a text that starts with '*' "
                                   "in quotes"),
    (r"scanning an alias", "a plain value cannot start with '*'; put it in quotes"),
    (r"scanning an anchor", "a plain value cannot start with '&'; put it in quotes"),
    (r"unknown escape character", "an unknown escape in double quotes; use single quotes"),
    (r"expected a single document", "more than one document: '---' may stand at the top only"),
)  # fmt: skip
"""Message of PyYAML -> the most frequent cause."""
VARIABLE = re.compile(r"\$\{\w+")
_SHOWN = 80


def explain_syntax(error: yaml.MarkedYAMLError, text: str) -> str:
    """The mistake in plain words, and the line at which it was detected.

    Args:
        error: of PyYAML.
        text: the text that PyYAML read.
    """
    said = f"{error.context or ''} {error.problem or ''}"
    mark = error.problem_mark or error.context_mark
    lines = text.splitlines()
    shown = lines[mark.line].strip()[:_SHOWN] if mark is not None and mark.line < len(lines) else ""
    for pattern, words in _WORDS:
        if match := re.search(pattern, said):
            message = words.format(*match.groups())
            if VARIABLE.search(shown):
                message += "; environment variables such as ${NAME} are not replaced: give such a value as a flag"
            return f"{message}: {shown!r}" if shown else message
    return f"cannot be read here: {shown!r}" if shown else "cannot be read"
