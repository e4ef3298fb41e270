"""`rlsdk make-model`: makes a small model with random weights and a byte-level tokenizer, for tests offline."""

from __future__ import annotations

from pathlib import Path

from rlsdk.api.small_model import make_model


def make(folder: Path, *, architecture: str, hidden: int, layers: int, context: int) -> None:
    """Writes the model and prints its description."""
    made = make_model(folder, architecture=architecture, hidden=hidden, layers=layers, context=context)
    print(f"{made}: {architecture} with random weights, {layers} layers of width {hidden}, a byte-level tokenizer")
