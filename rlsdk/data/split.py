"""Splits rows into train and evaluation rows without common questions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from rlsdk.data.render import PromptFormat
from rlsdk.data.rows import DataRow
from rlsdk.interfaces import ConfigError, DataError
from rlsdk.interfaces.spelling import Setting, source_of


def question_key(row: DataRow) -> str:
    """Key of a question: the selected prompt, ignoring case and white space."""
    prompt = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, sort_keys=True)
    return " ".join(prompt.split()).casefold()


def split_by_content(
    rows: Sequence[DataRow],
    *,
    form: PromptFormat | None = None,
    eval_fraction: float | None = None,
    num_eval: int | None = None,
    seed: int = 0,
) -> tuple[list[DataRow], list[DataRow]]:
    """Splits rows into (train, eval) so that no question is in both, however often it is repeated.

    A question's side depends on its text and the seed, not on its position: with `eval_fraction` it stays the same when
    rows are added. Train keeps repeated questions; eval has each question once. Both keep the given order.

    Args:
        rows: of one source.
        form: has the field of the question.
        eval_fraction: share of the distinct questions, 0 to 1.
        num_eval: number of distinct questions; exactly one of the two must be given.
        seed: another seed selects other questions.

    Raises:
        ConfigError: both or neither of the two, or a fraction outside 0 to 1.
        DataError: fewer distinct questions than requested plus one for training.
    """
    if (eval_fraction is None) == (num_eval is None):
        raise ConfigError(f"give one of eval_fraction ({eval_fraction}) and num_eval ({num_eval}), not both or none")
    if eval_fraction is not None and not 0 <= eval_fraction <= 1:
        raise ConfigError(f"eval_fraction is {eval_fraction}; expected 0 to 1")
    keys = [question_key(row) for row in (form or PromptFormat()).select(rows)]
    places = {key: _place(key, seed) for key in keys}
    if eval_fraction is not None:
        held = {key for key, place in places.items() if place < eval_fraction * 2**64}
    else:
        held = set(sorted(places, key=lambda key: (places[key], key))[: num_eval or 0])
    if len(held) == len(places) or (num_eval is not None and len(held) < num_eval):
        raise _too_few(rows, len(places), num_eval or eval_fraction or 0)
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held]
    seen: set[str] = set()
    evaluation = [row for row, key in zip(rows, keys, strict=True) if key in held and _first(key, seen)]
    return train, evaluation


def _too_few(rows: Sequence[DataRow], num_questions: int, asked: float) -> DataError:
    where = source_of(rows[0].source) if rows else "data"
    have = f"{len(rows)} row{'' if len(rows) == 1 else 's'} with {num_questions} distinct question"
    have += "" if num_questions == 1 else "s"
    if num_questions < 2:
        return DataError(f"{where}: has {have}; expected at least one to train on and another for evaluation")
    return DataError(
        f"{where}: cannot hold out {asked:g} for evaluation: it has {have}, and one must be left to train on. Hold out "
        f"fewer (`{Setting('data.num_eval_rows', max(num_questions // 8, 1))}`), or name other rows "
        f"(`{Setting('data.eval', 'FILE')}`)"
    )


def drop_seen(
    rows: Sequence[DataRow],
    seen: Iterable[DataRow],
    *,
    form: PromptFormat | None = None,
    seen_form: PromptFormat | None = None,
) -> tuple[list[DataRow], int]:
    """The rows whose question is not in `seen`, and the number of removed rows: removes questions of a separate
    evaluation set from the train rows. `seen_form` is the format of `seen`, if it differs."""
    form = form or PromptFormat()
    taken = {question_key(row) for row in (seen_form or form).select(list(seen))}
    kept = [row for row, picked in zip(rows, form.select(rows), strict=True) if question_key(picked) not in taken]
    return kept, len(rows) - len(kept)


def distinct(rows: Sequence[DataRow], *, form: PromptFormat | None = None) -> list[DataRow]:
    """The first row of each question."""
    seen: set[str] = set()
    keys = [question_key(row) for row in (form or PromptFormat()).select(rows)]
    return [row for row, key in zip(rows, keys, strict=True) if _first(key, seen)]


def _place(key: str, seed: int) -> int:
    """A 64-bit number that depends only on the question and the seed."""
    digest = hashlib.blake2b(f"{seed}\x00{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _first(key: str, seen: set[str]) -> bool:
    """Whether a key is seen for the first time."""
    new = key not in seen
    seen.add(key)
    return new
