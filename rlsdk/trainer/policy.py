"""The learner of reinforcement learning: a batch of groups to optimizer steps of the actor, and of the critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlsdk.algorithms import (
    Denominator,
    KlController,
    PolicyObjective,
    ValueObjective,
    correct_rollout,
    denominator,
    keep_top_entropy,
    length_penalty,
    log_prob_difference,
    loss_weights,
    mismatch,
    overlong_filter,
    overlong_punishment,
    reject_rows,
    relative_length_reward,
    token_level_rewards,
)
from rlsdk.config import AlgorithmConfig
from rlsdk.interfaces import AdvantageEstimator, Batch, KlEstimator, LossAggregation, Objective, ParityError, reads_of
from rlsdk.trainer.experience import cut_mini_batches, scatter_loss_weights, with_signal
from rlsdk.trainer.hosts import MiniBatchResult
from rlsdk.trainer.metrics import StepClock
from rlsdk.trainer.state import TrainerState

if TYPE_CHECKING:
    from rlsdk.trainer.events import RunView
    from rlsdk.trainer.groups import RoleGroup
    from rlsdk.trainer.session import Session


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """How rewards become optimizer steps."""

    algorithm: AlgorithmConfig
    advantage: AdvantageEstimator
    objective: PolicyObjective
    aggregation: LossAggregation
    kl_in_reward: KlEstimator
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Of reward models, by role."""
    critic_warmup_steps: int = 0
    updates_per_step: int = 1
    epochs_per_step: int = 1
    seed: int = 0
    max_response_tokens: int
    comparable: bool = True
    """The sampler's log-probs are those of the contract."""
    update_timeout_s: float | None = None
    parity_threshold: float
    parity_is_error: bool = False

    @property
    def needs_baseline(self) -> bool:
        """The estimator measures samples against a greedy one."""
        return "baseline_scores" in reads_of(self.advantage).fields


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a step came to."""

    batch: Batch
    """With all that was prepared."""
    actor: Sequence[MiniBatchResult]
    """One for each optimizer step; none while the critic warms up."""
    critic: Sequence[MiniBatchResult]
    metrics: Mapping[str, float]
    """Beside those of the optimizer steps."""


class PolicyLearner:
    """Scores, log-probs, values, advantages, updates."""

    def __init__(self, session: Session, options: PolicyOptions, state: TrainerState, view: RunView) -> None:
        self.session = session
        self.options = options
        self.state = state
        self.view = view
        self._parity_checked = False

    def learn(self, batch: Batch, step: int, clock: StepClock) -> Learned:
        """Trains on a step's batch.

        Args:
            batch: of whole groups, graded.
            step: number of steps behind this one, which the cut into mini-batches is drawn from.
            clock: takes the seconds of each phase.
        """
        with self.view.phase("log_probs"), clock.measure("log_probs"):
            batch, metrics = self.prepare(batch)
        with clock.measure("advantages"):
            batch, more = self.advantages(batch)
        with clock.measure("update"):
            plans = self._plans(batch, step)
            critic = self._update_critic(batch, plans)
            warming_up = self.session.critic is not None and step < self.options.critic_warmup_steps
            actor = [] if warming_up else self._update_actor(batch, plans)
        return Learned(batch=batch, actor=actor, critic=critic, metrics={**metrics, **more})

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Everything that an engine computes before the first update; each field for all rows, or not at all."""
        if not self._parity_checked:
            self._check_parity(batch)
        batch, metrics = self._reward_models(batch)
        decided = self._denominator(batch)
        self._on_policy_first = decided.first_on_policy
        if decided.source == "rollout":
            batch = batch.with_tokens(old_log_probs=batch["rollout_log_probs"])
        elif decided.source == "recomputed" or self._penalty() or decided.correct:
            batch = batch.with_tokens(old_log_probs=self._forward(self.session.actor, batch, "log_probs"))
        if self.options.algorithm.entropy_share is not None or "entropy" in self._wanted():
            batch = batch.with_tokens(entropy=self._forward(self.session.actor, batch, "entropy"))
        if self.session.ref is not None:
            batch = batch.with_tokens(ref_log_probs=self._forward(self.session.ref, batch, "log_probs"))
        if self.session.critic is not None:
            batch = batch.with_tokens(values=self._forward(self.session.critic, batch, "values"))
        if decided.source == "recomputed":
            found = mismatch(batch, batch["old_log_probs"], batch["rollout_log_probs"])
            metrics |= {f"mismatch/{name}": value for name, value in found.metrics().items()}
        return self._corrected(batch, decided), metrics

    def advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Adds token rewards and advantages."""
        algorithm = self.options.algorithm
        metrics: dict[str, float] = {}
        batch = self._lengths(batch)
        penalty, policy = self._penalty(), batch.tokens.get("old_log_probs", batch["rollout_log_probs"])
        if algorithm.kl_in_reward:
            mask = batch["response_mask"]
            kl = self.options.kl_in_reward(policy[mask], batch["ref_log_probs"][mask])
            metrics = {"policy/kl": float(kl.mean()) if len(kl) else 0.0, "policy/kl_coef": penalty}
            steered = KlController(coef=penalty, target=algorithm.kl_target, horizon=algorithm.kl_horizon)
            self.state.kl_coef = steered.after(metrics["policy/kl"], batch.num_rows).coef
        batch = token_level_rewards(batch, kl_coef=penalty, estimator=self.options.kl_in_reward, log_probs=policy)
        batch = self.options.advantage(batch, **algorithm.advantage_options)
        batch.validate(("advantages",))
        return batch, metrics

    def check_difference(self, mean: float, largest: float) -> None:
        """Compares what two engines gave the same tokens with `trainer.parity_threshold`, in nats.

        Raises:
            ParityError: it is more, and `trainer.parity_action` is `error`.
        """
        limit = self.options.parity_threshold
        if mean <= limit:
            return
        text = (
            f"train backend {self.session.actor.backend!r} and rollout backend {self.session.rollout.backend!r} give "
            f"the same tokens log-probs that differ by {mean:.4f} nats on average (largest {largest:.4f}); "
            f"trainer.parity_threshold is {limit}"
        )
        if self.options.parity_is_error:
            raise ParityError(f"{text}. Compare model.dtype and the engines' options, or raise the threshold.")
        self.view.notice(f"warning: {text}")

    def _reward_models(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Adds what every reward model gives to the scores."""
        metrics = {}
        for name, group in self.session.reward_models.items():
            given = self._forward(group, batch, "scores")
            batch = batch.with_rows(scores=batch["scores"] + self.options.reward_weights[name] * given)
            metrics[f"reward/{name}"] = float(given.mean()) if len(given) else 0.0
        return batch, metrics

    def _denominator(self, batch: Batch) -> Denominator:
        algorithm = self.options.algorithm
        return denominator(
            algorithm.old_log_probs,
            first_version=batch["policy_version"],
            last_version=batch["last_policy_version"],
            current_version=self.state.policy_version,
            num_updates=self.options.updates_per_step * self.options.epochs_per_step,
            correction=algorithm.correction.is_on,
            comparable=self.options.comparable,
        )

    def _corrected(self, batch: Batch, decided: Denominator) -> Batch:
        correction = self.options.algorithm.correction
        if decided.correct and (correction.mode != "none" or correction.reject == "none"):
            mode = "truncate" if correction.mode == "none" else correction.mode
            level, upper, lower = correction.level, correction.upper, correction.lower
            batch = correct_rollout(batch, level=level, mode=mode, upper=upper, lower=lower)
        if correction.reject != "none":
            upper, lower = correction.reject_upper, correction.reject_lower
            batch = reject_rows(batch, level=correction.reject, upper=upper, lower=lower)
        return batch

    def _lengths(self, batch: Batch) -> Batch:
        lengths, most = self.options.algorithm.lengths, self.options.max_response_tokens
        if lengths.soft_tokens is not None:
            batch = overlong_punishment(
                batch, max_tokens=most, cache_tokens=lengths.soft_tokens, factor=lengths.soft_factor
            )
        if lengths.penalty:
            batch = length_penalty(batch, coef=lengths.penalty, free_tokens=lengths.free_tokens)
        if lengths.shorter_reward:
            batch = relative_length_reward(batch, coef=lengths.shorter_reward)
        return overlong_filter(batch) if lengths.overlong_filter else batch

    def _penalty(self) -> float:
        """Coefficient of the KL in the reward."""
        return self.state.kl_coef if self.options.algorithm.kl_in_reward else 0.0

    def _wanted(self) -> tuple[str, ...]:
        """Fields that the estimator and the loss ask for."""
        return (*reads_of(self.options.advantage).fields, *self.options.objective.fields)

    def _plans(self, batch: Batch, step: int) -> list[tuple[Batch, list[Tensor]]]:
        """For each epoch, the batch with each token's share of the loss, and the rows of each mini-batch."""
        plans = []
        for epoch in range(self.options.epochs_per_step):
            seed = (self.options.seed, "cut", step) if epoch == 0 else (self.options.seed, "cut", step, epoch)
            cut = cut_mini_batches(
                batch.num_rows,
                self.options.updates_per_step,
                seed=seed,
                groups=batch["uid"] if self.options.objective.whole_groups else None,
            )
            plans.append((self._weigh(batch, cut), cut))
        return plans

    def _weigh(self, batch: Batch, mini_batches: Sequence[Tensor]) -> Batch:
        """Adds each token's share of its mini-batch's loss."""
        aggregation, most = self.options.aggregation, self.options.max_response_tokens
        share = self.options.algorithm.entropy_share
        weights = []
        for rows in mini_batches:
            part = batch.select(rows)
            part = part.with_tokens(loss_weight=loss_weights(part, aggregation, max_tokens=most))
            weights.append((part if share is None else keep_top_entropy(part, share))["loss_weight"])
        return scatter_loss_weights(batch, mini_batches, weights)

    def _update_actor(self, batch: Batch, plans: Sequence[tuple[Batch, list[Tensor]]]) -> list[MiniBatchResult]:
        """The first update sees the weights that `old_log_probs` stand for, unless they are the sampler's."""
        later = self.options.objective
        first = replace(later, on_policy=self._on_policy_first)
        kept = plans
        if self.options.algorithm.skip_zero_advantage and later.zero_without_advantage:
            kept = [(weighed, [with_signal(batch, rows) for rows in cut]) for weighed, cut in plans]
        return self._update(self.session.actor, kept, first, later, later.fields)

    def _update_critic(self, batch: Batch, plans: Sequence[tuple[Batch, list[Tensor]]]) -> list[MiniBatchResult]:
        if self.session.critic is None:
            return []
        objective = ValueObjective(clip=self.options.algorithm.value_clip)
        return self._update(self.session.critic, plans, objective, objective, objective.fields)

    def _update(
        self,
        role: RoleGroup,
        plans: Sequence[tuple[Batch, list[Tensor]]],
        first: Objective,
        later: Objective,
        fields: Sequence[str],
    ) -> list[MiniBatchResult]:
        """One optimizer step per mini-batch and epoch. All are sent at once; the workers run them in order."""
        total = sum(len(cut) for _, cut in plans)
        device = self.session.turns.using(role.name, training=True)
        with self.view.phase("update", total=total), device:
            waiting: list[Any] = []
            for weighed, cut in plans:
                shared = self.session.put(weighed.keep(("input_ids", *fields)))
                for rows in cut:
                    waiting.append(role.submit("update", shared.select(rows), later if waiting else first))
            results = []
            for pending in waiting:
                results.append(pending.result(self.options.update_timeout_s))
                self.view.advance()
            return results

    def _forward(self, role: RoleGroup, batch: Batch, output: str) -> Tensor:
        """One output of a train engine for every row: `[N]`, or `[B]` for `scores`."""
        needed = self.session.put(batch.keep(("input_ids", "response_mask")))
        with self.session.turns.using(role.name):
            answer: Batch = role.run("forward", needed, {output: output}, timeout_s=self.options.update_timeout_s)
        return answer[output]

    def _check_parity(self, batch: Batch) -> None:
        """The gate before the first update: both engines must give the same tokens the same log-probs.

        Raises:
            ParityError: they do not, and `trainer.parity_action` is `error`.
        """
        self._parity_checked = True
        trained = self._forward(self.session.actor, batch, "log_probs")
        found = log_prob_difference(trained, batch["rollout_log_probs"], batch["response_mask"])
        self.check_difference(found.mean_abs, found.max_abs)
