"""The rows of the quickstart: words of five letters, to be spelt backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random

from rlsdk.interfaces import ConfigError

TASK = "spell_backward"
SIZE = 500
"""Number of rows, if none is given."""
LETTERS = 5
"""In each word."""
WORDS = Path(__file__).with_name("quickstart_words.txt")


def load_quickstart(
    rest: str, *, limit: int | None = None, size: int | None = None, seed: int = 0
) -> Iterator[Mapping[str, object]]:
    """Yields rows `{question, answer, metadata}`, the same for the same seed.

    They are those of reasoning-gym's task `spell_backward` with words of five letters, byte for byte.

    Args:
        rest: `spell_backward`.
        limit: number of rows if `size` is not given.
        size: number of rows.
        seed: of the first row; each further row has the next one.

    Raises:
        ConfigError: another `rest`, or a value that is no whole number.
    """
    if rest != TASK:
        raise ConfigError(f"quickstart:{rest}: expected quickstart:{TASK}, the only task of this source")
    count = size if size is not None else SIZE if limit is None else limit
    for name, value, least in (("size", count, 1), ("seed", seed, None)):
        if type(value) is not int or (least is not None and value < least):
            of = "" if least is None else f" of at least {least}"
            raise ConfigError(f"quickstart:{TASK}: {name} is {value!r}; expected a whole number{of}")
    return (_row(at, seed) for at in range(count))


def _row(at: int, seed: int) -> dict[str, object]:
    word = Random(seed + at).choice(_words())
    return {
        "question": f"Spell this word backward (example: sun -> nus): {word}",
        "answer": word[::-1],
        "metadata": {
            "source_dataset": TASK,
            "source_index": at,
            "word": word,
            "word_len": LETTERS,
            "difficulty": {"word_len": [LETTERS, LETTERS]},
        },
    }


@cache
def _words() -> Sequence[str]:
    lines = WORDS.read_text(encoding="utf-8").splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]
