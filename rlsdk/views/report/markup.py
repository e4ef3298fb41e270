"""HTML with all text escaped, and a content security policy that blocks foreign scripts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from rlsdk.system.printable import printable

SIGNIFICANT = 5
"""Significant digits of numbers in a page's data: more than a screen can show."""
_LARGEST = 1e15


def escaped(value: object) -> str:
    """Escapes text for elements and quoted attributes; control characters are written out."""
    return html.escape(printable(str(value)), quote=True)


def number_of(value: object) -> float | None:
    """The value as a finite number; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return float(value)


def figure(value: object, digits: int = 3) -> str:
    """A number in readable form; empty if it is not one."""
    number = number_of(value)
    return "" if number is None else f"{number:.{digits}g}"


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """A number for a page's data: rounded to `SIGNIFICANT` digits, null if not finite."""
    return [
        None if value is None or not math.isfinite(value) else float(f"{value:.{SIGNIFICANT}g}") for value in values
    ]


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table of text; the first cell of each row is its heading."""
    top = f"<thead><tr>{''.join(f'<th>{_breakable(name)}</th>' for name in head)}</tr></thead>" if head else ""
    body = "".join(
        f"<tr><th>{_breakable(first)}</th>{''.join(f'<td>{escaped(text)}</td>' for text in others)}</tr>"
        for first, *others in rows
    )
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _breakable(name: str) -> str:
    """A name that may be wrapped after dots, underscores and slashes, but not within words."""
    return re.sub(r"([._/])(?=\w)", r"\1<wbr>", escaped(name))


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A definition list of names and values."""
    return f"<dl>{''.join(f'<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>' for name, text in rows)}</dl>"


def json_block(name: str, value: Any) -> str:
    """Data for the page's own script. A browser does not run a block of this type, and no text can end it early."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


@cache
def asset(name: str) -> str:
    """Content of a file that is part of every page."""
    return resources.files("rlsdk.views.report").joinpath("assets", name).read_text(encoding="utf-8")


def document(
    title: str, main: str, data: Mapping[str, Any], *, live: tuple[str, str] | None = None, now: float = 0.0
) -> str:
    """A whole page that needs nothing else.

    Its policy allows the scripts and the style of this package, by their hashes, and nothing else: no other script, no
    handler in an attribute, no request (but where `live` asks this server), no frame, no form.

    Args:
        title: of the window.
        main: what it shows; every text in it escaped.
        data: what its curves are drawn from.
        live: path that is asked for news, and the mark of what the page shows already.
        now: of a live page, by the server's clock, in seconds since the epoch.
    """
    scripts = [asset("uplot.min.js"), asset("page.js")]
    style = asset("uplot.min.css") + asset("page.css")
    sources = " ".join(_hash(text) for text in scripts)
    connect = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {sources}; style-src {_hash(style)}; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    asks = f' data-live="{escaped(live[0])}" data-mark="{escaped(live[1])}" data-now="{now:.1f}"' if live else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escaped(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<style>{style}</style></head><body{asks} data-colors="difference"><div id="main">{main}</div>'
        f"{json_block('data', data)}{''.join(f'<script>{text}</script>' for text in scripts)}</body></html>\n"
    )


@cache
def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
