"""Writes what guessing with notes starts from: turns of random games, and a model of random weights.

python examples/guess/notes_games.py
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from games import ROWS, write_model
from notes import GUESSES, HIGHEST

FOLDER = Path("runs/notes-task")
NEXT = {"": 4, "4<": 2, "4>": 6, "2<": 1, "2>": 3, "6<": 5, "6>": 7}
"""Bisection: what to guess first, and after a guess and its answer."""


def games() -> Iterator[dict[str, str]]:
    """Games, each with a number of its own, which says nothing about the answer."""
    draw = random.Random(0)
    for game in range(ROWS):
        yield {"prompt": f"{game:04d}?", "answer": str(draw.randint(1, HIGHEST))}


def turns() -> Iterator[dict[str, str]]:
    """What each turn sees, and what it writes: the guess that bisection makes after the note, and a note that is the
    guess in half of the turns and a random number in the others. What is left to learn is to note the guess."""
    draw = random.Random(1)
    for game in games():
        seen, told, number = game["prompt"], "", int(game["answer"])
        for _ in range(GUESSES):
            guess = NEXT.get(told) or draw.randint(1, HIGHEST)
            note = guess if draw.random() < 0.5 else draw.randint(1, HIGHEST)
            yield {"prompt": seen, "answer": f"n{note}g{guess};"}
            if guess == number:
                break
            told = f"{note}{'<' if number < guess else '>'}"
            seen = f"n{told}"


def main(folder: Path) -> None:
    """Writes `games.jsonl`, `turns.jsonl` and `model/` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", "0123456789gn;<>=?")
    for name, rows in (("games", games()), ("turns", turns())):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
