"""The example of two players: each is a chain with a score of its own, and sees the board from its side."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_cases import Scripted, prompt_of, tokenizer_of

from rlsdk.interfaces import Episode

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tictactoe"))


def played(says: Sequence[str], plays: str = "both", **options: Any) -> tuple[Episode, list[str]]:
    from tictactoe import play

    policy = Scripted(tokenizer_of("json_in_tags"), says)
    episode = asyncio.run(play(prompt_of(plays=plays), policy, **options))
    return episode, [policy.decode(ids) for ids in policy.calls]


def test_each_player_sees_its_own_marks_and_gets_its_own_score() -> None:
    episode, seen = played(["5", "1", "3", "2", "7"])
    assert seen == [".........>", "....o....>", "o...x....>", "x.o.o....>", "oox.x....>"]
    assert (episode.chains, episode.chain_rewards) == ((0, 1, 0, 1, 0), {0: 1.0, 1: 0.0})
    assert (episode.extra, episode.info["first_won"], episode.info["plies"]) == ({"points": 0.0}, True, 5)
    assert [row.num_sampled for row in episode.rows] == [2] * 5


@pytest.mark.parametrize(
    ("says", "own"),
    [
        (["1", "1"], {0: 0.5, 1: -1.0}),
        (["what"], {0: -1.0}),
        (["1", "2", "3", "4", "6", "5", "7", "9", "8"], {0: 0.5, 1: 0.5}),
        (["1", "2", "4", "5", "3", "8"], {0: 0.0, 1: 1.0}),
    ],
)
def test_what_a_game_is_worth(says: Sequence[str], own: Mapping[int, float]) -> None:
    assert played(says)[0].chain_rewards == own


def test_one_score_for_both_is_the_first_players() -> None:
    episode, _ = played(["1", "1"], one_score=True)
    assert (episode.chain_rewards, episode.extra) == ({}, {"points": 0.5})


@pytest.mark.parametrize("plays", ["first", "second"])
def test_a_random_player_is_not_trained_and_plays_the_same_again(plays: str) -> None:
    def move(turn: int, text: str) -> str:
        return str(text[-10:-1].index(".") + 1)

    episode, seen = played(move, plays)  # type: ignore[arg-type]
    assert seen == played(move, plays)[1]  # type: ignore[arg-type]
    assert (len(episode.rows), {*episode.chains}, episode.chain_rewards) == (len(seen), {0}, {})
    assert seen[0].count(".") == (9 if plays == "first" else 8)
    assert episode.extra["points"] in (0.0, 0.5, 1.0)


def test_its_data_is_games_and_free_squares(tmp_path: Path) -> None:
    from positions import held_out, positions

    rows = [row for row, _ in zip(positions(), range(500), strict=False)]
    assert all(row["prompt"][int(row["answer"][0]) - 1] == "." for row in rows)
    assert {row["plays"] for row in held_out()} == {"first", "second"}
