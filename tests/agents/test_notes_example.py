"""The example with notes: a row for each turn, which sees the last note and the last answer only."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from agent_cases import Scripted, prompt_of, tokenizer_of

from rlsdk.interfaces import Ended, Episode

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "guess"))


def played(says: Sequence[str], *, last_row_only: bool = False) -> tuple[Episode, list[str]]:
    from notes import play

    policy = Scripted(tokenizer_of("json_in_tags"), says)
    episode = asyncio.run(play(prompt_of(answer="5"), policy, last_row_only=last_row_only))
    return episode, [policy.decode(ids) for ids in policy.calls[1:]]


def test_every_turn_is_a_row_that_sees_a_note_and_an_answer() -> None:
    episode, seen = played(["n4g4", "n3g6", "ng5"])
    assert seen == ["n4>", "n3<"]
    assert (len(episode.rows), episode.ended, dict(episode.extra)) == (3, Ended.AGENT, {"won": True})
    assert [row.num_sampled for row in episode.rows] == [5, 5, 4]


@pytest.mark.parametrize(
    ("says", "rows", "ended"),
    [(["n1g1"] * 3, 3, Ended.TURNS), (["n1g1", "nonsense"], 2, Ended.AGENT), (["g5"], 1, Ended.AGENT)],
)
def test_a_game_that_is_lost(says: Sequence[str], rows: int, ended: Ended) -> None:
    episode, _ = played(says)
    assert (len(episode.rows), episode.ended, dict(episode.extra)) == (rows, ended, {"won": False})


def test_the_last_row_alone_is_what_credit_by_rows_would_train() -> None:
    episode, seen = played(["n4g4", "n7g5"], last_row_only=True)
    assert (len(episode.rows), episode.info["turns"], len(seen)) == (1, 2, 1)
    assert episode.extra == {"won": True}
