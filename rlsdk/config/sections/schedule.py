"""The section of the schedule: when samples are generated, with which weights, and which a step may train on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import NonNegativeInt

from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import Section
from rlsdk.config.sections.old_log_probs import choose_old_log_probs
from rlsdk.config.sections.role_kinds import ROLLOUT
from rlsdk.interfaces.settings import NO_INFLUENCE
from rlsdk.interfaces.spelling import Setting

if TYPE_CHECKING:
    from rlsdk.config.sections.algorithm import AlgorithmConfig
    from rlsdk.config.sections.engines import PlacementConfig


class ScheduleConfig(Section):
    """When samples are generated. The rule: a group for step k starts once the weights of step k - 1 - `max_staleness`
    are served, and no older samples are trained on."""

    max_staleness: NonNegativeInt = 0
    """Trainer steps by which a group's first weights may be older than in a synchronous run. 0: each step generates,
    then trains; 1: the next step's groups are generated while this one trains; more: asynchronous."""
    order: Literal["prompt", "finish"] = "prompt"
    """Which groups a step trains on. prompt: its own, in the order of prompts; finish: those that finished first,
    unless a skipped group would then exceed `max_staleness`."""
    on_new_weights: Literal["drain", "recompute", "keep"] = "drain"
    """What happens to running samples if new weights arrive. drain: they finish first; recompute: they pause, and
    continue under the new weights with a recomputed KV cache; keep: the same with the old KV cache."""
    journal: Annotated[Literal["none", "resume", "all"], NO_INFLUENCE] = "resume"
    """What the journal keeps. resume: the samples that a resumed run can reuse, back to the oldest kept checkpoint;
    all: the whole run, so that `rlsdk replay` can repeat it; none."""
    uncorrected: Annotated[bool, NO_INFLUENCE] = False
    """Allows training on stale samples without correction, if `algorithm.old_log_probs` is `always` without
    `algorithm.correction`, or if log-probs of the engines are not comparable."""

    @property
    def overlaps(self) -> bool:
        """Whether samples are generated while a step trains."""
        return self.max_staleness > 0

    @property
    def keeps(self) -> Literal["resume", "all"]:
        """Which segments of the journal are kept."""
        return "all" if self.journal == "all" else "resume"

    def problems(self) -> Iterator[Problem]:
        if not self.overlaps:
            yield from self._unused()
        elif self.order == "finish" and self.on_new_weights == "drain":
            yield Problem(
                "order",
                "'finish' with on_new_weights 'drain' waits for the slowest sample before every update of the "
                "weights, and would only prefer short answers; choose on_new_weights 'recompute', or order 'prompt'",
            )

    def _unused(self) -> Iterator[Problem]:
        because = "because at schedule.max_staleness 0"
        if self.order == "finish":
            yield Problem(
                "order", f"'finish' leaves nothing to choose, {because} a step trains all that it started; use 'prompt'"
            )
        if self.on_new_weights != "drain":
            yield Problem(
                "on_new_weights",
                f"{self.on_new_weights!r} has no effect, {because} no sample runs when weights come; use 'drain', or "
                f"`{Setting('schedule.max_staleness', 1)}`",
            )
        if self.uncorrected:
            yield Problem("uncorrected", f"True has no effect, {because} no sample is stale; leave it out")


def schedule_problems(
    schedule: ScheduleConfig, placement: PlacementConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """Problems between the schedule and other sections."""
    if not schedule.overlaps:
        return
    sharing = beside_rollout(placement)
    if sharing:
        yield Problem(
            "schedule.max_staleness",
            f"{schedule.max_staleness} generates samples while a step trains, but placement gives the rollout the "
            f"devices of {sharing}, which take turns; expected 0, or devices of its own: "
            f"`{Setting('placement.preset', 'colocate_actor_ref')}` with "
            f"`{Setting('placement.devices', {'rollout': 'N'})}`",
        )
    naive = not choose_old_log_probs(algorithm, stale=True, num_updates=1).accounts_for_sampler
    if naive and not schedule.uncorrected:
        yield Problem(
            "algorithm.old_log_probs",
            f"'always' without a correction, at schedule.max_staleness {schedule.max_staleness}: the ratio forgets "
            "which weights sampled. Choose 'auto' or 'decoupled', give "
            f"`{Setting('algorithm.correction.mode', 'truncate')}`, or say "
            f"`{Setting('schedule.uncorrected', True)}`",
        )
    if schedule.uncorrected and not naive and algorithm.correction.is_on:
        yield Problem("schedule.uncorrected", "True contradicts algorithm.correction, which is on; leave one out")


def beside_rollout(placement: PlacementConfig) -> str:
    """The roles that share the rollout's devices, as text; empty: none."""
    if placement.preset is not None:
        return "every other role (preset colocate_all)" if placement.preset == "colocate_all" else ""
    own = placement.roles.get(ROLLOUT)
    return ", ".join(sorted(role for role, pool in placement.roles.items() if pool == own and role != ROLLOUT))
