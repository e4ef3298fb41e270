"""Events of a run. The trainer never prints; a view implements these methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rlsdk.interfaces import SyncReport


class RunView:
    """Ignores everything; a terminal view overrides what it shows."""

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[Any]:
        """Brackets a phase of the step (`rollout`, `reward`, `log_probs`, `update`, `eval`, `save`, `sft`)."""
        return nullcontext()

    def waiting(self, what: str) -> AbstractContextManager[Any]:
        """Context of a wait at the start of a run; `what` names what is awaited."""
        return nullcontext()

    def advance(self, count: int = 1) -> None:
        """Progress within the current phase."""

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """One trainer step is done."""

    def sft_step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """One step of supervised training is done."""

    def pairs_step(self, label: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """One step of training from pairs is done; its metrics begin with `label`."""

    def judged(self, rules: Mapping[str, str]) -> None:
        """Rule for what counts as correct in later evaluations, by name of the set: for instance `gsm8k >= 1`."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""

    def synced(self, report: SyncReport) -> None:
        """Weights reached the rollout engines."""

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """A few samples of the step, with their text and rewards."""

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete."""

    def notice(self, text: str) -> None:
        """A message for the user, such as a warning, dropped rows, or failed rewards."""
