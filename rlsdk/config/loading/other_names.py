"""Other names of fields: those of other trainers, and those of the same setting in another command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlsdk.config.introspection.describe import option_paths
from rlsdk.config.loading.foreign_names import FOREIGN_NAMES, Choices
from rlsdk.config.sections.schema import RunConfig

USUAL = ("train.optim.lr",)
"""Suggested first if several fields have the same name."""
MOST_ELSEWHERE = 4
Reads = Callable[[str], bool]
"""Whether a command may read the field at a path."""


def every(path: str) -> bool:
    """Of a command that may read all fields."""
    return True


def known_elsewhere(path: str) -> bool:
    """Whether a field of this path, or of its last part, has another name here."""
    return not {path, path.rpartition(".")[2]}.isdisjoint(FOREIGN_NAMES)


def meant_by(path: str, reads: Reads = every) -> Sequence[str]:
    """The fields that a path that does not exist, or its last part, probably means, of those that a command reads."""
    if "-" in path and not known_elsewhere(path):
        return meant_by(path.replace("-", "_"), reads)
    key = path.rpartition(".")[2]
    named = _first(FOREIGN_NAMES.get(path) or FOREIGN_NAMES.get(key, ()), reads)
    parts = (option.split(".") for option in option_paths(RunConfig))
    places = {".".join(steps[: at + 1]) for steps in parts for at in range(1, len(steps))}
    same = sorted(
        (place for place in places if place.endswith(f".{key}") and reads(place)),
        key=lambda place: (place not in USUAL, not place.startswith("train."), place),
    )
    # A table of other trainers' names knows better than an equal name, except where the equal names hold it too.
    found = same if set(named) <= set(same) else named
    return found if len(found) <= MOST_ELSEWHERE else named


def same_meaning(path: str, reads: Reads) -> Sequence[str]:
    """The fields that mean in a command what the field at `path` means in another."""
    for choices in FOREIGN_NAMES.values():
        if any(path in choice for choice in choices) and (found := _first(choices, reads)):
            return found
    return ()


def _first(choices: Choices, reads: Reads) -> tuple[str, ...]:
    known = (tuple(path for path in choice if reads(path)) for choice in choices)
    return next((choice for choice in known if choice), ())
