"""What a run did before it was resumed, and what it does now: its journal, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rlsdk.interfaces import GenerationOutput, Trajectory
from rlsdk.rollouts import Group, GroupTask, Sample
from rlsdk.rollouts.collecting import Record
from rlsdk.rollouts.flights import Kept, SampleSeed
from rlsdk.rollouts.journal import Journal, Recorded, read_journal
from rlsdk.rollouts.records import grade_from, trajectory_from, unfinished_from


class History:
    """Reads and writes a run's journal. Without a folder nothing is written, and nothing was made before."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        made_by: str = "",
        keep: Literal["resume", "all"] = "resume",
        text_of: Callable[[Trajectory], str] = lambda trajectory: "",
    ) -> None:
        """Opens nothing yet.

        Args:
            folder: of the journal; None: none is kept.
            made_by: stands for all that samples and their grades depend on: others of the journal do not count.
            keep: see `Journal`.
            text_of: what the rewards saw of a trajectory of the journal.
        """
        self._folder, self._made_by, self._text_of = folder, made_by, text_of
        self._journal = None if folder is None else Journal(folder, made_by=made_by, keep=keep)
        self._recorded = Recorded()
        self.is_resumed = False

    @property
    def record(self) -> Record | None:
        """Gets every sample."""
        return self._journal

    @property
    def planned(self) -> Mapping[int, Sequence[int]]:
        """By step: the groups that it took before."""
        return self._recorded.trained

    def resume(self, step: int, *, newest_version: int | None = None) -> Mapping[SampleSeed, GenerationOutput]:
        """Reads what was made after `step`.

        Args:
            step: of the checkpoint.
            newest_version: samples of newer weights, and the plan, do not count; None: all count.

        Returns:
            What samples had that were stopped, by seed and index.

        Raises:
            CheckpointError: the journal is damaged.
        """
        self.is_resumed = True
        if self._folder is None:
            return {}
        self._recorded = read_journal(self._folder, after=step, made_by=self._made_by)
        if newest_version is not None:
            self._recorded = self._recorded.no_newer(newest_version)
        return {key: unfinished_from(one) for key, one in self._recorded.unfinished.items()}

    def begin(self, step: int) -> None:
        """This process goes on, or begins, after this step."""
        if self._journal is not None:
            if not self.is_resumed:
                self._journal.clear()
            self._journal.open(step)

    def made(self, task: GroupTask) -> Mapping[tuple[str, int], Sample] | None:
        """The samples that a group has from before, once; None: it has none."""
        if task.ordinal not in self._recorded.samples:
            return None
        found = {}
        for key, record in self._recorded.samples.pop(task.ordinal).items():
            trajectory = trajectory_from(record, task.prompt.prompt_ids)
            text = "" if trajectory is None else self._text_of(trajectory)
            found[key] = Sample(trajectory=trajectory, text=text, grade=grade_from(record))
        return found

    def started(self, step: int, groups: Sequence[int]) -> None:
        if self._journal is not None:
            self._journal.write("start", step=step, groups=list(groups))

    def published(self, step: int) -> None:
        if self._journal is not None:
            self._journal.write("publish", step=step)

    def taken(self, step: int, groups: Sequence[int]) -> None:
        """These groups are what a step trains."""
        if self._journal is not None:
            self._journal.write("train", step=step, groups=list(groups))

    def updated(
        self, step: int, groups: Sequence[Group], rejected: Sequence[Group], figures: Mapping[str, float]
    ) -> None:
        """The step is done; this survives the end of the machine."""
        if self._journal is None:
            return
        trained, let_go = ([group.task.ordinal for group in found] for found in (groups, rejected))
        self._journal.write("update", step=step, groups=trained, rejected=let_go, figures=dict(figures))
        self._journal.flush()

    def halted(self, kept: Sequence[Kept]) -> None:
        """What samples have that were stopped for good."""
        if self._journal is not None:
            for request, output in kept:
                self._journal.unfinished(request, output)
            self._journal.flush()

    def saving(self, step: int) -> None:
        """A checkpoint of this step is begun."""
        if self._journal is not None:
            self._journal.open(step)

    def saved(self, oldest: int) -> None:
        """Nothing continues from before this step any more."""
        if self._journal is not None:
            self._journal.forget(oldest)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
