"""Formats durations and counts as text."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds as text: `45 s`, `12 min 5 s`, `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def counted(count: float, word: str) -> str:
    """A count with its noun: `1 step`, `2 steps`, `0.5 GPUs`."""
    return f"{count:g} {word}" if count == 1 else f"{count:g} {word}s"
