"""Reads what a run's journal recorded before a resume, and records the run in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rlsdk.interfaces import GenerationOutput, Trajectory
from rlsdk.rollouts import Group, GroupTask, Sample
from rlsdk.rollouts.client.flights import Kept, SampleSeed
from rlsdk.rollouts.groups.group_assembly import Record, Unfinished
from rlsdk.rollouts.groups.receipts import step_account
from rlsdk.rollouts.journal.journal import Journal
from rlsdk.rollouts.journal.recorded import Recorded, read_journal
from rlsdk.rollouts.journal.records import begun_from, samples_from, unfinished_from

MOST_NAMED = 8
"""Most changes that a notice names."""
MOST_SHOWN = 40
"""Most characters of a value in a notice."""


class History:
    """Reads and writes a run's journal. Without a folder nothing is read or written."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        made_by: Mapping[str, Any] = MappingProxyType({}),
        keep: Literal["resume", "all"] = "resume",
        text_of: Callable[[Trajectory], str] = lambda trajectory: "",
        vocabulary: int | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Opens nothing yet.

        Args:
            folder: folder of the journal; None: no journal is kept.
            made_by: all that samples and grades depend on, by name; records made by anything else are not used.
            keep: see `Journal`.
            text_of: returns the text of a journaled trajectory as the rewards saw it.
            vocabulary: number of token ids of the model; None: ids are not checked.
            notice: receives a line where records are not used.
        """
        self._folder, self._made_by, self._text_of = folder, dict(made_by), text_of
        self._vocabulary, self._notice = vocabulary, notice
        self._journal = None if folder is None else Journal(folder, made_by=self._made_by, keep=keep)
        self._is_stale = False
        """Whether the folder holds the journal of another run."""
        self._recorded = Recorded()
        self.is_resumed = False

    @property
    def record(self) -> Record | None:
        """The journal, which records every sample; None if no journal is kept."""
        return self._journal

    @property
    def planned(self) -> Mapping[int, Sequence[int]]:
        """Groups of each step before the resume, by step."""
        return self._recorded.trained

    @property
    def run(self) -> str | None:
        """Identity of the run in its journal, which its checkpoints name; None: no journal is kept."""
        return None if self._journal is None else self._journal.run

    def resume(
        self,
        step: int,
        *,
        run: str | None = None,
        needed: Callable[[int], bool] = lambda group: True,
        newest_version: int | None = None,
    ) -> Mapping[SampleSeed, GenerationOutput]:
        """Reads the samples that were made after `step`, and are needed.

        Args:
            step: step of the checkpoint.
            run: identity of the run in the checkpoint; None: it kept no journal, so nothing is of it.
            needed: see `read_journal`.
            newest_version: samples of newer weights, and the plan, are ignored; None: all are used.

        Returns:
            The kept parts of interrupted samples, by seed and index.

        Raises:
            CheckpointError: the journal is damaged.
        """
        self.is_resumed = True
        if self._folder is None or self._journal is None:
            return {}
        recorded = read_journal(
            self._folder, after=step, made_by=self._made_by, run=run or "", since=step, needed=needed
        )
        self._journal.run = run or self._journal.run
        self._is_stale = recorded.is_foreign
        if text := unused_notice(self._folder, recorded):
            self._notice(text)
        self._recorded = recorded if newest_version is None else recorded.no_newer(newest_version)
        self._journal.follow(recorded, newest_version)
        return {key: unfinished_from(one, self._vocabulary) for key, one in self._recorded.unfinished.items()}

    def begin(self, step: int) -> None:
        """Records that this process starts or continues after this step.

        Raises:
            OutputError: the journal cannot be written.
        """
        if self._journal is not None:
            if not self.is_resumed or self._is_stale:
                self._journal.clear()
            self._journal.open(step)

    def made(self, task: GroupTask) -> Mapping[tuple[str, int], Sample] | None:
        """Pops the samples that a group has from before the resume; None if it has none."""
        records = self._recorded.samples.pop(task.ordinal, None)
        if records is None:
            return None
        return samples_from(records, task.prompt.prompt_ids, self._text_of, self._vocabulary)

    def begun(self, task: GroupTask) -> Unfinished:
        """Pops what unfinished samples of a group have from before the resume."""
        turns, tools = (of.pop(task.ordinal, {}) for of in (self._recorded.turns, self._recorded.tools))
        return begun_from(turns, tools, self._vocabulary)

    def started(self, step: int, groups: Sequence[int]) -> None:
        if self._journal is not None:
            self._journal.write("start", step=step, groups=list(groups))

    def published(self, step: int) -> None:
        if self._journal is not None:
            self._journal.write("publish", step=step)

    def taken(self, step: int, groups: Sequence[int]) -> None:
        """Records the groups that a step trains on."""
        if self._journal is not None:
            self._journal.write("train", step=step, groups=list(groups))

    def updated(
        self, step: int, groups: Sequence[Group], rejected: Sequence[Group], figures: Mapping[str, float]
    ) -> None:
        """Records a finished step, synced to the disk so that it survives a machine failure."""
        if self._journal is None:
            return
        trained, let_go = ([group.task.ordinal for group in some] for some in (groups, rejected))
        tokens = step_account(groups, rejected)
        self._journal.write("update", step=step, groups=trained, rejected=let_go, tokens=tokens, figures=dict(figures))
        self._journal.sync()

    def halted(self, kept: Sequence[Kept]) -> None:
        """Records the kept parts of samples that were stopped for good."""
        if self._journal is not None:
            for request, output in kept:
                self._journal.unfinished(request, output)
            self._journal.sync()

    def saving(self, step: int) -> None:
        """Records that a checkpoint of this step is begun."""
        if self._journal is not None:
            self._journal.open(step)

    def saved(self, oldest: int) -> None:
        """Records that no resume will start before this step."""
        if self._journal is not None:
            self._journal.forget(oldest)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


def unused_notice(folder: Path, found: Recorded) -> str:
    """Says why a journal's records are not used; empty if they are."""
    again = "what was not trained on is generated again"
    if found.is_foreign:
        return f"the samples in {folder} are not used: they are not of the run that wrote the checkpoint; {again}"
    if not found.differs:
        return ""
    shown = [_change(name, then, now) for name, (then, now) in found.differs.items()]
    more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    return f"the samples in {folder} are not used: since then, changed: {', '.join(shown[:MOST_NAMED])}{more}; {again}"


def _change(name: str, then: Any, now: Any) -> str:
    if name.startswith("content of ") and None not in (then, now):
        return name  # of digests it says nothing that they differ
    return f"{name} ({_shown(then)} -> {_shown(now)})"


def _shown(value: Any) -> str:
    text = "none" if value is None else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
