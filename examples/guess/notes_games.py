"""Writes what guessing with notes starts from: turns of random games, and a model of random weights.

python examples/guess/notes_games.py
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from games import GUESSES, HIGHEST, ROWS, write_model

FOLDER = Path("runs/notes-task")


def games() -> Iterator[dict[str, str]]:
    """Games, each with a number of its own, which says nothing about the answer."""
    draw = random.Random(0)
    for game in range(ROWS):
        yield {"prompt": f"{game:04d}?", "answer": str(draw.randint(1, HIGHEST))}


def turns() -> Iterator[dict[str, str]]:
    """What each turn of a random game sees, and what it writes: its guess as a note, and the guess."""
    draw = random.Random(1)
    for game in games():
        seen, number = game["prompt"], int(game["answer"])
        for _ in range(GUESSES):
            guess = draw.randint(1, HIGHEST)
            yield {"prompt": seen, "answer": f"n{guess}g{guess};"}
            if guess == number:
                break
            seen = f"n{guess}{'<' if number < guess else '>'}"


def main(folder: Path) -> None:
    """Writes `games.jsonl`, `turns.jsonl` and `model/` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", "0123456789gn;<>=?")
    for name, rows in (("games", games()), ("turns", turns())):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
