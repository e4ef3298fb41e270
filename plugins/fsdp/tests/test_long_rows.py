"""Ranks that split a row share its memory, and its gradients are those of one process."""

from __future__ import annotations

from pathlib import Path

from comparing import EXACT

from benchmarks.long_rows import difference, measure, write_model


def test_two_ranks_take_two_thirds_of_the_memory_of_a_row_at_most(folder: Path) -> None:
    """Of 4,096 tokens; `python -m benchmarks.long_rows` measures 65,536."""
    model = write_model(folder / "long")
    one, split = measure(model, 4096, 1), measure(model, 4096, 2)
    print(f"one process {one.growth_bytes:,} bytes, larger of two ranks {split.growth_bytes:,}")
    assert one.growth_bytes > 30 << 20
    assert split.growth_bytes <= 2 / 3 * one.growth_bytes
    assert difference(split, one) <= EXACT
