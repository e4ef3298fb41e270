"""A process reward model that chooses among the samples of a prompt, or among candidates for each step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rlsdk.algorithms import Samples, reduce_steps, step_scores
from rlsdk.config import Measure, RunConfig, config_error
from rlsdk.config.checks.check import check_backend, missing_head
from rlsdk.config.checks.requirements import role_requirements
from rlsdk.config.derived.roles import best_of_role
from rlsdk.config.problem import Problem
from rlsdk.config.sections.role_sections import BestOfConfig
from rlsdk.interfaces import (
    BackendKind,
    Batch,
    Capability,
    ConfigError,
    FinishReason,
    Generate,
    PromptView,
    SamplingParams,
    Span,
    Trajectory,
    Turn,
)
from rlsdk.interfaces.spelling import Setting
from rlsdk.rollouts import Group, make_batch
from rlsdk.rollouts.groups.rollouter import SampleGenerate
from rlsdk.trainer.inputs.model_config import fields_of
from rlsdk.trainer.inputs.step_ends import StepReader
from rlsdk.trainer.roles.role_group import BatchStore, RoleGroup
from rlsdk.trainer.stages.forward_parts import ROWS_A_CALL

if TYPE_CHECKING:
    from rlsdk.registry import Registry

Candidate = tuple[Sequence[int], Sequence[int]]
"""Tokens before a step, and those of the step."""


@dataclass(kw_only=True)
class StepJudge:
    """Scores steps with a running process reward model."""

    group: RoleGroup
    store: BatchStore
    reader: StepReader
    how: str
    """How the scores of a sample's steps become one."""
    num_candidates: int | None = None
    """Candidates for each step of a response; None: it chooses among samples."""
    timeout_s: float | None = None
    _waiting: list[tuple[Sequence[Candidate], asyncio.Future[list[float]]]] = field(default_factory=list)
    _is_busy: bool = False

    @classmethod
    def of_config(cls, config: RunConfig, group: RoleGroup, store: BatchStore, reader: StepReader) -> StepJudge:
        """The judge of `eval.best_of`."""
        own = config.eval.best_of
        assert own is not None
        return cls(
            group=group,
            store=store,
            reader=reader,
            how=own.step_scores,
            num_candidates=own.num_candidates if own.by == "step" else None,
            timeout_s=config.deadlines.rollout_s,
        )

    @property
    def search(self) -> StepSearch | None:
        """The rollouter that searches step by step; None: it chooses among samples."""
        return None if self.num_candidates is None else StepSearch(judge=self, num_candidates=self.num_candidates)

    def of_samples(self, groups: Sequence[Group]) -> list[list[float]]:
        """The score of each sample of each group; 0 for one without a complete step."""
        batch = make_batch(groups, temperature=1.0)
        ends, samples = self.reader.mark(batch), Samples.of(batch)
        scores = reduce_steps(samples, ends, step_scores(batch, ends, self._values(batch)), self.how)
        of = dict(zip(zip(*(samples.of_rows(batch[name]).tolist() for name in ("uid", "sample")), strict=True),
                      scores.tolist(), strict=True))  # fmt: skip
        return [[of.get((group.task.ordinal, at), 0.0) for at in range(len(group.samples))] for group in groups]

    async def of_candidates(self, candidates: Sequence[Candidate]) -> list[float]:
        """The score of each candidate for a step; 0 for one that ends no step. Calls of one moment share a pass."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[float]] = loop.create_future()
        self._waiting.append((candidates, future))
        if not self._is_busy:
            self._is_busy = True
            self._serving = loop.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        try:
            while self._waiting:
                taken, self._waiting = self._waiting, []
                try:
                    rows = [row for candidates, _ in taken for row in candidates]
                    found = iter(await asyncio.to_thread(self._of_candidates, rows))
                except Exception as error:  # the waiting caller gets it
                    for _, future in taken:
                        future.set_exception(error)
                    continue
                for candidates, future in taken:
                    scores = [next(found) for _ in candidates]
                    if not future.done():
                        future.set_result(scores)
        finally:
            self._is_busy = False

    def _of_candidates(self, rows: Sequence[Candidate]) -> list[float]:
        """A step is scored at the token after it, whichever that is."""
        after = next(iter(self.reader.stops))
        batch = Batch.from_rows([[*before, *step, after] for before, step in rows])
        last = [self.reader.ends(step, is_followed=True)[-1:] for _, step in rows]
        ends = torch.zeros(batch.num_tokens, dtype=torch.bool)
        places = [
            start + len(before) + end
            for start, (before, _), found in zip(batch.offsets.tolist(), rows, last, strict=False)
            for end in found
        ]
        ends[places] = True
        scores = step_scores(batch, ends, self._values(batch))
        return batch.row_sum(scores).tolist()

    def _values(self, batch: Batch) -> torch.Tensor:
        """`[N]`, in several calls."""
        needed, parts = batch.keep(("input_ids",)), []
        for first in range(0, max(batch.num_rows, 1), ROWS_A_CALL):
            part = self.store.put(needed.select(slice(first, first + ROWS_A_CALL)))
            answer: Batch = self.group.run("forward", part, {"values": "values"}, timeout_s=self.timeout_s)
            parts.append(answer["values"])
        return torch.cat(parts)


@dataclass(frozen=True, kw_only=True)
class StepSearch:
    """A rollouter: samples several candidates for each step of a response, and continues from the best one."""

    judge: StepJudge
    num_candidates: int

    async def __call__(self, prompt: PromptView, generate: Generate, **options: Any) -> Trajectory:
        assert isinstance(generate, SampleGenerate)  # the stream's own, which takes a separator and a place
        if options:
            raise ConfigError(f"rollout.rollouter_options {sorted(options)}: the search by steps has none")
        ids, spans = [*prompt.prompt_ids], [Span.given(prompt.prompt_ids)]
        room = min(generate.sampling.max_tokens, generate.max_model_tokens - len(ids))
        reason, steps = FinishReason.LENGTH, 0
        while room > 0:
            best = await self._best(ids, room, generate, steps)
            spans.append(best.span)
            ids += best.span.token_ids.tolist()
            room -= len(best.span)
            steps += 1
            if best.finish_reason is not FinishReason.STOP or ids[-1] in self.judge.reader.stops:
                reason = best.finish_reason
                break
        return Trajectory(spans=tuple(spans), finish_reason=reason, info={"steps": float(steps)})

    async def _best(self, ids: Sequence[int], room: int, generate: SampleGenerate, step: int) -> Turn:
        stop = (self.judge.reader.separator,)
        drawn = (
            generate(ids, max_tokens=room, stop_strings=stop, place=("step", step, at))
            for at in range(self.num_candidates)
        )
        turns = await asyncio.gather(*drawn)
        scores = await self.judge.of_candidates([(ids, turn.span.token_ids.tolist()) for turn in turns])
        return turns[max(range(len(turns)), key=scores.__getitem__)]


def step_reader(own: BestOfConfig, tokenizer: Any, sampling: SamplingParams) -> StepReader:
    """What finds the ends of steps in responses."""
    return StepReader(tokenizer=tokenizer, separator=own.step_separator, stops=sampling.stop_token_ids)


def check_best_of(config: RunConfig, registry: Registry, measures: Sequence[Measure], device: str) -> None:
    """Checks `eval.best_of` before anything is started.

    Raises:
        ConfigError: its model has no head for scores or its backend cannot run it; or there is nothing to choose from.
    """
    own = config.eval.best_of
    if own is None:
        return
    role, path = best_of_role(config), "eval.best_of"
    fields = fields_of(own.path, own.revision, f"{path}.path")
    kind = None if "model_type" not in fields else str(fields["model_type"])
    problems = [*missing_head(role, fields)]
    needed = role_requirements(config, role, kind, device, 1)
    problems += check_backend(needed, role.backend, registry, field=role.fields["backend"])
    if own.by == "answer" and all(measure.config.samples_per_prompt < 2 for measure in measures):
        several = Setting("eval.samples_per_prompt", 8)
        problems.append(Problem(path, f"there is one sample of a prompt, and nothing to choose from: give {several}"))
    if own.by == "step" and not config.rollout.is_single_turn:
        problems.append(Problem(f"{path}.by", value="step", expected="'answer': samples have several turns"))
    spec = registry.backend(BackendKind.ROLLOUT, config.rollout.backend)
    if own.by == "step" and Capability.STOP_STRINGS not in spec.capabilities:
        text = f"'answer': rollout backend {spec.name!r} cannot end a response at a separator"
        problems.append(Problem(f"{path}.by", value="step", expected=text))
    if problems:
        raise config_error(problems)
