"""Decides which forward passes without gradient a step makes: the learner makes them, the planner counts them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rlsdk.config.derived.roles import needed_roles
from rlsdk.config.sections.old_log_probs import OldLogProbs, choose_old_log_probs
from rlsdk.config.sections.role_kinds import ACTOR, TEACHER, kind_of, reward_role, teacher_role
from rlsdk.config.sections.schema import RunConfig


@dataclass(frozen=True)
class ForwardPass:
    """A pass without gradient of one role over all rows of a step."""

    role: str
    output: str
    """`log_probs`, `entropy`, `values`, `scores`, `hidden_states`, or `top_log_probs` with `top_ids`."""
    field: str
    """Field of the batch that it fills; `scores` are added to it, and so are those made of a process reward model's
    values."""


@dataclass(frozen=True, kw_only=True)
class StepPasses:
    """What a step computes before its updates."""

    old: OldLogProbs
    passes: tuple[ForwardPass, ...]
    """In order. In the first step of a process the learner makes one more pass of the actor, which compares the two
    engines."""


def step_passes(config: RunConfig, *, stale: bool, comparable: bool = True, reads: Collection[str] = ()) -> StepPasses:
    """The forward passes of one step of the policy gradient algorithm.

    Args:
        config: the run, with the roles that its own functions declare (`with_declared_roles`).
        stale, comparable: see `choose_old_log_probs`.
        reads: fields of the batch that the advantage estimator and the loss declare.
    """
    trainer = config.trainer
    num_updates = trainer.updates_per_step * trainer.epochs_per_step
    old = choose_old_log_probs(config.algorithm, stale=stale, num_updates=num_updates, comparable=comparable)
    return StepPasses(old=old, passes=tuple(_passes(config, old, reads)))


def pass_of_teacher(config: RunConfig, name: str) -> ForwardPass:
    """The pass of a teacher."""
    if config.learns_exactly:
        return ForwardPass(name, "hidden_states", "teacher_states")
    if config.learns_by_divergence:
        return ForwardPass(name, "top_log_probs", "teacher_top_log_probs")
    kind = kind_of(TEACHER)
    return ForwardPass(name, kind.output, kind.field_of(name))


def _passes(config: RunConfig, old: OldLogProbs, reads: Collection[str]) -> Iterator[ForwardPass]:
    algorithm = config.algorithm
    kinds = {name: kind_of(name) for name in needed_roles(config) if kind_of(name).output}
    of_steps = {reward_role(model.name) for model in config.reward_models if model.step_scores is not None}
    beside = [
        ForwardPass(name, "values" if name in of_steps else kind.output, kind.field_of(name))
        for name, kind in kinds.items()
        if kind.name != TEACHER
    ]
    beside += [pass_of_teacher(config, teacher_role(one.name)) for one in config.teachers]
    yield from (one for one in beside if one.field == "scores")
    # A KL in the reward compares the reference with the train engine's log-probs, unless the sampler's were chosen; so
    # does the gap to a teacher.
    compares = algorithm.kl_in_reward or (bool(config.teachers) and not config.learns_by_divergence)
    if old.source == "recomputed" or (compares and old.source != "rollout"):
        yield ForwardPass(ACTOR, "log_probs", "old_log_probs")
    if algorithm.entropy_share is not None or "entropy" in reads:
        yield ForwardPass(ACTOR, "entropy", "entropy")
    yield from (one for one in beside if one.field != "scores")
