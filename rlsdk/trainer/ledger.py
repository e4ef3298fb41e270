"""Which prompts were used, and which of them were not trained on yet: the data state that a resume needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlsdk.data import Prompt, PromptStream
from rlsdk.interfaces import CheckpointError


class Ledger:
    """Gives each group its prompt, and keeps account of those that were started and are neither trained nor let go."""

    def __init__(self, prompts: PromptStream) -> None:
        self._prompts = prompts
        self.next_group = 0
        """Ordinal of the next group that takes a new prompt."""
        self.open: dict[int, int] = {}
        """By ordinal, the step of the group's `Start`."""
        self._positions: dict[int, Mapping[str, Any]] = {}
        """By ordinal that is open: where the data stood before its prompt."""
        self._again: dict[int, tuple[Prompt, int]] = {}
        """By ordinal: prompt and epoch of groups that were open when the state was taken."""

    def start(self, ordinal: int, step: int) -> tuple[Prompt, int]:
        """The prompt of a group that is started for this step, and its epoch."""
        self.open[ordinal] = step
        if ordinal in self._again:
            return self._again.pop(ordinal)
        if ordinal != self.next_group:
            raise ValueError(f"group {ordinal} was started when {self.next_group} was next: a driver's mistake")
        return self._take()

    def close(self, ordinals: Iterable[int]) -> None:
        """These groups were trained, or let go."""
        for ordinal in ordinals:
            del self.open[ordinal], self._positions[ordinal]

    def open_by_step(self) -> dict[int, list[int]]:
        """Groups that must be made again, by step."""
        found: dict[int, list[int]] = {}
        for ordinal in sorted(self._again):
            found.setdefault(self.open[ordinal], []).append(ordinal)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands before the oldest group that is open, and what is open from there on."""
        first = min(self.open, default=self.next_group)
        return {
            "prompts": self._positions.get(first) or self._prompts.state_dict(),
            "next_group": first,
            "until": self.next_group,
            "open": [[ordinal, step] for ordinal, step in sorted(self.open.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` was taken.

        Raises:
            CheckpointError: the data is not what it was, or the state is of another version of rlsdk.
        """
        if not {"prompts", "next_group", "until", "open"} <= state.keys():
            raise CheckpointError(
                f"the checkpoint's account of the data has {sorted(state)}; expected also until and open: it was "
                "written by another version of rlsdk. Start anew with --trainer.resume never"
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
        # After `take`: an epoch that begins with this prompt counts.
        return prompt, self._prompts.epoch
