"""Terminal output of untrusted text; the only way by which rlsdk prints it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from rlsdk.system.printable import printable


class SafeConsole(Console):
    """rich's console, with control sequences in texts shown instead of executed. Its own colors and bars work as
    usual."""

    def on_broken_pipe(self) -> None:
        """Leaves the error to the command; rich would end the program."""
        raise  # rich calls this while it handles the error

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
