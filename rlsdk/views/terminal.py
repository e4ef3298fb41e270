"""The one way from rlsdk to a terminal for text that others wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from rlsdk.kit.printable import printable


class SafeConsole(Console):
    """rich's console; control sequences in a text are shown, not obeyed. Its own colors and bars are as usual."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
