"""The learner of reinforcement learning: a batch of groups to optimizer steps of the actor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from rlsdk.algorithms import PolicyObjective, log_prob_difference, loss_weights, token_level_rewards
from rlsdk.config import AlgorithmConfig
from rlsdk.interfaces import AdvantageEstimator, Batch, ParityError
from rlsdk.trainer.experience import cut_mini_batches, scatter_loss_weights, with_signal
from rlsdk.trainer.hosts import MiniBatchResult
from rlsdk.trainer.metrics import StepClock

if TYPE_CHECKING:
    from rlsdk.trainer.events import RunView
    from rlsdk.trainer.groups import Answer, RoleGroup
    from rlsdk.trainer.session import Session

TRAINED_FIELDS = ("input_ids", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages",
                  "loss_weight")  # fmt: skip
"""What leaves the controller for an update; everything else stays."""


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """How rewards become optimizer steps."""

    algorithm: AlgorithmConfig
    advantage: AdvantageEstimator
    objective: PolicyObjective
    updates_per_step: int
    epochs_per_step: int
    seed: int
    max_response_tokens: int
    update_timeout_s: float
    parity_threshold: float
    parity_is_error: bool


class PolicyLearner:
    """Log-probs, advantages, updates. It holds no state of the run but whether the engines' parity was looked at."""

    def __init__(self, session: Session, options: PolicyOptions, view: RunView) -> None:
        self.session = session
        self.options = options
        self.view = view
        self._parity_checked = False

    def learn(self, batch: Batch, step: int, clock: StepClock) -> tuple[Batch, list[MiniBatchResult]]:
        """Trains on a step's batch; returns it with what was prepared, and the result of each optimizer step.

        Args:
            batch: of whole groups, graded.
            step: number of steps behind this one, which the cut into mini-batches is drawn from.
            clock: takes the seconds of each phase.
        """
        with self.view.phase("log_probs"), clock.measure("log_probs"):
            batch = self.log_probs(batch)
        with clock.measure("advantages"):
            batch = self.advantages(batch)
        with clock.measure("update"):
            return batch, self.update(batch, step)

    def log_probs(self, batch: Batch) -> Batch:
        """Adds `old_log_probs` where an update needs them, `ref_log_probs` where a KL is asked for: for all rows."""
        if not self._parity_checked:
            self._check_parity(batch)
        if self.options.algorithm.old_log_probs == "rollout":
            batch = batch.with_tokens(old_log_probs=batch["rollout_log_probs"])
        elif self._needs_old():
            old = self._forward(self.session.actor, batch, "old_log_probs")
            batch = batch.with_tokens(old_log_probs=old)
        if self.session.ref is not None:
            batch = batch.with_tokens(ref_log_probs=self._forward(self.session.ref, batch, "ref_log_probs"))
        return batch

    def advantages(self, batch: Batch) -> Batch:
        """Adds token rewards and advantages."""
        algorithm = self.options.algorithm
        penalty = algorithm.kl_coef if algorithm.kl_in_reward else 0.0
        batch = token_level_rewards(batch, kl_coef=penalty, estimator=algorithm.kl_estimator)
        batch = self.options.advantage(batch, **algorithm.advantage_options)
        batch.validate(("advantages",))
        return batch

    def update(self, batch: Batch, step: int) -> list[MiniBatchResult]:
        """One optimizer step per mini-batch and epoch. All are sent at once; the workers run them in order."""
        later = self.options.objective
        epochs = self.options.epochs_per_step
        # The first update sees the very weights that sampled: its ratio is one by definition.
        first = replace(later, on_policy=self.options.algorithm.old_log_probs == "auto" and epochs == 1)
        actor = self.session.actor
        device = self.session.turns.using(actor.name, training=True)
        with self.view.phase("update", total=epochs * self.options.updates_per_step), device:
            waiting: list[Answer] = []
            for epoch in range(epochs):
                mini_batches = self._cut(batch, step, epoch)
                weighed = self._weigh(batch, mini_batches)
                shared = self.session.put(weighed.keep(TRAINED_FIELDS))
                if self.options.algorithm.skip_zero_advantage and later.zero_without_advantage:
                    mini_batches = [with_signal(batch, rows) for rows in mini_batches]
                for rows in mini_batches:
                    waiting.append(actor.submit("update", shared.select(rows), later if waiting else first))
            results = []
            for pending in waiting:
                results.append(pending.result(self.options.update_timeout_s))
                self.view.advance()
            return results

    def _needs_old(self) -> bool:
        """False where the step makes one update and no penalty reads them: the current log-probs are the old ones."""
        options = self.options
        updates = options.updates_per_step * options.epochs_per_step
        return options.algorithm.old_log_probs == "always" or updates > 1 or options.algorithm.kl_in_reward

    def _cut(self, batch: Batch, step: int, epoch: int) -> list[Tensor]:
        """Rows of each mini-batch; every epoch has a cut of its own."""
        seed = (self.options.seed, "cut", step) if epoch == 0 else (self.options.seed, "cut", step, epoch)
        return cut_mini_batches(batch.num_rows, self.options.updates_per_step, seed=seed)

    def _weigh(self, batch: Batch, mini_batches: Sequence[Tensor]) -> Batch:
        """Adds each token's share of its mini-batch's loss."""
        kind, most = self.options.algorithm.loss_aggregation, self.options.max_response_tokens
        weights = [loss_weights(batch.select(rows), kind, max_tokens=most) for rows in mini_batches]
        return scatter_loss_weights(batch, mini_batches, weights)

    def _forward(self, role: RoleGroup, batch: Batch, field: str) -> Tensor:
        """Log-probs of a batch's rows under a train engine, flat."""
        needed = self.session.put(batch.keep(("input_ids", "response_mask")))
        with self.session.turns.using(role.name):
            answer: Batch = role.run("forward", needed, {"log_probs": field}, timeout_s=self.options.update_timeout_s)
        return answer[field]

    def _check_parity(self, batch: Batch) -> None:
        """The gate before the first update: both engines must give the same tokens the same log-probs.

        Raises:
            ParityError: they do not, and `trainer.parity_action` is `error`.
        """
        self._parity_checked = True
        trained = self._forward(self.session.actor, batch, "old_log_probs")
        found = log_prob_difference(trained, batch["rollout_log_probs"], batch["response_mask"])
        self.check_difference(found.mean_abs, found.max_abs)

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
