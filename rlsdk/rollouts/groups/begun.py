"""What a sample that was not finished has from an earlier process: turns that were sampled, tools that ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsdk.interfaces import ToolUse, Turn


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What a journal has of a sample that was not finished."""

    turns: Mapping[str, Turn] = field(default_factory=dict)
    """By key of the call."""
    tools: Mapping[int, ToolUse] = field(default_factory=dict)
    """By number of the call of a tool within the episode. Results are not cut, and those of failed calls are the
    failure alone."""


@dataclass(frozen=True, kw_only=True)
class ToolResults:
    """Results of tools without state, of one sample: they are taken from the journal, and put into it."""

    begun: Mapping[int, ToolUse]
    record: Callable[[int, ToolUse], None] | None = None
    """Called with the number of a call and its result; None: no journal is kept."""

    def known(self, call: int, name: str, arguments: Mapping[str, Any]) -> ToolUse | None:
        """The result of the call of this number, if it had this name and these arguments."""
        found = self.begun.get(call)
        return found if found is not None and (found.name, found.arguments) == (name, dict(arguments)) else None

    def keep(self, call: int, use: ToolUse) -> None:
        """Records a call that ran to its end."""
        if self.record is not None:
            self.record(call, use)
