"""The synchronous loop: prompts, rollout, rewards, log-probs, advantages, update, evaluation, checkpoint.

On policy by construction: every step samples with the weights that the last one left. Everything random is drawn from
(seed, step, position), so a run that resumes goes on with the numbers it would have had.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlsdk.algorithms import (
    PolicyObjective,
    log_prob_difference,
    loss_weights,
    token_level_rewards,
)
from rlsdk.interfaces import Batch, Capability, ParityError, RlsdkError, SyncReport, TrainSpec
from rlsdk.rewards import RewardResult
from rlsdk.trainer.checkpoint import CheckpointStore
from rlsdk.trainer.events import RunView
from rlsdk.trainer.experience import cut_mini_batches, make_batch, make_requests, scatter_loss_weights
from rlsdk.trainer.hosts import MiniBatchResult, Samples
from rlsdk.trainer.metrics import StepClock, batch_metrics, update_metrics
from rlsdk.trainer.session import Session, can

if TYPE_CHECKING:
    from rlsdk.trainer.run import RunParts


@dataclass
class TrainerState:
    """What a checkpoint keeps besides the engine's own part and the data's position."""

    step: int = 0
    """Trainer steps done."""
    policy_version: int = 0
    """Optimizer steps contained in the weights that changed them."""
    moving: bool = False
    """A gradient other than zero was seen: from now on every optimizer step changes the weights."""
    warm_started: bool = False
    """The supervised warm start is done."""
    samples: int = 0
    tokens: int = 0
    reward_failures: dict[str, int] = field(default_factory=dict)
    """Samples without a score, by kind, over the whole run."""


class Trainer:
    """Runs steps. One object per run, in the controller process, which owns no device."""

    def __init__(self, session: Session, parts: RunParts, view: RunView) -> None:
        self.session = session
        self.config = session.config
        self.parts = parts
        self.view = view
        self.state = TrainerState()
        self.stop_requested = False
        self.clock = StepClock()
        self.store = CheckpointStore(parts.run_dir / "checkpoints", self.config.trainer.keep_checkpoints)

    def fit(self) -> None:
        """Steps until `trainer.steps` are done or a stop is requested; always leaves a checkpoint behind."""
        steps = self.config.trainer.steps
        if self.state.step == 0 and self.config.eval.at_start:
            self.evaluate()
        while self.state.step < steps and not self.stop_requested:
            self.step()
            last = self.state.step == steps or self.stop_requested
            if self._due(self.config.eval.every_steps, last):
                self.evaluate()
            if self._due(self.config.trainer.save_every_steps, last):
                self.save()

    def step(self) -> Mapping[str, float]:
        """One turn of the loop."""
        self.clock = StepClock()
        rows = self.parts.prompts.take(self.config.trainer.prompts_per_step)
        samples = self.rollout([row.prompt_ids for row in rows])
        batch = make_batch(
            [row.prompt_ids for row in rows], samples, temperature=self.config.rollout.temperature
        )
        batch, rewards = self.reward(batch, rows, samples)
        mini_batches = self.cut(batch.num_rows)
        batch = self.log_probs(batch, mini_batches)
        batch = self.advantages(batch, mini_batches)
        results = self.update(batch, mini_batches)
        return self.finish(batch, rewards, results)
