"""Solutions in steps, each with a label: what `rlsdk process-reward` trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlsdk.data.rows import DataRow, Fields, JsonValue, Steps, lookup, missing_field
from rlsdk.interfaces import DataError

TAG = "\N{CYRILLIC SMALL LETTER KA}\N{CYRILLIC SMALL LETTER I}"
"""Ends a step in the texts of Math-Shepherd (Wang et al. 2024, arXiv 2312.08935)."""
_FIRST_STEP = "Step 1:"
_LABELS: Mapping[str, float] = {"+": 1.0, "-": 0.0, "true": 1.0, "false": 0.0}
"""Labels as texts."""
_ASKED_BY = {"steps": "preferences.step_field", "labels": "preferences.step_label_field"}


@dataclass(frozen=True, kw_only=True)
class StepFields:
    """Fields of a row with the texts of the steps and with their labels."""

    steps: str = "completions"
    labels: str = "labels"


def with_prompt(row: DataRow, fields: StepFields) -> DataRow:
    """The row with `prompt`, steps and labels in fields of their own, where it is one of Math-Shepherd or PRM800K; else
    the row itself.

    Math-Shepherd has one text with a tag at the end of each step (`input`), and the same with `+` or `-` in place of
    the tags (`label`). PRM800K has `question.problem` and rated steps (`label.steps`): of each the chosen one is
    taken, and the one with the lowest rating where the solution ends without a choice.

    Raises:
        DataError: it begins like one of them and does not go on so.
    """
    if fields.steps in row.row:
        return row
    given, label = row.row.get("input"), row.row.get("label")
    if isinstance(given, str) and isinstance(label, str) and TAG in given:
        prompt, texts, labels = _shepherd(given, label, row.source)
    elif isinstance(label, Mapping) and isinstance(rated := label.get("steps"), list):
        prompt, texts, labels = _problem(row), *_rated(rated, row.source)
    else:
        return row
    made = {**row.row, "prompt": prompt, fields.steps: texts, fields.labels: labels}
    return replace(row, row=made, fields=Fields(prompt="prompt"))


def read_steps(row: DataRow, fields: StepFields) -> Steps:
    """The steps of a row, and the label of each.

    Raises:
        DataError: a field is missing or holds something else, or their numbers differ; names the row.
    """
    texts = _list(row, fields.steps, "steps")
    labels = _list(row, fields.labels, "labels")
    if len(texts) != len(labels):
        raise DataError(
            f"{row.source}: {len(texts)} steps in {fields.steps!r} and {len(labels)} labels in {fields.labels!r}: "
            "expected one label a step; null for a step that is not learned"
        )
    for at, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{row.source}: step {at} in {fields.steps!r}: {str(text)[:60]!r}: expected a text")
    named = f"field {fields.labels!r} ({_ASKED_BY['labels']})"
    return Steps(texts=tuple(map(str, texts)), labels=tuple(_label(value, row.source, named) for value in labels))


def _list(row: DataRow, field: str, what: str) -> Sequence[JsonValue]:
    try:
        value = lookup(row.row, field)
    except KeyError:
        raise missing_field(field, row, _ASKED_BY[what], flag=_ASKED_BY[what]) from None
    if isinstance(value, list) and value:
        return value
    raise DataError(
        f"{row.source}: field {field!r} ({_ASKED_BY[what]}) must be a list with one item for each step, got "
        f"{str(value)[:80]!r}"
    )


def _label(value: JsonValue, source: str, named: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) and value.strip().lower() in _LABELS:
        return _LABELS[value.strip().lower()]
    if isinstance(value, bool | int | float) and (value == -1 or 0 <= value <= 1):
        return max(float(value), 0.0)
    raise DataError(
        f"{source}: {named}: {str(value)[:60]!r}: expected true or false, a number from 0 (wrong) to 1 (right), -1 for "
        "wrong, or null for a step that is not learned"
    )


def _shepherd(text: str, label: str, source: str) -> tuple[str, list[JsonValue], list[JsonValue]]:
    """Prompt, steps and labels of a row of Math-Shepherd."""
    *parts, rest = text.split(TAG)
    signs: list[JsonValue] = []
    at = 0
    for part in parts:
        sign = label[at + len(part) : at + len(part) + 1]
        if label[at : at + len(part)] != part or sign not in ("+", "-"):
            raise DataError(
                f"{source}: step {len(signs) + 1}: 'label' does not go on as 'input' with + or - in place of {TAG!r}: "
                f"{label[at : at + len(part) + 1][-60:]!r}"
            )
        signs.append(sign)
        at += len(part) + 1
    if rest.strip():
        raise DataError(f"{source}: 'input' goes on after its last {TAG!r}: {rest[:60]!r}; expected a tag at its end")
    begin = parts[0].rfind(_FIRST_STEP)
    if begin <= 0:
        raise DataError(f"{source}: 'input' holds no {_FIRST_STEP!r} behind a question: {parts[0][:60]!r}")
    return text[:begin].strip(), [part.strip() for part in (parts[0][begin:], *parts[1:])], signs


def _problem(row: DataRow) -> str:
    try:
        return str(lookup(row.row, "question.problem"))
    except KeyError:
        raise DataError(f"{row.source}: has rated steps in 'label.steps' and no 'question.problem'") from None


def _rated(steps: Sequence[JsonValue], source: str) -> tuple[list[JsonValue], list[JsonValue]]:
    """Steps and labels of a row of PRM800K. Ratings are -1, 0 (neither right nor wrong: taken for right, as in the
    figures of Lightman et al. 2023, arXiv 2305.20050) and 1."""
    taken = [one for one in (_taken(step, source, at) for at, step in enumerate(steps, 1)) if one is not None]
    if not taken:
        raise DataError(f"{source}: no step in 'label.steps' has a rating")
    labels: list[JsonValue] = [None if rating is None else float(rating >= 0) for _, rating in taken]
    return [text for text, _ in taken], labels


def _taken(step: JsonValue, source: str, at: int) -> tuple[str, float | None] | None:
    """Text and rating of the step that a solution went on with; None: there is none."""
    if not isinstance(step, Mapping):
        raise DataError(f"{source}: step {at} in 'label.steps' is no object: {str(step)[:60]!r}")
    human, chosen = step.get("human_completion"), step.get("chosen_completion")
    completions = [one for one in _of(step.get("completions")) if isinstance(one, Mapping)]
    if isinstance(chosen, int) and 0 <= chosen < len(completions):
        return _text_and_rating(completions[chosen])
    if isinstance(human, Mapping):
        return str(human.get("text")), 1.0
    worst = min(completions, key=lambda one: _text_and_rating(one)[1] or 0.0, default=None)
    return None if worst is None else _text_and_rating(worst)


def _of(value: JsonValue) -> Iterator[JsonValue]:
    return iter(value if isinstance(value, list) else [])


def _text_and_rating(one: Mapping[str, JsonValue]) -> tuple[str, float | None]:
    rating = one.get("rating")
    return str(one.get("text")), float(rating) if isinstance(rating, int | float) else None
