"""An episode of several turns for people: its rows span by span, its tools, and the account of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlsdk.interfaces import Episode, Trajectory

MAX_CHARS = 4000
"""Of one text; longer ones are cut in the middle."""
Pieces = Callable[[Sequence[int]], list[str]]


def conversation(episode: Episode, pieces: Pieces) -> dict[str, Any]:
    """The record of an episode: JSON types. Empty for a single turn.

    Args:
        episode: of a sample that is logged.
        pieces: returns the text that each token adds.
    """
    if len(episode.rows) == 1 and len(episode.rows[0].spans) == 2 and not episode.tools:
        return {}
    trained: dict[tuple[int, ...], int] = {}
    for number, row in enumerate(episode.rows, 1):
        trained |= {tuple(span.token_ids.tolist()): number for span in row.spans if span.sampled}
    receipt = episode.receipt
    return {
        "ended": episode.ended.value,
        "rows": [
            {
                "chain": episode.chains[at] if episode.chains else 0,
                "scale": episode.scales[at] if episode.scales else 1.0,
                "trained": row.num_sampled,
                "spans": list(_spans(row, at + 1, trained, pieces)),
            }
            for at, row in enumerate(episode.rows)
        ],
        "tools": [
            {
                "turn": use.turn,
                "name": use.name,
                "arguments": dict(use.arguments),
                "result": _cut(use.result),
                "failed": use.failed,
            }
            for use in episode.tools
        ],
        "not_trained": {} if receipt is None else dict(receipt.not_trained),
    }


def _spans(
    row: Trajectory, number: int, trained: dict[tuple[int, ...], int], pieces: Pieces
) -> Iterator[dict[str, Any]]:
    texts = pieces([int(token) for span in row.spans for token in span.token_ids.tolist()])
    end = 0
    for span in row.spans:
        start, end = end, end + len(span)
        found: dict[str, Any] = {"text": _cut("".join(texts[start:end])), "tokens": len(span), "sampled": span.sampled}
        if span.sampled:
            found["versions"] = sorted({run.version for run in span.versions if run.num_tokens})
        elif (owner := trained.get(tuple(span.token_ids.tolist()))) not in (None, number):
            found["trained_in"] = owner
        yield found


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"
