"""An episode as a conversation: rows one under another, turns of the model and what it was given. Text is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rlsdk.views.report.markup import escaped, number_of
from rlsdk.views.report.tokens import Token, coloured

MAX_ROWS, MAX_TURNS, MAX_TOOLS = 16, 100, 100
"""Most that are shown of an episode."""


def conversation(episode: object, tokens: Sequence[Token]) -> str:
    """The episode of a logged sample; empty if it is none, or not as rlsdk writes it.

    Args:
        episode: as `rlsdk.trainer.tracking.episodes` makes it.
        tokens: of the sample, those behind the first span of each row, as far as they were logged.
    """
    rows = _mappings(episode.get("rows")) if isinstance(episode, Mapping) else []
    if not isinstance(episode, Mapping) or not rows:
        return ""
    behind = iter(tokens)
    shown = "".join(_row(row, at, len(rows), behind) for at, row in enumerate(rows[:MAX_ROWS], 1))
    more = f"<p class=quiet>{len(rows) - MAX_ROWS} more rows</p>" if len(rows) > MAX_ROWS else ""
    return f'<div class="episode">{shown}{more}{_tools(episode)}{_account(episode, rows)}</div>'


def _row(row: Mapping[str, Any], number: int, count: int, behind: Iterator[Token]) -> str:
    spans = _mappings(row.get("spans"))
    turns = "".join(_turn(span, is_first=not at, behind=behind) for at, span in enumerate(spans[:MAX_TURNS]))
    head = f"row {number} of {count}, {_count(row.get('trained'))} tokens trained"
    if number_of(row.get("chain")):
        head += f", chain {_count(row.get('chain'))}"
    if (scale := number_of(row.get("scale"))) not in (None, 1.0):
        head += f", weight {scale:g}"
    return f'<div class="row"><div class="label">{escaped(head)}</div>{turns}</div>'


def _turn(span: Mapping[str, Any], *, is_first: bool, behind: Iterator[Token]) -> str:
    length = int(number_of(span.get("tokens")) or 0)
    own = [] if is_first else [*islice(behind, max(length, 0))]
    text = coloured(own) if len(own) == length and own else escaped(span.get("text", ""))
    if span.get("sampled") is True:
        versions = span.get("versions")
        which = ", ".join(_count(one) for one in versions[:9]) if isinstance(versions, list) else ""
        kind, said = "policy", f"policy, version {which}: {length} tokens, trained"
    elif number_of(span.get("trained_in")):
        kind, said = "again", f"policy, in row {_count(span.get('trained_in'))}, which trains it: {length} tokens"
    else:
        kind, said = "context", f"given: {length} tokens"
    return f'<div class="turn {kind}"><div class="who">{escaped(said)}</div><div class="text">{text}</div></div>'


def _tools(episode: Mapping[str, Any]) -> str:
    uses = _mappings(episode.get("tools"))
    if not uses:
        return ""
    names = "<tr><th>turn</th><th>tool</th><th>arguments</th><th>answer</th></tr>"
    lines = "".join(map(_use, uses[:MAX_TOOLS]))
    return f"<details class=tools><summary>{len(uses)} calls of tools</summary><table>{names}{lines}</table></details>"


def _use(use: Mapping[str, Any]) -> str:
    arguments = escaped(json.dumps(use.get("arguments"), ensure_ascii=False))
    wrong = " class=minus" if use.get("failed") is True else ""
    return (
        f"<tr><td>{_count((number_of(use.get('turn')) or 0) + 1)}</td><td>{escaped(use.get('name', ''))}</td>"
        f"<td>{arguments}</td><td{wrong}>{escaped(use.get('result', ''))}</td></tr>"
    )


def _account(episode: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    found, ended = episode.get("not_trained"), episode.get("ended", "")
    left = {name: number_of(count) or 0.0 for name, count in found.items()} if isinstance(found, Mapping) else {}
    gone = "".join(f" + {count:.0f} {name}" for name, count in left.items())
    trained = sum(number_of(row.get("trained")) or 0.0 for row in rows)
    said = escaped(f"{trained + sum(left.values()):.0f} sampled = {trained:.0f} trained{gone}; ended: {ended}")
    return f'<div class="label">{said}</div>'


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _count(value: object) -> str:
    number = number_of(value)
    return "?" if number is None else f"{number:.0f}"
