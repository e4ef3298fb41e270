"""Bisection with a memory of notes: each turn sees the last note and the last answer, and nothing else.

    the first turn      0007?
    the model           n4g4;         a note, and a guess
    what it sees next   n4<           its note, and the answer: not the guess
    the model           n2g2;

So every turn is a row of its own, and what a note is worth shows only turns later: the score reaches it through the
episode's advantage.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlsdk.interfaces import Ended, Episode, Span, Trajectory

if TYPE_CHECKING:
    from rlsdk.interfaces import Generate, PromptView, RewardSample

HIGHEST, GUESSES = 7, 3
TURN = re.compile(r"n([0-9]?)g([0-9])")


async def play(prompt: PromptView, generate: Generate, *, last_row_only: bool = False) -> Episode:
    """Plays a game, a row for each turn.

    Args:
        prompt: the game; `answer` is the number to be guessed.
        generate: the policy.
        last_row_only: train the last turn alone, as if it were the episode: what this costs is what notes are worth.
    """
    number, ids = int(prompt.row["answer"]), [*prompt.prompt_ids]
    rows: list[Trajectory] = []
    won, ended = False, Ended.TURNS
    for _ in range(GUESSES):
        turn = await generate(ids)
        rows.append(Trajectory(spans=(Span.given(ids), turn.span), finish_reason=turn.finish_reason))
        written = TURN.fullmatch(generate.text(turn))
        if written is None:
            ended = Ended.AGENT
            break
        guess = int(written[2])
        won = guess == number
        if won:
            ended = Ended.AGENT
            break
        ids = list(generate.encode(f"n{written[1]}{'<' if number < guess else '>'}"))
    return Episode(
        rows=tuple(rows[-1:] if last_row_only else rows), ended=ended, info={"turns": len(rows)}, extra={"won": won}
    )


def right(sample: RewardSample) -> float:
    """1 for a game that was won."""
    return float(bool(sample.extra["won"]))
