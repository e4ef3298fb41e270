"""Section on the schedule: when groups are made, with which weights, and what a step may be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt

from rlsdk.config.base import Section
from rlsdk.config.problem import Problem
from rlsdk.config.role_names import ROLLOUT

if TYPE_CHECKING:
    from rlsdk.config.algorithm import AlgorithmConfig
    from rlsdk.config.engines import PlacementConfig


class ScheduleConfig(Section):
    """When groups are made. One law: a group for step k starts once the weights of step k - 1 - `max_staleness` are
    served, and nothing older is trained on."""

    max_staleness: NonNegativeInt = 0
    """Trainer steps by which the weights that begin a group may be older than those of a synchronous run. 0: each step
    makes its groups, then trains; 1: the next step's groups are made while this one trains; more: asynchronous."""
    order: Literal["prompt", "finish"] = "prompt"
    """Which groups a step trains. prompt: its own, in order of prompts; finish: those that finished first, unless a
    group left behind would exceed the bound."""
    on_new_weights: Literal["drain", "recompute", "keep"] = "drain"
    """What running samples do when new weights come. drain: they finish first; recompute: they pause, and continue
    under the new weights with keys and values made again; keep: the same with the old keys and values."""
    journal: Literal["none", "resume", "all"] = "resume"
    """What is written of the run as it goes. resume: all that a resumed run need not make again, as far as checkpoints
    that are kept go back; all: the whole run, so that `rlsdk replay` can repeat it; none."""
    uncorrected: bool = False
    """Trains on stale samples without weighing their distance to the sampler, where `algorithm.old_log_probs` is
    `always` without a correction, or the engines' log-probs cannot be compared."""

    @property
    def overlaps(self) -> bool:
        """Groups are made while a step trains."""
        return self.max_staleness > 0

    @property
    def keeps(self) -> Literal["resume", "all"]:
        """Which segments of the journal stay."""
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
                "`--schedule.max_staleness 1`",
            )
        if self.uncorrected:
            yield Problem("uncorrected", f"True has no effect, {because} no sample is stale; leave it out")


def schedule_problems(
    schedule: ScheduleConfig, placement: PlacementConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """What other sections say against a schedule."""
    if not schedule.overlaps:
        return
    sharing = _beside_rollout(placement)
    if sharing:
        yield Problem(
            "schedule.max_staleness",
            f"{schedule.max_staleness} makes groups while a step trains, but placement gives the rollout the devices "
            f"of {sharing}, which take turns; expected 0, or devices of its own: `--placement.preset "
            "colocate_actor_ref` with `--placement.devices '{rollout: N}'`",
        )
    naive = algorithm.old_log_probs == "always" and not algorithm.correction.is_on
    if naive and not schedule.uncorrected:
        yield Problem(
            "algorithm.old_log_probs",
            f"'always' without a correction, at schedule.max_staleness {schedule.max_staleness}: the ratio forgets "
            "which weights sampled. Choose 'auto' or 'decoupled', give `--algorithm.correction.mode truncate`, or say "
            "`--schedule.uncorrected true`",
        )
    if schedule.uncorrected and not naive and algorithm.correction.is_on:
        yield Problem("schedule.uncorrected", "True contradicts algorithm.correction, which is on; leave one out")


def _beside_rollout(placement: PlacementConfig) -> str:
    """The roles that share the rollout's devices, in words; empty: none."""
    if placement.preset is not None:
        return "every other role (preset colocate_all)" if placement.preset == "colocate_all" else ""
    own = placement.roles.get(ROLLOUT)
    return ", ".join(sorted(role for role, pool in placement.roles.items() if pool == own and role != ROLLOUT))
