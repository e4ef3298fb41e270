"""The policy gradient algorithm: every recipe is this algorithm with different parts.

It computes scores of reward models, log-probs, values and advantages, then makes one actor step for each mini-batch and
epoch, and one of the critic if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlsdk.algorithms import (
    KlController,
    Samples,
    SftObjective,
    ValueObjective,
    correct_rollout,
    count_stale,
    group_signal,
    has_signal,
    keep_top_entropy,
    loss_weights,
    mismatch,
    overlong_filter,
    reject_rows,
    token_level_rewards,
)
from rlsdk.config import OldLogProbs, RunConfig, step_passes
from rlsdk.config.sections.role_kinds import ACTOR, CRITIC, reward_role, teacher_role
from rlsdk.interfaces import Algorithm, AlgorithmContext, Batch, ConfigError, Models, Update, reads_of
from rlsdk.trainer.learner.algorithm import build_objective
from rlsdk.trainer.learner.mini_batches import (
    cut_mini_batches,
    has_advantage,
    make_sft_batch,
    rows_in_turn,
    scatter_loss_weights,
    shape_scores,
    with_signal,
)
from rlsdk.trainer.learner.model_scores import add_scores, add_step_scores
from rlsdk.trainer.learner.teaching import learn_from_teachers, with_teacher


class PolicyGradient(Algorithm):
    """Composes the registered functions that the fields of `algorithm` name."""

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.run: RunConfig = context.config
        self.config = config = self.run.algorithm
        self.advantage = context.function("advantage", config.advantage)
        self.aggregation = context.function("aggregation", config.loss_aggregation)
        self.kl_in_reward = context.function("kl estimator", config.kl_reward_estimator)
        self.objective = build_objective(config, context)
        self.kl_coef = config.kl_coef
        """Coefficient of the KL in the reward: as configured, or adapted to a target KL."""
        self._on_policy_first = False
        self._step_scores = {reward_role(one.name): one.step_scores for one in self.run.reward_models}
        self._teachers = {teacher_role(one.name): one for one in self.run.teachers}

    @property
    def greedy_baseline(self) -> bool:
        """Whether the advantage estimator needs a greedy baseline sample."""
        return "baseline_scores" in reads_of(self.advantage).fields

    @property
    def max_groups(self) -> int | None:
        dynamic = self.config.dynamic_sampling
        return round(dynamic.max_groups * self.run.trainer.prompts_per_step) if dynamic.enabled else None

    def accepts(self, scores: Sequence[float]) -> bool:
        dynamic = self.config.dynamic_sampling
        return not dynamic.enabled or has_signal(
            torch.tensor(scores, dtype=torch.float64), min_spread=dynamic.min_spread, compares=self._compares
        )

    def prepare(self, batch: Batch, models: Models) -> tuple[Batch, Mapping[str, float]]:
        stale = count_stale(batch, models.policy_version) > 0
        made = step_passes(self.run, stale=stale, comparable=self.context.comparable, reads=self._wanted())
        self._check(made.old)
        self._on_policy_first = made.old.first_on_policy
        metrics: dict[str, float] = {}
        if made.old.source == "rollout":
            batch = batch.with_tokens(old_log_probs=batch["rollout_log_probs"])
        for each in made.passes:
            if (teacher := self._teachers.get(each.role)) is not None:
                number = [*self._teachers].index(each.role)
                batch = with_teacher(batch, models, each, teacher, self.config.distillation, number)
                continue
            given = models.forward(each.role, batch, each.output)
            if each.field == "scores":
                how, weight = self._step_scores.get(each.role), models.reward_weights[each.role]
                if how is None:
                    # A sample's score is that of its last row, which has how it ended.
                    batch, own = add_scores(batch, Samples.of(batch).of_rows(given), weight, each.role)
                else:
                    batch, own = add_step_scores(batch, given, weight, each.role, how)
                metrics |= own
            else:
                batch = batch.with_tokens(**{each.field: given})
        if made.old.source == "recomputed":
            metrics_of_mismatch = mismatch(batch, batch["old_log_probs"], batch["rollout_log_probs"])
            metrics |= {f"mismatch/{name}": value for name, value in metrics_of_mismatch.metrics().items()}
        return self._corrected(batch, made.old), metrics

    def advantages(self, batch: Batch) -> tuple[Batch, Mapping[str, float]]:
        metrics: dict[str, float] = {}
        batch = self._lengths(batch)
        penalty, policy = self._penalty(), batch.tokens.get("old_log_probs", batch["rollout_log_probs"])
        if self.config.kl_in_reward:
            mask = batch["response_mask"]
            kl = self.kl_in_reward(policy[mask], batch["ref_log_probs"][mask])
            metrics = {"policy/kl": float(kl.mean()) if len(kl) else 0.0, "policy/kl_coef": penalty}
            steered = KlController(coef=penalty, target=self.config.kl_target, horizon=self.config.kl_horizon)
            self.kl_coef = steered.after(metrics["policy/kl"], Samples.of(batch).count).coef
        batch = token_level_rewards(batch, kl_coef=penalty, estimator=self.kl_in_reward, log_probs=policy)
        if self._compares is not None:
            metrics["reward/groups_with_signal"] = group_signal(batch, compares=self._compares).share
        batch = _narrowed(self.advantage(batch, **self.config.advantage_options))
        batch.validate(("advantages",))
        if self._teachers:
            batch, of_teachers = learn_from_teachers(batch, self._teachers, self.config.distillation)
            metrics |= of_teachers
        return batch, metrics

    def updates(self, batch: Batch, *, step: int) -> Sequence[Update]:
        samples = Samples.of(batch)
        if samples.has_several_rows:
            batch = batch.with_rows(has_advantage=has_advantage(samples))
        plans = self._plans(batch, step)
        has_critic = "values" in batch
        warming_up = has_critic and step < self.run.critic.warmup_steps
        critic = self._critic_updates(plans) if has_critic else []
        return critic if warming_up else [*critic, *self._actor_updates(plans, step)]

    def state_dict(self) -> Mapping[str, Any]:
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kl_coef = float(state["kl_coef"])

    def _actor_updates(self, plans: Sequence[tuple[Batch, list[Tensor]]], step: int) -> list[Update]:
        """Plans the actor's updates. The first one runs at the weights of `old_log_probs`, unless these are the
        sampler's. Rows without signal are left out if they have no gradient; the other rows' loss weights still count
        them."""
        later = replace(self.objective, several_rows="has_advantage" in plans[0][0])
        first = replace(later, on_policy=self._on_policy_first)
        skips = self.config.skip_zero_advantage and later.zero_without_advantage
        cuts = [(weighed, rows) for weighed, cut in plans for rows in cut]
        made: list[Update] = []
        for at, (weighed, rows) in enumerate(cuts):
            if self.config.ptx.coef:
                made.append(self._supervised(step * len(cuts) + at))
            kept = with_signal(weighed, rows) if skips else rows
            objective = later if at else first
            made.append(Update(role=ACTOR, batch=weighed, rows=kept, objective=objective, fields=later.fields))
        return made

    def _supervised(self, number: int) -> Update:
        """Supervised loss term of the run's optimizer step `number`."""
        ptx, examples = self.config.ptx, self.context.examples
        rows = rows_in_turn(len(examples), ptx.rows_per_update, number, seed=(self.run.trainer.seed, "ptx"))
        chosen = [examples[row] for row in rows]
        batch = make_sft_batch([each.prompt_ids for each in chosen], [each.answer_ids for each in chosen])
        batch = batch.with_tokens(loss_weight=loss_weights(batch))
        objective = SftObjective(coef=ptx.coef)
        every = torch.arange(batch.num_rows)
        return Update(role=ACTOR, batch=batch, rows=every, objective=objective, fields=objective.fields, adds=True)

    def _critic_updates(self, plans: Sequence[tuple[Batch, list[Tensor]]]) -> list[Update]:
        objective = ValueObjective(clip=self.config.value_clip)
        return [
            Update(role=CRITIC, batch=weighed, rows=rows, objective=objective, fields=objective.fields)
            for weighed, cut in plans
            for rows in cut
        ]

    def _check(self, old: OldLogProbs) -> None:
        """Refuses what the checks of a configuration refuse before a run, for an algorithm that was built without them.

        Raises:
            ConfigError: the sampler's log-probs would be in the loss twice, or although they are not comparable.
        """
        if old.corrects_twice:
            raise ConfigError(
                "old_log_probs is 'rollout' with a correction, but the ratio already uses the sampler's log-probs; "
                "choose 'decoupled', or no correction"
            )
        if old.compared and not self.context.comparable:
            raise ConfigError(
                f"algorithm.{' and algorithm.'.join(old.compared)}: the rollout engine's log-probs belong to another "
                "distribution than the train engine's: choose old_log_probs 'always' without a correction, or sample "
                "with top_p 1, top_k 0 and min_p 0"
            )

    def _corrected(self, batch: Batch, old: OldLogProbs) -> Batch:
        correction = self.config.correction
        if old.correct and (correction.mode != "none" or correction.reject == "none"):
            mode = "truncate" if correction.mode == "none" else correction.mode
            level, upper, lower = correction.level, correction.upper, correction.lower
            batch = correct_rollout(batch, level=level, mode=mode, upper=upper, lower=lower)
        if correction.reject != "none":
            upper, lower = correction.reject_upper, correction.reject_lower
            batch = reject_rows(batch, level=correction.reject, upper=upper, lower=lower)
        return batch

    def _lengths(self, batch: Batch) -> Batch:
        lengths = self.config.lengths
        batch = shape_scores(batch, lengths, max_tokens=self.run.rollout.max_response_tokens)
        return overlong_filter(batch) if lengths.overlong_filter else batch

    @property
    def _compares(self) -> str | None:
        """What the advantage estimator compares within a group; None: all scores."""
        return getattr(self.advantage, "compares", None)

    def _penalty(self) -> float:
        """Coefficient of the KL in the reward."""
        return self.kl_coef if self.config.kl_in_reward else 0.0

    def _wanted(self) -> tuple[str, ...]:
        """Fields that the advantage estimator and the loss need."""
        return (*reads_of(self.advantage).fields, *self.objective.fields)

    def _plans(self, batch: Batch, step: int) -> list[tuple[Batch, list[Tensor]]]:
        """For each epoch: the batch with each token's loss weight, and the rows of each mini-batch."""
        plans = []
        for epoch in range(self.run.trainer.epochs_per_step):
            seed = (self.run.trainer.seed, "cut", step) if epoch == 0 else (self.run.trainer.seed, "cut", step, epoch)
            whole = batch["uid"] if self.objective.whole_groups else batch.sample_of_row
            cut = cut_mini_batches(whole, self.run.trainer.updates_per_step, seed=seed)
            plans.append((self._weigh(batch, cut), cut))
        return plans

    def _weigh(self, batch: Batch, mini_batches: Sequence[Tensor]) -> Batch:
        """Adds each token's weight in the loss of its mini-batch."""
        aggregation, most = self.aggregation, self.run.rollout.max_response_tokens
        share = self.config.entropy_share
        weights = []
        for rows in mini_batches:
            part = batch.select(rows)
            part = part.with_tokens(loss_weight=loss_weights(part, aggregation, max_tokens=most))
            weights.append((part if share is None else keep_top_entropy(part, share))["loss_weight"])
        return scatter_loss_weights(batch, mini_batches, weights)


def _narrowed(batch: Batch) -> Batch:
    """Rounds what an estimator computed from scores, in float64, to the dtype in which engines read it."""
    names = [name for name in ("advantages", "returns") if name in batch.tokens]
    return batch.with_tokens(**{name: batch[name].float() for name in names if batch[name].is_floating_point()})
