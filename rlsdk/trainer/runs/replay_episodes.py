"""Plays the episodes of a run's journal again (`rlsdk replay --episodes`): without an engine, and writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.data import Prompt, PromptStream
from rlsdk.interfaces import BatchError, CheckpointError, Episode, Rollouter
from rlsdk.interfaces.spelling import Setting
from rlsdk.rollouts.journal.journal import FOLDER
from rlsdk.rollouts.journal.playing import (
    DivergedError,
    RecordedEpisode,
    ReplayedGenerate,
    difference,
    recorded_episodes,
)
from rlsdk.trainer.generation.group_source import group_seed
from rlsdk.trainer.generation.sampler import Draw, group_task
from rlsdk.trainer.inputs.codec import TokenCodec
from rlsdk.trainer.runs.build_rl import prompts_of
from rlsdk.trainer.runs.build_stream import options_of, rollouter_of
from rlsdk.trainer.runs.prepare import PreparedRun
from rlsdk.trainer.runs.run_inputs import RunInputs, build_run_inputs

if TYPE_CHECKING:
    from rlsdk.trainer.tracking.events import RunView

AT_ONCE = 16
"""Episodes that are played at once."""


@dataclass(frozen=True, kw_only=True)
class PlayedEpisode:
    """An episode that was played again."""

    group: int
    index: int
    difference: str
    """The first call or turn that is not that of the journal; empty: none."""


def replay_episodes(run: PreparedRun, view: RunView, *, run_dir: Path) -> list[PlayedEpisode]:
    """Plays every recorded episode again: its environment or its agent runs, and gets the turns of the journal.

    Raises:
        CheckpointError: the journal has no episode of several calls, or is damaged.
    """
    recorded = recorded_episodes(run_dir / FOLDER)
    if not recorded:
        raise CheckpointError(
            f"{run_dir / FOLDER} has no turns of an episode; a run with an environment, an agent or a rollouter of its "
            f"own and `{Setting('schedule.journal', 'all')}` keeps them"
        )
    config = run.config.model_copy(update={"tracking": run.config.tracking.model_copy(update={"trackers": ()})})
    with closing(build_run_inputs(config, run.registry, run_dir, view, rewarded=False, supervised=False)) as inputs:
        rollouter = rollouter_of(config, run.registry, inputs.tokenizer)
        try:
            return asyncio.run(_Player(inputs, rollouter).play(recorded))
        finally:
            if (close := getattr(rollouter, "close", None)) is not None:
                close()


class _Player:
    """Plays episodes of a run."""

    def __init__(self, inputs: RunInputs, rollouter: Rollouter) -> None:
        self._inputs, self._config, self._rollouter = inputs, inputs.config, rollouter
        self._codec, self._places = TokenCodec(inputs.tokenizer), asyncio.Semaphore(AT_ONCE)
        samples = self._config.trainer.samples_per_prompt
        self._draw = Draw(source="train", num_samples=samples, sampling=inputs.sampling)

    async def play(self, recorded: Sequence[RecordedEpisode]) -> list[PlayedEpisode]:
        """Plays them, and returns what was found, in order."""
        prompts = dict(_prompts(prompts_of(self._config, self._inputs), max(one.group for one in recorded)))
        return await asyncio.gather(*(self._again(one, *prompts[one.group]) for one in recorded))

    async def _again(self, recorded: RecordedEpisode, prompt: Prompt, epoch: int) -> PlayedEpisode:
        config = self._config
        seed = group_seed(config.trainer.seed, recorded.group, config.trainer.prompts_per_step)
        task = group_task(prompt, self._draw, epoch=epoch, ordinal=recorded.group, seed=seed)
        sample = recorded.sample(prompt.prompt_ids)
        generate = ReplayedGenerate(task, self._codec, config.max_model_tokens, recorded, sample)
        async with self._places:
            try:
                made = await self._rollouter(task.prompt, generate, **options_of(config))
            except (DivergedError, BatchError) as error:
                found = str(error)
            else:
                found = difference(sample, made if isinstance(made, Episode) else Episode.of(made), generate)
        return PlayedEpisode(group=recorded.group, index=recorded.index, difference=found)


def _prompts(stream: PromptStream, last: int) -> Iterator[tuple[int, tuple[Prompt, int]]]:
    """Ordinal of each group up to `last`, its prompt and epoch."""
    for ordinal in range(last + 1):
        prompt = stream.take(1)[0]
        yield ordinal, (prompt, stream.epoch)
