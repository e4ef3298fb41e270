"""Tic-tac-toe by self-play: two players of one policy in one episode, each a chain of rows with a score of its own.

    what a player sees    x...o....>     its own marks are x, those of the other one o
    what it plays         9;             a free square, 1 to 9

Every move is a row. What a game is worth to a player, its own rows get: it is compared with the same player of the
other games of its group. On rows that say so, the other player moves at random; nothing is trained on those.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlsdk.interfaces import Episode, Span, Trajectory

if TYPE_CHECKING:
    from rlsdk.interfaces import Generate, PromptView, RewardSample

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
FREE = -1
MOVE = re.compile(r"[1-9]")
Board = Sequence[int]
"""Nine squares: `FREE`, or the player that took it, 0 or 1."""


async def play(prompt: PromptView, generate: Generate, *, one_score: bool = False) -> Episode:
    """Plays a game, a row for each move of the policy.

    Args:
        prompt: its row says who plays: `both`, or `first` or `second` against a random player.
        generate: the policy.
        one_score: give both players the first one's score, as if the episode were one player's.
    """
    plays, draw = prompt.row["plays"], random.Random(generate.seed)
    players = {"both": (0, 1), "first": (0,), "second": (1,)}[plays]
    board, rows, chains, illegal = [FREE] * 9, list[Trajectory](), list[int](), False
    for ply in range(9):
        player = ply % 2
        if player in players:
            ids = generate.encode(seen(board, player))
            turn = await generate(ids)
            rows.append(Trajectory(spans=(Span.given(ids), turn.span), finish_reason=turn.finish_reason))
            chains.append(player if plays == "both" else 0)
            square = square_of(generate.text(turn))
            illegal = square not in free(board)
        else:
            square = draw.choice(free(board))
        if illegal:
            break
        board[square] = player
        if winner(board) is not None:
            break
    scores = points(board, illegal_by=player if illegal else None)
    own = {} if plays != "both" or one_score else {chain: scores[chain] for chain in {*chains}}
    return Episode(
        rows=tuple(rows),
        chains=tuple(chains),
        chain_rewards=own,
        info={
            "plies": ply + 1, "illegal": illegal, "drawn": scores == (0.5, 0.5), "first_won": scores[0] == 1,
            **({} if plays == "both" else {"won": scores[players[0]] == 1}),
        },
        extra={"points": 0.0 if own else scores[players[0]]},
    )  # fmt: skip


def seen(board: Board, player: int) -> str:
    """The board as a player sees it."""
    return "".join("." if square == FREE else "x" if square == player else "o" for square in board) + ">"


def square_of(text: str) -> int:
    """The square that a move names, from 0; `FREE` if it names none."""
    return int(text) - 1 if MOVE.fullmatch(text) else FREE


def free(board: Board) -> list[int]:
    return [at for at, square in enumerate(board) if square == FREE]


def winner(board: Board) -> int | None:
    """The player that has a line."""
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c] != FREE), None)


def points(board: Board, illegal_by: int | None) -> tuple[float, float]:
    """What a game is worth to its players: 1 for a win, 0.5 for a draw, 0 for a loss; -1 for a move that is none, which
    ends the game and is a draw for the other player."""
    if illegal_by is not None:
        return (-1.0, 0.5) if illegal_by == 0 else (0.5, -1.0)
    won = winner(board)
    return (0.5, 0.5) if won is None else (1.0, 0.0) if won == 0 else (0.0, 1.0)


def score(sample: RewardSample) -> float:
    """Points of the player against a random one; of two players of the policy each chain has its own, and the episode
    none."""
    return float(sample.extra["points"])
