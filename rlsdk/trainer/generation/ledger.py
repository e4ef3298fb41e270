"""Tracks used prompts, and which of them were not trained on yet: the state of the data for a resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlsdk.data import Prompt, PromptStream
from rlsdk.interfaces import CheckpointError
from rlsdk.interfaces.spelling import Setting


class Ledger:
    """Gives each group its prompt, and tracks the open groups: started, and neither trained on nor dropped."""

    def __init__(self, prompts: PromptStream) -> None:
        self._prompts = prompts
        self.next_group = 0
        """Ordinal of the next group that takes a new prompt."""
        self.open: dict[int, int] = {}
        """Open groups: ordinal -> step of the group's `Start`."""
        self._positions: dict[int, Mapping[str, Any]] = {}
        """Open groups: ordinal -> state of the prompt stream before its prompt."""
        self._again: dict[int, tuple[Prompt, int]] = {}
        """Groups that were open when the state was saved: ordinal -> prompt and epoch."""

    def start(self, ordinal: int, step: int) -> tuple[Prompt, int]:
        """Returns the prompt and epoch of a group that is started for this step."""
        self.open[ordinal] = step
        if ordinal in self._again:
            return self._again.pop(ordinal)
        if ordinal != self.next_group:
            raise ValueError(f"group {ordinal} was started when {self.next_group} was next: a driver's mistake")
        return self._take()

    def close(self, ordinals: Iterable[int]) -> None:
        """Closes groups that were trained on or dropped."""
        for ordinal in ordinals:
            del self.open[ordinal], self._positions[ordinal]

    def open_by_step(self) -> dict[int, list[int]]:
        """Groups that must be generated again, by step."""
        by_step: dict[int, list[int]] = {}
        for ordinal in sorted(self._again):
            by_step.setdefault(self.open[ordinal], []).append(ordinal)
        return by_step

    def state_dict(self) -> dict[str, Any]:
        """State of the data before the oldest open group, and all open groups."""
        first = min(self.open, default=self.next_group)
        return {
            "prompts": self._positions.get(first) or self._prompts.state_dict(),
            "next_group": first,
            "until": self.next_group,
            "open": [[ordinal, step] for ordinal, step in sorted(self.open.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state.

        Raises:
            CheckpointError: the data changed, or the state is of another version of rlsdk.
        """
        if not {"prompts", "next_group", "until", "open"} <= state.keys():
            raise CheckpointError(
                f"the checkpoint's account of the data has {sorted(state)}; expected also until and open: it was "
                f"written by another version of rlsdk. Start from scratch with {Setting('trainer.resume', 'never')}"
            )
        self._prompts.load_state_dict(state["prompts"])
        self.next_group = int(state["next_group"])
        self.open = {int(ordinal): int(step) for ordinal, step in state["open"]}
        self._positions, self._again = {}, {}
        while self.next_group < int(state["until"]):
            ordinal = self.next_group
            taken = self._take()
            if ordinal in self.open:
                self._again[ordinal] = taken
            else:
                del self._positions[ordinal]

    def _take(self) -> tuple[Prompt, int]:
        self._positions[self.next_group] = self._prompts.state_dict()
        self.next_group += 1
        prompt = self._prompts.take(1)[0]
        # Read after `take`, so that an epoch that begins with this prompt counts.
        return prompt, self._prompts.epoch
