"""The synchronous loop: prompts, rollout, rewards, log-probs, advantages, update, evaluation, checkpoint.

On policy by construction: every step samples with the weights that the last one left. Everything random is drawn from
(seed, step, position), so a run that resumes goes on with the numbers it would have had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlsdk.algorithms import log_prob_difference, loss_weights, token_level_rewards
from rlsdk.config import dump_config
from rlsdk.interfaces import Batch, Capability, ParityError
from rlsdk.kit.atomic import atomic_write_text
from rlsdk.trainer.checkpoint import CheckpointStore, read_state
from rlsdk.trainer.evaluation import measure_all
from rlsdk.trainer.events import RunView
from rlsdk.trainer.experience import cut_mini_batches, make_batch, scatter_loss_weights, with_signal
from rlsdk.trainer.hosts import MiniBatchResult
from rlsdk.trainer.metrics import StepClock, batch_metrics, update_metrics
from rlsdk.trainer.parts import check_failures
from rlsdk.trainer.rollout import sample
from rlsdk.trainer.state import TrainerState

if TYPE_CHECKING:
    from rlsdk.cluster import Pending, WorkerGroup
    from rlsdk.data import Prompt
    from rlsdk.rewards import RewardResult
    from rlsdk.trainer.parts import RunParts
    from rlsdk.trainer.session import RlSession

TRAINED_FIELDS = ("input_ids", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages",
                  "loss_weight")  # fmt: skip
"""What leaves the controller for an update; everything else stays."""


class Trainer:
    """Runs steps. One object per run, in the controller process, which owns no device."""

    def __init__(self, session: RlSession, parts: RunParts, view: RunView, stop: Callable[[], bool]) -> None:
        self.session = session
        self.config = session.config
        self.parts = parts
        self.view = view
        self.state = TrainerState()
        self.stop = stop
        self.clock = StepClock()
        self.sync_metrics: Mapping[str, float] = {}
        """Of the last sync."""
        self.parity_checked = False
        self.first_eval: Mapping[str, float] | None = None
        self.last_eval: Mapping[str, float] = {}
        self.last_checkpoint: Path | None = None
        self.store = CheckpointStore(parts.run_dir / "checkpoints", self.config.trainer.keep_checkpoints)

    def fit(self) -> None:
        """Steps until `trainer.steps` are done or a stop is requested; always leaves a checkpoint behind."""
        if self.state.step == 0 and self.config.eval.at_start and self.config.eval.every_steps is not None:
            self.evaluate()
        while self.state.step < self.config.trainer.steps and not self.stop():
            self.step()
            finished = self.state.step == self.config.trainer.steps
            if _due(self.state.step, self.config.eval.every_steps, last=finished):
                self.evaluate()
            if _due(self.state.step, self.config.trainer.save_every_steps, last=finished or self.stop()):
                self.save()

    def step(self) -> Mapping[str, float]:
        """One turn of the loop; returns its metrics."""
        self.clock = StepClock()
        prompts = self.parts.prompts.take(self.config.trainer.prompts_per_step)
        batch = self.rollout(prompts)
        batch, rewards = self.reward(batch, prompts)
        mini_batches = self.cut(batch)
        batch = self.log_probs(batch, mini_batches)
        batch = self.advantages(batch, mini_batches)
        results = self.update(batch, mini_batches)
        return self.finish(batch, prompts, rewards, results)

    def rollout(self, prompts: Sequence[Prompt]) -> Batch:
        """Brings the rollout engines to the current weights and samples every prompt."""
        token_ids = [prompt.prompt_ids for prompt in prompts]
        seed = (self.config.trainer.seed, "train", self.state.step)
        with self.view.phase("rollout"), ExitStack() as phase:
            self.enter_rollout(phase)
            with self.clock.measure("rollout"):
                n = self.config.trainer.samples_per_prompt
                samples = sample(self.session.rollout, token_ids, self.parts.sampling, n=n, seed=seed)
            with self.clock.measure("sync"):
                phase.close()
        return make_batch(token_ids, samples, temperature=self.config.rollout.temperature)

    def enter_rollout(self, phase: ExitStack) -> None:
        """Swaps to the inference layout for as long as `phase` lives."""
        with self.clock.measure("sync"):
            report = phase.enter_context(self.session.manager.rollout_phase(self.state.policy_version))
        if report is not None:
            self.sync_metrics = {"sync/bytes": float(report.num_bytes), "sync/moved_bytes": float(report.moved_bytes)}
            self.view.synced(report)

    def reward(self, batch: Batch, prompts: Sequence[Prompt]) -> tuple[Batch, RewardResult]:
        """Scores every response; a sample whose reward failed is counted and carries no gradient."""
        with self.view.phase("reward"), self.clock.measure("reward"):
            result = self.parts.score(batch, prompts)
        for kind, count in result.failures.items():
            self.state.reward_failures[kind] = self.state.reward_failures.get(kind, 0) + count
        check_failures(result, self.config, self.view)
        return batch.with_rows(scores=torch.from_numpy(result.scores), valid=torch.from_numpy(result.valid)), result

    def cut(self, batch: Batch) -> list[Tensor]:
        """Rows of each mini-batch of this step."""
        seed = (self.config.trainer.seed, "cut", self.state.step)
        return cut_mini_batches(batch.num_rows, self.config.trainer.updates_per_step, seed=seed)

    def log_probs(self, batch: Batch, mini_batches: Sequence[Tensor]) -> Batch:
        """Adds `old_log_probs` where an update will need them, and `ref_log_probs` where a KL is asked for."""
        with self.view.phase("log_probs"), self.clock.measure("log_probs"):
            if not self.parity_checked:
                self.check_parity(batch)
            if self.config.algorithm.old_log_probs == "rollout":
                batch = batch.with_tokens(old_log_probs=batch["rollout_log_probs"])
            elif len(off_policy := self.off_policy_rows(batch, mini_batches)):
                old = self.forward(self.session.actor.group, batch.select(off_policy), "old_log_probs")
                flat = torch.zeros(batch.num_tokens)
                flat[batch.token_index(off_policy)] = old
                batch = batch.with_tokens(old_log_probs=flat)
            if self.session.ref is not None:
                ref = self.forward(self.session.ref.group, batch, "ref_log_probs")
                batch = batch.with_tokens(ref_log_probs=ref)
        return batch

    def off_policy_rows(self, batch: Batch, mini_batches: Sequence[Tensor]) -> Tensor:
        """Rows that some update will see with other weights than those that sampled them.

        The first update of a step is exactly on policy: its ratio is one by definition and needs no second pass.
        """
        if self.config.algorithm.old_log_probs == "always" or self.config.trainer.epochs_per_step > 1:
            return torch.arange(batch.num_rows)
        later = torch.cat([*mini_batches[1:], torch.empty(0, dtype=torch.int64)]).sort().values
        # A penalty in the reward reads them of every row: the field is complete or absent.
        return torch.arange(batch.num_rows) if self.config.algorithm.kl_in_reward and len(later) else later

    def forward(self, group: WorkerGroup, batch: Batch, field: str) -> Tensor:
        """Log-probs of a batch's rows under a train engine, flat."""
        needed = self.session.cluster.put(batch.keep(("input_ids", "response_mask")))
        answer: Batch = group.run("forward", needed, {"log_probs": field})
        return answer[field]

    def check_parity(self, batch: Batch) -> None:
        """The gate before the first update: both engines must give the same tokens the same log-probs.

        Raises:
            ParityError: they do not, and `trainer.parity_action` is `error`.
        """
        self.parity_checked = True
        trained = self.forward(self.session.actor.group, batch, "old_log_probs")
        found = log_prob_difference(trained, batch["rollout_log_probs"], batch["response_mask"])
        limit = self.config.trainer.parity_threshold
        if found.mean_abs <= limit:
            return
        text = (
            f"train backend {self.session.actor.backend!r} and rollout backend {self.session.rollout.backend!r} give "
            f"the same tokens log-probs that differ by {found.mean_abs:.4f} nats on average (largest "
            f"{found.max_abs:.4f}); trainer.parity_threshold is {limit}"
        )
        if self.config.trainer.parity_action == "error":
            raise ParityError(f"{text}. Compare model.dtype and the engines' options, or raise the threshold.")
        self.view.notice(f"warning: {text}")

    def advantages(self, batch: Batch, mini_batches: Sequence[Tensor]) -> Batch:
        """Adds token rewards, advantages, and each token's share of its mini-batch loss."""
        algorithm = self.config.algorithm
        with self.clock.measure("advantages"):
            penalty = algorithm.kl_coef if algorithm.kl_in_reward else 0.0
            policy = batch["old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"]
            batch = token_level_rewards(batch, kl_coef=penalty, estimator=algorithm.kl_estimator, log_probs=policy)
            batch = self.parts.advantage(batch, **algorithm.advantage_options)
            batch.validate(("advantages",))
            weights = [
                loss_weights(batch.select(rows), algorithm.loss_aggregation, max_tokens=self.parts.sampling.max_tokens)
                for rows in mini_batches
            ]
            return scatter_loss_weights(batch, mini_batches, weights)

    def update(self, batch: Batch, mini_batches: Sequence[Tensor]) -> list[MiniBatchResult]:
        """One optimizer step per mini-batch and epoch. All are sent at once; the workers run them in order.

        The first update of a step sees the very weights that sampled, so it needs no old log-probs.
        """
        config = self.config.trainer
        shared = self.session.cluster.put(batch.keep(TRAINED_FIELDS))
        later = self.parts.objective
        first = replace(later, on_policy=self.config.algorithm.old_log_probs == "auto" and config.epochs_per_step == 1)
        if self.config.algorithm.skip_zero_advantage and later.zero_without_advantage:
            mini_batches = [with_signal(batch, rows) for rows in mini_batches]
        turns = [rows for _ in range(config.epochs_per_step) for rows in mini_batches]
        group = self.session.actor.group
        with self.view.phase("update", total=len(turns)), self.clock.measure("update"):
            waiting = [
                group.submit("update", shared.select(rows), later if turn else first) for turn, rows in enumerate(turns)
            ]
            return [self.collect(pending) for pending in waiting]

    def collect(self, pending: Pending) -> MiniBatchResult:
        """Waits for one optimizer step and counts it."""
        result: MiniBatchResult = pending.result(self.config.trainer.timeout_s)
        self.view.advance()
        self.state.count_update(result.step)
        return result

    def finish(
        self, batch: Batch, prompts: Sequence[Prompt], rewards: RewardResult, results: Sequence[MiniBatchResult]
    ) -> Mapping[str, float]:
        """Counts the step and tells whoever listens."""
        self.state.step += 1
        self.state.samples += batch.num_rows
        self.state.tokens += batch.num_tokens
        metrics = {
            **batch_metrics(batch, rewards),
            **update_metrics(results),
            "policy/version": float(self.state.policy_version),
            "data/epoch": float(self.parts.prompts.epoch),
            **self.sync_metrics,
            **self.clock.metrics(),
        }
        metrics["throughput/tokens_per_s"] = batch.num_tokens / metrics["time/step_s"]
        samples = self.parts.show_samples(batch, prompts, rewards)
        self.parts.track(self.state.step, metrics, samples)
        self.view.step(self.state.step, self.config.trainer.steps, metrics)
        self.view.samples(self.state.step, samples)
        for callback in self.parts.callbacks:
            callback(self.state.step, metrics)
        return metrics

    def evaluate(self) -> None:
        """Accuracy of the current weights on held-out prompts."""
        if not self.parts.eval_prompts:
            return
        start = time.perf_counter()
        with self.view.phase("eval"), ExitStack() as phase:
            self.enter_rollout(phase)
            metrics = measure_all(self.session.rollout, self.parts)
        metrics["time/eval_s"] = time.perf_counter() - start
        self.parts.track(self.state.step, metrics)
        self.view.evaluated(self.state.step, metrics)
        self.last_eval = metrics
        if self.first_eval is None:
            self.first_eval = metrics

    def save(self) -> Path:
        """Writes a checkpoint: engine state, a Hugging Face folder `model/`, and everything else a resume needs."""
        actor = self.session.actor
        state = {
            "trainer": self.state.dump(),
            "prompts": self.parts.prompts.state_dict(),
            "first_eval": self.first_eval,
        }
        with self.view.phase("save"), self.store.write(self.state.step, state) as draft:
            engine, model = draft / "actor", draft / "model"
            engine.mkdir()
            actor.run("save_checkpoint", str(engine))
            if Capability.EXPORT in actor.spec.capabilities:
                model.mkdir()
                actor.run("save_pretrained", str(model))
                self.parts.tokenizer.save_pretrained(str(model))
            atomic_write_text(draft / "config.yaml", dump_config(self.config))
        self.last_checkpoint = self.store.folder / f"step_{self.state.step:08d}"
        self.view.saved(self.state.step, self.last_checkpoint)
        return self.last_checkpoint

    def restore(self, checkpoint: Path) -> None:
        """Goes on from a whole checkpoint."""
        saved = read_state(checkpoint)
        self.session.actor.run("load_checkpoint", str(checkpoint / "actor"))
        self.state = TrainerState.load(saved["trainer"])
        self.parts.prompts.load_state_dict(saved["prompts"])
        self.first_eval = saved["first_eval"]
        self.last_checkpoint = checkpoint


def _due(step: int, every: int | None, *, last: bool) -> bool:
    return every is not None and (last or step % every == 0)
