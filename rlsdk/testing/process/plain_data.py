"""Values that are sent between processes, perhaps of other environments: they may contain plain data only."""

from __future__ import annotations

import io
import pickle

FOREIGN = ("torch", "numpy")
"""Packages of which no object may be sent."""


class _Reader(pickle.Unpickler):
    """Notes the packages whose objects it meets."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: set[str] = set()

    def find_class(self, module: str, name: str) -> object:
        if module.partition(".")[0] in FOREIGN:
            self.found.add(f"{module}.{name}")
        return super().find_class(module, name)


def not_plain(value: object) -> list[str]:
    """Reasons why a value is no plain data: it cannot be sent, is not equal once it was, or contains an object of torch
    or numpy."""
    try:
        reader = _Reader(pickle.dumps(value))
        again = reader.load()
    except Exception as error:
        return [f"it cannot be sent: {type(error).__name__}: {error}"]
    return sorted(f"it contains {name}" for name in reader.found) + ([] if again == value else ["it changes when sent"])
