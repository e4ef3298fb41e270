"""Where a step's groups come from: the schedule's commands, carried out on the stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlsdk.data import PromptStream
from rlsdk.rollouts import (
    Finished,
    Group,
    GroupTask,
    Publish,
    Published,
    RolloutStream,
    Schedule,
    Start,
    Train,
    Updated,
)
from rlsdk.rollouts.schedule import Command
from rlsdk.trainer.sampler import Draw, group_task


class GroupSource:
    """Drives a `Schedule`. `next` gives the groups of the next step; `updated` says that their update is done."""

    def __init__(
        self,
        stream: RolloutStream,
        prompts: PromptStream,
        draw: Draw,
        *,
        groups_per_step: int,
        steps: int,
        seed: int,
        publish: Callable[[], None],
        accept: Callable[[Group], bool] = lambda group: True,
        max_groups_per_step: int | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            stream: makes the groups; closed with this.
            prompts: which of them come next.
            draw: how they are sampled.
            groups_per_step: that a step trains.
            steps: of the whole stage.
            seed: of the run.
            publish: brings the current weights to every replica.
            accept: whether a group teaches anything; another is started in place of one that does not.
            max_groups_per_step: that may be started for one step; past it, others are trained on, too.
        """
        self._stream = stream
        self._groups_per_step = groups_per_step
        self._steps = steps
        self._accept = accept
        self._max_groups_per_step = max_groups_per_step
        self._schedule = self._schedule_from(0, 0)
        self._prompts = prompts
        self._draw = draw
        self._seed = seed
        self._publish = publish
        self._commands: deque[Command] = deque()
        self._begun = False
        self._finished: dict[int, Group] = {}
        self._until: dict[int, int] = {}
        """By step that is open: behind the ordinal of its last group."""
        self._positions: dict[int, Mapping[str, Any]] = {}
        self._trained: Mapping[str, Any] = self._position()
        self._rejected: list[Group] = []

    def next(self) -> list[Group]:
        """The groups of the next step, in the order of the data; waits for them."""
        if not self._begun:
            self._begun = True
            self._commands.extend(self._schedule.begin())
        while True:
            while self._commands:
                match self._commands.popleft():
                    case Publish(step):
                        self._publish()
                        self._commands.extend(self._schedule.handle(Published(step)))
                    case Start(step, groups):
                        self._start(step, groups)
                    case Train(step, groups):
                        self._training = step
                        return self._take(groups)
            group = self._stream.take()
            self._finished[group.task.ordinal] = group
            self._commands.extend(self._schedule.handle(Finished(group.task.ordinal, self._accept(group))))

    def updated(self) -> None:
        """The update on the groups of the last `next` is done."""
        self._trained = self._positions.pop(self._training)
        self._commands.extend(self._schedule.handle(Updated(self._training)))

    @property
    def rejected(self) -> Sequence[Group]:
        """Groups of the last `next` that were made and are not trained on."""
        return self._rejected

    @property
    def epoch(self) -> int:
        """Full passes over the data that are behind the last step that was trained."""
        return int(self._trained["prompts"]["epoch"])

    def state_dict(self) -> Mapping[str, Any]:
        """Where the data stands behind the last step that was trained; what was started beyond it is made again."""
        return self._trained

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Goes to where `state` was taken, behind `step`.

        Raises:
            CheckpointError: the data is not what it was.
        """
        self._prompts.load_state_dict(state["prompts"])
        self._schedule = self._schedule_from(step, int(state["next_group"]))
        self._trained = self._position()

    def close(self) -> None:
        self._stream.close()

    def _schedule_from(self, step: int, next_group: int) -> Schedule:
        return Schedule(
            groups_per_step=self._groups_per_step,
            last_step=self._steps,
            done=step,
            next_group=next_group,
            max_groups_per_step=self._max_groups_per_step,
        )

    def _position(self) -> Mapping[str, Any]:
        """Where the data stands, and the ordinal of the group that comes next."""
        return {"prompts": self._prompts.state_dict(), "next_group": self._schedule.next_group}

    def _take(self, groups: Sequence[int]) -> list[Group]:
        """The groups of a step; those that were rejected for it, older than its last, are let go."""
        taken = [self._finished.pop(ordinal) for ordinal in groups]
        self._rejected = [self._finished.pop(at) for at in sorted(self._finished) if at < self._until[self._training]]
        del self._until[self._training]
        return taken

    def _start(self, step: int, groups: range) -> None:
        self._stream.start([self._task(ordinal) for ordinal in groups])
        self._until[step] = groups.stop
        self._positions[step] = self._position()

    def _task(self, ordinal: int) -> GroupTask:
        """The next prompt as the group of this ordinal.

        Its randomness comes from the step that it is for in a synchronous run, and its place in it.
        """
        prompt = self._prompts.take(1)[0]
        # After `take`: an epoch that begins with this prompt counts.
        epoch = self._prompts.epoch
        seed = (self._seed, "train", *divmod(ordinal, self._groups_per_step))
        return group_task(prompt, self._draw, epoch=epoch, ordinal=ordinal, seed=seed)
